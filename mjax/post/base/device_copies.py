"""Arrays that were computed on some devices, copied to others of the same processes.

Nothing here waits for the host. A field is cut where it was computed, and JAX moves each piece as
soon as it is there. So a role on devices of its own computes while the trainer's are at work.
"""

import functools
import math
from collections import defaultdict

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mjax.models.attention.zigzag import zigzag


def copied_shards(array: jax.Array, target: NamedSharding) -> jax.Array:
    """A global array on other devices, which their sharding `target` cuts alike.

    Each device gets its shard from one of the same process, which must have it whole.
    """
    held, parts = defaultdict(list), []
    for shard in array.addressable_shards:
        held[str(shard.index)].append(shard.data)
    places = target.addressable_devices_indices_map(array.shape)
    for number, index in enumerate(places.values()):
        copies = held[str(index)]
        parts.append(copies[number % len(copies)])
    moved = jax.device_put(parts, list(places))
    return jax.make_array_from_single_device_arrays(array.shape, target, moved)


def copied_field(
    field: jax.Array, columns: np.ndarray | None, target: NamedSharding, mesh: Mesh
) -> jax.Array:
    """A field [B, S, ...] of the devices of `mesh`, sharded as `target` says on its devices.

    columns: for each column of the copy the one of `field`, int [S]; None: the same.
    In each process, field and copy hold the same rows: either all rows, or the process's own share.

    `field` is laid out by rows first: a process's devices are `groups`, and all devices of a group
    hold one equal part of the process's rows whole. Each shard of the copy is cut out of one part.
    """
    places = target.addressable_devices_indices_map(field.shape)
    # The rows of this process, and the parts into which the target cuts them.
    row_parts = {rows.indices(len(field)) for rows, *_ in places.values()}
    begin, end = min(row_parts)[0], max(row_parts)[1]
    count = len(mesh.local_devices)
    groups = math.gcd(len(row_parts), count)
    grid = mesh.devices.reshape(-1, groups, count // groups)
    axes = "rows" if end - begin == len(field) else ("processes", "rows")
    by_rows = NamedSharding(Mesh(grid, ("processes", "rows", "copies")), P(axes))
    cut = _moved_to(by_rows)(field)
    parts = {shard.device: shard.data for shard in cut.addressable_shards}
    own = np.reshape(mesh.local_devices, (groups, -1))
    size, pieces = (end - begin) // groups, []
    for number, (device, (rows, taken, *_)) in enumerate(places.items()):
        first, stop, _ = rows.indices(len(field))
        group, skipped = divmod(first - begin, size)
        part = parts[own[group, number % own.shape[1]]]
        last = skipped + stop - first
        piece = part[skipped:last]
        # Not in the program above: XLA's partitioner dies of some of its gathers.
        if columns is not None:
            taken = columns[taken]
        pieces.append(jax.device_put(piece[:, taken], device))
    return jax.make_array_from_single_device_arrays(field.shape, target, pieces)


@functools.cache
def _moved_to(sharding: NamedSharding):
    """The program that lays an array out as `sharding` says, on the devices that have it."""
    return jax.jit(lambda array: array, out_shardings=sharding)


def columns_of_copy(width: int, given_cp: int, wanted_cp: int) -> np.ndarray | None:
    """The `columns` of a copy between meshes with these sizes of cp, for rows of `width` tokens."""
    if given_cp == wanted_cp:
        return None
    return np.argsort(_placed(width, given_cp))[_placed(width, wanted_cp)]


def _placed(width: int, cp: int) -> np.ndarray:
    """The columns of a row in the order in which a mesh holds them."""
    return zigzag(width, cp) if cp > 1 else np.arange(width)
