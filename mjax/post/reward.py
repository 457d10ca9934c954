"""`mjax reward --config X [a.b=c ...]`: reward models, of pairs of answers or of steps.

It is `mjax train` with the objective `reward` and other defaults. A causal language model gets a
head of one score in place of its vocabulary's (`model.num_labels`).
"""

from mjax.data.preview import add_preview
from mjax.errors import CommandParser, run_cli
from mjax.post.preference import answer_defaults, before_training
from mjax.post.sft import keys_of
from mjax.run.command import train_command

REWARD_RATE = 1e-5
NOTES = f"""
Keys that are not set have the defaults of mjax sft, but for
  train.objective           reward
  model.num_labels          1
  checkpoint.init_changes   heads: the vocabulary's head is left out, the score's is drawn
  lora.trained              score, with lora.rank
  schedule.lr               {REWARD_RATE:g}, with lora.rank ten times that
docs/train/preferences.md has the losses, the data and the figures.
"""


def main() -> int:
    """The command line."""
    parser = CommandParser(
        "post.reward",
        description="Train a reward model on pairs of answers, or on steps of answers.",
        epilog=NOTES,
    )
    add_preview(parser)
    return train_command(parser, defaults=reward_defaults, first=before_training)


def reward_defaults(tree: dict) -> dict:
    """Values for the keys that `tree`, as yet unchecked, does not set."""
    found = answer_defaults(tree, "reward", REWARD_RATE)
    found.setdefault("model", {})["num_labels"] = 1
    found["checkpoint"]["init_changes"] = ["heads"]
    if keys_of(tree, "lora").get("rank"):
        found["lora"] = {"trained": ["score"]}
    return found


if __name__ == "__main__":
    run_cli(main)
