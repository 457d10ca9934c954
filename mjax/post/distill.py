"""`mjax distill --config X distill.teacher=FOLDER`: train a student on a teacher's distributions.

It is `mjax train` with the objective `distill` and other defaults. The teacher is a role
(`base/roles.py`) on the mesh of the student or one of its own, and computes its activations first.
"""

import argparse

from mjax.checkpoint.base.companion_files import tokenizer_of
from mjax.config.languages.paths import as_path
from mjax.config.rules.reinforce_rules import draws_answers
from mjax.config.schema.run import Config
from mjax.errors import CommandParser, UserError, at_least, run_cli
from mjax.post.reinforce import answers_of_update, require_rollouts
from mjax.post.sft import keys_of, sft_defaults
from mjax.run.command import train_command

DISTILL_RATE = 1e-4
DISTILL_DEFAULTS = f"""
Keys that are not set have the defaults of mjax sft, but for
  train.objective           distill
  schedule.lr               {DISTILL_RATE:g}
  data.tokenizer            without checkpoint.init_from the teacher's
  train.global_batch_size   with distill.student_share the answers of a step: a row for each
docs/train/distillation.md has the loss; mjax prune makes a student of a teacher.
"""


def main() -> int:
    """The command line."""
    parser = CommandParser(
        "post.distill",
        description="Train a student on the distributions of a teacher.",
        epilog=DISTILL_DEFAULTS,
    )
    about = "write the teacher's likeliest tokens of all samples for distill.stored, and exit"
    parser.add_argument("--write", type=as_path, metavar="FOLDER", help=about)
    about = "with --write: tokens of each place (default: 64)"
    parser.add_argument("--top", type=at_least(1), default=64, metavar="K", help=about)
    return train_command(
        parser,
        defaults=distill_defaults,
        first=_before_distilling,
        batch_source="mjax.post.teacher:distillation_batches",
    )


def distill_defaults(tree: dict) -> dict:
    """Values for the keys that `tree`, as yet unchecked, does not set."""
    found = sft_defaults(tree)
    found["schedule"]["lr"] = DISTILL_RATE
    found["train"]["objective"] = "distill"
    keys = keys_of(tree, "distill")
    if keys.get("student_share"):
        _require_prompts(tree)
        found["train"]["global_batch_size"] = answers_of_update(tree)
    teacher = keys.get("teacher")
    if "data" not in found and isinstance(teacher, str):
        tokenizer = tokenizer_of(teacher)
        found["data"] = {"tokenizer": None if tokenizer is None else str(tokenizer)}
    return found


def _require_prompts(tree: dict) -> None:
    """Raise `UserError` for keys that name no prompts, for the default ones would be drawn."""
    conversations = keys_of(keys_of(tree, "data"), "conversations")
    if "environment" not in keys_of(tree, "reinforce") and not conversations.get("path"):
        raise UserError(
            "distill.student_share: the student needs prompts to answer; set "
            "data.conversations.path or reinforce.environment"
        )


def _before_distilling(cfg: Config, args: argparse.Namespace) -> int | None:
    """Refuse what is no distillation, and write a teacher's tokens; None goes on."""
    if cfg.train.objective != "distill":
        raise UserError(
            f"train.objective={cfg.train.objective} has no teacher; leave it out, or run mjax train"
        )
    if draws_answers(cfg):
        require_rollouts(cfg)
    if args.write is None:
        return None
    if draws_answers(cfg):
        raise UserError("--write: answers that are yet to be drawn cannot be rated; leave it out")
    import jax

    from mjax.post.teacher import write_teacher
    from mjax.run.faults.watchdog import naming_lost_processes
    from mjax.sharding.mesh import start_processes
    from mjax.sharding.processes.agreement import ends_with_others

    start_processes(args.coordinator, args.num_processes, args.process_id)
    with naming_lost_processes(), ends_with_others():
        count = write_teacher(cfg, args.write, args.top)
        first = jax.process_index() == 0
    if first:
        print(f"{args.write}: the {args.top} likeliest tokens of {count} samples")
    return 0


if __name__ == "__main__":
    run_cli(main)
