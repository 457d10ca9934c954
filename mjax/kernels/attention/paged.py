"""Attention to caches that lie in pages: of new tokens of many rows, each to its own row.

A pool of pages [P, K, PAGE, H] holds the keys of all rows, and another one their values. A row's
table says which pages are its own, in order. Page 0 belongs to no row: padding is written there.
Slots of a page that no token of the row has reached may hold anything, even infinities.
Invariant: the output of a token depends on its row only, not on other rows or on padding.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
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
    # What page 0 holds does not matter, so neither does the order of writes to it.
    return pages.at[page, :, slot].set(new.astype(pages.dtype), unique_indices=True)


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
    assert values is not None or scales is None, "latent caches have no scales"
    assert each is None or len(q) == each * len(rows.lengths), "each row has as many tokens"
    facts = {"call": call, "value_size": value_size or values.shape[-1], "page": keys.shape[2]}
    if choose("paged_attention", q.dtype, q.shape, **facts).name == "xla":
        return _paged_reference(q, keys, values, rows, call, sinks, scales, value_size)
    arrays = PagedArrays(q, keys, values, rows, sinks, scales)
    splits = splits_for(arrays, each) if each else None
    return attend_by_tiles(arrays, call, each, tile_for(arrays, each), splits)


# ---- reference ---------------------------------------------------------------------------------


def _paged_reference(q, keys, values, rows, call, sinks, scales, value_size):
    row, position = tokens_of_rows(rows, len(q))

    def attend(token):
        q, row, position = token
        table = rows.tables[row]
        key = _of_row(keys, table)
        value = key[..., :value_size] if values is None else _of_row(values, table)
        of_row = [None] * 2 if scales is None else [_of_row(x, table) for x in scales]
        return _attention_of_token(q, key, value, position, call, sinks, of_row)

    return jax.lax.map(attend, (q, row, position), batch_size=TOKENS_AT_ONCE)


def _of_row(pages: jax.Array, table: jax.Array) -> jax.Array:
    """Return the slots [K, M * PAGE, ...] of a row with `table` [M], of pages [P, K, PAGE, ...]."""
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
    """Sizes of a program: queries (new tokens times heads of a group), keys, warps, loads ahead.

    Keys of a tile lie in one page.
    """

    queries: int
    keys: int
    warps: int
    stages: int


class Splits(NamedTuple):
    """Pages of a split, and programs that take the splits of a row and a kv head by turns."""

    pages: int
    walkers: int


# Tiles of all rows, and the most tokens of a split with no more of them: GPUs want some hundred
# programs, and longer splits cost less. Measured on an H100.
SPLIT_TOKENS = ((32, 256), (256, 512), (1 << 30, 1024))
MOST_SPLITS = 32  # of a row: memory for their parts
MOST_PROGRAMS = 4096  # those beyond a row's length cost their start


def tile_for(arrays: PagedArrays, each: int | None) -> PagedTile:
    """The tile for `each` new tokens of each row, one or a few, or None: for any number."""
    width, page = arrays.q.shape[-1], arrays.keys.shape[2]
    queries = min(max(power_of_2(each * arrays.group), 16), 64) if each else 128
    if arrays.values is None:
        queries = min(queries, 64)
        return PagedTile(queries, 32, 4 if queries == 16 else 8, 2 if queries == 64 else 3)
    if each is None:
        return PagedTile(queries, min(64, page), 8, 3 if width <= 128 else 2)
    keys = min(64 if width <= 128 else 32, page)
    if arrays.scales is not None and queries == 16:  # a page has half the bytes: more are loaded
        return PagedTile(queries, keys, 2, 4)
    return PagedTile(queries, keys, 4, 3)


def splits_for(arrays: PagedArrays, each: int) -> Splits:
    """The splits of rows with tables of this width; they do not depend on lengths."""
    count, width = arrays.rows.tables.shape
    tiles = -(-each * arrays.group // tile_for(arrays, each).queries)
    programs = count * arrays.keys.shape[1] * tiles
    tokens = next(tokens for most, tokens in SPLIT_TOKENS if programs <= most)
    pages = max(tokens // arrays.keys.shape[2], power_of_2(-(-width // MOST_SPLITS)))
    walkers = max(1, min(-(-width // pages), MOST_PROGRAMS // programs))
    return Splits(pages, walkers)


def attend_by_tiles(
    arrays: PagedArrays,
    call: AttentionCall,
    each: int | None,
    tile: PagedTile,
    splits: Splits | None = None,
) -> jax.Array:
    """`paged_attention` by our kernels: of splits of keys, then of parts; without splits, at once.

    Splits are for rows that have `each` new tokens.
    """
    from mjax.kernels.attention.paged_triton import attend_to_pages, merge_splits

    q, (_, kv_heads, page, _) = arrays.q, arrays.keys.shape
    constants = _kernel_constants(arrays, call, each)
    shared = {name: constants[name] for name in ("EACH", "H", "WINDOW")}
    split, count, walkers = 0, 1, 1
    tiles = len(q) * arrays.group // tile.queries + constants["ROWS"] + 1
    if splits is not None:
        walkers = splits.walkers
        split, count = splits.pages * page, -(-constants["M"] // splits.pages)
        tiles = constants["ROWS"] * -(-each * arrays.group // tile.queries) * walkers
    shared |= {"SPLIT": split, "SPLITS": count}
    size = constants["WIDTH"] - constants["TAIL"]
    means = jax.ShapeDtypeStruct((*q.shape[:2], count, size), jnp.float32)
    sums = jax.ShapeDtypeStruct(means.shape[:3], jnp.float32)
    out = jax.ShapeDtypeStruct((*q.shape[:2], size), q.dtype)
    made = triton_call(
        attend_to_pages,
        _operands(arrays),
        [out] if splits is None else [means, sums],
        programs=tiles * kv_heads,
        warps=tile.warps,
        WALKERS=walkers,
        QUERIES=tile.queries,
        KEYS=tile.keys,
        STAGES=tile.stages,
        **constants | shared,
        **({"sums": None} if splits is None else {}),
    )
    if splits is None:
        return made[0]
    room = power_of_2(count)
    return triton_call(
        merge_splits,
        [*made, arrays.rows.lengths],
        [out],
        programs=q.shape[0] * q.shape[1],
        warps=max(1, min(8, room * constants["H"] // 2048)),
        HEADS=q.shape[1],
        SIZE=size,
        ROOM=room,
        **shared,
    )[0]


def power_of_2(least: int) -> int:
    """The smallest power of 2 that is no less."""
    return 1 << (least - 1).bit_length()


def _operands(arrays: PagedArrays) -> list[jax.Array]:
    """The arrays that our kernel takes; those that it does not read have one element."""
    q, rows = arrays.q, arrays.rows
    values = np.zeros(1, q.dtype) if arrays.values is None else arrays.values
    scales = arrays.scales or (np.zeros(1, np.float32),) * 2
    # one for all heads, which is a constant: XLA fills arrays by a kernel
    sinks = np.full(1, -np.inf) if arrays.sinks is None else arrays.sinks
    sinks = sinks.astype(np.float32)
    return [q, arrays.keys, values, *scales, sinks, rows.tables, rows.lengths, rows.starts]


def _kernel_constants(arrays: PagedArrays, call: AttentionCall, each: int | None) -> dict:
    """The constants that our kernel is compiled for; a window as long as a table is none."""
    count, width = arrays.rows.tables.shape
    _, kv_heads, page, channels = arrays.keys.shape
    size = channels if arrays.values is not None else 1 << (channels.bit_length() - 1)
    return dict(
        M=width,
        T=len(arrays.q),
        ROWS=count,
        ROOM=power_of_2(count + 1),
        EACH=each or 0,
        KV_HEADS=kv_heads,
        GROUP=arrays.group,
        H=max(power_of_2(size), 32 if arrays.scales else 16),  # half of them is a side of a product
        WIDTH=channels,
        TAIL=channels - size,
        PAGE=page,
        SINKS=int(arrays.sinks is not None),
        SCALE=call.scale,
        SOFTCAP=call.softcap or 0,
        WINDOW=call.window if call.window is not None and call.window < width * page else 0,
    )
