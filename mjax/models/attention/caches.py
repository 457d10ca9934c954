"""Caches of attention: how they hold tokens, how they are written and attended to.

A branch knows no layout: it writes what it computed for new tokens and attends to all that is
there. Row b's token i is in slot i, so a row needs no padding before it. What lies in the slots
behind a row's last token is finite and never seen; later tokens take its place. A class here
declares its arrays (`spec`) beside the code that reads them.
"""

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mjax.kernels.attention.decode import decode_attention
from mjax.kernels.base.attention_call import AttentionArrays, AttentionCall
from mjax.models.attention.context_parallel import context_attention
from mjax.models.base.branch import CacheSpec
from mjax.models.base.context import Context, NewTokens


class KeysValues(NamedTuple):
    """Keys after RoPE and values of each kv head, both [B, K, T, H]."""

    keys: jax.Array
    values: jax.Array

    @staticmethod
    def spec(batch: int, heads: int, length: int, size: int) -> "KeysValues":
        """The arrays of caches for `length` tokens a row."""
        array = CacheSpec((batch, heads, length, size), ("batch", "kv_heads", None, None))
        return KeysValues(array, array)

    def write(self, k: jax.Array, v: jax.Array, new: NewTokens) -> "KeysValues":
        """The cache with k and v [B, S, K, H] of new tokens."""
        return KeysValues(
            keys=_write_slots(self.keys, k.swapaxes(1, 2), new.first, 2),
            values=_write_slots(self.values, v.swapaxes(1, 2), new.first, 2),
        )

    def attend(
        self,
        q: jax.Array,
        call: AttentionCall,
        arrays: AttentionArrays,
        new: NewTokens,
        ctx: Context,
    ) -> jax.Array:
        """Attention of new tokens q [B, S, N, H] to their rows up to themselves, [B, S, N, H]."""
        call = replace(call, implementation="xla")
        arrays = _of_slots(arrays, new, q.shape[1], self.keys.shape[2])
        if q.shape[1] == 1:
            return decode_attention(q, self.keys, self.values, call, arrays)
        k = self.keys.swapaxes(1, 2)
        v = self.values.swapaxes(1, 2)
        return context_attention(q, k, v, call, arrays, ctx)


class Latents(NamedTuple):
    """The latent of each token and the key part that all heads share, [B, T, R + P]."""

    latents: jax.Array

    @staticmethod
    def spec(batch: int, length: int, width: int) -> "Latents":
        """The array of caches for `length` tokens a row; every tp device holds it whole."""
        return Latents(CacheSpec((batch, length, width), ("batch", None, None)))

    def write(self, latent: jax.Array, new: NewTokens) -> "Latents":
        """The cache with the latents [B, S, R + P] of new tokens."""
        return Latents(_write_slots(self.latents, latent, new.first, 1))

    def read(
        self, arrays: AttentionArrays, new: NewTokens, tokens: int
    ) -> tuple[jax.Array, AttentionArrays]:
        """All slots [B, T, R + P], and the arrays of attention of `tokens` new tokens to them."""
        return self.latents, _of_slots(arrays, new, tokens, self.latents.shape[1])

    def attend(
        self,
        q: jax.Array,
        call: AttentionCall,
        arrays: AttentionArrays,
        new: NewTokens,
    ) -> jax.Array:
        """Attention of one token a row, q [B, 1, N, R + P], to its row as one kv head.

        The values keep the key part, which the caller cuts off: to cut the cache would copy it.
        """
        arrays = _of_slots(arrays, new, 1, self.latents.shape[1])
        slots = self.latents[:, None]
        return decode_attention(q, slots, slots, call, arrays)


class SourceKeysValues(NamedTuple):
    """Keys and values [B, K, T, H] of another stream, written once; `real` int32 [B, T] is 1 for
    its tokens and 0 for padding."""

    keys: jax.Array
    values: jax.Array
    real: jax.Array

    @staticmethod
    def spec(batch: int, heads: int, length: int, size: int) -> "SourceKeysValues":
        """The arrays of caches for sources of `length` tokens."""
        keys, values = KeysValues.spec(batch, heads, length, size)
        real = CacheSpec((batch, length), ("batch", None), dtype="int32")
        return SourceKeysValues(keys, values, real)

    def write(self, k: jax.Array, v: jax.Array, real: jax.Array) -> "SourceKeysValues":
        """The cache of a source with keys and values [B, T, K, H]."""
        first = jnp.int32(0)
        keys = _write_slots(self.keys, k.swapaxes(1, 2), first, 2)
        values = _write_slots(self.values, v.swapaxes(1, 2), first, 2)
        return SourceKeysValues(keys, values, real)

    def attend(
        self, q: jax.Array, call: AttentionCall, arrays: AttentionArrays, ctx: Context
    ) -> jax.Array:
        """Attention of q [B, S, N, H] to all tokens of the source, [B, S, N, H]."""
        columns = arrays.columns[0], jnp.arange(self.real.shape[1], dtype=jnp.int32)
        segments = jnp.ones(q.shape[:2], jnp.int32), self.real
        arrays = replace(arrays, columns=columns, segments=segments)
        k = self.keys.swapaxes(1, 2)
        v = self.values.swapaxes(1, 2)
        return context_attention(q, k, v, call, arrays, ctx)


def _of_slots(arrays: AttentionArrays, new: NewTokens, tokens: int, length: int) -> AttentionArrays:
    """The arrays of attention of `tokens` new tokens to `length` slots, each row up to itself."""
    slots = jnp.arange(length, dtype=jnp.int32)
    return replace(arrays, columns=(new.slots(tokens), slots), segments=None)


def _write_slots(cache: jax.Array, new: jax.Array, first: jax.Array, axis: int) -> jax.Array:
    """A cache with `new` in the slots of `axis` from `first` on, int32 [] or [B]: of each row.

    One place for all rows is a slice, written in place by every compiler; places of rows are one
    scatter. A batch of one row has one place.
    """
    new = new.astype(cache.dtype)
    if first.ndim == 1 and len(cache) == 1:
        first = first[0]
    if first.ndim == 0:
        return jax.lax.dynamic_update_slice_in_dim(cache, new, first, axis)

    def of_row(cache: jax.Array, new: jax.Array, first: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(cache, new, first, axis - 1)

    return jax.vmap(of_row)(cache, new, first)
