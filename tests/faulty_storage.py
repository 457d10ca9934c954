"""Storage that fails on request, for processes that tests start: any file operation, any library.

`faulty_storage.c` does it, loaded before the C library; where there is no C compiler, tests skip.
"""

import ctypes
import mmap
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


class _Record(ctypes.Structure):
    """As in `faulty_storage.c`."""

    _fields_ = [
        (name, ctypes.c_longlong) for name in ("counted", "first", "last", "error", "failed")
    ]


class Faults:
    """Which of the file operations below a folder fail; processes that run may be told anew."""

    def __init__(self, file: Path) -> None:
        if not file.exists():
            file.write_bytes(bytes(mmap.PAGESIZE))
        with open(file, "r+b") as opened:
            self._page = mmap.mmap(opened.fileno(), mmap.PAGESIZE)
        self._record = _Record.from_buffer(self._page)

    def fail(self, first: int, last: int, error: int) -> None:
        """Let operations `first` to `last`, counted from 1 and from now on, fail with `error`."""
        self._record.last = 0  # off while the rest is written
        self._record.counted, self._record.failed, self._record.error = 0, 0, error
        self._record.first, self._record.last = first, last

    def stop(self) -> tuple[int, int]:
        """Let none fail any more; (operations counted, operations failed) since `fail`."""
        self._record.last = 0
        return self._record.counted, self._record.failed


def environment(tmp_path: Path, folder: Path) -> dict[str, str]:
    """The variables with which a process has faulty storage below `folder`.

    Its `Faults` are those of the file FAULTY_CONTROL. Skips the test where that cannot be.
    """
    compiler = shutil.which("cc")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("failing file operations need Linux and a C compiler (cc)")
    library = tmp_path / "faulty_storage.so"
    source = Path(__file__).with_name("faulty_storage.c")
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"]
    subprocess.run(command, check=True)
    control = tmp_path / "faults"
    Faults(control)
    own = {"FAULTY_FOLDER": str(folder), "FAULTY_CONTROL": str(control)}
    return os.environ | own | {"LD_PRELOAD": str(library)}
