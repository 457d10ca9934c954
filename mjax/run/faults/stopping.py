"""Stopping a run in good order: signals, wall time, agreement of all processes, bad numbers.

Invariant: Processes act only on what all of them know. At every step each process contributes its
reason to stop to a maximum over all devices. Like the metrics it is fetched one step late, so
neither the device nor the host waits for it. This follows Megatron-LM's exit-signal-handler.
"""

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from types import FrameType

import jax

from mjax.errors import INTERRUPTED
from mjax.sharding.processes.agreement import largest_of_all

# What a process may have to say after a step; all act on the largest.
GO_ON, SAVE_FAILED, TIME_IS_UP, SIGNALED, TAKEN_OVER = range(5)
NO_BETTER = 5  # of an evaluation, which all processes know
# Slurm sends SIGTERM at the end, or what --signal names before; a closed terminal SIGHUP.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
REASONS = {
    TIME_IS_UP: "train.max_minutes is over",
    SIGNALED: "a stop signal was received",
    NO_BETTER: "the held-out loss has not fallen in train.early_stop evaluations",
}


class Stopper:
    """A context that notes the signals of `STOP_SIGNALS` and the end of the wall time.

    A second SIGINT ends the process at once with code 130. A signal that the process was started
    to ignore, as nohup does with SIGHUP, stays ignored.
    """

    def __init__(self, max_minutes: float | None) -> None:
        self._deadline = None if max_minutes is None else time.monotonic() + 60 * max_minutes
        self._signaled = False
        self._previous: dict[int, object] = {}

    def __enter__(self) -> "Stopper":
        for number in STOP_SIGNALS:
            if signal.getsignal(number) == signal.SIG_IGN:
                continue
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def ask(self, devices: Iterable[jax.Device], news: int = GO_ON) -> jax.Array | int:
        """GO_ON or what to act on, agreed by all processes; asynchronous, fetch with `int`.

        `devices`: those that train. `news`: what else this process has to say.
        """
        late = self._deadline is not None and time.monotonic() > self._deadline
        reason = TIME_IS_UP if late else GO_ON
        if self._signaled:
            reason = SIGNALED
        return largest_of_all(max(reason, news), devices)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self._signaled and number == signal.SIGINT:
            say_at_once("stopping at once")
            os._exit(INTERRUPTED)
        self._signaled = True
        name = signal.Signals(number).name
        say_at_once(f"{name}: finishing this step, then saving; interrupt again to stop at once")


def say_at_once(text: str) -> None:
    """Write to the file descriptor: a signal handler may interrupt a print."""
    with contextlib.suppress(OSError):  # the terminal may be what has gone
        os.write(2, f"\nmjax: {text}\n".encode())
