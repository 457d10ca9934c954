"""Stopping a run in good order: signals, wall time, agreement of all processes, bad numbers.

Invariants: Processes act only on what all of them know. None waits forever: a watchdog ends a
process whose step does not end because another process died or hangs. At every step each process
contributes its reason to stop to a maximum over all devices. Like the metrics it is fetched one
step late, so neither the device nor the host waits for it. This follows Megatron-LM's
exit-signal-handler.
"""

import faulthandler
import os
import signal
import threading
import time
from functools import lru_cache
from types import FrameType

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

# Reasons to stop that a process may have; all act on the largest.
GO_ON, TIME_IS_UP, SIGNALED = 0, 1, 2
STUCK = 3  # exit code of the watchdog
REASONS = {TIME_IS_UP: "train.max_minutes is over", SIGNALED: "a stop signal was received"}


class NonFiniteLoss(RuntimeError):
    """Training met a loss or gradient norm that is not a number; the message is one line."""


class Stopper:
    """A context that notes SIGTERM, SIGINT and the end of the wall time.

    A second SIGINT ends the process at once with code 130.
    """

    def __init__(self, max_minutes: float | None) -> None:
        self._deadline = None if max_minutes is None else time.monotonic() + 60 * max_minutes
        self._signaled = False
        self._previous: dict[int, object] = {}

    def __enter__(self) -> "Stopper":
        for number in (signal.SIGTERM, signal.SIGINT):
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def ask(self) -> jax.Array | int:
        """GO_ON or the reason to stop, agreed by all processes; asynchronous, fetch with `int`."""
        late = self._deadline is not None and time.monotonic() > self._deadline
        reason = TIME_IS_UP if late else GO_ON
        if self._signaled:
            reason = SIGNALED
        if jax.process_count() == 1:
            return reason
        return largest_of_all(reason)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self._signaled and number == signal.SIGINT:
            _say("stopping at once")
            os._exit(128 + signal.SIGINT)
        self._signaled = True
        name = signal.Signals(number).name
        _say(f"{name}: finishing this step, then saving; interrupt again to stop at once")


class Watchdog:
    """A context that ends the process if `beat` is not called for `minutes`; it prints all stacks.

    It guards against a collective that waits for a process that died or hangs. Nothing in Python
    can interrupt that, so the process exits at once with code `STUCK`.
    """

    def __init__(self, minutes: float | None) -> None:
        self._seconds = None if minutes is None else 60 * minutes
        self._over = threading.Event()
        self._last = time.monotonic()

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

    def _watch(self) -> None:
        while not self._over.wait(min(1.0, self._seconds / 4)):
            if time.monotonic() - self._last > self._seconds:
                faulthandler.dump_traceback(all_threads=True)
                _say(
                    f"process {jax.process_index()} of {jax.process_count()}: no step has ended "
                    f"in train.step_timeout_minutes={self._seconds / 60:g}; another process may "
                    "have died or hang (stacks above); start all again: the run resumes from its "
                    "newest checkpoint"
                )
                os._exit(STUCK)


def largest_of_all(value: int) -> jax.Array:
    """The largest `value` of all processes, int32 []; every process must call."""
    mesh = _all_devices()
    one = np.full(1, value, np.int32)
    shards = [jax.device_put(one, device) for device in mesh.local_devices]
    sharding = NamedSharding(mesh, P("all"))
    values = jax.make_array_from_single_device_arrays((mesh.size,), sharding, shards)
    return _largest(mesh)(values)


@lru_cache(maxsize=1)
def _all_devices() -> Mesh:
    return Mesh(np.array(jax.devices()), ("all",))


@lru_cache(maxsize=1)
def _largest(mesh: Mesh):
    return jax.jit(lambda values: values.max(), out_shardings=NamedSharding(mesh, P()))


def _say(text: str) -> None:
    """Write to the file descriptor: a signal handler may interrupt a print."""
    os.write(2, f"\nmjax: {text}\n".encode())
