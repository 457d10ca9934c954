"""Which process makes the others wait: what each host does between two steps, compared.

All processes of a step end it together, as its collectives wait for the slowest one. So the time of
a step distinguishes no process. The work of each host alone does: it waits for its batch (seconds
of the wall) and dispatches the step (seconds of its thread's CPU time, as some backends let the
dispatch wait for other processes). Each process measures both. Every log record has the times of
all, gathered on the devices after the step, so that nobody waits for them. Megatron-LM's straggler
detector and MegaScale also time kernels of each GPU; a slow GPU or link is not seen here.
"""

import statistics
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import jax
import numpy as np

from mjax.sharding.processes.agreement import values_of_all

SLOW = 0.1  # share of the step by which a host exceeds the median
SUSPICIONS = 3  # records in which a process is slow before it is named

T = TypeVar("T")


@dataclass(frozen=True)
class HostFigures:
    """Milliseconds a step of every process, [processes]: waiting for data, and dispatching."""

    data: np.ndarray
    dispatch: np.ndarray

    def record(self, ms_per_step: float | None) -> dict[str, float | int]:
        """The fields of a log record; `data_wait` is of process 0, the share of the step."""
        total = self.data + self.dispatch
        fields: dict[str, float | int] = {"host_ms": statistics.median_low(total.tolist())}
        if ms_per_step:
            fields["data_wait"] = min(1.0, float(self.data[0]) / ms_per_step)
        if len(total) > 1:
            slowest = int(total.argmax())
            fields["slowest_host"] = slowest
            fields["slowest_host_ms"] = float(total[slowest])
        return fields


class HostTime:
    """Measures this process; `gather` gives what all of them measured."""

    def __init__(self) -> None:
        self._data = self._dispatch = 0.0
        self._steps = 0
        self._has_begun = False
        self._suspicions: Counter[int] = Counter()

    def waiting(self, batches: Iterator[T]) -> Iterator[T]:
        """`batches`, with the time that each is waited for."""
        while True:
            began = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self._data += time.perf_counter() - began
            self._steps += 1
            yield batch

    @contextmanager
    def dispatching(self) -> Iterator[None]:
        """Around the calls that place a batch and dispatch its step."""
        began = time.thread_time()
        try:
            yield
        finally:
            self._dispatch += time.thread_time() - began

    def gather(self, devices: Iterable[jax.Device]) -> jax.Array | np.ndarray | None:
        """Seconds a step since the call before; asynchronous, for `figures`.

        Every process must call it, with the devices that train. None the first time: then the step
        was compiled.
        """
        mean = np.array([self._data, self._dispatch], np.float32) / max(self._steps, 1)
        is_first, self._has_begun = not self._has_begun, True
        self._data = self._dispatch = 0.0
        self._steps = 0
        # The first call compiles the exchange, while the clock of the run still stands.
        gathered = values_of_all(mean, devices)
        return None if is_first else gathered

    def slow_process(self, figures: HostFigures, ms_per_step: float | None) -> str | None:
        """A line, once, on a process that has been slow in some records."""
        fields = figures.record(ms_per_step)
        if not ms_per_step or "slowest_host" not in fields:
            return None
        excess = fields["slowest_host_ms"] - fields["host_ms"]
        if excess < SLOW * ms_per_step:
            return None
        slowest = fields["slowest_host"]
        self._suspicions[slowest] += 1
        if self._suspicions[slowest] != SUSPICIONS:
            return None
        return (
            f"process {slowest} is slow: its host takes {fields['slowest_host_ms']:.0f} ms a step "
            f"({figures.data[slowest]:.0f} of them for data), the median {fields['host_ms']:.0f} "
            f"ms; a step takes {ms_per_step:.0f} ms"
        )


def figures_of(gathered: jax.Array | np.ndarray | None) -> HostFigures | None:
    """The figures of `gather`, on the host."""
    if gathered is None:
        return None
    data, dispatch = 1000 * np.asarray(jax.device_get(gathered), np.float64).T
    return HostFigures(data, dispatch)
