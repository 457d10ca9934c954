"""Caches of attention: how they hold tokens, how they are written and attended to.

A branch knows no layout: it writes what it computed for new tokens and attends to all that is
there. All rows share the columns (slots) of a cache; `infer/cache.py` says which slots are real.
"""

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mjax.kernels.attention.decode import decode_attention
from mjax.kernels.base.attention_call import AttentionArrays, AttentionCall
from mjax.models.attention.context_parallel import context_attention
from mjax.models.base.context import Context


class KeysValues(NamedTuple):
    """Keys after RoPE and values of each kv head, both [B, K, T, H]."""

    keys: jax.Array
    values: jax.Array

    @property
    def length(self) -> int:
        return self.keys.shape[2]

    def write(self, k: jax.Array, v: jax.Array, first: jax.Array | int) -> "KeysValues":
        """The cache with k and v [B, S, K', H] in the slots from `first` on; K' divides K."""
        return KeysValues(
            keys=_written(self.keys, k, first),
            values=_written(self.values, v, first),
        )

    def read(self) -> tuple[jax.Array, jax.Array]:
        """All keys and values, [B, T, K, H]."""
        k = self.keys.swapaxes(1, 2)
        v = self.values.swapaxes(1, 2)
        return k, v

    def attend(
        self,
        q: jax.Array,
        call: AttentionCall,
        arrays: AttentionArrays,
        ctx: Context,
    ) -> jax.Array:
        """Attention of q [B, S, N, H] to all slots, [B, S, N, H]."""
        call = replace(call, implementation="xla")
        if q.shape[1] == 1:
            return decode_attention(q, self.keys, self.values, call, arrays)
        return context_attention(q, *self.read(), call, arrays, ctx)


def _written(cache: jax.Array, new: jax.Array, first: jax.Array | int) -> jax.Array:
    """A cache [B, K, T, H] with `new` [B, S, K', H] from slot `first` on."""
    copies = cache.shape[1] // new.shape[2]  # of each kv head (`Attention.cache`)
    new = new.swapaxes(1, 2).astype(cache.dtype)
    if copies > 1:
        new = jnp.repeat(new, copies, 1)
    place = (0, 0, first, 0)
    return jax.lax.dynamic_update_slice(cache, new, place)


class Latents(NamedTuple):
    """The latent of each token and the key part that all heads share, [B, T, R + P]."""

    latents: jax.Array

    @property
    def length(self) -> int:
        return self.latents.shape[1]

    def write(self, latent: jax.Array, first: jax.Array | int) -> "Latents":
        """The cache with `latent` [B, S, R + P] in the slots from `first` on."""
        latent = latent.astype(self.latents.dtype)
        place = (0, first, 0)
        return Latents(jax.lax.dynamic_update_slice(self.latents, latent, place))

    def attend(
        self,
        q: jax.Array,
        call: AttentionCall,
        arrays: AttentionArrays,
    ) -> jax.Array:
        """Attention of one token a row, q [B, 1, N, R + P], to all slots as one kv head.

        The values keep the key part, which the caller cuts off: to cut the cache would copy it.
        """
        slots = self.latents[:, None]
        return decode_attention(q, slots, slots, call, arrays)
