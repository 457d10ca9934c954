"""Whether all weights of a run are finite; asked before they are saved."""

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

    def count(params: dict) -> dict:
        leaves, tree = jax.tree.flatten(params)
        counts = jnp.stack([jnp.sum(~jnp.isfinite(leaf), dtype=jnp.int32) for leaf in leaves])
        return jax.tree.unflatten(tree, jax.lax.psum(counts, mesh.axis_names))

    return jax.jit(on_shards(count, mesh, (stored,), P()))


def first_nonfinite(counts: dict) -> str | None:
    """The name of the first parameter whose count is not zero."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(jax.device_get(counts))
    return next((".".join(key.key for key in path) for path, count in leaves if count), None)
