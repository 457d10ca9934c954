"""Stopping a run in good order: signals, wall time, agreement of all processes, bad numbers.

Invariant: processes act only on what all of them know. Each contributes "I was asked to stop" to a
small maximum over all devices at every step; like the metrics it is fetched one step late, so
neither the device nor the host waits for it. After Megatron's exit-signal-handler.
"""

import os
import signal
import time
from functools import lru_cache
from types import FrameType

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

# Bits that a process may contribute; the largest of all processes is acted on.
GO_ON, TIME_IS_UP, SIGNALLED = 0, 1, 2
REASONS = {TIME_IS_UP: "train.max_minutes is over", SIGNALLED: "a stop signal was received"}


class NonFiniteLoss(RuntimeError):
    """Training met a loss or gradient norm that is not a number; the message is one line."""


class Stopper:
    """Context that notes SIGTERM, SIGINT and the wall time instead of dying of them.

    A second SIGINT ends the process at once with code 130.
    """

    def __init__(self, max_minutes: float | None) -> None:
        self._deadline = None if max_minutes is None else time.monotonic() + 60 * max_minutes
        self._signalled = False
        self._previous: dict[int, object] = {}

    def __enter__(self) -> "Stopper":
        for number in (signal.SIGTERM, signal.SIGINT):
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def ask(self) -> jax.Array | int:
        """GO_ON or why to stop, agreed by all processes; asynchronous, fetch with `int`."""
        late = self._deadline is not None and time.monotonic() > self._deadline
        mine = SIGNALLED if self._signalled else TIME_IS_UP if late else GO_ON
        return mine if jax.process_count() == 1 else largest_of_all(mine)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self._signalled and number == signal.SIGINT:
            _say("stopping at once")
            os._exit(128 + signal.SIGINT)
        self._signalled = True
        name = signal.Signals(number).name
        _say(f"{name}: finishing this step, then saving; interrupt again to stop at once")


def largest_of_all(value: int) -> jax.Array:
    """Largest `value` that any process passes in this call; every process must call."""
    mesh = _all_devices()
    shards = [jax.device_put(np.full(1, value, np.int32), d) for d in mesh.local_devices]
    values = jax.make_array_from_single_device_arrays(
        (mesh.size,), NamedSharding(mesh, P("all")), shards
    )
    return _largest(mesh)(values)


@lru_cache(maxsize=1)
def _all_devices() -> Mesh:
    return Mesh(np.array(jax.devices()), ("all",))


@lru_cache(maxsize=1)
def _largest(mesh: Mesh):
    return jax.jit(lambda values: values.max(), out_shardings=NamedSharding(mesh, P()))


def _say(text: str) -> None:
    """Straight to the file descriptor: a handler may interrupt a half-done print."""
    os.write(2, f"\nmjax: {text}\n".encode())
