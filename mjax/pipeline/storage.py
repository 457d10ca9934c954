"""Parameters as the mesh stores them, and back: pipeline order and padding.

On the mesh a stack of L layers is stored as [pp * v * slots, ...] in slot order, so that a
contiguous shard over pp is a device's chunks, and a dimension that the ZeRO axes do not divide is
padded (`sharding/rules.py`); padding is zero and stays so. Invariant: whatever leaves the trainer
(parameters, gradients, checkpoints) is in canonical order [L] and shape, hence independent of
layout and mesh. Where nothing is moved or padded nothing is copied.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from mjax.models.pattern import STACK_OF
from mjax.pipeline.layout import Layout
from mjax.sharding.collectives import mesh_axes
from mjax.sharding.rules import Padding


@dataclass(frozen=True)
class Storage:
    """`layout` of the pipeline, if any; `paddings`: key path of every parameter -> its padding."""

    layout: Layout | None = None
    paddings: dict[str, Padding | None] = field(default_factory=dict)

    @property
    def moves_nothing(self) -> bool:
        own = self.layout.stacks if self.layout is not None else ()
        in_order = all(_in_order(self.layout.storage_rows(s)) for s in own)
        return in_order and not any(self.paddings.values())


def to_storage(storage: Storage, tree: dict) -> dict:
    """Parameters (or a tree like them, at any depth) as canonical -> as stored.

    Stacks go from [L, ...] to [pp * v * slots, ...]; padding is zero.
    """

    def store(stack: str, leaf: jax.Array) -> jax.Array:
        rows = storage.layout.storage_rows(stack)
        filled = (rows >= 0).reshape(-1, *[1] * (leaf.ndim - 1))
        return jnp.where(filled, jnp.take(leaf, np.maximum(rows, 0), axis=0), 0)

    return _map_padded(storage, _pad, _map_stacks(storage.layout, store, tree))


def to_canonical(storage: Storage, tree: dict) -> dict:
    """The inverse of `to_storage`."""

    def restore(stack: str, leaf: jax.Array) -> jax.Array:
        rows = storage.layout.storage_rows(stack)
        place = np.argsort(np.where(rows < 0, rows.size, rows), kind="stable")
        return jnp.take(leaf, place[: (rows >= 0).sum()], axis=0)

    return _map_stacks(storage.layout, restore, _map_padded(storage, _unpad, tree))


def storage_specs(layout: Layout | None, specs: dict) -> dict:
    """Declarations of the parameters in the order they are stored in, without padding."""
    stored = lambda name, s: replace(s, shape=(layout.storage_rows(name).size, *s.shape[1:]))  # noqa: E731
    return _map_stacks(layout, stored, specs)


def _map_stacks(layout: Layout | None, f: Callable, tree: dict) -> dict:
    """`f(stack, leaf)` of the leaves under a stack's name, the others as they are."""
    if layout is None:
        return tree

    def one(path, leaf):
        names = [k.key for k in path if getattr(k, "key", None) in STACK_OF.values()]
        if not names or _in_order(layout.storage_rows(names[0])):
            return leaf
        return f(names[0], leaf)

    return jax.tree_util.tree_map_with_path(one, tree)


def _in_order(rows: np.ndarray) -> bool:
    return np.array_equal(rows, np.arange(rows.size))


def of_parameter(table: dict[str, object], path: tuple) -> object | None:
    """The entry of the parameter whose key path ends `path`: an optimiser's leaf follows it."""
    tails = (jax.tree_util.keystr(path[i:]) for i in range(len(path)))
    return next((table[tail] for tail in tails if tail in table), None)


def _map_padded(storage: Storage, f: Callable, tree: dict) -> dict:
    def one(path, leaf):
        found = of_parameter(storage.paddings, path)
        return leaf if found is None else f(leaf, found)

    return jax.tree_util.tree_map_with_path(one, tree)


def _pad(x: jax.Array, p: Padding) -> jax.Array:
    blocks = x.reshape(*x.shape[: p.dim], p.blocks, p.length, *x.shape[p.dim + 1 :])
    width = [(0, (p.padded - p.length) * (i == p.dim + 1)) for i in range(blocks.ndim)]
    return jnp.pad(blocks, width).reshape(*x.shape[: p.dim], -1, *x.shape[p.dim + 1 :])


def _unpad(x: jax.Array, p: Padding) -> jax.Array:
    blocks = x.reshape(*x.shape[: p.dim], p.blocks, p.padded, *x.shape[p.dim + 1 :])
    own = jax.lax.slice_in_dim(blocks, 0, p.length, axis=p.dim + 1)
    return own.reshape(*x.shape[: p.dim], -1, *x.shape[p.dim + 1 :])


# ---- arrays on the mesh ----------------------------------------------------------------------


def canonical(storage: Storage, tree: dict) -> dict:
    """Global arrays as stored -> as canonical."""
    if storage.moves_nothing:
        return tree
    shardings = jax.tree.map(lambda a: a.sharding, canonical_abstract(storage, tree))
    return jax.jit(partial(to_canonical, storage), out_shardings=shardings)(tree)


def from_canonical(storage: Storage, tree: dict, abstract: dict) -> dict:
    """Global arrays as canonical -> as stored, sharded like `abstract`."""
    if storage.moves_nothing:
        return tree
    shardings = jax.tree.map(lambda a: a.sharding, abstract)
    return jax.jit(partial(to_storage, storage), out_shardings=shardings)(tree)


def canonical_abstract(storage: Storage, tree: dict) -> dict:
    """Canonical shapes and shardings of arrays (or shapes with shardings) as stored."""
    if storage.moves_nothing:
        return tree

    def one(stored, shape):
        same = shape.shape == stored.shape
        sharding = stored.sharding if same else even_sharding(stored.sharding, shape.shape)
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)

    return jax.tree.map(one, tree, jax.eval_shape(partial(to_canonical, storage), tree))


def even_sharding(like: NamedSharding, shape: tuple[int, ...]) -> NamedSharding:
    """Over the axes of `like` as far as dimensions divide: an axis of 6 devices is one of 2 and one
    of 3, and each cuts the largest dimension that it divides."""
    axes, entries, left = [], [[] for _ in shape], list(shape)
    for axis, size in like.mesh.shape.items():
        for prime in _primes(size):
            axes.append((f"{axis}{len(axes)}", prime))
            fits = [i for i, n in enumerate(left) if n % prime == 0]
            if axis in mesh_axes(like.spec) and fits:
                dim = max(fits, key=left.__getitem__)
                left[dim] //= prime
                entries[dim].append(axes[-1][0])
    names, sizes = zip(*axes, strict=True)
    types = (AxisType.Auto,) * len(names)
    mesh = Mesh(like.mesh.devices.reshape(sizes), names, axis_types=types)
    return NamedSharding(mesh, PartitionSpec(*(tuple(e) or None for e in entries)))


def _primes(n: int) -> list[int]:
    least = next((p for p in range(2, math.isqrt(n) + 1) if n % p == 0), n)
    return [] if n == 1 else [least, *_primes(n // least)]
