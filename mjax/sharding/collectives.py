"""The `Parallel` handle: all that a module knows about the mesh it runs on.

The whole train step is one `jax.shard_map`, manual over every axis. Inside it modules see local
shapes and call these methods; at size 1 every method is the identity, so a model used outside any
mesh is an ordinary Flax module. Invariant (DESIGN section 3): each device computes its *share* of
the global loss, and shares sum over all devices to the loss; JAX's own transposes of these
collectives are then exact, with no hand-written forward/backward pairs.
"""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from mjax.config.mesh_rules import AXES

BATCH_AXES = ("dp", "ep")
_FEW = 8  # devices: those of a host, as a rule
_LITTLE = 2**20  # elements: of vectors of all layers, whose sums XLA exchanges together


@dataclass(frozen=True)
class Parallel:
    """Static sizes of the five mesh axes and the collectives over them."""

    pp: int = 1
    dp: int = 1
    ep: int = 1
    cp: int = 1
    tp: int = 1

    def live(self, *axes: str) -> tuple[str, ...]:
        """Those of `axes` that have more than one device, in mesh order."""
        return tuple(a for a in AXES if a in axes and getattr(self, a) > 1)

    def size(self, *axes: str) -> int:
        n = 1
        for a in axes:
            n *= getattr(self, a)
        return n

    def index(self, axis: str) -> jax.Array | int:
        return lax.axis_index(axis) if getattr(self, axis) > 1 else 0

    def psum(self, x: jax.Array, *axes: str) -> jax.Array:
        return lax.psum(x, self.live(*axes)) if self.live(*axes) else x

    def pmax(self, x: jax.Array, *axes: str) -> jax.Array:
        """Maximum over `axes`; no gradient flows through it."""
        x = lax.stop_gradient(x)
        return lax.pmax(x, self.live(*axes)) if self.live(*axes) else x

    def gather(self, x: jax.Array, axes: str | tuple[str, ...], dim: int) -> jax.Array:
        """Concatenate the shards of `dim` (transpose: reduce-scatter). Axes go outer to inner."""
        axes = self._live_in_order(axes)
        return lax.all_gather(x, axes, axis=dim, tiled=True) if axes else x

    def scatter(self, x: jax.Array, axes: str | tuple[str, ...], dim: int) -> jax.Array:
        """Sum over `axes`, each device keeping its shard of `dim` (transpose: all-gather)."""
        axes = self._live_in_order(axes)
        return lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True) if axes else x

    def exchange(
        self, x: jax.Array, axes: str | tuple[str, ...], dim: int, dtype: jnp.dtype
    ) -> jax.Array:
        """`scatter` summed in `dtype`, of shards that travel in the dtype that x has."""
        axes = self._live_in_order(axes)
        if not axes:
            return x.astype(dtype)
        parts = lax.all_to_all(x, axes, dim, dim, tiled=True)
        n = self.size(*axes)
        shape = *x.shape[:dim], n, x.shape[dim] // n, *x.shape[dim + 1 :]
        return jnp.sum(parts.reshape(shape), dim, dtype=dtype)

    def spread(self, x: jax.Array, axes: str | tuple[str, ...], dim: int) -> jax.Array:
        """`gather` as an all-to-all of the shard's copies. GPUs can do that without taking
        multiprocessors from matmuls (`plan/xla_options.py`), a gather they cannot."""
        axes = self._live_in_order(axes)
        if not axes:
            return x
        copies = jnp.broadcast_to(x, (self.size(*axes), *x.shape))
        parts = jnp.moveaxis(lax.all_to_all(copies, axes, 0, 0, tiled=True), 0, dim)
        return parts.reshape(*x.shape[:dim], -1, *x.shape[dim + 1 :])

    def shard(self, x: jax.Array, axes: str | tuple[str, ...], dim: int) -> jax.Array:
        """This device's shard of `dim` of a value that is equal on all devices of `axes`."""
        for axis in self._live_in_order(axes):
            size = x.shape[dim] // getattr(self, axis)
            x = lax.dynamic_slice_in_dim(x, self.index(axis) * size, size, dim)
        return x

    def _live_in_order(self, axes: str | tuple[str, ...]) -> tuple[str, ...]:
        axes = (axes,) if isinstance(axes, str) else axes
        return tuple(a for a in axes if getattr(self, a) > 1)

    def gather_seq(self, x: jax.Array) -> jax.Array:
        """[B, S/tp, ...] -> [B, S, ...]: sequence parallelism, on entry to a tp region."""
        return self.gather(x, "tp", 1)

    def scatter_seq(self, x: jax.Array) -> jax.Array:
        """[B, S, ...] partial sums -> [B, S/tp, ...]: on leaving a tp region."""
        return self.scatter(x, "tp", 1)

    def shard_seq(self, x: jax.Array) -> jax.Array:
        """[B, S, ...] equal over tp -> this device's [B, S/tp, ...]."""
        return self.shard(x, "tp", 1)


LOCAL = Parallel()


def scatter_gradients(
    grads: dict, have: dict, want: dict, parallel: Parallel, dtype: jnp.dtype
) -> dict:
    """Reduce-scatter gradients from partition `have` to `want`, which cuts some dimensions more,
    summed in `dtype`. Shards travel in the dtype that gradients have, for as long as a device can
    send one to each of the others; little arrays in `dtype`, which XLA sends in one exchange.

    A dimension that the axes do not divide is padded with zeros at its end.
    """

    def reduce(x, axes, dim):
        if x.dtype == dtype or x.size < _LITTLE or parallel.size(*axes) > _FEW:
            return parallel.scatter(x.astype(dtype), axes, dim)
        return parallel.exchange(x, axes, dim, dtype)

    cut = _cut(reduce, grads, have, want, parallel)
    return jax.tree.map(lambda a: a.astype(dtype), cut)


def shard_weights(weights: dict, have: dict, want: dict, parallel: Parallel) -> dict:
    """Take this device's shards of weights in partition `have`; padded as gradients are."""
    return _cut(parallel.shard, weights, have, want, parallel)


def gather_weights(
    weights: dict,
    have: dict,
    want: dict,
    specs: dict,
    parallel: Parallel,
    gather: Callable | None = None,
) -> dict:
    """All-gather weights from partition `have` to `want`, which cuts some dimensions less.

    `specs`: their declarations (global shapes), by which padding is cut off. `gather`: another way
    than `parallel.gather`.
    """
    gather = gather or parallel.gather

    def leaf(fine, coarse, spec, x):
        for dim, axes in extra_axes(coarse, fine):
            length = spec.shape[dim] // parallel.size(*mesh_axes((coarse[dim],)))
            whole = lambda a, d: gather(a, axes, d)  # noqa: B023, E731
            cut = lambda a, d: lax.slice_in_dim(whole(a, d), 0, length, axis=d)  # noqa: B023, E731
            x = _each(cut, x, dim, fine)
        return x

    return jax.tree.map(leaf, have, want, specs, weights)


def whole_layers(
    weights: dict, have: dict, want: dict, specs: dict, parallel: Parallel, dtype: jnp.dtype
) -> dict:
    """`gather_weights` of weights rounded to `dtype`, by copies among a few devices; gradients, by
    `scatter_gradients`, are summed in fp32 and have the dtypes of `weights`."""

    def gather(x, axes, dim):
        few = parallel.size(*axes) <= _FEW
        return (parallel.spread if few else parallel.gather)(x, axes, dim)

    @jax.custom_vjp
    def whole(weights):
        low = jax.tree.map(lambda w: w.astype(dtype), weights)
        return gather_weights(low, have, want, specs, parallel, gather)

    def backward(_, grads):
        sums = scatter_gradients(grads, want, have, parallel, jnp.dtype(jnp.float32))
        return (jax.tree.map(lambda g, w: g.astype(w.dtype), sums, weights),)

    whole.defvjp(lambda weights: (whole(weights), None), backward)
    return whole(weights)


def _cut(collective: Callable, tree: dict, have: dict, want: dict, parallel: Parallel) -> dict:
    """`collective(x, axes, dim)` over every dimension that `want` cuts more than `have`."""

    def one(axes, x, dim):
        missing = -x.shape[dim] % parallel.size(*axes)
        x = jnp.pad(x, [(0, missing * (i == dim)) for i in range(x.ndim)]) if missing else x
        return collective(x, axes, dim)

    def leaf(coarse, fine, x):
        for dim, axes in extra_axes(coarse, fine):
            x = _each(functools.partial(one, axes), x, dim, fine)
        return x

    return jax.tree.map(leaf, have, want, tree)


def _each(change: Callable, x: jax.Array | tuple, dim: int, partition: Iterable) -> jax.Array:
    """change(x, dim) of an array, or of each of a tuple of layers, which lack its first dimension
    (models/linear.py, `apart`)."""
    return jax.tree.map(lambda a: change(a, dim - len(partition) + a.ndim), x)


def reduce_gradients(grads: dict, partitions: dict, parallel: Parallel) -> dict:
    """THE gradient rule: psum each gradient over the mesh axes its parameter is replicated on.

    `grads` are the gradients of this device's share of the loss with respect to its local shards;
    `partitions` is the same tree of `PartitionSpec`. Exact for every feature, on every mesh. Axes
    that a gather made whole were summed by its transpose or by `scatter_gradients`.
    """

    def reduce(g, p):
        return parallel.psum(g, *(a for a in AXES if a not in mesh_axes(p)))

    return jax.tree.map(reduce, grads, partitions)


def extra_axes(
    coarse: jax.sharding.PartitionSpec, fine: jax.sharding.PartitionSpec
) -> list[tuple[int, tuple[str, ...]]]:
    """(dimension, mesh axes) by which `fine` cuts more than `coarse`; those axes come last."""
    out = []
    for dim, (few, many) in enumerate(zip(coarse, fine, strict=True)):
        few, many = mesh_axes((few,)), mesh_axes((many,))
        assert many[: len(few)] == few, (coarse, fine)
        out += [(dim, many[len(few) :])] if len(many) > len(few) else []
    return out


def global_norm(tree: dict, partitions: dict, parallel: Parallel) -> jax.Array:
    """fp32 L2 norm of a sharded tree that counts each parameter once on any mesh."""
    sums: dict[tuple[str, ...], jax.Array] = {}
    leaves = zip(jax.tree.leaves(tree), jax.tree.leaves(partitions), strict=True)
    for x, p in leaves:
        axes = parallel.live(*mesh_axes(p))
        sums[axes] = sums.get(axes, 0.0) + jnp.sum(jnp.square(x.astype(jnp.float32)))
    return jnp.sqrt(sum(parallel.psum(s, *axes) for axes, s in sums.items()))


def mesh_axes(partition: Iterable) -> tuple[str, ...]:
    """Mesh axes that a `PartitionSpec`, or some of its entries, shard over, in order."""
    out: list[str] = []
    for entry in partition:
        out += () if entry is None else (entry,) if isinstance(entry, str) else entry
    return tuple(out)
