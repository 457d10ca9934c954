"""The cache of keys and values, for batches of rows of unequal length.

Rows are padded on the left, so that all share the columns (slots of the cache) while each counts
its own positions from its first real token. Invariant: a query sees a key only where `real` of
both is 1 and the key's column is not later, so a row's result does not depend on its neighbors,
its padding or the size of the cache.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import register_dataclass

from mjax.config.languages.layer_pattern import ENCODER
from mjax.config.schema.model import ModelConfig
from mjax.errors import UserError
from mjax.models.base.branch import CacheSpec, cache_specs
from mjax.models.base.context import Context, Kernels, tokens_of
from mjax.models.decoder import Decoder
from mjax.models.runtime.run import Caches
from mjax.sharding.mesh import parallel_of
from mjax.sharding.rules import partition


@register_dataclass
@dataclass(frozen=True)
class KVCache:
    """layers: the cache of each layer, by the names of its branches (`models/base/branch.py`).

    real int32 [B, T]: 1 where a slot holds a token, 0 for padding and empty slots. lengths int32
    [B]: tokens of each row, which is its next position. column int32 []: the next slot, equal for
    all rows. source int32 [B, S]: `real` of what an encoder reads, or None.
    """

    layers: Caches
    real: jax.Array
    lengths: jax.Array
    column: jax.Array
    source: jax.Array | None = None


def require_decoder(cfg: ModelConfig) -> None:
    """Raise `UserError` for a model with an encoder, whose tokens see those that follow."""
    architecture = cfg.architecture
    if architecture.reads_neighbors:
        raise UserError(
            f"model.layer_pattern={cfg.layer_pattern}: generation with retrieval (R blocks) is not "
            "built; train.eval_interval gives the held-out loss (docs/models/encoders.md)"
        )
    if architecture.reads_target or not architecture.generates:
        raise UserError(
            f"model.layer_pattern={cfg.layer_pattern}: an encoder (B blocks, or V and no P) "
            "continues no text and gives a text no probability; use it by mjax.from_pretrained "
            "(docs/models/encoders.md, docs/models/multimodal.md)"
        )


def empty_cache(
    cfg: ModelConfig,
    batch: int,
    length: int,
    dtype: jnp.dtype,
    mesh: Mesh | None = None,
    source: jax.Array | None = None,
) -> KVCache:
    """Room for `length` tokens in each of `batch` rows, heads sharded over tp of `mesh`.

    `source` is that of the cache.
    """
    tp = 1 if mesh is None else parallel_of(mesh).tp
    specs = cache_specs(cfg, batch, length, tp, 0 if source is None else source.shape[1])

    def empty(spec: CacheSpec) -> jax.Array:
        return jnp.zeros(spec.shape, jnp.float32 if spec.precise else dtype)

    layers = jax.tree.map(empty, specs)
    zeros = jnp.zeros((batch, length), jnp.int32)
    return placed(cfg, KVCache(layers, zeros, zeros[:, 0], jnp.int32(0), source), mesh)


def extend(
    model: Decoder,
    cache: KVCache,
    ids: jax.Array,
    real: jax.Array,
    mesh: Mesh | None = None,
    source_ids: jax.Array | None = None,
    items: Mapping[str, jax.Array] | None = None,
) -> tuple[jax.Array, KVCache]:
    """Run ids [B, S] behind what the cache holds -> final activations [B, S, D], the new cache.

    `real` int32 [B, S] is 0 for padding, whose activations mean nothing. The caller keeps
    `column` + S within the cache: slots are not checked while tracing. Beside an encoder, `ids` are
    the decoder's; the encoder reads `source_ids`, given once. So are `items`, by modality
    [B, I, ...], whose places `ids` hold.
    """
    columns = cache.column + jnp.arange(ids.shape[1], dtype=jnp.int32)
    positions = cache.lengths[:, None] + jnp.maximum(jnp.cumsum(real, 1) - 1, 0)
    keys = jax.lax.dynamic_update_slice(cache.real, real, (0, cache.column))
    info = tokens_of(ids.shape, positions, real, columns=columns, key_segments=keys)
    ctx = Context(kernels=Kernels(attention="xla"))
    if model.cfg.modalities:
        x, _, layers = model.hidden(ids, info, ctx, cache.layers, given=items or {})
    elif cache.source is None:
        x, _, layers = model.hidden(ids, info, ctx, cache.layers)
    else:
        places = jnp.maximum(jnp.cumsum(cache.source, 1) - 1, 0)
        source = tokens_of(cache.source.shape, places, cache.source)
        info = replace(info, others={ENCODER: source})
        x, _, layers = model.hidden(source_ids, info, ctx, cache.layers, target=ids)
    lengths = cache.lengths + real.sum(1)
    new = KVCache(layers, keys, lengths, cache.column + ids.shape[1], cache.source)
    return x, placed(model.cfg, new, mesh)


def placed(cfg: ModelConfig, cache: KVCache, mesh: Mesh | None) -> KVCache:
    """The cache pinned to its sharding, so that every step returns what the next one takes."""
    if mesh is None:
        return cache
    parallel = parallel_of(mesh)

    def pin(spec: CacheSpec, x: jax.Array) -> jax.Array:
        cut = NamedSharding(mesh, partition(spec.axes, parallel))
        return jax.lax.with_sharding_constraint(x, cut)

    specs = cache_specs(cfg, *cache.real.shape, parallel.tp)
    layers = jax.tree.map(pin, specs, cache.layers)
    rest = cache.real, cache.lengths, cache.column, cache.source
    return KVCache(layers, *replicated(rest, mesh))


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
