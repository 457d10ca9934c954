"""The stacked parameters in the order of the pipeline's slots, and back.

On the mesh a stack of L layers is stored as [pp * v * slots, ...] in slot order, so that a
contiguous shard over pp is a device's chunks; padding rows are zero and stay so. Invariant:
whatever leaves the trainer (parameters, gradients, checkpoints) is in canonical order [L], hence
independent of the layout. Where the two orders agree (one chunk a device, equal stages) nothing is
moved or copied.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from mjax.models.pattern import STACK_OF
from mjax.pipeline.layout import Layout


def to_storage(layout: Layout | None, tree: dict) -> dict:
    """Parameters (or a tree like them, at any depth) in canonical order -> as stored.

    Stacks go from [L, ...] to [pp * v * slots, ...]; padding rows are zero.
    """

    def store(stack: str, leaf: jax.Array) -> jax.Array:
        rows = layout.storage_rows(stack)
        filled = (rows >= 0).reshape(-1, *[1] * (leaf.ndim - 1))
        return jnp.where(filled, jnp.take(leaf, np.maximum(rows, 0), axis=0), 0)

    return _map_stacks(layout, store, tree)


def to_canonical(layout: Layout | None, tree: dict) -> dict:
    """The inverse of `to_storage`."""

    def restore(stack: str, leaf: jax.Array) -> jax.Array:
        rows = layout.storage_rows(stack)
        place = np.argsort(np.where(rows < 0, rows.size, rows), kind="stable")
        return jnp.take(leaf, place[: (rows >= 0).sum()], axis=0)

    return _map_stacks(layout, restore, tree)


def storage_specs(layout: Layout | None, specs: dict) -> dict:
    """Declarations of the parameters as stored."""
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


# ---- arrays on the mesh ----------------------------------------------------------------------


def canonical(layout: Layout | None, tree: dict) -> dict:
    """Global arrays as stored -> in canonical order."""
    if _moves_nothing(layout):
        return tree
    shardings = jax.tree.map(lambda a: a.sharding, canonical_abstract(layout, tree))
    return jax.jit(partial(to_canonical, layout), out_shardings=shardings)(tree)


def from_canonical(layout: Layout | None, tree: dict, abstract: dict) -> dict:
    """Global arrays in canonical order -> as stored, sharded like `abstract`."""
    if _moves_nothing(layout):
        return tree
    shardings = jax.tree.map(lambda a: a.sharding, abstract)
    return jax.jit(partial(to_storage, layout), out_shardings=shardings)(tree)


def canonical_abstract(layout: Layout | None, tree: dict) -> dict:
    """Shapes and shardings in canonical order of arrays (or shapes with shardings) as stored.

    Layers that pp does not divide are cut along another dimension over it.
    """
    if _moves_nothing(layout):
        return tree

    def one(stored, shape):
        entries = [*stored.sharding.spec, *[None] * (len(shape.shape) - len(stored.sharding.spec))]
        if entries and entries[0] == "pp" and shape.shape[0] % layout.pp:
            free = [i for i, n in enumerate(shape.shape) if not (entries[i] or n % layout.pp)]
            entries[0] = None
            if free:
                entries[max(free, key=lambda i: shape.shape[i])] = "pp"
        sharding = NamedSharding(stored.sharding.mesh, PartitionSpec(*entries))
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)

    return jax.tree.map(one, tree, jax.eval_shape(partial(to_canonical, layout), tree))


def _moves_nothing(layout: Layout | None) -> bool:
    return layout is None or all(_in_order(layout.storage_rows(s)) for s in layout.stacks)
