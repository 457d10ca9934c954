"""Writing log records so that no log is ever worth the run.

Each place that records go to (a file, the terminal, a service) has a thread of its own. Invariant:
the training loop never waits for a log and never ends because of one. A place that fails is said
once and tried again with every record; one that hangs costs its own records only.
"""

import contextlib
import errno
import json
import math
import os
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mjax.errors import reason

MOST_WAITING = 10_000  # records kept for a place that cannot be written
GONE = (errno.EPIPE, errno.EIO, errno.ENXIO, errno.EBADF)  # of a terminal or pipe
CLOSING = 10.0  # seconds that a place has for its last records at the end of a run

Sink = Callable[[Any], None]


class LogWriter:
    """Hands what it is called with to `sink`, one after the other, in a thread.

    `name` is that of the place in messages. `close_sink` is called at the end.
    """

    def __init__(self, name: str, sink: Sink, close_sink: Callable[[], None] | None = None) -> None:
        self._name = name
        self._sink = sink
        self._close_sink = close_sink
        self._queue: queue.Queue = queue.Queue(MOST_WAITING)
        self._fails = self._is_full = False
        self._thread = threading.Thread(target=self._work, name=f"log {name}", daemon=True)
        self._thread.start()

    def __call__(self, record: object) -> None:
        """Never blocks: a record that finds `MOST_WAITING` others waiting is dropped."""
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            if not self._is_full:
                warn(f"{self._name} hangs; training goes on, its records are dropped")
            self._is_full = True

    def close(self) -> None:
        """Give the place `CLOSING` seconds for what is left."""
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)
        self._thread.join(CLOSING)
        if self._thread.is_alive():
            warn(f"{self._name} hangs; its last records are lost")

    def _work(self) -> None:
        while (record := self._queue.get()) is not None:
            self._try(self._sink, record)
        if self._close_sink is not None:
            self._try(self._close_sink)

    def _try(self, action: Callable, *arguments: object) -> None:
        try:
            action(*arguments)
        except Exception as e:
            if not self._fails:
                warn(f"{self._name} cannot be written ({reason(e)}); training goes on")
            self._fails = True
        else:
            if self._fails:
                warn(f"{self._name} is written again")
            self._fails = False


class JsonLines:
    """Appends records as lines of JSON; lines that cannot be written wait for the next call.

    Invariant: the file never holds a torn line that this process wrote. It is opened for each
    record, so that a file system that was mounted again is found. Numbers that are not finite are
    written as null, so that every line is standard JSON.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting: deque[bytes] = deque(maxlen=MOST_WAITING)
        self._size = path.stat().st_size if path.exists() else 0

    def __call__(self, record: dict) -> None:
        values = {name: _finite_or_none(value) for name, value in record.items()}
        self._waiting.append(json.dumps(values).encode() + b"\n")
        self.flush()

    def flush(self) -> None:
        """Write what waits; raises `OSError` and keeps it if that fails."""
        if not self._waiting:
            return
        text = b"".join(self._waiting)
        with open(self.path, "ab", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            if size > self._size:  # a part of a line that a full disk let through
                file.truncate(self._size)
            begin = min(size, self._size)
            written = 0
            while written < len(text):
                written += file.write(text[written:])
        self._size = begin + len(text)
        self._waiting.clear()


def _finite_or_none(value: float | int | str | None) -> float | int | str | None:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def print_line(text: str) -> None:
    """Print on standard output; raises `OSError` where that fails.

    A terminal or pipe that is gone is replaced by nothing, so that Python can end in good order.
    """
    try:
        print(text, flush=True)
    except OSError as e:
        if e.errno not in GONE:
            raise
        _print_nowhere()
        warn(f"standard output has gone ({reason(e)}); training goes on")


def close_output() -> None:
    """Send standard output nowhere from now on if it cannot be written."""
    try:
        sys.stdout.flush()
    except OSError:
        _print_nowhere()


def _print_nowhere() -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


def warn(text: str) -> None:
    """A line on standard error, if that can be written. It may be called in a signal handler."""
    with contextlib.suppress(OSError):
        os.write(2, f"mjax: {text}\n".encode())
