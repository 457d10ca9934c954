"""The steps of a run on disk: folders named by numbers, complete once they have the name.

Wherever RUN is its newest step, RUN@best is that of lowest held-out loss, RUN@160 step 160.
"""

import math
import re
from pathlib import Path

from mjax.errors import UserError
from mjax.json_file import read_json

HELD_OUT_LOSS = "held_out_loss"  # key of a step's record
_RUN_AND_STEP = re.compile(r"(.+)@(best|\d+)")


def is_step(folder: Path) -> bool:
    """Whether `folder` is one step of a checkpoint folder."""
    return folder.name.isdecimal() and (folder / "state").is_dir()


def steps_in(folder: Path) -> list[Path]:
    """The steps of a checkpoint folder, oldest first."""
    return sorted(filter(is_step, folder.iterdir()), key=lambda p: int(p.name))


def checkpoint_folder(path: Path) -> Path | None:
    """The folder with one subfolder a step, of a run or of itself."""
    for folder in (path, path / "checkpoints"):
        if folder.is_dir() and steps_in(folder):
            return folder
    return None


def newest_step(path: Path) -> Path | None:
    """The folder of the newest step in a run or checkpoint folder; a step is its own newest.

    RUN@best has its best step instead, and RUN@160 its step 160. Raises `UserError` if there is no
    such step.
    """
    if is_step(path):
        return path
    run, chosen = _run_and_step(path)
    folder = checkpoint_folder(run)
    if folder is None:
        return None
    if chosen == "best":
        return _best_step(run, folder)
    return _step_numbered(run, folder, int(chosen)) if chosen else steps_in(folder)[-1]


def run_of(path: Path) -> Path:
    """The folder that RUN@best or RUN@160 names; another path is its own."""
    return _run_and_step(path)[0]


def _run_and_step(path: Path) -> tuple[Path, str]:
    """(a folder, the step that a path chooses in it: best, a number or nothing)."""
    match = _RUN_AND_STEP.fullmatch(path.name)
    if match is None or path.exists():
        return path, ""
    return path.with_name(match[1]), match[2]


def _step_numbered(run: Path, folder: Path, number: int) -> Path:
    numbers = {int(step.name): step for step in steps_in(folder)}
    if number not in numbers:
        there = ", ".join(map(str, numbers))
        raise UserError(f"{run}@{number}: {folder} has no such step; it has {there}")
    return numbers[number]


def _best_step(run: Path, folder: Path) -> Path:
    """The step of lowest held-out loss in a checkpoint folder."""
    records = {step: read_json(step / "meta" / "metadata") for step in steps_in(folder)}
    losses = {step: record.get(HELD_OUT_LOSS) for step, record in records.items()}
    known = {s: loss for s, loss in losses.items() if loss is not None and math.isfinite(loss)}
    if not known:
        raise UserError(
            f"{run}@best: no step in {folder} has a held-out loss; save where the run "
            f"evaluates (checkpoint.interval, train.eval_interval), or give a step"
        )
    return min(known, key=known.get)
