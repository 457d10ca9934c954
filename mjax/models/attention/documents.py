"""Attention to keys in pages of fixed places, summed page after page: the batch-invariant form.

A token's text is cut into pages at multiples of `IN_PAGE` tokens from its start. Each token walks
the pages of its own text in order and keeps a running maximum and sums (arXiv 1805.02867).
Invariant: pages that a token does not see change no bit. So its output depends neither on how many
pages there are, nor on where they lie.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mjax.config.schema.model import AttentionConfig
from mjax.kernels.attention.api import masked_scores
from mjax.kernels.base.attention_call import AttentionArrays, AttentionCall

IN_PAGE = 64  # tokens
_NO_SCORE = -1e30  # the maximum of no scores

# f(number of a page) -> (keys, values) of each token's text there, both [T, K, IN_PAGE, H].
ReadPage = Callable[[jax.Array], tuple[jax.Array, jax.Array]]


class RunningSoftmax(NamedTuple):
    """The largest score so far, and sums over keys: of weights, and of weighted values, all fp32.

    The first two are [T, K, N/K, 1], the last one is [T, K, N/K, H].
    """

    top: jax.Array
    total: jax.Array
    values: jax.Array


def attend_in_order(
    q: jax.Array, read: ReadPage, lengths: jax.Array, page: int, call: AttentionCall
) -> jax.Array:
    """q [T, N, H] -> [T, N, H]: each token sees the first `lengths` int32 [T] keys of its text.

    The last of them is its own. Tokens of length 0 get zeros.
    """
    tokens, _, size = q.shape
    keys, _ = jax.eval_shape(read, jnp.int32(0))
    q_TKGH = q.reshape(tokens, keys.shape[1], -1, size)

    def walk(number: jax.Array, state: RunningSoftmax) -> RunningSoftmax:
        keys, values = lax.optimization_barrier(read(number))
        places = number * page
        places = places + jnp.arange(page, dtype=jnp.int32)
        seen = places < lengths[:, None]
        if call.window is not None:
            behind = lengths[:, None] - places
            seen = seen & (behind <= call.window)
        return _with_page(state, q_TKGH, keys, values, seen, call)

    sums = jnp.zeros(q_TKGH.shape, jnp.float32)
    nothing = sums[..., :1]
    start = RunningSoftmax(nothing + _NO_SCORE, nothing, sums)
    pages = (lengths.max() + page - 1) // page
    found = lax.fori_loop(0, pages, walk, start)
    divisor = jnp.where(found.total > 0, found.total, 1)
    out = found.values / divisor
    out = lax.optimization_barrier(out.astype(q.dtype))
    return out.reshape(q.shape)


def _with_page(
    state: RunningSoftmax,
    q_TKGH: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    seen: jax.Array,
    call: AttentionCall,
) -> RunningSoftmax:
    """The sums with one page more, of whose keys each token has `seen` some, bool [T, IN_PAGE]."""
    # What is not seen may hold anything, even infinities.
    is_real = seen[:, None, :, None]
    keys = jnp.where(is_real, keys, 0)
    values = jnp.where(is_real, values, 0)
    seen = seen[:, None, None]
    products = jnp.einsum("tkgh,tkph->tkgp", q_TKGH, keys, preferred_element_type=jnp.float32)
    scores = masked_scores(products, seen, call)
    largest = scores.max(-1, keepdims=True)
    top = jnp.maximum(state.top, largest)
    kept = jnp.exp(state.top - top)
    weights = jnp.exp(scores - top)
    weights = jnp.where(seen, weights, 0)
    total = state.total * kept
    total = total + weights.sum(-1, keepdims=True)
    weighted = jnp.einsum(
        "tkgp,tkph->tkgh",
        weights.astype(q_TKGH.dtype),
        values,
        preferred_element_type=jnp.float32,
    )
    return RunningSoftmax(top, total, state.values * kept + weighted)


class DocumentTokens(NamedTuple):
    """A block of tokens of documents that lie one after the other.

    first: int32 [], the place of the block. starts: int32 [T], the places where their documents
    begin. lengths: int32 [T], tokens of each document up to this one; 0: padding.
    """

    first: jax.Array
    starts: jax.Array
    lengths: jax.Array


class DocumentKeysValues(NamedTuple):
    """Keys after RoPE and values of documents one after the other, both [K, T + IN_PAGE, H]."""

    keys: jax.Array
    values: jax.Array

    @staticmethod
    def empty(sizes: AttentionConfig, tokens: int, dtype: jnp.dtype) -> "DocumentKeysValues":
        """The cache for so many tokens, before any."""
        shape = sizes.num_key_value_heads, tokens + IN_PAGE, sizes.head_dim
        none = jnp.zeros(shape, dtype)
        return DocumentKeysValues(none, none)

    def write(self, k: jax.Array, v: jax.Array, new: DocumentTokens) -> "DocumentKeysValues":
        """The cache with k and v [T, 1, K, H] of a block."""

        def written(held: jax.Array, block: jax.Array) -> jax.Array:
            block = block[:, 0].swapaxes(0, 1)
            return lax.dynamic_update_slice_in_dim(held, block, new.first, 1)

        keys = written(self.keys, k)
        values = written(self.values, v)
        return DocumentKeysValues(keys, values)

    def attend(
        self, q: jax.Array, call: AttentionCall, arrays: AttentionArrays, new: DocumentTokens
    ) -> jax.Array:
        """Attention of a block q [T, 1, N, H] to its documents, [T, 1, N, H]."""

        def read(number: jax.Array) -> tuple[jax.Array, jax.Array]:
            begins = new.starts + number * IN_PAGE
            return _pages_at(self.keys, begins), _pages_at(self.values, begins)

        out = attend_in_order(q[:, 0], read, new.lengths, IN_PAGE, call)
        return out[:, None]


def _pages_at(held: jax.Array, begins: jax.Array) -> jax.Array:
    """Pages [T, K, IN_PAGE, H] of held [K, .., H], from each of the places int32 [T] on."""

    def at(begin: jax.Array) -> jax.Array:
        return lax.dynamic_slice_in_dim(held, begin, IN_PAGE, 1)

    return jax.vmap(at)(begins)
