"""Fields of a batch that were computed on some devices, copied to others of the same process.

Nothing here waits for the host. A field is cut where it was computed, and JAX moves each piece as
soon as it is there. So a role on devices of its own computes while the trainer's are at work.
"""

import functools
import math

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mjax.models.attention.zigzag import zigzag


def copied_field(
    field: jax.Array, columns: np.ndarray | None, target: NamedSharding, mesh: Mesh
) -> jax.Array:
    """A field [B, S, ...] of the devices of `mesh`, sharded as `target` says on its devices.

    columns: for each column of the copy the one of `field`, int [S]; None: the same.
    """
    places = target.addressable_devices_indices_map(field.shape)
    row_parts = {rows.indices(len(field)) for rows, *_ in places.values()}
    groups = math.gcd(len(row_parts), mesh.size)
    grid = mesh.devices.reshape(groups, -1)
    by_rows = NamedSharding(Mesh(grid, ("rows", "copies")), P("rows"))
    cut = _moved_to(by_rows)(field)
    parts = {shard.device: shard.data for shard in cut.addressable_shards}
    size, pieces = len(field) // groups, []
    for number, (device, (rows, taken, *_)) in enumerate(places.items()):
        first, end, _ = rows.indices(len(field))
        group, skipped = divmod(first, size)
        part = parts[grid[group, number % grid.shape[1]]]
        last = skipped + end - first
        piece = part[skipped:last]
        # Not in the program above: XLA's partitioner dies of some of its gathers.
        if columns is not None:
            taken = columns[taken]
        pieces.append(jax.device_put(piece[:, taken], device))
    return jax.make_array_from_single_device_arrays(field.shape, target, pieces)


@functools.cache
def _moved_to(sharding: NamedSharding):
    """The program that lays an array out as `sharding` says, on the devices that have it."""
    return jax.jit(_same, out_shardings=sharding)


def _same(array: jax.Array) -> jax.Array:
    return array


def columns_of_copy(width: int, given_cp: int, wanted_cp: int) -> np.ndarray | None:
    """The `columns` of a copy between meshes with these sizes of cp, for rows of `width` tokens."""
    if given_cp == wanted_cp:
        return None
    return np.argsort(_placed(width, given_cp))[_placed(width, wanted_cp)]


def _placed(width: int, cp: int) -> np.ndarray:
    """The columns of a row in the order in which a mesh holds them."""
    return zigzag(width, cp) if cp > 1 else np.arange(width)
