"""Attention to caches that lie in pages: of new tokens of many rows, each to its own row.

A pool of pages [P, K, PAGE, H] holds the keys of all rows, and another one their values. A row's
table says which pages are its own, in order. Page 0 belongs to no row: padding is written there.
Slots of a page that no token of the row has reached may hold anything, even infinities.
Invariant: the output of a token depends on its row only, not on other rows or on padding.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import register_dataclass

from mjax.kernels.attention.api import masked_scores
from mjax.kernels.base.attention_call import AttentionCall
from mjax.kernels.base.chooser import choose
from mjax.kernels.base.triton_call import triton_call

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
    facts = {"call": call, "value_size": value_size or values.shape[-1], "page": keys.shape[2]}
    if choose("paged_attention", q.dtype, q.shape, **facts).name == "xla":
        return _reference(q, keys, values, rows, call, sinks, scales, value_size)
    arrays = PagedArrays(q, keys, values, rows, sinks, scales)
    if each is None:
        return paged_prefill(arrays, call, prefill_tile(arrays))
    return paged_decode(arrays, call, each, decode_tile(arrays, each), splits_of(arrays, each))


# ---- reference ---------------------------------------------------------------------------------


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


# ---- our kernels -------------------------------------------------------------------------------


class PagedArrays(NamedTuple):
    """The arrays of `paged_attention`; without `values`, keys hold them."""

    q: jax.Array
    keys: jax.Array
    values: jax.Array | None
    rows: PagedRows
    sinks: jax.Array | None = None
    scales: Scales | None = None

    @property
    def group(self) -> int:
        """Heads of queries that share a head of keys."""
        return self.q.shape[1] // self.keys.shape[1]


class PagedTile(NamedTuple):
    """Sizes of a program: queries (new tokens times heads of a group), keys, warps, loads ahead."""

    queries: int
    keys: int
    warps: int
    stages: int


class Splits(NamedTuple):
    """Pages of a split, and programs that take the splits of a row and a kv head by turns."""

    pages: int
    walkers: int


SPLIT_TOKENS, SHORT_SPLIT_TOKENS = 1024, 256  # of many rows, and of so few that GPUs idle
FEW_PROGRAMS = 64  # rows times kv heads
MOST_SPLITS = 32  # of a row: memory for their parts
MOST_PROGRAMS = 4096  # those beyond a row's length cost their start


def decode_tile(arrays: PagedArrays, each: int) -> PagedTile:
    """The tile for `each` new tokens of each row, one or a few."""
    queries = min(max(power_of_2(each * arrays.group), 16), 64)
    if arrays.values is None:
        return PagedTile(min(queries, 32), 32, 8 if queries > 16 else 4, 3)
    if arrays.q.shape[-1] > 128:
        return PagedTile(queries, 32, 4, 3)
    return PagedTile(queries, 64, 4, 3)


def prefill_tile(arrays: PagedArrays) -> PagedTile:
    """The tile for rows of any number of new tokens."""
    if arrays.values is None:
        return PagedTile(64, 32, 8, 2)
    return PagedTile(128, 64, 8, 3) if arrays.q.shape[-1] <= 128 else PagedTile(64, 64, 4, 2)


def splits_of(arrays: PagedArrays, each: int) -> Splits:
    """The splits of rows with tables of this width; they do not depend on lengths."""
    count, width = arrays.rows.tables.shape
    page = arrays.keys.shape[2]
    programs = count * arrays.keys.shape[1]
    tokens = SHORT_SPLIT_TOKENS if programs < FEW_PROGRAMS else SPLIT_TOKENS
    pages = max(tokens // page, power_of_2(-(-width // MOST_SPLITS)))
    walkers = max(1, min(-(-width // pages), MOST_PROGRAMS // programs))
    return Splits(pages, walkers)


def paged_decode(
    arrays: PagedArrays, call: AttentionCall, each: int, tile: PagedTile, splits: Splits
) -> jax.Array:
    """`paged_attention` of rows with `each` new tokens: parts of their keys, then one of parts."""
    from mjax.kernels.attention.paged_triton import merge_splits, paged_splits

    q, rows = arrays.q, arrays.rows
    constants, shared = (
        _constants(arrays, call, tile),
        {"SPLIT": splits.pages * arrays.keys.shape[2]},
    )
    count = -(-rows.tables.shape[1] // splits.pages)
    shared |= {"SPLITS": count, "EACH": each, "WINDOW": constants["WINDOW"]}
    size = constants["VALUES"]
    tiles = -(-each * arrays.group // tile.queries)
    means, sums = triton_call(
        paged_splits,
        [*_operands(arrays), rows.tables, rows.lengths],
        [
            jax.ShapeDtypeStruct((*q.shape[:2], count, size), jnp.float32),
            jax.ShapeDtypeStruct((*q.shape[:2], count), jnp.float32),
        ],
        programs=len(rows.lengths) * arrays.keys.shape[1] * tiles * splits.walkers,
        WALKERS=splits.walkers,
        **constants | shared,
    )
    room = power_of_2(count)
    return triton_call(
        merge_splits,
        [means, sums, rows.lengths],
        [jax.ShapeDtypeStruct((*q.shape[:2], size), q.dtype)],
        programs=q.shape[0] * q.shape[1],
        warps=max(1, min(8, room * size // 2048)),
        HEADS=q.shape[1],
        VALUES=size,
        ROOM=room,
        **shared,
    )[0]


def paged_prefill(arrays: PagedArrays, call: AttentionCall, tile: PagedTile) -> jax.Array:
    """`paged_attention` of rows with any number of new tokens, by tiles of queries."""
    from mjax.kernels.attention.paged_triton import paged_tiles

    q, rows = arrays.q, arrays.rows
    count = len(rows.lengths)
    tiles = len(q) * arrays.group // tile.queries + count + 1
    constants = _constants(arrays, call, tile)
    return triton_call(
        paged_tiles,
        [*_operands(arrays), rows.tables, rows.lengths, rows.starts],
        [jax.ShapeDtypeStruct((*q.shape[:2], constants["VALUES"]), q.dtype)],
        programs=tiles * arrays.keys.shape[1],
        T=len(q),
        ROWS=count,
        ROOM=power_of_2(count + 1),
        **constants,
    )[0]


def power_of_2(least: int) -> int:
    """The smallest power of 2 that is no less."""
    return 1 << (least - 1).bit_length()


def _operands(arrays: PagedArrays) -> list[jax.Array]:
    """The first six arrays that a kernel takes; those that it does not read have one element."""
    unread = functools.partial(jnp.zeros, 1)
    values = unread(arrays.keys.dtype) if arrays.values is None else arrays.values
    scales = arrays.scales or (unread(jnp.float32),) * 2
    sinks = unread(jnp.float32) if arrays.sinks is None else arrays.sinks.astype(jnp.float32)
    return [arrays.q, arrays.keys, values, *scales, sinks]


def _constants(arrays: PagedArrays, call: AttentionCall, tile: PagedTile) -> dict:
    """The constants that both kernels are compiled for; a window as long as a table is none."""
    _, kv_heads, page, width = arrays.keys.shape
    main = 1 << (width.bit_length() - 1)
    longest = arrays.rows.tables.shape[1] * page
    return dict(
        warps=tile.warps,
        M=arrays.rows.tables.shape[1],
        KV_HEADS=kv_heads,
        GROUP=arrays.group,
        MAIN=main,
        TAIL=width - main,
        VALUES=main if arrays.values is None else arrays.values.shape[-1],
        PAGE=page,
        SCALE=call.scale,
        SOFTCAP=call.softcap or 0,
        WINDOW=call.window if call.window is not None and call.window < longest else 0,
        SINKS=arrays.sinks is not None,
        SCALED=arrays.scales is not None,
        LATENT=arrays.values is None,
        QUERIES=tile.queries,
        KEYS=tile.keys,
        STAGES=tile.stages,
    )
