"""Caches of attention in pages: tokens of many rows share one pool, as their tables say.

These take the place of the caches in `caches.py`, and branches write and attend as they do there.
The pools are arrays [pages, ..] of PAGE tokens a page; page 0 takes what padding writes. Tokens
bring the places of theirs (`PagedTokens`), so a pool knows no row.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from mjax.errors import UserError
from mjax.kernels.attention.paged import paged_attention, write_pages
from mjax.kernels.base.attention_call import AttentionArrays, AttentionCall
from mjax.models.attention.calls import IN_ORDER
from mjax.models.attention.documents import IN_PAGE, attend_in_order
from mjax.models.base.branch import CacheSpec
from mjax.models.base.context import PagedTokens

PAGE = IN_PAGE  # tokens of a page: of as many the batch-invariant mode makes a sum
FP8 = "float8_e4m3fn"


class PagedKeysValues(NamedTuple):
    """Keys after RoPE and values of each kv head, both [pages, K, PAGE, H].

    key_scales, value_scales: fp32 [pages, K, PAGE], of caches in 8 bits: what a token's channels
    are multiplied by. None: the cache has the dtype of the model.
    """

    keys: jax.Array
    values: jax.Array
    key_scales: jax.Array | None = None
    value_scales: jax.Array | None = None

    def in_8_bits(self) -> "PagedKeysValues":
        """The specs of a cache in e4m3, from those of one in the model's dtype."""
        axes = self.keys.axes
        keys, values = (CacheSpec(x.shape, axes, FP8) for x in (self.keys, self.values))
        scales = CacheSpec(keys.shape[:-1], axes[:-1], "float32")
        return PagedKeysValues(keys, values, scales, scales)

    def write(self, k: jax.Array, v: jax.Array, new: PagedTokens) -> "PagedKeysValues":
        """The cache with k and v [B, S, K, H] of new tokens."""
        k, k_scales = _in_8_bits(k, self.key_scales)
        v, v_scales = _in_8_bits(v, self.value_scales)

        def written(pages: jax.Array | None, tokens: jax.Array | None) -> jax.Array | None:
            if pages is None:
                return None
            return write_pages(pages, _flat_tokens(tokens), new.pages, new.places)

        return PagedKeysValues(*map(written, self, (k, v, k_scales, v_scales)))

    def attend(
        self, q: jax.Array, call: AttentionCall, arrays: AttentionArrays, new: PagedTokens
    ) -> jax.Array:
        """Attention of new tokens q [B, S, N, H] to their rows up to themselves, [B, S, N, H]."""
        if call.implementation == IN_ORDER:
            # A table of one page would be no choice for the loop over pages.
            tables, lengths = jnp.pad(new.rows.tables, ((0, 0), (0, 1))), new.rows.lengths

            def read(number: jax.Array) -> tuple[jax.Array, jax.Array]:
                pages = tables[:, number]
                return self.keys[pages], self.values[pages]

            page = self.keys.shape[2]
            return attend_in_order(q[:, 0], read, lengths, page, call)[:, None]
        scales = None
        if self.key_scales is not None:
            scales = self.key_scales, self.value_scales
        out = paged_attention(
            _flat_tokens(q),
            self.keys,
            self.values,
            new.rows,
            call,
            sinks=arrays.sinks,
            scales=scales,
            each=new.each,
        )
        return out.reshape(*q.shape[:-1], out.shape[-1])


class PagedLatents(NamedTuple):
    """The latent of each token and the key part that all heads share, [pages, PAGE, R + P]."""

    latents: jax.Array

    def write(self, latent: jax.Array, new: PagedTokens) -> "PagedLatents":
        """The cache with the latents [B, S, R + P] of new tokens."""
        one_head = _flat_tokens(latent)[:, None]
        pages = write_pages(self.latents[:, None], one_head, new.pages, new.places)
        return PagedLatents(pages[:, 0])

    @staticmethod
    def reads_as_they_are(tokens: int) -> bool:
        """Latents in pages are never expanded: a row's pages would have to be gathered."""
        return True

    def read(self, arrays: AttentionArrays, new: PagedTokens, tokens: int) -> NoReturn:
        """Raise `UserError`: latents in pages are read as they are or not at all."""
        raise UserError(
            "adapters of single rows on kv_b: latents in pages are read through one kv_b; leave "
            "kv_b out of the adapters, or merge them"
        )

    def attend(
        self,
        q: jax.Array,
        call: AttentionCall,
        arrays: AttentionArrays,
        new: PagedTokens,
        rank: int,
    ) -> jax.Array:
        """Attention of new tokens q [B, S, N, R + P] to their rows as one kv head, [B, S, N, R]."""
        keys = self.latents[:, None]
        out = paged_attention(
            _flat_tokens(q), keys, None, new.rows, call, value_size=rank, each=new.each
        )
        return out.reshape(*q.shape[:-1], rank)


class PagedExperts(NamedTuple):
    """The experts that each token went to in a layer, int16 [pages, PAGE, k]."""

    experts: jax.Array

    @staticmethod
    def spec(pages: int, page: int, count: int) -> "PagedExperts":
        """The array for `count` experts of a token; every tp device holds it whole."""
        axes = "batch", None, None
        return PagedExperts(CacheSpec((pages, page, count), axes, "int16"))

    def write(self, experts: jax.Array, new: PagedTokens) -> "PagedExperts":
        """The cache with the experts [B, S, k] of new tokens."""
        flat = _flat_tokens(experts).astype(self.experts.dtype)
        return PagedExperts(self.experts.at[new.pages, new.places].set(flat))


def experts_in_pages(caches: Sequence, pages: Sequence[int], first: int) -> jax.Array:
    """The experts of the tokens in pages of a lane, int16 [W * PAGE, L, k], on one of its devices.

    In several processes it is on all devices, and every process must call.
    first: the number of the lane's page 0 among those of all lanes.
    """
    held = jax.tree.leaves(caches, is_leaf=lambda cache: isinstance(cache, PagedExperts))
    pools = [cache.experts for cache in held if isinstance(cache, PagedExperts)]
    where, numbers = None, np.array(pages, np.int32)
    if pools[0].is_fully_addressable:
        pools = [_shard_from(pool, first) for pool in pools]
    else:
        where, numbers = pools[0].sharding.update(spec=PartitionSpec()), numbers + first
    found = _of_pages(where)(pools, numbers)
    found.copy_to_host_async()
    return found


def _shard_from(pool: jax.Array, first: int) -> jax.Array:
    return next(s.data for s in pool.addressable_shards if (s.index[0].start or 0) == first)


@functools.cache
def _of_pages(where: NamedSharding | None) -> Callable[..., jax.Array]:
    def of_pages(pools: list[jax.Array], pages: jax.Array) -> jax.Array:
        found = jnp.stack([pool[pages] for pool in pools], 2)
        return found.reshape(-1, *found.shape[2:])

    return jax.jit(of_pages, out_shardings=where)


def _flat_tokens(x: jax.Array) -> jax.Array:
    """[B, S, ..] -> [B * S, ..]."""
    return x.reshape(-1, *x.shape[2:])


def _in_8_bits(x: jax.Array, scales: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
    """(x [B, S, K, H] in e4m3, its scales [B, S, K]) for a cache that has scales, else x itself."""
    if scales is None:
        return x, None
    x = x.astype(jnp.float32)
    largest = jnp.abs(x).max(-1)
    most = float(jnp.finfo(FP8).max)
    scale = jnp.maximum(largest / most, jnp.finfo(jnp.float32).tiny)  # not 0, as devices flush
    rounded = x / scale[..., None]
    return rounded.astype(FP8), scale
