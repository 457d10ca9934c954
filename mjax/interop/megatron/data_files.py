"""The data files of a torch_dist folder in writing; a process that is started again goes on.

Beside them lies a journal, one line a part, written once the bytes of the part are in a file.
Invariant: a part depends on nothing but the command, so a folder that took two processes has the
bytes of one that took one.
"""

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TextIO

from mjax.config.languages.paths import require_files
from mjax.errors import UserError, or_user_error

FILE_BYTES = 4 * 2**30  # after which the next data file begins
_JOURNAL = ".journal"
_Offsets = tuple[int, ...] | None  # of a chunk; None: of an object


class StoredPart(NamedTuple):
    """The place of the bytes of a tensor's chunk, or of an object."""

    name: str
    offsets: _Offsets
    file: str
    first: int
    length: int


class DataFiles:
    """Appends parts to the data files in `folder`; what the journal has is not made again."""

    def __init__(self, folder: Path, journal: TextIO):
        self.folder, self.places, self._journal = folder, [], journal
        self._found = {(part.name, part.offsets): part for part in _journaled(journal)}
        self._ends: dict[str, int] = {}
        for part in self._found.values():
            end = part.first + part.length
            self._ends[part.file] = max(self._ends.get(part.file, 0), end)
        for file in folder.glob("*.distcp"):
            os.truncate(file, self._ends.get(file.name, 0))  # what a killed process began

    def append(self, name: str, offsets: _Offsets, content: Callable[[], bytes]) -> None:
        """Write a part, unless it is there."""
        part = self._found.get((name, offsets))
        self.places.append(part or self._write(name, offsets, content()))

    def alias(self, name: str, other: str) -> None:
        """The chunks of a tensor are those of another, too."""
        own = [part for part in self.places if part.name == name]
        self.places += [part._replace(name=other) for part in own]

    def _write(self, name: str, offsets: _Offsets, content: bytes) -> StoredPart:
        number = max(len(self._ends) - 1, 0)
        number += self._ends.get(f"__0_{number}.distcp", 0) >= FILE_BYTES
        file = f"__0_{number}.distcp"
        part = StoredPart(name, offsets, file, self._ends.get(file, 0), len(content))
        with (self.folder / file).open("ab") as data:
            data.write(content)
        self._ends[file] = part.first + part.length
        print(json.dumps(part), file=self._journal, flush=True)
        return part


def _journaled(journal: TextIO) -> Iterator[StoredPart]:
    """Yield the parts that a journal names; a line that is not whole ends it."""
    journal.seek(0)
    whole = len(journal.readline())  # the command
    for line in journal.readlines():
        try:
            name, offsets, *place = json.loads(line)
        except (ValueError, TypeError):
            break
        whole += len(line)
        yield StoredPart(name, None if offsets is None else tuple(offsets), *place)
    journal.truncate(whole)


@contextlib.contextmanager
def unfinished_folder(out: Path, command: dict) -> Iterator[tuple[Path, TextIO]]:
    """The folder that becomes `out` if the block ends well, and its journal.

    A process that is killed, or that finds a device full, leaves it to the next one of the same
    `command`; a `UserError` takes it away. Raises `UserError` where `out` holds something already.
    """
    require_files(out)
    out = out.absolute()
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise UserError(f"{out} exists already; give another folder, or remove it")
    folder = out.with_name(f".{out.name}.unfinished")
    again = "free or mend it and start again, which goes on"
    with or_user_error(f"cannot write folder {folder}: {{reason}}; {again}"):
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / _JOURNAL).open("a+", encoding="ascii", errors="replace") as journal:
            with or_user_error(f"{folder}: another process writes it; wait for it"):
                fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
            journal.seek(0)
            if journal.readline() != json.dumps(command) + "\n":
                for part in filter(Path.is_dir, folder.iterdir()):
                    shutil.rmtree(part)
                journal.truncate(0)
                print(json.dumps(command), file=journal, flush=True)
            try:
                yield folder, journal
            except UserError:
                shutil.rmtree(folder, ignore_errors=True)
                raise
            (folder / _JOURNAL).unlink()
            folder.rename(out)
