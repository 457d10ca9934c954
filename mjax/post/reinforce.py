"""`mjax reinforce --config X [a.b=c ...]`: reinforcement learning with rollouts of the policy.

It is `mjax train` with the objective `policy`, other defaults and a source of batches that draws
them: an engine with the trainer's weights answers the prompts of an environment (`rollouts/`).
"""

import argparse

from mjax.config.schema.reinforce import ReinforceConfig
from mjax.config.schema.run import Config
from mjax.errors import CommandParser, UserError, run_cli
from mjax.post.preference import answer_defaults
from mjax.post.sft import keys_of
from mjax.run.command import train_command

POLICY_RATE = 1e-6
REINFORCE_DEFAULTS = f"""
Keys that are not set have the defaults of mjax sft, but for
  train.objective           policy
  train.global_batch_size   the answers of a step: a row for each
  schedule.lr               {POLICY_RATE:g}, with lora.rank ten times that
docs/train/reinforcement.md has the loop, the environments and the figures.
"""


def main() -> int:
    """The command line."""
    parser = CommandParser(
        "post.reinforce",
        description="Train a policy on the rewards of its own answers.",
        epilog=REINFORCE_DEFAULTS,
    )
    return train_command(
        parser,
        defaults=reinforce_defaults,
        first=require_policy,
        batch_source="mjax.post.reinforce_batches:reinforce_batches",
    )


def reinforce_defaults(tree: dict) -> dict:
    """Values for the keys that `tree`, as yet unchecked, does not set."""
    found = answer_defaults(tree, "policy", POLICY_RATE)
    found["train"]["global_batch_size"] = answers_of_update(tree)
    return found


def answers_of_update(tree: dict) -> int:
    """The answers that an update is on, by the keys of `tree`, as yet unchecked."""
    keys = keys_of(tree, "reinforce")

    def number(name: str) -> int:
        value = keys.get(name, getattr(ReinforceConfig(), name))
        return value if isinstance(value, int) and value > 0 else 1

    answers = number("prompts_per_step") * number("group_size")
    return max(answers // number("updates_per_rollout"), 1)


def require_policy(cfg: Config, args: argparse.Namespace | None = None) -> None:
    """Raise `UserError` for a config that is none of this command."""
    settings = cfg.reinforce
    if cfg.train.objective != "policy" and ":" not in cfg.train.objective:
        raise UserError(
            f"train.objective={cfg.train.objective} has no rollouts; leave it out, or run mjax "
            "train"
        )
    if settings.loss_type == "ppo" and cfg.checkpoint.local_dir is not None:
        raise UserError(
            "checkpoint.local_dir: its steps have no critic, which reinforce.loss_type=ppo needs; "
            "leave it out"
        )
    require_rollouts(cfg)


def require_rollouts(cfg: Config) -> None:
    """Raise `UserError` for a config by which no rollouts can be drawn."""
    settings = cfg.reinforce
    if settings.prompts_per_step % settings.updates_per_rollout:
        raise UserError(
            f"reinforce.updates_per_rollout={settings.updates_per_rollout} does not divide "
            f"reinforce.prompts_per_step={settings.prompts_per_step}; an update takes whole groups"
        )
    if cfg.data.tokenizer is None:
        raise UserError("data.tokenizer: prompts and answers need one; name a file or byte")


if __name__ == "__main__":
    run_cli(main)
