"""Processes that decode images and sounds for the loader's threads.

Each is a program of its own (`python -m mjax.data.decoders`) that imports no JAX, ignores signals
meant for the run and ends with the pipe to it. A thread of the run reads files, sends their bytes
and receives arrays. Invariant: nothing that is decoded depends on how many processes there are.
"""

import contextlib
import functools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import numpy as np

from mjax.errors import UNREADABLE, UserError

MOST = 16  # processes, unless the config says how many
_MOST_SENT = 16  # items at once

Decode = Callable[[bytes | np.ndarray], np.ndarray]


def attempt(function: Callable, *given: object) -> np.ndarray | bytes | str:
    """What a function that reads or decodes returns, or why it cannot, in words."""
    try:
        return function(*given)
    except (*UNREADABLE, SyntaxError, ArithmeticError) as e:
        return " ".join(str(e).split()) or type(e).__name__


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

        `decode` is pickled. An item that cannot be read or decoded is why, in words. Raises
        `UserError` where a process has ended.
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
        """What this thread's process makes of some items."""
        if not sent:
            return []
        if not hasattr(self.local, "pipe"):
            self.local.process, self.local.pipe = _start()
        try:
            self.local.pipe.send((decode, sent))
            return self.local.pipe.recv()
        except (EOFError, OSError):
            self.local.pipe.close()
            del self.local.pipe
            code = self.local.process.wait()
        how = f"signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exit code {code}"
        raise UserError(
            f"data.images.workers: a process that decodes images and sounds ended by {how}; free "
            "memory or lower data.images.workers, then start again"
        )


@functools.cache
def decoders(count: int | None) -> Decoders:
    """The processes of this run, as many for all its data; None: one a core, up to `MOST`."""
    return Decoders(min(os.cpu_count() or 1, MOST) if count is None else count)


def _start() -> tuple[subprocess.Popen, Connection]:
    """A process that decodes, and the pipe to it."""
    ours, its = Pipe()
    command = [sys.executable, "-m", "mjax.data.decoders", str(its.fileno())]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(command, pass_fds=[its.fileno()], env=env)
    its.close()  # or the end of the process would not be seen
    return process, ours


def main(number: int) -> None:
    """Decode what comes through the pipe of this file descriptor, until it is closed."""
    for ending in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ending, signal.SIG_IGN)  # the run decides when to end
    with contextlib.suppress(EOFError, OSError), Connection(number) as pipe:
        while True:
            decode, given = pipe.recv()
            pipe.send([attempt(decode, encoded) for encoded in given])


if __name__ == "__main__":
    main(int(sys.argv[1]))
