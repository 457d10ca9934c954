"""Arrays that are expensive to make, kept on disk under a hash of what they were made from.

Invariant: an entry is a folder that appears by one rename, complete. Processes that start at once
may each build it; the first rename wins and all of them read the same bytes.
"""

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from mjax.errors import or_user_error

CACHE_VERSION = 1  # raise it when the meaning of a cached array changes


def cached_arrays(
    folder: str | os.PathLike,
    key: dict,
    names: Sequence[str],
    build: Callable[[], Sequence[np.ndarray]],
) -> tuple[list[np.ndarray], list[Path]]:
    """(the arrays `build()` returns, memory-mapped; their files `folder`/HASH/NAME.npy).

    `key` is JSON data that determines them; it is kept beside the arrays. Raises `UserError` if
    the entry is missing and `folder` cannot be written.
    """
    description = _description(key)
    entry = entry_of(folder, key)
    if not entry.is_dir():
        arrays = build()
        with or_user_error(
            f"{folder}: the index cache cannot be written ({{reason}}): "
            "set data.cache_dir to a folder you may write"
        ):
            _publish(entry, description, dict(zip(names, arrays, strict=True)))
    files = [entry / f"{name}.npy" for name in names]
    wrong = f"{entry}: damaged index cache ({{reason}}): delete this folder"
    with or_user_error(wrong, (OSError, ValueError, EOFError)):
        return [np.asarray(np.load(file, mmap_mode="r")) for file in files], files


def entry_of(folder: str | os.PathLike, key: dict) -> Path:
    """The folder of the arrays of a key in `folder`; it is there if they are."""
    digest = hashlib.blake2b(_description(key).encode(), digest_size=16)
    return Path(folder) / digest.hexdigest()


def _description(key: dict) -> str:
    return json.dumps({"version": CACHE_VERSION, **key}, indent=1, sort_keys=True)


def _publish(entry: Path, description: str, arrays: dict[str, np.ndarray]) -> None:
    entry.parent.mkdir(parents=True, exist_ok=True)
    temporary = entry.with_name(f"{entry.name}.{uuid.uuid4().hex}")
    try:
        temporary.mkdir()
        for name, array in arrays.items():
            np.save(temporary / f"{name}.npy", array)
        (temporary / "description.json").write_text(description + "\n")
        try:
            os.rename(temporary, entry)
        except OSError:
            if not entry.is_dir():  # otherwise another process was faster: same content
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
