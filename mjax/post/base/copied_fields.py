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
    bounds = {device: index[0].indices(len(field))[:2] for device, index in places.items()}
    groups = math.gcd(len(set(bounds.values())), mesh.size)
    grid = mesh.devices.reshape(groups, -1)
    cut = _with_columns(NamedSharding(Mesh(grid, ("rows", "copies")), P("rows")))(field, columns)
    parts = {shard.device: shard.data for shard in cut.addressable_shards}
    size, pieces = len(field) // groups, []
    for number, (device, (first, end)) in enumerate(bounds.items()):
        group, skipped = divmod(first, size)
        part = parts[grid[group, number % grid.shape[1]]]
        rows = slice(skipped, skipped + end - first)
        pieces.append(jax.device_put(part[rows, *places[device][1:]], device))
    return jax.make_array_from_single_device_arrays(field.shape, target, pieces)


@functools.cache
def _with_columns(sharding: NamedSharding):
    """The program that lays columns in an order, and the result as `sharding` says."""
    return jax.jit(_in_order, out_shardings=sharding)


def _in_order(field: jax.Array, columns: jax.Array | None) -> jax.Array:
    return field if columns is None else field.take(columns, 1)


def columns_of_copy(width: int, given_cp: int, wanted_cp: int) -> np.ndarray | None:
    """The `columns` of a copy between meshes with these sizes of cp, for rows of `width` tokens."""
    if given_cp == wanted_cp:
        return None
    return np.argsort(_placed(width, given_cp))[_placed(width, wanted_cp)]


def _placed(width: int, cp: int) -> np.ndarray:
    """The columns of a row in the order in which a mesh holds them."""
    return zigzag(width, cp) if cp > 1 else np.arange(width)
