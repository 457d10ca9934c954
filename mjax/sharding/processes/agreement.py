"""Runs an action in one process for all: every process returns, or all raise the same error.

Invariant: if the action fails, no process waits for the one that gave up.
"""

from collections.abc import Callable
from functools import lru_cache

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mjax.errors import UserError

LONGEST = 4096  # bytes of an error's line that travel


def on_process_0(action: Callable[[], object]) -> None:
    """Run `action` on process 0; a `UserError` there is raised by all. Every process must call."""
    line = b""
    if jax.process_index() == 0:
        try:
            action()
        except UserError as e:
            if jax.process_count() == 1:
                raise
            line = str(e).encode()[:LONGEST]
    if jax.process_count() == 1:
        return
    text = np.zeros(LONGEST, np.uint8)
    text[: len(line)] = np.frombuffer(line, np.uint8)
    said = multihost_utils.broadcast_one_to_all(text).tobytes().rstrip(b"\0")
    if said:
        raise UserError(said.decode(errors="replace"))


def wait_for_every_process(name: str) -> None:
    """Return when every process has called with this name."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


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
