"""Caches of attention: how they hold tokens, how they are written and attended to.

A branch knows no layout: it writes what it computed for new tokens and attends to all that is
there. Row b's token i is in slot i, so a row needs no padding before it. Slots after a row's last
token are finite and never seen; later tokens take their place. A class here declares its arrays
(`spec`) beside the code that reads them.
"""

from dataclasses import replace
from typing import NamedTuple

import jax

from mjax.kernels.attention.api import attention
from mjax.kernels.attention.decode import decode_attention, write_slots
from mjax.kernels.base.attention_call import AttentionArrays, AttentionCall
from mjax.models.base.branch import CacheSpec
from mjax.models.base.context import NewTokens


class KeysValues(NamedTuple):
    """Keys after RoPE and values of each kv head, both [B, K, T, H]."""

    keys: jax.Array
    values: jax.Array

    @staticmethod
    def spec(batch: int, heads: int, length: int, size: int) -> "KeysValues":
        """The arrays of caches for `length` tokens a row."""
        shape = batch, heads, length, size
        axes = "batch", "kv_heads", None, None
        array = CacheSpec(shape, axes)
        return KeysValues(array, array)

    def write(self, k: jax.Array, v: jax.Array, new: NewTokens) -> "KeysValues":
        """The cache with k and v [B, S, K, H] of new tokens."""
        k = k.swapaxes(1, 2)
        v = v.swapaxes(1, 2)
        keys = write_slots(self.keys, k, new.first, 2)
        values = write_slots(self.values, v, new.first, 2)
        return KeysValues(keys, values)

    def attend(
        self, q: jax.Array, call: AttentionCall, arrays: AttentionArrays, new: NewTokens
    ) -> jax.Array:
        """Attention of new tokens q [B, S, N, H] to their rows up to themselves, [B, S, N, H]."""
        call = replace(call, implementation="xla")
        length = self.keys.shape[2]
        slots = new.slots(q.shape[1])
        arrays = arrays.to_slots(slots, length)
        if q.shape[1] == 1:
            return decode_attention(q, self.keys, self.values, call, arrays)
        k = self.keys.swapaxes(1, 2)
        v = self.values.swapaxes(1, 2)
        return attention(q, k, v, call, arrays)


class Latents(NamedTuple):
    """The latent of each token and the key part that all heads share, [B, T, R + P]."""

    latents: jax.Array

    @staticmethod
    def spec(batch: int, length: int, width: int) -> "Latents":
        """The array of caches for `length` tokens a row; every tp device holds it whole."""
        shape = batch, length, width
        axes = "batch", None, None
        return Latents(CacheSpec(shape, axes))

    def write(self, latent: jax.Array, new: NewTokens) -> "Latents":
        """The cache with the latents [B, S, R + P] of new tokens."""
        return Latents(write_slots(self.latents, latent, new.first, 1))

    @staticmethod
    def reads_as_they_are(tokens: int) -> bool:
        """Whether `tokens` new tokens of a row attend to latents (`attend`), not to `read` ones."""
        return tokens == 1

    def read(
        self, arrays: AttentionArrays, new: NewTokens, tokens: int
    ) -> tuple[jax.Array, AttentionArrays]:
        """All slots [B, T, R + P], and the arrays of attention of `tokens` new tokens to them."""
        return self.latents, arrays.to_slots(new.slots(tokens), self.latents.shape[1])

    def attend(
        self, q: jax.Array, call: AttentionCall, arrays: AttentionArrays, new: NewTokens, rank: int
    ) -> jax.Array:
        """Attention of one token a row, q [B, 1, N, R + P], to its row as one kv head.

        The values are the first `rank` channels, [B, 1, N, R].
        """
        arrays = arrays.to_slots(new.slots(1), self.latents.shape[1])
        slots = self.latents[:, None]
        # The values keep the key part until here: to cut the cache would copy it.
        return decode_attention(q, slots, slots, call, arrays)[..., :rank]
