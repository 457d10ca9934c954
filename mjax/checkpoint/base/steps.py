"""The steps of a run on disk: folders named by numbers, complete once they have the name."""

from pathlib import Path


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
    """The folder of the newest step in a run or checkpoint folder; a step is its own newest."""
    if is_step(path):
        return path
    folder = checkpoint_folder(path)
    return folder and steps_in(folder)[-1]
