"""A process whose step does not end says what it was doing and exits; none waits for ever.

Nothing in Python can interrupt a collective that waits for a process that has died or hangs. So a
thread watches the loop, and ends the process with exit code 3, which a launcher or `--restarts`
starts again. The reads that precede the exit may hang, too, and have a limit of their own. jax does
not say which collective a device waits in: NCCL's own log does (docs/train/failures.md).
"""

import contextlib
import faulthandler
import os
import re
import threading
import time
from collections.abc import Callable, Iterator

import jax

from mjax.errors import START_AGAIN, LostProcess, first_line
from mjax.run.faults.stopping import say_at_once

LONGEST_LOOK = 5.0  # seconds that reading the memory of devices may take

# Words of gloo, NCCL, JAX's coordination service and gRPC about a process that has gone.
GONE_WORDS = re.compile(
    r"gloo|nccl|coordination (service|agent)|heartbeat|connection (reset|closed|refused)"
    r"|socket closed|broken pipe|barrier|unavailable|deadline_exceeded|aborted",
    re.IGNORECASE,
)


class Watchdog:
    """A context that ends the process if `beat` is not called for `minutes`; None: never.

    `doing` names what the loop is about; that is printed then, with the stacks of all threads and
    the memory of devices.
    """

    def __init__(self, minutes: float | None) -> None:
        self._seconds = None if minutes is None else 60 * minutes
        self._over = threading.Event()
        self._last = self._since = time.monotonic()
        self._doing = "starting"
        self._dispatched = self._ended = 0  # steps

    def __enter__(self) -> "Watchdog":
        self.beat()
        if self._seconds is not None:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def beat(self) -> None:
        """The loop calls it after a step, or after something else that takes as long."""
        self._last = time.monotonic()

    def doing(self, what: str) -> None:
        """The loop is about to do `what`, which may hang."""
        self._doing, self._since = what, time.monotonic()

    def dispatched(self, step: int) -> None:
        """Step `step` was handed to the device."""
        self._dispatched = step

    def ended(self, step: int) -> None:
        """The result of step `step` has arrived."""
        self._ended = step
        self.beat()

    def _watch(self) -> None:
        while not self._over.wait(min(1.0, self._seconds / 4)):
            now = time.monotonic()
            if now - self._last > self._seconds:
                faulthandler.dump_traceback(all_threads=True)
                say_at_once(
                    f"process {jax.process_index()} of {jax.process_count()}: no step has ended "
                    f"in train.step_timeout_minutes={self._seconds / 60:g}; for the last "
                    f"{now - self._since:.0f} s it was {self._doing}; steps dispatched: "
                    f"{self._dispatched}, ended: {self._ended}; {memory_in_use()}"
                )
                say_at_once(
                    "another process may have died or hang: compare what each was doing. Start "
                    "all again: the run resumes from its newest checkpoint (--restarts N does it). "
                    "If it recurs, NCCL_DEBUG=INFO with NCCL_DEBUG_SUBSYS=COLL names each "
                    "process's last collective"
                )
                os._exit(START_AGAIN)


def memory_in_use(read: Callable[[], list[str]] | None = None) -> str:
    """The memory in use on this process's devices, in words; `LONGEST_LOOK` seconds at most."""
    found: list[str] = []

    def look() -> None:
        with contextlib.suppress(Exception):  # a device that erred
            found.append(", ".join((read or _memory_lines)()))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(LONGEST_LOOK)
    if not found:
        return f"memory of devices: no answer in {LONGEST_LOOK:g} s"
    return f"memory of devices: {found[0] or 'unknown'}"


def _memory_lines() -> list[str]:
    lines = []
    for device in jax.local_devices():
        stats = device.memory_stats() or {}
        if "bytes_in_use" in stats:
            used, most = stats["bytes_in_use"] / 1e9, stats.get("bytes_limit", 0) / 1e9
            lines.append(f"{device.id}: {used:.1f} of {most:.1f} GB")
    return lines


@contextlib.contextmanager
def naming_lost_processes() -> Iterator[None]:
    """A block whose error is `LostProcess` where the loss of another process made it."""
    try:
        yield
    except Exception as e:
        if line := lost_process(e):
            raise LostProcess(line) from e
        raise


def lost_process(error: BaseException) -> str | None:
    """A line on the process whose loss made `error` in a job of several; None: it is another's.

    Errors of a device's own, as for want of memory, are not taken for it.
    """
    if jax.process_count() == 1:
        return None
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, jax.errors.JaxRuntimeError) and GONE_WORDS.search(str(cause)):
            return (
                f"process {jax.process_index()} of {jax.process_count()} has lost another one: "
                f"{first_line(cause)}; start all again: the run resumes from its newest checkpoint"
            )
        cause = cause.__cause__ or cause.__context__
    return None
