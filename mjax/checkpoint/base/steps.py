"""The steps of a run on disk: folders named by numbers, complete once they have the name.

RUN@best is the step of lowest held-out loss wherever RUN is the newest.
"""

import math
from pathlib import Path

from mjax.errors import UserError
from mjax.json_file import read_json

BEST = "@best"
HELD_OUT_LOSS = "held_out_loss"  # key of a step's record


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

    RUN@best has its best step instead. Raises `UserError` if no step of that was evaluated.
    """
    if is_step(path):
        return path
    if path.name.endswith(BEST) and not path.exists():
        return _best_step(path.with_name(path.name.removesuffix(BEST)))
    folder = checkpoint_folder(path)
    return folder and steps_in(folder)[-1]


def _best_step(path: Path) -> Path | None:
    """The step of lowest held-out loss in a run or checkpoint folder."""
    folder = checkpoint_folder(path)
    if folder is None:
        return None
    records = {step: read_json(step / "meta" / "metadata") for step in steps_in(folder)}
    losses = {step: record.get(HELD_OUT_LOSS) for step, record in records.items()}
    known = {s: loss for s, loss in losses.items() if loss is not None and math.isfinite(loss)}
    if not known:
        raise UserError(
            f"{path}{BEST}: no step in {folder} has a held-out loss; save where the run "
            f"evaluates (checkpoint.interval, train.eval_interval), or give a step"
        )
    return min(known, key=known.get)
