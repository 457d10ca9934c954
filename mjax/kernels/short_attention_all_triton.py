"""The backward pass of attention as one Triton kernel, for rows whose queries a program can hold.

Arrays and constants are those of `short_attention_triton.py`, with as many heads of keys as of
queries. Five products where two kernels have seven, and each input is read once.
"""

import triton
import triton.language as tl

from mjax.kernels.short_attention_triton import (
    LOG2E,
    NEVER,
    _arrays_of,
    _bias,
    _keys_values,
    _length,
    _numbers,
    _places,
    _query_places,
    _seen,
    _segments,
    _store_sums,
    _sums,
    _task,
    _tile,
)


@triton.jit
def attention_d_all(
    q,
    k,
    v,
    q_segments,
    k_segments,
    lengths,
    v_bias,
    out,
    lse,
    d_out,
    d_q,
    d_k,
    d_v,
    d_sums,
    S: tl.constexpr,
    T: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    H: tl.constexpr,
    SCALE: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SEGMENTED: tl.constexpr,
    PADDED: tl.constexpr,
    PARTS: tl.constexpr,
    BIASED: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write the gradients of q, k and v, and `d_sums` [B, 2, N, H] of that of q and of d_out.

    A program holds the queries of a head in tiles of QUERIES, the last one of 16 if that will do,
    and walks the tiles of keys. The gradients of queries stay in registers meanwhile.
    """
    row, head, _ = _task(1, HEADS, 1)
    arrays, bias = (q, q_segments, out, lse, d_out), _bias(v_bias, head, H, BIASED)
    held, d_queries, d_sum = _all_held(
        arrays, row, head, bias, S, HEADS, H, PARTS, SEGMENTED, QUERIES
    )
    sums = d_sums + (row * 2 * HEADS + head) * H
    if BIASED:
        _store_sums(sums + HEADS * H, d_sum)
    into, length = _arrays_of(d_q, d_k, d_v, KV_HEADS, H, PARTS), _length(lengths, row, T, PADDED)
    for begin in tl.range(0, length, KEYS, num_stages=STAGES):
        keys = begin + tl.arange(0, KEYS)
        key, value = _keys_values(q, k, v, row, keys, head, T, KV_HEADS, H, PARTS)
        tile = key, value, keys, _segments(k_segments, row, keys, T, SEGMENTED), length
        d_queries, d_key, d_value = _steps(
            held, tile, d_queries, SCALE, CAUSAL, WINDOW, SEGMENTED, PADDED
        )
        at = _places(row, keys, head, T, PARTS * KV_HEADS, H)
        _store_keys(into, at, keys, length, T, d_key * SCALE, d_value, PADDED)
    if PADDED:
        _store_unseen(into, row, head, length, T, PARTS * KV_HEADS, H, KEYS)
    d_sum = _store_queries(d_q, row, head, held, d_queries, SCALE, S, HEADS, H, PARTS)
    if BIASED:
        _store_sums(sums, d_sum)


@triton.jit
def _all_held(arrays, row, head, bias, S, HEADS, H, PARTS, SEGMENTED, QUERIES):
    """By tiles of queries: what a program holds, zeros for their gradients; the sums of d_out."""
    TILES: tl.constexpr = (S + QUERIES - 17) // QUERIES
    held, d_queries, d_sum = (), (), tl.zeros([16, H], tl.float32)
    for i in tl.static_range(TILES + (S > TILES * QUERIES)):
        queries = i * QUERIES + tl.arange(0, QUERIES if i < TILES else 16)
        one, d_more = _held(arrays, row, head, queries, bias, S, HEADS, H, PARTS, SEGMENTED)
        held, d_sum = held + (one,), d_sum + d_more
        d_queries = d_queries + (tl.zeros([queries.shape[0], H], tl.float32),)
    return held, d_queries, d_sum


@triton.jit
def _held(arrays, row, head, queries, bias, S, HEADS, H, PARTS, SEGMENTED):
    """What a program holds of a tile of queries, and the sums of their d_out."""
    q, q_segments, out, lse, d_out = arrays
    at, of_q = _query_places(row, queries, head, S, HEADS, H, PARTS)
    query, d_mean = _tile(q, of_q, queries < S), _tile(d_out, at, queries < S)
    mean = _tile(out, at, queries < S) - bias
    delta = tl.sum(mean * d_mean.to(tl.float32), 1)
    total = _numbers(lse, row, head, queries, S, HEADS, float("inf"))  # exp2(-inf) is 0
    mine = _segments(q_segments, row, queries, S, SEGMENTED)
    held = query, d_mean, total, delta, queries, mine
    return held, _sums(d_mean)


@triton.jit
def _steps(held, tile, d_queries, SCALE, CAUSAL, WINDOW, SEGMENTED, PADDED):
    """(the gradients of queries with what a tile of keys adds, those of its keys and values)."""
    d_key = tl.zeros([tile[0].shape[1], tile[0].shape[0]], tl.float32)
    d_value, found = d_key, ()
    for i in tl.static_range(len(held)):
        so_far = d_queries[i], d_key, d_value
        d_query, d_key, d_value = _step(
            held[i], tile, so_far, SCALE, CAUSAL, WINDOW, SEGMENTED, PADDED
        )
        found = found + (d_query,)
    return found, d_key, d_value


@triton.jit
def _step(held, tile, so_far, SCALE, CAUSAL, WINDOW, SEGMENTED, PADDED):
    """The three gradients with what a tile of queries and one of keys add.

    Those of keys and values are [H, keys]: a warp group of a Hopper takes 64 rows of a product.
    """
    query, d_mean, total, delta, queries, mine = held
    key, value, keys, theirs, length = tile
    d_query, d_key, d_value = so_far
    scores = tl.dot(query, tl.trans(key)) * (SCALE * LOG2E) - total[:, None]
    if CAUSAL or WINDOW or SEGMENTED or PADDED:
        seen = _seen(queries, keys, mine, theirs, length, CAUSAL, WINDOW, SEGMENTED)
        scores = tl.where(seen, scores, NEVER)
    else:  # keys beyond the row are zeros, whose weights must be finite; those of others are <= 1
        scores = tl.minimum(scores, 1.0)
    weights = tl.exp2(scores)
    d_value = tl.dot(tl.trans(d_mean), weights.to(key.dtype), d_value)
    d_scores = weights * (tl.dot(d_mean, tl.trans(value)) - delta[:, None])
    d_scores = d_scores.to(key.dtype)
    d_query = tl.dot(d_scores, key, d_query)
    d_key = tl.dot(tl.trans(query), d_scores, d_key)
    return d_query, d_key, d_value


@triton.jit
def _store_keys(into, at, keys, length, T, d_key, d_value, PADDED):
    """Write the gradients [H, keys] of a tile of keys and values, zeros for those not seen."""
    d_keys, d_values = into
    dtype = d_keys.dtype.element_ty
    d_key, d_value = tl.trans(d_key.to(dtype)), tl.trans(d_value.to(dtype))
    if PADDED:
        is_seen = (keys < length)[:, None]
        d_key, d_value = tl.where(is_seen, d_key, 0.0), tl.where(is_seen, d_value, 0.0)
    tl.store(d_keys + at, d_key, (keys < T)[:, None])
    tl.store(d_values + at, d_value, (keys < T)[:, None])


@triton.jit
def _store_unseen(into, row, head, length, T, HEADS, H, KEYS):
    """Write zeros for the keys of the tiles that no query sees."""
    nothing = tl.zeros([H, KEYS], tl.float32)
    for begin in tl.range(tl.cdiv(length, KEYS) * KEYS, T, KEYS):
        keys = begin + tl.arange(0, KEYS)
        at = _places(row, keys, head, T, HEADS, H)
        _store_keys(into, at, keys, T, T, nothing, nothing, False)


@triton.jit
def _store_queries(d_q, row, head, held, d_queries, SCALE, S, HEADS, H, PARTS):
    """Write the gradients of queries, and return their sums."""
    total = tl.zeros([16, H], tl.float32)
    for i in tl.static_range(len(held)):
        queries, d_query = held[i][4], (d_queries[i] * SCALE).to(d_q.dtype.element_ty)
        _, of_q = _query_places(row, queries, head, S, HEADS, H, PARTS)
        tl.store(d_q + of_q, d_query, (queries < S)[:, None])
        total += _sums(d_query)
    return total
