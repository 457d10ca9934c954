"""The `Parallel` handle: all that a module knows about the mesh it runs on; and THE gradient rule.

The train step is one `jax.shard_map`, manual over every axis. Inside it modules see local
shapes and call the methods of `Parallel`. At size 1 every method is the identity, so a model used
outside any mesh is an ordinary Flax module. Invariant (DESIGN section 3): each device computes its
*share* of the global loss, and shares sum over all devices to the loss. JAX's own transposes of
these collectives are then exact, with no hand-written pairs of forward and backward.
"""

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from mjax.config.rules.mesh_rules import AXES

DATA_AXES = ("dp", "ep")  # over which the rows of a batch are split
_FEW_DEVICES = 8  # as many as a host has, as a rule
_LITTLE = 2**20  # elements; XLA exchanges the sums of smaller arrays together

Axes = str | tuple[str, ...]


class ExpertAxes(NamedTuple):
    """The mesh axes of a layer's experts.

    over: those that divide the experts; tokens travel along them. within: those that cut each one.
    """

    over: tuple[str, ...]
    within: tuple[str, ...]


@dataclass(frozen=True)
class Parallel:
    """Static sizes of the five mesh axes and the collectives over them.

    cuts_sequence: whether tp splits the tokens between blocks (sequence parallelism). If not, as in
        generation, whose steps have one token a row, every tp device has all of them.
    folds_experts: whether tp divides experts, as ep does, instead of cutting each
        (`mesh.expert_tp=1`).
    """

    pp: int = 1
    dp: int = 1
    ep: int = 1
    cp: int = 1
    tp: int = 1
    cuts_sequence: bool = True
    folds_experts: bool = False

    @property
    def expert_axes(self) -> ExpertAxes:
        """The axes of experts. Tokens that all tp devices have do not travel: experts are cut."""
        if self.folds_experts and self.cuts_sequence:
            return ExpertAxes(("ep", "tp"), ())
        return ExpertAxes(("ep",), ("tp",))

    def live(self, *axes: str) -> tuple[str, ...]:
        """Returns the given axes that have more than one device, in mesh order."""
        return tuple(axis for axis in AXES if axis in axes and getattr(self, axis) > 1)

    def size(self, *axes: str) -> int:
        """The number of devices along `axes` together."""
        return math.prod(getattr(self, axis) for axis in axes)

    def index(self, axes: Axes) -> jax.Array | int:
        """This device's number along axes, outer to inner."""
        number = 0
        for axis in self._live_in_order(axes):
            inner = lax.axis_index(axis)
            number = inner if isinstance(number, int) else number * self.size(axis) + inner
        return number

    def psum(self, x: jax.Array, *axes: str) -> jax.Array:
        """The sum over `axes`."""
        live = self.live(*axes)
        return lax.psum(x, live) if live else x

    def pmax(self, x: jax.Array, *axes: str) -> jax.Array:
        """The maximum over `axes`; no gradient flows through it."""
        x = lax.stop_gradient(x)
        live = self.live(*axes)
        return lax.pmax(x, live) if live else x

    def all_gather(self, x: jax.Array, axes: Axes, dim: int) -> jax.Array:
        """The shards of `dim` concatenated (transpose: reduce-scatter). Axes go outer to inner."""
        axes = self._live_in_order(axes)
        return lax.all_gather(x, axes, axis=dim, tiled=True) if axes else x

    def reduce_scatter(self, x: jax.Array, axes: Axes, dim: int) -> jax.Array:
        """The sum over `axes`, each device keeping its shard of `dim` (transpose: all-gather)."""
        axes = self._live_in_order(axes)
        return lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True) if axes else x

    def reduce_scatter_low(self, x: jax.Array, axes: Axes, dim: int, dtype: jnp.dtype) -> jax.Array:
        """`reduce_scatter` summed in `dtype` of shards that travel in the lower dtype of x."""
        axes = self._live_in_order(axes)
        if not axes:
            return x.astype(dtype)
        shards = lax.all_to_all(x, axes, dim, dim, tiled=True)
        before, behind = x.shape[:dim], x.shape[dim + 1 :]
        devices = self.size(*axes)
        shards = shards.reshape(*before, devices, x.shape[dim] // devices, *behind)
        return jnp.sum(shards, dim, dtype=dtype)

    def all_to_all(self, x: jax.Array, axes: Axes, cut: int, joined: int) -> jax.Array:
        """Exchange over `axes`: shard x in the dimension `cut` and make `joined` whole."""
        axes = self._live_in_order(axes)
        return lax.all_to_all(x, axes, cut, joined, tiled=True) if axes else x

    def all_gather_by_copies(self, x: jax.Array, axes: Axes, dim: int) -> jax.Array:
        """`all_gather` as an all-to-all of copies of the shard.

        GPUs can do that without taking multiprocessors from matmuls (`plan/xla_options.py`). An
        all-gather they cannot.
        """
        axes = self._live_in_order(axes)
        if not axes:
            return x
        devices = self.size(*axes)
        copies = jnp.broadcast_to(x, (devices, *x.shape))
        shards = lax.all_to_all(copies, axes, 0, 0, tiled=True)
        shards = jnp.moveaxis(shards, 0, dim)
        before, behind = x.shape[:dim], x.shape[dim + 1 :]
        return shards.reshape(*before, -1, *behind)

    def shard(self, x: jax.Array, axes: Axes, dim: int) -> jax.Array:
        """This device's shard of `dim` of a value that is equal on all devices of `axes`."""
        for axis in self._live_in_order(axes):
            size = x.shape[dim] // getattr(self, axis)
            first = self.index(axis) * size
            x = lax.dynamic_slice_in_dim(x, first, size, dim)
        return x

    def gather_seq(self, x: jax.Array) -> jax.Array:
        """[B, S/tp, ...] -> [B, S, ...]: sequence parallelism, on entry to a tp region."""
        return self.all_gather(x, "tp", 1) if self.cuts_sequence else x

    def scatter_seq(self, x: jax.Array) -> jax.Array:
        """[B, S, ...] partial sums -> [B, S/tp, ...]: on leaving a tp region."""
        return self.reduce_scatter(x, "tp", 1) if self.cuts_sequence else self.psum(x, "tp")

    def shard_seq(self, x: jax.Array, dim: int = 1) -> jax.Array:
        """[B, S, ...] equal over tp -> this device's [B, S/tp, ...]; `dim` is that of tokens."""
        return self.shard(x, "tp", dim) if self.cuts_sequence else x

    def _live_in_order(self, axes: Axes) -> tuple[str, ...]:
        """Returns the given axes that have more than one device, in the given order."""
        axes = (axes,) if isinstance(axes, str) else axes
        return tuple(axis for axis in axes if getattr(self, axis) > 1)


LOCAL = Parallel()


# ---- arrays that ZeRO stores in finer shards -----------------------------------------------------


def gather_weight(
    weight: jax.Array,
    stored: PartitionSpec,
    wanted: PartitionSpec,
    shape: tuple[int, ...],
    parallel: Parallel,
    *,
    by_copies: bool = False,
) -> jax.Array:
    """A weight in partition `wanted`, all-gathered from the finer partition `stored`.

    `shape` is the global shape. Padding of dimensions that the shards do not divide is removed.
    """
    for dim, axes in extra_axes(wanted, stored):
        if by_copies and parallel.size(*axes) <= _FEW_DEVICES:
            weight = parallel.all_gather_by_copies(weight, axes, dim)
        else:
            weight = parallel.all_gather(weight, axes, dim)
        shards = parallel.size(*mesh_axes((wanted[dim],)))
        weight = lax.slice_in_dim(weight, 0, shape[dim] // shards, axis=dim)
    return weight


def gather_layer_weight(
    weight: jax.Array,
    stored: PartitionSpec,
    wanted: PartitionSpec,
    shape: tuple[int, ...],
    parallel: Parallel,
    dtype: jnp.dtype,
) -> jax.Array:
    """`gather_weight` of a weight rounded to `dtype`, by copies among a few devices.

    Its gradient is summed in fp32 by `scatter_gradient` and has the dtype of `weight`.
    """

    @jax.custom_vjp
    def gather(weight: jax.Array) -> jax.Array:
        low = weight.astype(dtype)
        return gather_weight(low, stored, wanted, shape, parallel, by_copies=True)

    def backward(_, gradient: jax.Array) -> tuple[jax.Array]:
        total = scatter_gradient(gradient, wanted, stored, parallel, jnp.dtype(jnp.float32))
        return (total.astype(weight.dtype),)

    def forward(weight: jax.Array) -> tuple[jax.Array, None]:
        return gather(weight), None

    gather.defvjp(forward, backward)
    return gather(weight)


def scatter_gradient(
    gradient: jax.Array,
    have: PartitionSpec,
    wanted: PartitionSpec,
    parallel: Parallel,
    dtype: jnp.dtype,
) -> jax.Array:
    """A gradient in partition `wanted`, reduce-scattered from the coarser partition `have`.

    It is summed in `dtype` and has that dtype. Shards travel in the dtype of the gradient, as long
    as a device can send one shard to each of the others. Little arrays travel in `dtype`, because
    XLA then sends them in one exchange. A dimension that the axes do not divide is padded with
    zeros at its end.
    """
    for dim, axes in extra_axes(have, wanted):
        devices = parallel.size(*axes)
        gradient = padded_to_shards(gradient, dim, devices)
        many_devices = devices > _FEW_DEVICES
        if gradient.dtype == dtype or gradient.size < _LITTLE or many_devices:
            gradient = parallel.reduce_scatter(gradient.astype(dtype), axes, dim)
        else:
            gradient = parallel.reduce_scatter_low(gradient, axes, dim, dtype)
    return gradient.astype(dtype)


def shard_weight(
    weight: jax.Array, have: PartitionSpec, wanted: PartitionSpec, parallel: Parallel
) -> jax.Array:
    """This device's shard of a weight in partition `have`, padded as gradients are."""
    for dim, axes in extra_axes(have, wanted):
        weight = padded_to_shards(weight, dim, parallel.size(*axes))
        weight = parallel.shard(weight, axes, dim)
    return weight


def padded_to_shards(x: jax.Array, dim: int, shards: int) -> jax.Array:
    """x with zeros at the end of `dim`, which `shards` then divide."""
    missing = -x.shape[dim] % shards
    if missing == 0:
        return x
    return jnp.pad(x, [(0, missing if axis == dim else 0) for axis in range(x.ndim)])


class ExtraAxes(NamedTuple):
    """The mesh axes that one partition of an array has in a dimension and another has not."""

    dim: int
    axes: tuple[str, ...]


def extra_axes(coarse: PartitionSpec, fine: PartitionSpec) -> list[ExtraAxes]:
    """The mesh axes of `fine` that `coarse` lacks, in each dimension; they come last there."""
    extra = []
    for dim, (coarse_entry, fine_entry) in enumerate(zip(coarse, fine, strict=True)):
        few = mesh_axes((coarse_entry,))
        many = mesh_axes((fine_entry,))
        assert many[: len(few)] == few, (coarse, fine)
        if len(many) > len(few):
            extra.append(ExtraAxes(dim, many[len(few) :]))
    return extra


def mesh_axes(partition: Iterable) -> tuple[str, ...]:
    """The mesh axes that a `PartitionSpec`, or some of its entries, shard over, in order."""
    axes: list[str] = []
    for entry in partition:
        if isinstance(entry, str):
            axes.append(entry)
        elif entry is not None:
            axes += entry
    return tuple(axes)


# ---- the gradient rule ---------------------------------------------------------------------------


def reduce_gradients(gradients: dict, partitions: dict, parallel: Parallel) -> dict:
    """THE gradient rule: psum each gradient over the mesh axes its parameter is replicated on.

    `gradients` are those of this device's share of the loss with respect to its local shards.
    `partitions` is a tree of `PartitionSpec`; under one of them may be several gradients. The rule
    is exact for every feature, on every mesh. The transpose of a gather, or `scatter_gradient`, has
    summed over the gathered axes.
    """

    def reduce(partition: PartitionSpec, gradient: jax.Array | list[jax.Array]):
        sharded = mesh_axes(partition)
        replicated = [axis for axis in AXES if axis not in sharded]
        return jax.tree.map(lambda g: parallel.psum(g, *replicated), gradient)

    return jax.tree.map(reduce, partitions, gradients)


def global_norm(tree: dict, partitions: dict, parallel: Parallel) -> jax.Array:
    """The fp32 L2 norm of a sharded tree, which counts each parameter once on any mesh.

    `partitions` are as in `reduce_gradients`.
    """
    sums: dict[tuple[str, ...], list[jax.Array]] = {}
    cuts, structure = jax.tree.flatten(partitions)
    parts = structure.flatten_up_to(tree)
    for partition, part in zip(cuts, parts, strict=True):
        axes = parallel.live(*mesh_axes(partition))
        squares = [_squares(leaf) for leaf in jax.tree.leaves(part)]
        sums.setdefault(axes, []).extend(squares)
    totals = []
    for axes, vectors in sums.items():
        local = _sum_of_all(vectors)
        totals.append(parallel.psum(local, *axes))
    return jnp.sqrt(functools.reduce(jnp.add, totals))


def _squares(x: jax.Array) -> jax.Array:
    """Sums of the squares of x, fp32 [1024] where that divides its size, else [1].

    One kernel adds up those of all parameters. A sum of all squares at once is two kernels each.
    """
    lanes = 1024 if x.size % 1024 == 0 else 1
    x = x.astype(jnp.float32).reshape(lanes, -1)
    return jnp.sum(jnp.square(x), 1)


def _sum_of_all(vectors: list[jax.Array]) -> jax.Array:
    """The sum of all elements, []; vectors of one length are added up before."""
    by_length: dict[int, jax.Array | float] = {}
    for vector in vectors:
        length = vector.size
        before = by_length.get(length, 0.0)
        by_length[length] = before + vector
    total = jnp.float32(0)
    for vector in by_length.values():
        total += jnp.sum(vector)
    return total
