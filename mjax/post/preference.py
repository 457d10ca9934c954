"""`mjax preference --config X [a.b=c ...]`: training on preferences (DPO and its kin, KTO, ORPO).

It is `mjax train` with the objective `preference` and other defaults. The reference is a role
(`base/roles.py`): each step computes its log-probabilities first, or they are read from files.
"""

import argparse

from mjax.config.schema.run import Config
from mjax.data.preview import add_preview, preview
from mjax.errors import CommandParser, UserError, run_cli
from mjax.post.sft import sft_defaults
from mjax.run.command import train_command

PREFERENCE_RATE = 1e-6
PREFERENCE_DEFAULTS = f"""
Keys that are not set have the defaults of mjax sft, but for
  train.objective           preference
  schedule.lr               {PREFERENCE_RATE:g}, with lora.rank ten times that
docs/train/preferences.md has the losses, the data and the figures.
"""


def main() -> int:
    """The command line."""
    parser = CommandParser(
        "post.preference",
        description="Train on preferences: pairs of answers, or answers that are good or bad.",
        epilog=PREFERENCE_DEFAULTS,
    )
    add_preview(parser)
    return train_command(
        parser,
        defaults=preference_defaults,
        first=before_training,
        batch_source="mjax.post.preference_batches:preference_batches",
    )


def preference_defaults(tree: dict) -> dict:
    """Values for the keys that `tree`, as yet unchecked, does not set."""
    return answer_defaults(tree, "preference", PREFERENCE_RATE)


def answer_defaults(tree: dict, objective: str, rate: float) -> dict:
    """The defaults of `mjax sft`, but for the objective and the learning rate."""
    found = sft_defaults(tree, rate)
    found["train"]["objective"] = objective
    return found


def before_training(cfg: Config, args: argparse.Namespace) -> int | None:
    """Refuse other objectives, and preview; None goes on."""
    if cfg.train.objective not in ("preference", "reward") and ":" not in cfg.train.objective:
        raise UserError(
            f"train.objective={cfg.train.objective} is not for answers that are compared; leave it "
            "out, or run mjax train"
        )
    return preview(cfg, args)


if __name__ == "__main__":
    run_cli(main)
