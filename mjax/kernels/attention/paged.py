"""Attention to caches that lie in pages: of new tokens of many rows, each to its own row.

A pool of pages [P, K, PAGE, H] holds the keys of all rows, and another one their values. A row's
table says which pages are its own, in order. Page 0 belongs to no row: padding is written there.
Slots of a page that no token of the row has reached may hold anything, even infinities.
Invariant: the output of a token depends on its row only, not on other rows or on padding.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.tree_util import register_dataclass

from mjax.kernels.attention.api import masked_scores
from mjax.kernels.base.attention_call import AttentionCall

TOKENS_AT_ONCE = 64  # of the reference, which gathers the keys of each


@register_dataclass
@dataclass(frozen=True)
class PagedRows:
    """The rows of a step: their pages, and which of the flat new tokens are theirs.

    tables: int32 [R, M]: the pages of each row, in order; 0 after its own.
    lengths: int32 [R]: tokens of a row, new ones included; 0: there is no such row.
    starts: int32 [R + 1]: row r has the new tokens starts[r] .. starts[r + 1] - 1. Tokens from
        starts[R] on are padding.
    """

    tables: jax.Array
    lengths: jax.Array
    starts: jax.Array


Scales = tuple[jax.Array, jax.Array]  # of keys and of values, fp32 [P, K, PAGE]


def tokens_of_rows(rows: PagedRows, count: int) -> tuple[jax.Array, jax.Array]:
    """(the row, the position) of each of `count` flat tokens, int32; of padding the position is -1.

    The row is always one that exists.
    """
    tokens = jnp.arange(count, dtype=jnp.int32)
    row = (tokens[:, None] >= rows.starts[None, 1:]).sum(-1, dtype=jnp.int32)
    row = jnp.minimum(row, len(rows.lengths) - 1)
    position = rows.lengths[row] - rows.starts[row + 1] + tokens
    is_own = (tokens < rows.starts[-1]) & (position >= 0)
    return row, jnp.where(is_own, position, -1)


def places_of_tokens(
    rows: PagedRows, row: jax.Array, position: jax.Array, page: int
) -> tuple[jax.Array, jax.Array]:
    """(the page, the slot within it) of tokens of `tokens_of_rows`; (0, 0) for padding."""
    at = jnp.maximum(position, 0)
    own = rows.tables[row, jnp.minimum(at // page, rows.tables.shape[1] - 1)]
    return jnp.where(position < 0, 0, own), at % page


def write_pages(pages: jax.Array, new: jax.Array, page: jax.Array, slot: jax.Array) -> jax.Array:
    """Return pages [P, K, PAGE, ...] with new [T, K, ...] in slots [T] of pages [T], int32.

    A donated array is written in place. No two tokens may have one slot, but in page 0.
    """
    count, heads, size = pages.shape[:3]
    # Rows of one matrix: XLA would transpose the pages for a scatter along two axes.
    flat = pages.reshape(count * heads * size, *pages.shape[3:])
    first = page * (heads * size) + slot
    places = first[:, None] + jnp.arange(heads, dtype=jnp.int32) * size
    new = new.astype(pages.dtype)
    # What page 0 holds does not matter, so neither does the order of writes to it.
    return (
        flat.at[places].set(new, mode="promise_in_bounds", unique_indices=True).reshape(pages.shape)
    )


@jax.named_scope("sdpa")
def paged_attention(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array | None,
    rows: PagedRows,
    call: AttentionCall,
    *,
    sinks: jax.Array | None = None,
    scales: Scales | None = None,
    value_size: int | None = None,
    each: int | None = None,
) -> jax.Array:
    """q [T, N, H], keys [P, K, PAGE, H], values [P, K, PAGE, H'] -> [T, N, H'] in q's dtype.

    The keys and values of the new tokens are in the pages already. A token sees those of its row
    up to its own position, within the window of `call`. Padding gives zeros.

    values: None: the first `value_size` channels of keys are the values, as in latent attention.
    sinks: extra logits [N], or None.
    scales: of caches in 8 bits; a key or value is its 8 bits times its scale.
    each: the number of new tokens of every row, or None where rows differ. Then T is R * each, and
        row r has the tokens from r * each on.
    """
    assert call.mask == "causal" and call.dropout == 0, "a cache is for causal rows, not training"
    assert (values is None) == (value_size is not None), "values are in one place"
    assert each is None or len(q) == each * len(rows.lengths), "each row has as many tokens"
    return _reference(q, keys, values, rows, call, sinks, scales, value_size)


def _reference(q, keys, values, rows, call, sinks, scales, value_size):
    row, position = tokens_of_rows(rows, len(q))

    def attend(token):
        q, row, position = token
        table = rows.tables[row]
        key = _of_row(keys, table)
        value = key[..., :value_size] if values is None else _of_row(values, table)
        of_row = [None] * 2 if scales is None else [_of_row(x, table) for x in scales]
        return _attention_of_token(q, key, value, position, call, sinks, of_row)

    return _map_in_parts(attend, (q, row, position))


def _of_row(pages: jax.Array, table: jax.Array) -> jax.Array:
    """What pages [P, K, PAGE, ...] hold of a row with `table` [M] -> [K, M * PAGE, ...]."""
    own = jnp.moveaxis(pages[table], 0, 1)  # [K, M, PAGE, ...]
    return own.reshape(own.shape[0], -1, *own.shape[3:])


def _attention_of_token(q, keys, values, position, call, sinks, scales):
    """q [N, H], keys [K, S, H], values [K, S, H'], position [] -> [N, H']."""
    heads, slots = len(keys), jnp.arange(keys.shape[1])
    seen = slots <= position
    if call.window is not None:
        seen = seen & (position - slots < call.window)
    own = jnp.where(seen[:, None], keys, 0).astype(q.dtype)
    grouped = q.reshape(heads, -1, q.shape[-1])
    products = jnp.einsum("kgh,ksh->kgs", grouped, own, preferred_element_type=jnp.float32)
    if scales[0] is not None:
        products = products * jnp.where(seen, scales[0], 0)[:, None]
    scores = masked_scores(products, seen, call)
    sink = None if sinks is None else sinks.astype(jnp.float32).reshape(heads, -1, 1)
    top = scores.max(-1, keepdims=True)
    top = top if sink is None else jnp.maximum(top, sink)
    weights = jnp.where(seen, jnp.exp(scores - top), 0)
    total = weights.sum(-1, keepdims=True) + (0 if sink is None else jnp.exp(sink - top))
    weights = weights / jnp.where(total > 0, total, 1)
    if scales[1] is not None:
        weights = weights * jnp.where(seen, scales[1], 0)[:, None]
    own = jnp.where(seen[:, None], values, 0).astype(q.dtype)
    out = jnp.einsum("kgs,ksh->kgh", weights.astype(q.dtype), own)
    return out.reshape(len(q), -1)


def _map_in_parts(function: Callable, tokens: tuple[jax.Array, ...]) -> jax.Array:
    """`function` of each token, of so many at a time that their keys need little memory."""
    if len(tokens[0]) <= TOKENS_AT_ONCE:
        return jax.vmap(function)(tokens)
    return jax.lax.map(function, tokens, batch_size=TOKENS_AT_ONCE)
