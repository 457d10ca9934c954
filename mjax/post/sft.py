"""`mjax sft --config X [a.b=c ...]`: supervised fine-tuning, on conversations.

It is `mjax train` with other defaults. Invariant: a key that the config or the command line sets
stays as it is. The batches, the loss on answers and the loop are those of training.
"""

import argparse
from pathlib import Path
from typing import Any

from mjax.checkpoint.base.companion_files import tokenizer_of
from mjax.checkpoint.base.hub import hub_name
from mjax.checkpoint.base.steps import newest_step, run_of
from mjax.config.schema.run import Config
from mjax.data.preview import add_preview, preview
from mjax.errors import CommandParser, UserError, run_cli
from mjax.run.command import train_command
from mjax.run.monitor.log_writer import warn

LEARNING_RATE = 2e-5
OF_ADAPTERS = 10  # times that rate, where adapters are trained
WARMUP = 0.03  # of the steps
EVALUATIONS = 10  # of a run
ABOUT = f"""
Keys that are not set have other defaults than in mjax train:
  model                     that of the weights in checkpoint.init_from, which keys of model
                            change; with model.hidden_size it is all given
  data.tokenizer            the tokenizer and chat template beside those weights
  schedule.lr               {LEARNING_RATE:g}, with lora.rank {OF_ADAPTERS} times that
  schedule.warmup_steps     {WARMUP:.0%} of train.steps
  optimizer.weight_decay    0
  train.eval_interval       a tenth of train.steps, if data is held out
  checkpoint.interval       as train.eval_interval
  checkpoint.keep_best      1, if each save has a held-out loss: RUN@best is the lowest
docs/train/fine-tuning.md goes from data to a model that is used.
"""


def main() -> int:
    """The command line."""
    parser = CommandParser(
        "post.sft",
        description="Fine-tune a model on conversations; the loss is on the answers.",
        epilog=ABOUT,
    )
    add_preview(parser)
    return train_command(parser, defaults=sft_defaults, first=_before_training)


def _before_training(cfg: Config, args: argparse.Namespace) -> int | None:
    """Refuse what is no fine-tuning, and preview; None goes on."""
    require_conversations(cfg)
    return preview(cfg, args)


def sft_defaults(tree: dict) -> dict:
    """Values for the keys that `tree`, as yet unchecked, does not set."""
    steps = _whole_number(tree, "train", "steps") or Config().train.steps
    decay_steps = _whole_number(tree, "schedule", "decay_steps") or steps
    warmup_steps = int(WARMUP * min(steps, decay_steps))
    factor = OF_ADAPTERS if _whole_number(tree, "lora", "rank") else 1
    found = {
        "schedule": {"lr": factor * LEARNING_RATE, "warmup_steps": warmup_steps},
        "optimizer": {"weight_decay": 0.0},
        "train": {},
        "checkpoint": {},
    }
    tenth = max(steps // EVALUATIONS, 1)
    evaluated = tenth if _holds_out(tree) else None
    if _is_set(tree, "train", "eval_interval"):
        evaluated = _whole_number(tree, "train", "eval_interval")
    saved = evaluated or tenth
    if _is_set(tree, "checkpoint", "interval"):
        saved = _whole_number(tree, "checkpoint", "interval")
    elif _is_set(tree, "checkpoint", "keep_every"):
        saved = None  # it must divide that
    found["train"]["eval_interval"] = evaluated
    found["checkpoint"]["interval"] = saved
    if evaluated and saved and saved % evaluated == 0:
        found["checkpoint"]["keep_best"] = 1
    start = _given(tree, "checkpoint", "init_from")
    if isinstance(start, str) and start:
        found |= _of_weights(tree, start)
    return found


def _of_weights(tree: dict, start: str) -> dict:
    """The model and the tokenizer of the weights that a run starts from."""
    found = {}
    is_whole = _is_set(tree, "model", "hidden_size")  # else keys of it change that of the weights
    if _is_set(tree, "data", "tokenizer") and is_whole:
        return found
    if hub_name(start) is None and not run_of(Path(start).expanduser()).exists():
        raise UserError(
            f"checkpoint.init_from={start}: there is no such folder; give that of a model from a "
            "hub, or of a run (configs/quickstart.yaml makes runs/quickstart)"
        )
    if _given(tree, "data", "tokenizer") is None:
        tokenizer = tokenizer_of(start)
        found["data"] = {"tokenizer": None if tokenizer is None else str(tokenizer)}
    if not is_whole:
        from mjax.interop.sources import source_of  # imports jax

        images = _given(tree, "data", "images")
        model = source_of(start, text=not (isinstance(images, dict) and images.get("path"))).cfg
        found["model"] = model.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    return found


def require_conversations(cfg: Config) -> None:
    """Raise `UserError` for a run that is not on conversations; warn of one that starts anew."""
    has_images = cfg.data.images.path is not None and bool(cfg.model.modalities)
    if cfg.data.conversations.path is None and not has_images:
        raise UserError(
            "mjax sft trains on conversations: set data.conversations.path to a file or folder of "
            "them, or data.images.path for a model that reads images or sounds; mjax train takes "
            "other data"
        )
    if cfg.checkpoint.init_from is None and newest_step(Path(cfg.run.dir)) is None:
        warn("the weights are drawn at random; checkpoint.init_from=FOLDER starts from a model's")


def keys_of(tree: dict, group: str) -> dict:
    """The keys of a group that are set."""
    found: Any = tree.get(group)
    return found if isinstance(found, dict) else {}


def _given(tree: dict, group: str, name: str) -> Any:
    """The value of a key as it was given, or None."""
    return keys_of(tree, group).get(name)


def _is_set(tree: dict, group: str, name: str) -> bool:
    return name in keys_of(tree, group)


def _whole_number(tree: dict, group: str, name: str) -> int | None:
    """The value of a key that was given, if it is a number of steps."""
    value = _given(tree, group, name)
    return value if isinstance(value, int) and value > 0 else None


def _holds_out(tree: dict) -> bool:
    """Whether the data that was given has a held-out part, or is split by default."""
    images = _given(tree, "data", "images")
    others = isinstance(images, dict) and images.get("valid_path")
    if _given(tree, "data", "valid_paths") or others:
        return True
    split = _given(tree, "data", "split")
    return not isinstance(split, list) or len(split) < 2 or split[1] != 0


if __name__ == "__main__":
    run_cli(main)
