"""The cache of keys and values, for batches of rows of unequal length.

Rows are padded on the left, so that all share the columns (slots of the cache) while each counts
its own positions from its first real token. Invariant: a query sees a key only where `real` of
both is 1 and the key's column is not later, so a row's result does not depend on its neighbors,
its padding or the size of the cache.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import register_dataclass

from mjax.config.schema import ModelConfig
from mjax.models.context import Context, tokens_of
from mjax.models.decoder import Decoder
from mjax.sharding.mesh import parallel_of
from mjax.sharding.rules import partition


@register_dataclass
@dataclass(frozen=True)
class KVCache:
    """layers: keys (after RoPE) and values, each [L, B, T, K, H]; real int32 [B, T]: 1 where a
    slot holds a token, 0 for padding and empty slots; lengths int32 [B]: tokens of each row, which
    is its next position; column int32 []: the next slot, equal for all rows."""

    layers: tuple[jax.Array, jax.Array]
    real: jax.Array
    lengths: jax.Array
    column: jax.Array


def empty_cache(
    cfg: ModelConfig, batch: int, length: int, dtype: jnp.dtype, mesh: Mesh | None = None
) -> KVCache:
    """Room for `length` tokens in each of `batch` rows, kv heads sharded over tp of `mesh`.

    Where tp does not divide them, the cache holds copies of each, so that every device has those
    that its query heads use and no more.
    """
    heads = math.lcm(cfg.num_key_value_heads, 1 if mesh is None else parallel_of(mesh).tp)
    shape = (cfg.num_hidden_layers, batch, length, heads, cfg.head_dim)
    layers = jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)
    zeros = jnp.zeros((batch, length), jnp.int32)
    return placed(KVCache(layers, zeros, zeros[:, 0], jnp.int32(0)), mesh)


def extend(
    model: Decoder, cache: KVCache, ids: jax.Array, real: jax.Array, mesh: Mesh | None = None
) -> tuple[jax.Array, KVCache]:
    """Run ids [B, S] behind what the cache holds -> final activations [B, S, D], the new cache.

    `real` int32 [B, S] is 0 for padding, whose activations mean nothing. The caller keeps
    `column` + S within the cache: slots are not checked while tracing.
    """
    columns = cache.column + jnp.arange(ids.shape[1], dtype=jnp.int32)
    positions = cache.lengths[:, None] + jnp.maximum(jnp.cumsum(real, 1) - 1, 0)
    keys = jax.lax.dynamic_update_slice(cache.real, real, (0, cache.column))
    info = tokens_of(ids.shape, positions, real, columns=columns, key_segments=keys)
    x, _, layers = model.hidden(ids, info, Context(attention="xla"), cache.layers)
    lengths = cache.lengths + real.sum(1)
    return x, placed(KVCache(layers, keys, lengths, cache.column + ids.shape[1]), mesh)


def placed(cache: KVCache, mesh: Mesh | None) -> KVCache:
    """The cache pinned to its sharding, so that every step returns what the next one takes."""
    if mesh is None:
        return cache
    heads = NamedSharding(mesh, partition((None, None, None, "kv_heads"), parallel_of(mesh)))
    layers = jax.lax.with_sharding_constraint(cache.layers, (heads, heads))
    return KVCache(layers, *replicated((cache.real, cache.lengths, cache.column), mesh))


def gathered(logits: jax.Array, mesh: Mesh | None) -> jax.Array:
    """[B, V], made in parts over tp, whole on every device; without the first constraint XLA would
    rather gather the vocabulary table."""
    if mesh is not None and logits.shape[1] % parallel_of(mesh).tp == 0:
        parts = NamedSharding(mesh, partition((None, "vocab"), parallel_of(mesh)))
        logits = jax.lax.with_sharding_constraint(logits, parts)
    return replicated(logits, mesh)


def replicated(tree, mesh: Mesh | None):
    """`tree` whole on every device of `mesh`."""
    if mesh is None:
        return tree
    whole = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, whole), tree)
