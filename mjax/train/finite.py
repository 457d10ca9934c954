"""Counts weights that are not finite; a run asks before it saves them."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from mjax.sharding.mesh import on_shards
from mjax.train.state import StateLayout


def nonfinite_counts(state_layout: StateLayout) -> jax.stages.Wrapped:
    """A program: stored parameters -> a tree of counts of numbers that are not finite, int32 [].

    Numbers that several devices hold count several times. All counts cross the mesh at once.
    """
    mesh, stored = state_layout.mesh, state_layout.placement.stored

    def count(leaf: jax.Array) -> jax.Array:
        return jnp.sum(~jnp.isfinite(leaf), dtype=jnp.int32)

    def count_all(params: dict) -> dict:
        leaves, tree = jax.tree.flatten(params)
        local = jnp.stack([count(leaf) for leaf in leaves])
        total = jax.lax.psum(local, mesh.axis_names)
        return jax.tree.unflatten(tree, total)

    return jax.jit(on_shards(count_all, mesh, (stored,), P()))


def first_nonfinite(counts: dict) -> str | None:
    """The name of the first parameter whose count is not zero."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(jax.device_get(counts))
    return next((".".join(key.key for key in path) for path, count in leaves if count), None)
