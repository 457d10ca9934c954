"""Checks every k steps that devices with the same part of the state store the same bits.

All devices along a mesh axis that does not split an array store it and update it alike. A device
that computes or stores wrongly then differs from the others, and nothing else would tell: its
numbers stay finite. Each device computes a digest of every shard it stores. The digests cross the
mesh in one exchange and are fetched one step late. Invariants: a flip of one bit always shows. A
state that has not passed is not saved. Arrays that ZeRO splits have no replica, and moments that
wait in host memory are left out.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from mjax.errors import ReplicasDiffer
from mjax.sharding.collectives import AXES, mesh_axes
from mjax.sharding.mesh import on_shards
from mjax.train.state import StateLayout
from mjax.train.trainer import Trainer

MOST_NAMED = 4  # devices in a message


class ReplicatedLeaf(NamedTuple):
    """An array of the state that several devices hold the same part of.

    path: in the state. axes: those that more than one device lies along and that do not split it.
    """

    path: tuple
    axes: tuple[str, ...]

    @property
    def name(self) -> str:
        first, *rest = (str(key.key) for key in self.path)
        return ".".join(rest) if first == "params" else ".".join((first, *rest))


class Difference(NamedTuple):
    """Replicas of an array that are not the same bits.

    devices: those that differ from most; without a majority, all that hold this part.
    has_majority: whether more than half of the replicas agree.
    """

    name: str
    devices: tuple[jax.Device, ...]
    has_majority: bool


def replicated_leaves(layout: StateLayout) -> list[ReplicatedLeaf]:
    """The arrays of the state that have replicas on the device; parameters come first."""
    shapes = jax.tree_util.tree_flatten_with_path(layout.abstract())[0]
    found = []
    for path, leaf in shapes:
        split = mesh_axes(leaf.sharding.spec)
        axes = tuple(axis for axis in layout.placement.parallel.live(*AXES) if axis not in split)
        if axes and leaf.sharding.memory_kind != "pinned_host":
            found.append(ReplicatedLeaf(path, axes))
    return sorted(found, key=lambda leaf: leaf.path[0].key != "params")


def digest(x: jax.Array) -> jax.Array:
    """A sum of the bits of each entry times an odd number that depends on its place, uint32 [].

    An odd factor loses no bit, so a change of one entry always changes the sum. Integers add up to
    the same in any order.
    """
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
    bits = lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)
    place = jnp.zeros((), jnp.uint32)
    for dim, length in enumerate(x.shape):
        along = lax.broadcasted_iota(jnp.uint32, x.shape, dim)
        place = place * jnp.uint32(length % 2**32) + along
    factor = _mixed(place) | 1
    return jnp.sum(bits * factor, dtype=jnp.uint32)


def _mixed(place: jax.Array) -> jax.Array:
    """MurmurHash3's last steps, uint32: each bit of the result depends on all bits of `place`."""
    place = (place ^ (place >> 16)) * jnp.uint32(0x85EBCA6B)
    place = (place ^ (place >> 13)) * jnp.uint32(0xC2B2AE35)
    return place ^ (place >> 16)


def digests_of(layout: StateLayout, leaves: list[ReplicatedLeaf]) -> jax.stages.Wrapped:
    """A program: state -> the digests of `leaves` on every device, uint32 [devices, leaves].

    Devices go in the order of the mesh. The table is the same on all of them.
    """

    def table(state: dict) -> jax.Array:
        pairs, _ = jax.tree_util.tree_flatten_with_path(state)
        arrays = dict(pairs)
        mine = jnp.stack([digest(arrays[leaf.path]) for leaf in leaves])
        return lax.all_gather(mine, AXES)

    partitions = layout.partitions()
    return jax.jit(on_shards(table, layout.mesh, (partitions,), PartitionSpec()))


def differing_replicas(
    table: np.ndarray, leaves: list[ReplicatedLeaf], mesh: Mesh
) -> list[Difference]:
    """The replicas whose digests in `table` [devices, leaves] differ."""
    found = []
    for leaf, column in zip(leaves, table.T, strict=True):
        devices = _by_part(mesh.devices, leaf.axes)
        digests = _by_part(column.reshape(mesh.devices.shape), leaf.axes)
        for holders, values in zip(devices, digests, strict=True):
            kinds, counts = np.unique(values, return_counts=True)
            if len(kinds) == 1:
                continue
            most = counts.argmax()
            has_majority = bool(2 * counts[most] > len(values))
            odd = holders[values != kinds[most]] if has_majority else holders
            found.append(Difference(leaf.name, tuple(odd), has_majority))
    return found


def _by_part(grid: np.ndarray, axes: tuple[str, ...]) -> np.ndarray:
    """`grid`, shaped like the mesh, as [parts, replicas]: those along `axes` are replicas."""
    last = range(-len(axes), 0)
    moved = np.moveaxis(grid, [AXES.index(axis) for axis in axes], last)
    return moved.reshape(-1, math.prod(moved.shape[i] for i in last))


def describe(found: list[Difference], mesh: Mesh) -> str:
    """Words that name the arrays and the devices of `found`."""
    names = list(dict.fromkeys(difference.name for difference in found))
    what = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more arrays"
    devices = list(dict.fromkeys(device for difference in found for device in difference.devices))
    who = "; ".join(_describe_device(device, mesh) for device in devices[:MOST_NAMED])
    if len(devices) > MOST_NAMED:
        who += f"; and {len(devices) - MOST_NAMED} more"
    if all(difference.has_majority for difference in found):
        return f"replicas of {what} differ in bits from most others on {who}"
    return f"replicas of {what} differ in bits, and no majority says which is right: {who}"


def _describe_device(device: jax.Device, mesh: Mesh) -> str:
    place = np.argwhere(mesh.devices == device)[0]
    sizes = mesh.devices.shape
    at = [f"{a}={i}" for a, i, size in zip(AXES, place, sizes, strict=True) if size > 1]
    return f"process {device.process_index} device {device.id} ({' '.join(at)})"


@dataclass
class ReplicaCheck:
    """Compares the replicas of a run every `interval` steps, and before a save; None: never.

    Every process sees the same digests, so all of them raise `ReplicasDiffer` alike.
    last_checkpoint: returns the path of the newest step. tell: is called with a step and a line.
    """

    trainer: Trainer
    interval: int | None
    last_checkpoint: Callable[[], str]
    tell: Callable[[int, str], None] = lambda step, line: None
    _table: jax.Array | None = None  # asked for, not yet read

    @cached_property
    def leaves(self) -> list[ReplicatedLeaf]:
        return replicated_leaves(self.trainer.state_layout)

    @cached_property
    def _digests(self) -> jax.stages.Wrapped:
        return digests_of(self.trainer.state_layout, self.leaves)

    def ask(self) -> None:
        """Let the devices make the digests of the state; they are not waited for."""
        if self.interval is not None and self.leaves:
            self._table = self._digests(self.trainer.state)

    def ask_if_due(self, step: int) -> None:
        """`ask` at the steps that `interval` divides."""
        if self.interval is not None and step % self.interval == 0:
            self.ask()

    def read(self, step: int) -> None:
        """Wait for the digests that were asked for, if any; raises `ReplicasDiffer`."""
        if self._table is None:
            return
        table, self._table = np.asarray(self._table), None
        found = differing_replicas(table, self.leaves, self.trainer.mesh)
        if not found:
            return
        line = f"step {step}: {describe(found, self.trainer.mesh)}"
        self.tell(step, line)
        raise ReplicasDiffer(
            f"{line}; a device computes or stores wrongly, so the step is not saved; last good "
            f"checkpoint: {self.last_checkpoint()}; start again to resume there, without it"
        )

    def require_equal(self, step: int) -> None:
        """Compare now; raises `ReplicasDiffer`."""
        self.ask()
        self.read(step)
