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
from jax.sharding import NamedSharding, PartitionSpec

from mjax.config.pattern import STACK_OF
from mjax.pipeline.layout import Layout
from mjax.sharding.collectives import Parallel, mesh_axes
from mjax.sharding.rules import Padding
from mjax.sharding.spec import ParamSpec


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

    def moves(self, path: tuple) -> "Moves":
        """(rows of its stack in the order of slots, padding) of the leaf at a key path; None for
        what stays as it is."""
        stack = None if self.layout is None else _stack_of(path)
        rows = None if stack is None else self.layout.storage_rows(stack)
        rows = None if rows is None or _in_order(rows) else tuple(map(int, rows))
        return rows, of_parameter(self.paddings, path)


Moves = tuple[tuple[int, ...] | None, Padding | None]


def to_storage(storage: Storage, tree: dict) -> dict:
    """Parameters (or a tree like them, at any depth) as canonical -> as stored.

    Stacks go from [L, ...] to [pp * v * slots, ...]; padding is zero.
    """
    return jax.tree_util.tree_map_with_path(lambda path, x: _store(x, storage.moves(path)), tree)


def to_canonical(storage: Storage, tree: dict) -> dict:
    """The inverse of `to_storage`."""
    return jax.tree_util.tree_map_with_path(lambda path, x: _restore(x, storage.moves(path)), tree)


def _store(x: jax.Array, moves: Moves) -> jax.Array:
    rows, padding = moves
    x = x if rows is None else _take_rows(x, np.asarray(rows))
    return x if padding is None else _pad(x, padding)


def _restore(x: jax.Array, moves: Moves) -> jax.Array:
    rows, padding = moves
    x = x if padding is None else _unpad(x, padding)
    if rows is None:
        return x
    place = np.argsort(np.where(np.asarray(rows) < 0, len(rows), rows), kind="stable")
    return _take_rows(x, place[: sum(row >= 0 for row in rows)])


def storage_specs(layout: Layout | None, specs: dict) -> dict:
    """Declarations of the parameters in the order they are stored in, without padding."""

    def one(path: tuple, spec: ParamSpec) -> ParamSpec:
        stack = None if layout is None else _stack_of(path)
        rows = spec.shape[:1] if stack is None else (layout.storage_rows(stack).size,)
        return replace(spec, shape=(*rows, *spec.shape[1:]))

    def is_spec(s):
        return isinstance(s, ParamSpec)

    return jax.tree_util.tree_map_with_path(one, specs, is_leaf=is_spec)


def coordinates(
    storage: Storage, path: tuple, spec: ParamSpec, partition: PartitionSpec, parallel: Parallel
) -> tuple[jax.Array, ...]:
    """The canonical index of every entry of this device's shard of a parameter along each of its
    dimensions; inside the mesh. `spec`: as `storage_specs` gives it. Padding gets any index."""
    rows, pad = storage.moves(path)
    out = []
    for dim, entry in enumerate(partition):
        padded = pad is not None and pad.dim == dim
        n, place = pad.blocks * pad.padded if padded else spec.shape[dim], 0
        for axis in mesh_axes((entry,)):
            place = place * parallel.size(axis) + parallel.index(axis)
        local = n // parallel.size(*mesh_axes((entry,)))
        index = place * local + jnp.arange(local)
        if padded:
            index = index // pad.padded * pad.length + index % pad.padded
        out.append(index if dim or rows is None else jnp.asarray(rows)[index])
    return tuple(out)


def _stack_of(path: tuple) -> str | None:
    """The stack that a key path lies in."""
    names = (getattr(key, "key", None) for key in path)
    return next((name for name in names if name in STACK_OF.values()), None)


def _take_rows(leaf: jax.Array, rows: np.ndarray) -> jax.Array:
    """Rows of `leaf` in that order, zeros for -1."""
    empty = jnp.zeros_like(leaf[:1])
    starts = np.flatnonzero((np.diff(rows, prepend=-2) != 1) | (rows < 0) | (rows == 0))
    runs = np.split(rows, starts[1:])
    return jnp.concatenate([leaf[r[0] : r[-1] + 1] if r[0] >= 0 else empty for r in runs])


def _in_order(rows: np.ndarray) -> bool:
    return np.array_equal(rows, np.arange(rows.size))


def of_parameter(table: dict[str, object], path: tuple) -> object | None:
    """The entry of the parameter whose key path ends `path`: an optimiser's leaf follows it."""
    tails = (jax.tree_util.keystr(path[i:]) for i in range(len(path)))
    return next((table[tail] for tail in tails if tail in table), None)


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
    return _each(storage, _restore, tree, canonical_abstract(storage, tree))


def from_canonical(storage: Storage, tree: dict, abstract: dict) -> dict:
    """Global arrays as canonical -> as stored, sharded like `abstract`."""
    return tree if storage.moves_nothing else _each(storage, _store, tree, abstract)


def _each(storage: Storage, move: Callable, tree: dict, abstract: dict) -> dict:
    """A program a leaf, which bounds the memory that moving takes."""

    def one(path: tuple, x: jax.Array, want: jax.ShapeDtypeStruct) -> jax.Array:
        moves = storage.moves(path)
        if moves == (None, None):
            return x
        have, to = (s.with_memory_kind("device") for s in (x.sharding, want.sharding))
        moved = _moved(move, moves, have, to, jax.device_put(x, have))
        moved = jax.device_put(moved, want.sharding)  # moments may live on the host
        return jax.block_until_ready(moved)  # CPU devices may not mix two programs

    return jax.tree_util.tree_map_with_path(one, tree, abstract)


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _moved(
    move: Callable, moves: Moves, have: NamedSharding, want: NamedSharding, x: jax.Array
) -> jax.Array:
    """`move` under other shardings, by hand: made whole where it acts or the cut differs, then cut.
    The compiler of jax 0.11.2 does not survive doing this by itself."""
    few, many = ([*s.spec, *[None] * (x.ndim - len(s.spec))] for s in (have, want))
    rows, padding = moves
    acts = {0} if rows is not None else set()
    acts |= set() if padding is None else {padding.dim}
    acts |= {dim for dim in range(x.ndim) if few[dim] != many[dim]}

    def body(x: jax.Array) -> jax.Array:
        for dim in acts:
            axes = mesh_axes((few[dim],))
            x = jax.lax.all_gather(x, axes, axis=dim, tiled=True) if axes else x
        x = move(x, moves)
        for dim in acts:
            axes = mesh_axes((many[dim],))
            size = x.shape[dim] // math.prod(want.mesh.shape[axis] for axis in axes)
            at = jax.lax.axis_index(axes) * size if axes else 0
            x = jax.lax.dynamic_slice_in_dim(x, at, size, dim)
        return x

    specs = PartitionSpec(*few), PartitionSpec(*many)
    return jax.shard_map(
        body, mesh=want.mesh, in_specs=specs[0], out_specs=specs[1], check_vma=False
    )(x)


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
    """Over the axes of `like`, each on its own dimension if it divides that, else on the largest
    that it divides, else on none."""
    entries, left = [[] for _ in shape], list(shape)
    for home, entry in enumerate(like.spec):
        for axis in mesh_axes((entry,)):
            fits = [i for i, n in enumerate(left) if n % like.mesh.shape[axis] == 0]
            if fits:
                dim = home if home in fits else max(fits, key=left.__getitem__)
                left[dim] //= like.mesh.shape[axis]
                entries[dim].append(axis)
    spec = PartitionSpec(*(tuple(e) or None for e in entries))
    return NamedSharding(like.mesh, spec, memory_kind=like.memory_kind)
