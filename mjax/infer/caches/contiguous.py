"""The caches of a model, for batches of rows of unequal length.

A row's token i is in slot i of its caches and has position i. New tokens come in blocks [B, S] in
which the real ones of a row come first. Invariant: a token sees the tokens of its row up to itself,
so a row's result does not depend on its neighbors, its padding or the size of the cache.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import jax
import jax.numpy as jnp
from jax.tree_util import register_dataclass

from mjax.config.schema.model import ModelConfig
from mjax.models.base.branch import CacheSpec, cache_specs
from mjax.models.base.context import Context, Kernels, NewTokens, tokens_of
from mjax.models.decoder import Decoder
from mjax.models.runtime.run import Caches
from mjax.sharding.collectives import LOCAL, Parallel, mesh_axes
from mjax.sharding.rules import partition


@register_dataclass
@dataclass(frozen=True)
class KVCache:
    """layers: the cache of each layer, by the names of its branches (`models/base/branch.py`).

    lengths int32 [B]: tokens of each row, which is its next slot and position.
    """

    layers: Caches
    lengths: jax.Array


def empty_cache(
    cfg: ModelConfig,
    batch: int,
    length: int,
    dtype: jnp.dtype,
    parallel: Parallel = LOCAL,
    source_length: int = 0,
) -> KVCache:
    """A device's part of caches with room for `length` tokens in each of its `batch` rows.

    An encoder beside the decoder reads `source_length` tokens.
    """
    specs = cache_specs(cfg, batch, length, parallel.tp, source_length)

    def empty(spec: CacheSpec) -> jax.Array:
        rest = partition(spec.axes[1:], parallel)
        shards = [parallel.size(*mesh_axes((entry,))) for entry in rest]
        sizes = [n // cut for n, cut in zip(spec.shape[1:], shards, strict=True)]
        return jnp.zeros((batch, *sizes), spec.dtype or dtype)

    return KVCache(jax.tree.map(empty, specs), jnp.zeros(batch, jnp.int32))


def extend(
    model: Decoder,
    cache: KVCache,
    ids: jax.Array,
    count: jax.Array | None = None,
    inputs: Mapping[str, jax.Array] = MappingProxyType({}),
    parallel: Parallel = LOCAL,
    adapters: jax.Array | None = None,
) -> tuple[jax.Array, KVCache]:
    """Run ids [B, S] after what the cache holds -> final activations [B, S, D], the new cache.

    The first `count` int32 [B] ids of a row are real (None: all are), and activations of others
    mean nothing. The caller keeps `lengths` + S within the cache: slots are not checked while
    tracing. `inputs` are what else the model reads in its first call (`Decoder.extend`). On a mesh
    it is a function of local shards, whose tokens tp does not cut. `adapters` int32 [B] are the
    slots of rows where the model has several (`Tokens.adapters`).
    """
    tokens = ids.shape[1]
    new = NewTokens(cache.lengths, count)
    positions, segments, added = new.slots(tokens), jnp.ones_like(ids), tokens
    if count is not None:
        last = cache.lengths + jnp.maximum(count, 1) - 1
        positions = jnp.minimum(positions, last[:, None])  # tables have no rows for padding
        segments, added = new.is_real(tokens).astype(jnp.int32), count
    info = replace(tokens_of(ids.shape, positions, segments), new=new, adapters=adapters)
    ctx = Context(parallel, kernels=Kernels(attention="xla"))
    x, _, layers = model.extend(ids, info, ctx, cache.layers, inputs)
    return x, KVCache(layers, cache.lengths + added)


def real_first(ids: jax.Array, real: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rows [B, S] padded on either side -> (their real ids first, how many these are, int32 [B]).

    `real` is 0 for padding.
    """
    order = jnp.argsort(real == 0, axis=1, stable=True)
    return jnp.take_along_axis(ids, order, 1), real.sum(1)


def last_real(x: jax.Array, count: jax.Array | None) -> jax.Array:
    """[B, D]: the activations x [B, S, D] of each row's last real token; the first if none is."""
    if count is None:
        return x[:, -1]
    last = jnp.maximum(count, 1) - 1
    return jnp.take_along_axis(x, last[:, None, None], 1)[:, 0]
