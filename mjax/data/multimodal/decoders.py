"""Processes that decode images and sounds for the loader's threads.

Each is a program of its own (`python -m mjax.data.decoders`) that imports no JAX, ignores signals
meant for the run and ends with the pipe to it. A thread of the run reads files, sends their bytes
and finds arrays in memory that both share. Invariant: no array depends on which process decoded
it, or on how many there are.
"""

import contextlib
import functools
import math
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import numpy as np

from mjax.errors import UserError, reason

MOST_PROCESSES = 16  # processes, unless the config says how many
# Or glibc gives memory back after each image, and asks for it anew: a third of the time.
KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": f"{1 << 28}", "MALLOC_MMAP_THRESHOLD_": f"{1 << 26}"}
_MOST_SENT = 8  # items at once
_ROOM = 1 << 30  # bytes of addresses for what a process has decoded

Decode = Callable[[bytes | np.ndarray], np.ndarray]


def attempt(function: Callable, *given: object) -> np.ndarray | bytes | str:
    """Call a function that reads or decodes; returns its result, or in words why it failed."""
    try:
        return function(*given)
    except Exception as e:  # libraries raise all kinds of errors for bytes that are no image
        return reason(e)


class Decoders:
    """`count` processes, each started when it is first needed; 0: the caller's thread decodes."""

    def __init__(self, count: int):
        self.count = count
        self.threads = ThreadPoolExecutor(count, "decoder") if count else None
        self.local = threading.local()

    def decode(
        self,
        decode: Decode,
        reads: Sequence[Callable[[], bytes | np.ndarray]],
        keep: Callable[[int, np.ndarray | str], None],
    ) -> None:
        """Call `keep(n, array)` for each item n that `reads` gives, in any order and thread.

        The array is there during that call only. An item that cannot be read or decoded is why, in
        words. `decode` is pickled. Raises `UserError` where a process has ended.
        """
        size = min(max(len(reads) // (2 * max(self.count, 1)), 1), _MOST_SENT)
        parts = [range(first, len(reads))[:size] for first in range(0, len(reads), size)]

        def decode_part(places: range) -> None:
            given = [attempt(reads[place]) for place in places]
            sent = [item for item in given if isinstance(item, bytes)] if self.count else []
            received = iter(self._ask(decode, sent))
            for place, item in zip(places, given, strict=True):
                if not isinstance(item, str):
                    is_sent = self.count and isinstance(item, bytes)
                    item = next(received) if is_sent else attempt(decode, item)
                keep(place, item)

        list(self.threads.map(decode_part, parts) if self.threads else map(decode_part, parts))

    def _ask(self, decode: Decode, sent: list[bytes]) -> list[np.ndarray | str]:
        """Decode some items in this thread's process; the results last until the next call."""
        if not sent:
            return []
        if not hasattr(self.local, "helper"):
            self.local.helper = Helper()
        try:
            return self.local.helper.ask(decode, sent)
        except (EOFError, OSError):
            code = self.local.helper.end()
            del self.local.helper
        how = f"signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exit code {code}"
        raise UserError(
            f"data.images.workers: a process that decodes images and sounds ended by {how}; free "
            "memory or lower data.images.workers, then start again"
        )


class Helper:
    """A process that decodes, the pipe to it, and the memory that it leaves arrays in."""

    def __init__(self):
        self.pipe, its = Pipe()
        memory = new_memory()
        self.memory = mmap.mmap(memory, _ROOM)
        numbers = its.fileno(), memory
        command = [sys.executable, "-m", "mjax.data.multimodal.decoders", *map(str, numbers)]
        env = KEEP_MEMORY | os.environ
        env |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self.process = subprocess.Popen(command, pass_fds=numbers, env=env)
        its.close()  # or the end of the process would not be seen
        os.close(memory)

    def ask(self, decode: Decode, sent: list[bytes]) -> list[np.ndarray | str]:
        """Decode some items: arrays in its memory that last until the next call, or words."""
        self.pipe.send((decode, sent))
        found = []
        for told in self.pipe.recv():
            if not isinstance(told, str):
                first, dtype, shape = told
                told = np.ndarray(shape, dtype, self.memory, first)
            found.append(told)
        return found

    def end(self) -> int:
        """The exit code of a process that has ended, or does as its pipe is closed."""
        self.pipe.close()
        return self.process.wait()


def new_memory() -> int:
    """A file descriptor of memory that processes share; what is not written to takes none."""
    if hasattr(os, "memfd_create"):
        memory = os.memfd_create("decoded")
    else:
        with tempfile.TemporaryFile() as file:
            memory = os.dup(file.fileno())
    os.truncate(memory, _ROOM)
    return memory


@functools.cache
def decoders(count: int | None) -> Decoders:
    """The processes of this run, for all its data; None: one a core, up to `MOST_PROCESSES`."""
    return Decoders(min(os.cpu_count() or 1, MOST_PROCESSES) if count is None else count)


def answer(pipe: Connection, memory: mmap.mmap) -> None:
    """Decode what is asked for next; arrays are left in the memory, and the pipe says where."""
    decode, sent = pipe.recv()
    told, first = [], 0

    def leave(encoded: bytes) -> tuple[int, str, tuple[int, ...]]:
        array = decode(encoded)
        np.ndarray(array.shape, array.dtype, memory, first)[...] = array
        return first, array.dtype.str, array.shape

    for encoded in sent:
        told.append(attempt(leave, encoded))
        if not isinstance(told[-1], str):
            _, dtype, shape = told[-1]
            first += -(-math.prod(shape) * np.dtype(dtype).itemsize // 64) * 64
    pipe.send(told)


def main(pipe: int, memory: int) -> None:
    """Decode what comes through the pipe of this file descriptor, until it is closed."""
    for ending in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ending, signal.SIG_IGN)  # the run decides when to end
    arrays = mmap.mmap(memory, _ROOM)
    with contextlib.suppress(EOFError, OSError), Connection(pipe) as connection:
        while True:
            answer(connection, arrays)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
