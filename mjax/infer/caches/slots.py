"""Caches by slot: each row that is served has a place of its own in them.

A state does not grow, an encoder's keys are written once, and relative biases need whole rows. So
none of these lies in pages (`paged.py`). A step takes the rows of its slots, [slots, ..], and then
puts them back. Slots after a row's last token are finite and never seen. The last slot is for
rows without work.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from mjax.kernels.base.attention_call import AttentionArrays, AttentionCall
from mjax.kernels.recurrence.token_step import StateSlots
from mjax.models.attention.caches import KeysValues
from mjax.models.base.branch import Source
from mjax.models.base.context import NewTokens, PagedTokens, tokens_of
from mjax.models.recurrent.recurrent_mixer import Parts


class SlotKeysValues(NamedTuple):
    """Keys and values of each kv head, both [slots, K, T, H]."""

    keys: jax.Array
    values: jax.Array

    def write(self, k: jax.Array, v: jax.Array, new: PagedTokens) -> "SlotKeysValues":
        """The cache with k and v [B, S, K, H] of new tokens."""
        rows = new.slots[:, None]
        place = _new_tokens(new).slots(k.shape[1])

        def written(cache: jax.Array, tokens: jax.Array) -> jax.Array:
            tokens = tokens.astype(cache.dtype)
            return cache.at[rows, :, place].set(tokens, mode="drop")

        keys = written(self.keys, k)
        values = written(self.values, v)
        return SlotKeysValues(keys, values)

    def attend(
        self, q: jax.Array, call: AttentionCall, arrays: AttentionArrays, new: PagedTokens
    ) -> jax.Array:
        """Attention of new tokens q [B, S, N, H] to their rows up to themselves, [B, S, N, H]."""
        rows = KeysValues(self.keys[new.slots], self.values[new.slots])
        return rows.attend(q, call, arrays, _new_tokens(new))


class SlotSources(NamedTuple):
    """Keys and values [slots, K, T, H] of another stream, with `real` int32 [slots, T].

    `real` is 1 for a source's tokens and 0 after them.
    """

    keys: jax.Array
    values: jax.Array
    real: jax.Array

    def write(self, k: jax.Array, v: jax.Array, real: jax.Array, new: PagedTokens) -> "SlotSources":
        """The cache with the sources of rows, whose keys and values are [B, S, K, H]."""
        slots = new.slots
        tokens = slice(0, k.shape[1])

        def written(cache: jax.Array, heads: jax.Array) -> jax.Array:
            heads = heads.swapaxes(1, 2)
            return cache.at[slots, :, tokens].set(heads.astype(cache.dtype))

        cleared = self.real.at[slots].set(0)
        return SlotSources(
            written(self.keys, k),
            written(self.values, v),
            cleared.at[slots, tokens].set(real),
        )

    def read(self, new: PagedTokens) -> tuple[jax.Array, jax.Array, Source]:
        """Keys and values [B, T, K, H] of the rows of a step, and the source that they are of."""
        real = self.real[new.slots]
        k = self.keys[new.slots].swapaxes(1, 2)
        v = self.values[new.slots].swapaxes(1, 2)
        return k, v, Source(None, tokens_of(real.shape, segments=real))


class SlotStates(NamedTuple):
    """A `RecurrentCache` of all rows that are served, [slots, ..], of which a step takes some."""

    histories: Parts
    state: jax.Array

    def slots(self, new: PagedTokens) -> StateSlots:
        """The slots of the rows of a step, and which of these begin."""
        return StateSlots(new.slots, new.are_first)


def with_states_copied(
    caches: list, source: jax.Array, target: jax.Array, lane: jax.Array | int
) -> list:
    """A lane's caches with the states of a slot also in another; slots are over all lanes."""

    def put(slots: jax.Array) -> jax.Array:
        first = lane * len(slots)
        own = (source >= first) & (source < first + len(slots))
        to = jnp.where(own, target - first, len(slots))
        return slots.at[to].set(slots[source - first], mode="drop")

    def copied(cache: object) -> object:
        return jax.tree.map(put, cache) if isinstance(cache, SlotStates) else cache

    return jax.tree.map(copied, caches, is_leaf=lambda x: isinstance(x, SlotStates))


def _new_tokens(new: PagedTokens) -> NewTokens:
    """The first new slot of each row; padding is written to slots of no row, or after its own."""
    before = new.rows.lengths - (new.rows.starts[1:] - new.rows.starts[:-1])
    return NewTokens(jnp.maximum(before, 0))
