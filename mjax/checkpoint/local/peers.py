"""The devices of each process, and what travels between processes.

A process is one of the job's, with as many devices as the others. Invariant: all processes call
with the same arguments, so that none waits for an exchange that another leaves out.
"""

import functools
import socket
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from jax import Shard
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


def machine_id() -> str:
    """An identifier that no two running machines share, and that changes when a machine restarts.

    Containers of one machine share it, whatever they call their host.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def devices_by_process(array: jax.Array | jax.ShapeDtypeStruct) -> list[list[jax.Device]]:
    """The devices that hold an array, those of process 0 first, each by its number."""
    found: dict[int, list[jax.Device]] = {}
    for device in sorted(array.sharding.device_set, key=lambda d: (d.process_index, d.id)):
        found.setdefault(device.process_index, []).append(device)
    return [found[process] for process in sorted(found)]


def in_device_order(array: jax.Array) -> list[Shard]:
    """The shards of an array in this process, in the order of `devices_by_process`."""
    return sorted(array.addressable_shards, key=lambda shard: shard.device.id)


def gather_numbers(numbers: Sequence[int]) -> np.ndarray:
    """int64 [processes, n]: what each process has passed; all pass as many."""
    mine = np.asarray(numbers, np.int64)
    if jax.process_count() == 1:
        return mine[None]
    halves = mine.view(np.int32)  # jax has no 64-bit numbers by default
    return np.asarray(multihost_utils.process_allgather(halves)).view(np.int64)


def send(
    shards: list[jax.Array], devices: list[list[jax.Device]], pairs: Sequence[tuple[int, int]]
) -> list[jax.Array]:
    """Send shards between processes, by `pairs` of (sender, receiver); returns those received.

    `shards` are those of this process, in the order of its `devices`, all of one shape. The i-th
    device of a receiver gets the shard of the sender's i-th device. Each process is at most one
    sender and one receiver. A process that is no receiver gets zeros.
    """
    count = len(devices[0])
    mesh = Mesh(np.array(devices).reshape(-1), ("device",))
    steps = []
    for sender, receiver in pairs:
        steps += [(sender * count + i, receiver * count + i) for i in range(count)]
    where = NamedSharding(mesh, P("device"))
    shape = mesh.size, *shards[0].shape
    rows = [shard[None] for shard in shards]
    whole = jax.make_array_from_single_device_arrays(shape, where, rows)
    received = _permute(mesh, tuple(steps))(whole)
    return [shard.data[0] for shard in in_device_order(received)]


@functools.cache
def _permute(mesh: Mesh, steps: tuple[tuple[int, int], ...]) -> jax.stages.Wrapped:
    def permute(x: jax.Array) -> jax.Array:
        return jax.lax.ppermute(x, "device", steps)

    spec = P("device")
    return jax.jit(jax.shard_map(permute, mesh=mesh, in_specs=spec, out_specs=spec))
