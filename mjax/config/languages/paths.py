"""Paths as users give them, in keys and on command lines, with ~ as the home folder.

Addresses of object stores are none. Data and weights may have one (`data/base/object_store.py`),
and the steps of a run a copy there. The run itself needs what stores lack: a lock, an atomic
rename, writes in place.
"""

import os
import re
from argparse import ArgumentTypeError
from os import PathLike
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

from mjax.errors import UserError

# Path("gs://bucket/run") has one slash.
ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
NEEDS_FILES = "is in an object store, but checkpoints need a file system (locks, renames, digests)"
MOUNT_IT = "mount it (gcsfuse, mountpoint-s3) or copy it to a disk, and give that folder"
MIRROR_IT = "give a folder, and the address as checkpoint.mirror"


class _NotAPath(ArgumentTypeError, ValueError):
    """An error that argparse and pydantic both make a line of."""


def path_text(text: str) -> str:
    """A path as text, with ~ as the home folder: a type of arguments and of keys of a config."""
    path = os.path.expanduser(text)
    if not path.strip():
        raise _NotAPath("must be a path, not empty; '.' is the current folder")
    if path.startswith("~"):
        raise _NotAPath(f"must be a path: nobody here is called {path[1:]!r}; or write ./{path}")
    return path


def as_path(text: str) -> Path:
    """The same as a `Path`, for arguments."""
    return Path(path_text(text))


PathText = Annotated[str, AfterValidator(path_text)]


def is_address(path: str | PathLike[str] | None) -> bool:
    """Whether `path` is an address such as gs://bucket/run or s3://bucket/run."""
    return path is not None and ADDRESS.match(str(path)) is not None


def require_files(path: str | PathLike[str]) -> None:
    """Raise `UserError` if `path` is an address and no path of a file system."""
    if is_address(path):
        raise UserError(f"{path} {NEEDS_FILES}; {MOUNT_IT}")
