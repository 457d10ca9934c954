"""Digests of the files of a checkpoint: made before it gets its name, checked before it is read.

`digests.json` in the folder of a step lists its files with their sizes and the CRC-32 of every
block of 64 MiB. Invariants: a changed bit in a listed file, or in the list itself, is found; a list
is complete, because it is written after all other files and before orbax's last rename. The files
are those on disk, so any mesh and any number of processes can check what others wrote. zlib's
CRC-32 was taken because it needs no further package, runs at 2 to 4 GB/s a thread and lets threads
run side by side; tensorstore's own CRC-32C (zarr3) is out of reach behind orbax's options.
"""

import json
import os
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

from mjax.checkpoint.base.source import run_all
from mjax.errors import UserError

LIST = "digests.json"
FORMAT = "crc32-64MiB"
DIGEST_BLOCK = 64 * 2**20  # bytes under one digest
TEMPORARY = ".orbax-checkpoint-tmp"  # orbax's mark of folders that are being written
READ_AT_ONCE = 2**20  # bytes read at a time; they stay in a core's cache

# Files that orbax changes after the list is made. They hold nothing that is restored.
UNLISTED = frozenset({LIST, "_CHECKPOINT_METADATA", "commit_success.txt"})


class DamagedCheckpoint(UserError):
    """Files of a checkpoint are not what was written; the message names the first of them."""


@dataclass(frozen=True)
class FileDigest:
    """bytes: the size of a file. blocks: the CRC-32 of each of its blocks."""

    bytes: int
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class DigestList:
    """The digests of the files of the step in `folder`, by their names relative to it."""

    folder: Path
    files: Mapping[str, FileDigest]

    def verify(self, *prefixes: str, process: int = 0, processes: int = 1) -> None:
        """Read the files whose names begin with one of `prefixes` (none: all) and compare.

        Each of several processes reads its part of the blocks. Raises `DamagedCheckpoint`.
        """
        tasks = []
        for name in sorted(self.files):
            if name.startswith(prefixes or ""):
                blocks = range(max(1, len(self.files[name].blocks)))
                tasks += [partial(self._verify_block, name, number) for number in blocks]
        run_all(tasks[process::processes])

    def _verify_block(self, name: str, number: int) -> None:
        wanted = self.files[name]
        try:
            size = os.stat(self.folder / name).st_size
            found = block_digest(self.folder / name, number) if wanted.blocks else None
        except OSError as e:
            raise self._damage(f"{name} cannot be read: {e.strerror}") from None
        if size != wanted.bytes:
            raise self._damage(f"{name} has {size:,} bytes instead of {wanted.bytes:,}")
        if wanted.blocks and found != wanted.blocks[number]:
            end = min(wanted.bytes, (number + 1) * DIGEST_BLOCK)
            raise self._damage(f"bytes {number * DIGEST_BLOCK:,} to {end:,} of {name} have changed")

    def _damage(self, what: str) -> DamagedCheckpoint:
        return DamagedCheckpoint(f"checkpoint {self.folder} is damaged: {what}")


def block_digest(file: Path, number: int) -> int:
    """The CRC-32 of block `number` of `file`."""
    digest, left = 0, DIGEST_BLOCK
    view = memoryview(bytearray(READ_AT_ONCE))
    with open(file, "rb", buffering=0) as f:
        f.seek(number * DIGEST_BLOCK)
        while left and (count := f.readinto(view[: min(READ_AT_ONCE, left)])):
            digest = zlib.crc32(view[:count], digest)
            left -= count
    return digest


def digest_files(files: Iterable[Path]) -> list[FileDigest]:
    """The digests of `files`, read by several threads."""
    sizes, tasks = [], []
    for file in files:
        size = os.stat(file).st_size
        sizes.append(size)
        tasks += [partial(block_digest, file, number) for number in range(-(-size // DIGEST_BLOCK))]
    blocks = iter(run_all(tasks))
    return [FileDigest(size, tuple(islice(blocks, -(-size // DIGEST_BLOCK)))) for size in sizes]


def digest_bytes(content: memoryview) -> FileDigest:
    """The digest of a file that holds `content`."""
    starts = range(0, len(content), DIGEST_BLOCK)
    blocks = tuple(zlib.crc32(content[start : start + DIGEST_BLOCK]) for start in starts)
    return FileDigest(len(content), blocks)


def files_of(folder: Path) -> dict[str, Path]:
    """The files of the step in `folder` that a list of digests has, by name relative to it.

    Names are those after orbax has taken the mark of temporary folders away.
    """
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name not in UNLISTED:
            item, *rest = path.relative_to(folder).parts
            files["/".join((item.split(TEMPORARY)[0], *rest))] = path
    return files


def write_digests(folder: Path, known: Mapping[str, FileDigest] | None = None) -> None:
    """Write the list of the step in `folder`; files that `known` lacks are read for it."""
    files = files_of(folder)
    digests = dict(known or {})
    unknown = [name for name in files if name not in digests]
    computed = digest_files(files[name] for name in unknown)
    digests.update(zip(unknown, computed, strict=True))
    write_list(folder / LIST, {name: digests[name] for name in files})


def read_digests(folder: Path) -> DigestList | None:
    """The list of the step in `folder`, or None if it has none. Raises `DamagedCheckpoint`."""
    if not (folder / LIST).is_file():
        return None
    return DigestList(folder, read_list(folder / LIST))


def require_never_made(folder: Path, record: Mapping) -> None:
    """Raise `DamagedCheckpoint` if the step in `folder`, which has no list, had one once.

    Its `record` says so.
    """
    if record.get("digests"):
        raise DamagedCheckpoint(f"checkpoint {folder} is damaged: its digests are gone")


def write_list(file: Path, files: Mapping[str, FileDigest]) -> None:
    """Write digests to `file`, under a digest of their own, and wait until they are on disk."""
    record = {"format": FORMAT, "files": {n: [d.bytes, *d.blocks] for n, d in files.items()}}
    text = json.dumps(record, separators=(",", ":"))
    with open(file, "w", encoding="utf-8") as f:
        f.write(f"{zlib.crc32(text.encode()):08x}\n{text}\n")
        f.flush()
        os.fsync(f.fileno())


def read_list(file: Path) -> dict[str, FileDigest]:
    """The digests in `file`. Raises `DamagedCheckpoint` unless they are as written."""
    try:
        digest, text = file.read_bytes().decode().rstrip("\n").split("\n")
        if digest != f"{zlib.crc32(text.encode()):08x}":
            raise ValueError("its own digest differs")
        record = json.loads(text)
        if record["format"] != FORMAT:
            raise UserError(
                f"{file}: digests of an unknown format {record['format']!r}; read the checkpoint "
                "with the mjax that wrote it"
            )
        return {name: FileDigest(size, tuple(d)) for name, (size, *d) in record["files"].items()}
    except UserError:
        raise
    except (OSError, ValueError, KeyError) as e:
        raise DamagedCheckpoint(
            f"checkpoint {file.parent} is damaged: {file.name} is unreadable ({e})"
        ) from None
