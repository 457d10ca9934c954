"""The slow device of a run: one small matmul on each, timed every k steps.

The time of a step names no device, because all end it together; a matmul without an exchange does.
Each process times its devices one after the other while no step runs, so the times are those of
the devices alone. Invariant: every process sees the times of all, and the numbers of a run stay as
they are. After the checks of NVIDIA's resiliency extension and MegaScale.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from mjax.run.monitor.metrics import Record
from mjax.sharding.processes.agreement import values_of_all

SLOWER = 0.1  # share by which a slow device exceeds the median
SEEN = 3  # checks in which a device is slow before it is named
MATMULS = 3  # of which the fastest counts
WIDTHS = {"cpu": 256}  # of the matrix, by platform
WIDTH_OF_GPUS, PRODUCTS = 4096, 4  # about a millisecond on an H100


@dataclass
class SlowDeviceWatch:
    """Times the devices every `interval` steps; None: never.

    time_device: returns the seconds that a device takes.
    """

    interval: int | None
    time_device: Callable[[jax.Device], float] = field(default_factory=lambda: seconds_of_matmul)
    _seen: Counter[int] = field(default_factory=Counter)
    _devices: list[jax.Device] = field(default_factory=list)

    def is_due(self, step: int) -> bool:
        return self.interval is not None and step % self.interval == 0

    def measure(self, devices: Sequence[jax.Device]) -> tuple[Record, str]:
        """(the fields of a record, a line on a device that has become conspicuous or "").

        Every process must call it, with the devices that train. Others may be at work.
        """
        self._devices = sorted(devices, key=lambda d: (d.process_index, d.id))
        me = jax.process_index()
        own = [device for device in self._devices if device.process_index == me]
        seconds = [self.time_device(device) for device in own]
        mine = np.array(seconds, np.float32)
        gathered = values_of_all(mine, self._devices)
        times = np.asarray(gathered, np.float64)
        return self.judge(1000 * times.reshape(-1))

    def judge(self, times: np.ndarray) -> tuple[Record, str]:
        """As `measure`, from the milliseconds of its devices, by process."""
        median, slowest = float(np.median(times)), int(times.argmax())
        record = {
            "device_ms": median,
            "slowest_device": slowest,
            "slowest_device_ms": float(times[slowest]),
        }
        if times[slowest] <= (1 + SLOWER) * median:
            return record, ""
        self._seen[slowest] += 1
        if self._seen[slowest] != SEEN:
            return record, ""
        device = (self._devices or jax.devices())[slowest]
        return record, (
            f"device {device.id} of process {device.process_index} ({device.device_kind}) is slow: "
            f"a matmul takes it {times[slowest]:.3g} ms, the median device {median:.3g} ms"
        )


def seconds_of_matmul(device: jax.Device) -> float:
    """The seconds of some matmuls on a device, the fastest of `MATMULS`."""
    width = WIDTHS.get(device.platform, WIDTH_OF_GPUS)
    x = jax.device_put(np.full((width, width), 1 / width, jnp.bfloat16), device)
    jax.block_until_ready(_chain(x))  # compiled, and the clock of the device raised
    found = []
    for _ in range(MATMULS):
        began = time.perf_counter()
        jax.block_until_ready(_chain(x))
        found.append(time.perf_counter() - began)
    return min(found)


@jax.jit
def _chain(x: jax.Array) -> jax.Array:
    """A chain of products, so that none is left out."""
    found = x
    for _ in range(PRODUCTS):
        found = found @ x
    return found
