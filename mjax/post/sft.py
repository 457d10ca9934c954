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

SFT_RATE = 2e-5  # learning rate
ADAPTER_FACTOR = 10  # times that rate, where adapters are trained
WARMUP_SHARE = 0.03  # of the steps
EVALUATIONS = 10  # of a run
SFT_DEFAULTS = f"""
Keys that are not set have other defaults than in mjax train:
  model                     that of the weights in checkpoint.init_from, which keys of model
                            change; with model.hidden_size it is all given
  data.tokenizer            the tokenizer and chat template beside those weights
  schedule.lr               {SFT_RATE:g}, with lora.rank {ADAPTER_FACTOR} times that
  schedule.warmup_steps     {WARMUP_SHARE:.0%} of train.steps
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
        epilog=SFT_DEFAULTS,
    )
    add_preview(parser)
    return train_command(parser, defaults=sft_defaults, first=_before_training)


def _before_training(cfg: Config, args: argparse.Namespace) -> int | None:
    """Refuse what is no fine-tuning, and preview; None goes on."""
    require_conversations(cfg)
    return preview(cfg, args)


def sft_defaults(tree: dict, rate: float = SFT_RATE) -> dict:
    """Values for the keys that `tree`, as yet unchecked, does not set.

    rate: the learning rate of whole weights, which adapters multiply.
    """
    steps = _whole_number(tree, "train", "steps") or Config().train.steps
    decay_steps = _whole_number(tree, "schedule", "decay_steps") or steps
    warmup_steps = int(WARMUP_SHARE * min(steps, decay_steps))
    factor = ADAPTER_FACTOR if _whole_number(tree, "lora", "rank") else 1
    found = {
        "schedule": {"lr": factor * rate, "warmup_steps": warmup_steps},
        "optimizer": {"weight_decay": 0.0},
        "train": {},
        "checkpoint": {},
    }
    tenth = max(steps // EVALUATIONS, 1)
    eval_interval = tenth if _holds_out(tree) else None
    if "eval_interval" in keys_of(tree, "train"):
        eval_interval = _whole_number(tree, "train", "eval_interval")
    save_interval = eval_interval or tenth
    if "interval" in keys_of(tree, "checkpoint"):
        save_interval = _whole_number(tree, "checkpoint", "interval")
    elif "keep_every" in keys_of(tree, "checkpoint"):
        save_interval = None  # it must divide that
    found["train"]["eval_interval"] = eval_interval
    found["checkpoint"]["interval"] = save_interval
    if eval_interval and save_interval and save_interval % eval_interval == 0:
        found["checkpoint"]["keep_best"] = 1
    start = keys_of(tree, "checkpoint").get("init_from")
    if isinstance(start, str) and start:
        found |= _of_weights(tree, start)
    return found


def _of_weights(tree: dict, start: str) -> dict:
    """The model and the tokenizer of the weights that a run starts from."""
    found = {}
    data = keys_of(tree, "data")
    is_whole = "hidden_size" in keys_of(tree, "model")  # else keys change the model of the weights
    if "tokenizer" in data and is_whole:
        return found
    if hub_name(start) is None and not run_of(Path(start).expanduser()).exists():
        raise UserError(
            f"checkpoint.init_from={start}: there is no such folder; give that of a model from a "
            "hub, or of a run (configs/quickstart.yaml makes runs/quickstart)"
        )
    if data.get("tokenizer") is None:
        tokenizer = tokenizer_of(start)
        found["data"] = {"tokenizer": None if tokenizer is None else str(tokenizer)}
    if not is_whole:
        from mjax.interop.sources import source_of  # imports jax

        model = source_of(start, text=not keys_of(data, "images").get("path")).cfg
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


def _whole_number(tree: dict, group: str, name: str) -> int | None:
    """The value of a key that is set, if it is a whole number above 0."""
    value = keys_of(tree, group).get(name)
    return value if isinstance(value, int) and value > 0 else None


def _holds_out(tree: dict) -> bool:
    """Whether the data that was given has a held-out part, or is split by default."""
    data = keys_of(tree, "data")
    if data.get("valid_paths") or keys_of(data, "images").get("valid_path"):
        return True
    split = data.get("split")
    return not isinstance(split, list) or len(split) < 2 or split[1] != 0


if __name__ == "__main__":
    run_cli(main)
