"""Folders that appear whole or not at all: written under another name, then renamed."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from mjax.config.languages.paths import require_files
from mjax.errors import UserError, or_user_error


def require_new(folder: str | Path) -> Path:
    """The absolute path of a folder to make. Raises `UserError` where it holds something."""
    require_files(folder)
    folder = Path(folder).absolute()
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise UserError(f"{folder} exists already; give another folder, or remove it")
    return folder


@contextlib.contextmanager
def new_folder(folder: str | Path) -> Iterator[Path]:
    """A temporary folder that becomes `folder` if the block ends well, and else is taken away.

    Raises `UserError` where `folder` already holds something or cannot be written.
    """
    folder = require_new(folder)
    temporary = folder.with_name(f".{folder.name}.tmp-{os.getpid()}")
    try:
        with or_user_error(f"cannot write folder {folder}: {{reason}}; free or mend it"):
            temporary.mkdir(parents=True)
            yield temporary
            temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
