"""Stopping a run in good order: signals, wall time, agreement of all processes, bad numbers.

Invariant: Processes act only on what all of them know. At every step each process contributes its
reason to stop to a maximum over all devices. Like the metrics it is fetched one step late, so
neither the device nor the host waits for it. This follows Megatron-LM's exit-signal-handler.
"""

import contextlib
import os
import signal
import time
from functools import lru_cache
from types import FrameType

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mjax.errors import INTERRUPTED

# What a process may have to say after a step; all act on the largest.
GO_ON, SAVE_FAILED, TIME_IS_UP, SIGNALED, TAKEN_OVER = range(5)
# Slurm sends SIGTERM at the end, or what --signal names before; a closed terminal SIGHUP.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
REASONS = {TIME_IS_UP: "train.max_minutes is over", SIGNALED: "a stop signal was received"}


class NonFiniteLoss(RuntimeError):
    """Training met a loss, gradient norm or weight that is not finite; the message is one line."""


class ReplicasDiffer(RuntimeError):
    """Devices that hold the same part of the state hold other bits; the message is one line."""


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

    def ask(self, news: int = GO_ON) -> jax.Array | int:
        """GO_ON or what to act on, agreed by all processes; asynchronous, fetch with `int`.

        `news`: what else this process has to say.
        """
        late = self._deadline is not None and time.monotonic() > self._deadline
        reason = TIME_IS_UP if late else GO_ON
        if self._signaled:
            reason = SIGNALED
        reason = max(reason, news)
        return reason if jax.process_count() == 1 else largest_of_all(reason)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self._signaled and number == signal.SIGINT:
            say_at_once("stopping at once")
            os._exit(INTERRUPTED)
        self._signaled = True
        name = signal.Signals(number).name
        say_at_once(f"{name}: finishing this step, then saving; interrupt again to stop at once")


def largest_of_all(value: int) -> jax.Array:
    """The largest `value` of all processes, int32 []; every process must call."""
    mesh = _all_devices()
    return _largest(mesh)(_rows(mesh, np.full(1, value, np.int32)))


def values_of_all(values: np.ndarray) -> jax.Array:
    """[processes, n] from each process's `values` [n] of one dtype; every process must call."""
    mesh = _all_devices()
    return _gathered(mesh)(_rows(mesh, values[None]))


def _rows(mesh: Mesh, row: np.ndarray) -> jax.Array:
    """[devices, ..]: each process's `row` [1, ..] on its devices."""
    shards = [jax.device_put(row, device) for device in mesh.local_devices]
    sharding = NamedSharding(mesh, P("all"))
    shape = (mesh.size, *row.shape[1:])
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


@lru_cache(maxsize=1)
def _all_devices() -> Mesh:
    return Mesh(np.array(jax.devices()), ("all",))


@lru_cache(maxsize=1)
def _largest(mesh: Mesh):
    return jax.jit(lambda values: values.max(), out_shardings=NamedSharding(mesh, P()))


@lru_cache(maxsize=1)
def _gathered(mesh: Mesh):
    owners = [device.process_index for device in mesh.devices.flat]
    firsts = np.array([owners.index(process) for process in sorted(set(owners))])
    return jax.jit(lambda rows: rows[firsts], out_shardings=NamedSharding(mesh, P()))


def say_at_once(text: str) -> None:
    """Write to the file descriptor: a signal handler may interrupt a print."""
    with contextlib.suppress(OSError):  # the terminal may be what has gone
        os.write(2, f"\nmjax: {text}\n".encode())
