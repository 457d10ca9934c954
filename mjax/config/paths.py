"""Paths that are none: addresses of object stores, which mjax neither reads nor writes.

A run needs what they lack: a lock, an atomic rename, reads of any range of a file. Orbax itself
writes to them with packages that mjax does not depend on.
"""

import re
from os import PathLike

from mjax.errors import UserError

# Path("gs://bucket/run") has one slash.
ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
NEEDS_FILES = "is in an object store, but checkpoints need a file system (locks, renames, digests)"
MOUNT_IT = "mount it (gcsfuse, mountpoint-s3) or copy it to a disk, and give that folder"


def is_address(path: str | PathLike[str] | None) -> bool:
    """Whether `path` is an address such as gs://bucket/run or s3://bucket/run."""
    return path is not None and ADDRESS.match(str(path)) is not None


def require_files(path: str | PathLike[str]) -> None:
    """Raise `UserError` if `path` is an address and no path of a file system."""
    if is_address(path):
        raise UserError(f"{path} {NEEDS_FILES}; {MOUNT_IT}")
