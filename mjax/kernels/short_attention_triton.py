"""Attention of short rows as Triton kernels; `short_attention.py` calls them.

Arrays are row-major: queries [B, S, N, H], keys and values [B, T, K, H]. Exponentials are to base
2. Scores, sums and log-sum-exps are fp32; products read operands of the inputs' dtype.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1e30)  # the largest score where no key is seen: a finite number


@triton.jit
def attention_forward(
    q,
    k,
    v,
    q_segments,
    k_segments,
    lengths,
    out,
    lse,
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
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write out [B, S, N, H] and the log-sum-exp of scores, to base 2, [B, N, S].

    A program takes QUERIES of a head and walks the tiles of keys that they see (FlashAttention-2,
    arXiv 2307.08691). SEGMENTED: a query sees keys of its own segment
    only. PADDED: a row's keys from its length on are not seen.
    """
    tiles: tl.constexpr = (S + QUERIES - 1) // QUERIES
    program = tl.program_id(0)
    start = program % tiles * QUERIES
    head = program // tiles % HEADS
    row = (program // (tiles * HEADS)).to(tl.int64)
    queries, channels = start + tl.arange(0, QUERIES), tl.arange(0, H)
    within = queries < S
    at = ((row * S + queries[:, None]) * HEADS + head) * H + channels[None]
    query = tl.load(q + at, within[:, None], other=0.0)
    if SEGMENTED:
        mine = tl.load(q_segments + row * S + queries, within, other=-1)
    length = T
    if PADDED:
        length = tl.load(lengths + row)
    low, high = _keys_seen(start, length, T, CAUSAL, WINDOW, PADDED, QUERIES, KEYS)
    top = tl.full([QUERIES], LOWEST, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    mean = tl.zeros([QUERIES, H], tl.float32)
    from_head = (row * T * KV_HEADS + head // (HEADS // KV_HEADS)) * H
    for begin in tl.range(low, high, KEYS, num_stages=STAGES):
        keys = begin + tl.arange(0, KEYS)
        place = from_head + keys[:, None] * (KV_HEADS * H) + channels[None]
        key = tl.load(k + place, (keys < T)[:, None], other=0.0)
        value = tl.load(v + place, (keys < T)[:, None], other=0.0)
        scores = tl.dot(query, tl.trans(key))
        if WINDOW or SEGMENTED:
            seen = _seen(queries[:, None], keys[None], length, CAUSAL, WINDOW)
            if SEGMENTED:
                theirs = tl.load(k_segments + row * T + keys, keys < T, other=-1)
                seen &= mine[:, None] == theirs[None]
            scores = tl.where(seen, scores, float("-inf"))
        elif CAUSAL or PADDED or T % KEYS:  # masking all tiles costs the forward a tenth
            if begin + KEYS > (start if CAUSAL else length):
                seen = _seen(queries[:, None], keys[None], length, CAUSAL, 0)
                scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * (SCALE * LOG2E))
        weights = tl.exp2(scores * (SCALE * LOG2E) - new_top[:, None])
        left = tl.exp2(top - new_top)
        total = total * left + tl.sum(weights, 1)
        mean = mean * left[:, None]
        mean = tl.dot(weights.to(value.dtype), value, mean)
        top = new_top
    total = tl.where(total > 0, total, 1.0)  # a query that sees no key has a mean of zeros
    tl.store(out + at, (mean / total[:, None]).to(query.dtype), within[:, None])
    tl.store(lse + (row * HEADS + head) * S + queries, top + tl.log2(total), within)


@triton.jit
def attention_d_queries(
    q,
    k,
    v,
    q_segments,
    k_segments,
    lengths,
    out,
    lse,
    d_out,
    d_q,
    deltas,
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
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write the gradient of q, and sum(out * d_out) over H, [B, N, S], in `deltas`.

    A program takes QUERIES of a head and walks the tiles of keys that they see.
    """
    tiles: tl.constexpr = (S + QUERIES - 1) // QUERIES
    program = tl.program_id(0)
    start = program % tiles * QUERIES
    head = program // tiles % HEADS
    row = (program // (tiles * HEADS)).to(tl.int64)
    queries, channels = start + tl.arange(0, QUERIES), tl.arange(0, H)
    within = queries < S
    at = ((row * S + queries[:, None]) * HEADS + head) * H + channels[None]
    d_mean = tl.load(d_out + at, within[:, None], other=0.0)
    mean = tl.load(out + at, within[:, None], other=0.0)
    delta = tl.sum(mean.to(tl.float32) * d_mean.to(tl.float32), 1)
    of_rows = (row * HEADS + head) * S + queries
    tl.store(deltas + of_rows, delta, within)
    query = tl.load(q + at, within[:, None], other=0.0)
    total = tl.load(lse + of_rows, within, other=0.0)
    if SEGMENTED:
        mine = tl.load(q_segments + row * S + queries, within, other=-1)
    length = T
    if PADDED:
        length = tl.load(lengths + row)
    low, high = _keys_seen(start, length, T, CAUSAL, WINDOW, PADDED, QUERIES, KEYS)
    d_query = tl.zeros([QUERIES, H], tl.float32)
    from_head = (row * T * KV_HEADS + head // (HEADS // KV_HEADS)) * H
    for begin in tl.range(low, high, KEYS, num_stages=STAGES):
        keys = begin + tl.arange(0, KEYS)
        place = from_head + keys[:, None] * (KV_HEADS * H) + channels[None]
        key = tl.load(k + place, (keys < T)[:, None], other=0.0)
        value = tl.load(v + place, (keys < T)[:, None], other=0.0)
        scores = tl.dot(query, tl.trans(key))
        weights = tl.exp2(scores * (SCALE * LOG2E) - total[:, None])
        if WINDOW or SEGMENTED:
            seen = _seen(queries[:, None], keys[None], length, CAUSAL, WINDOW)
            if SEGMENTED:
                theirs = tl.load(k_segments + row * T + keys, keys < T, other=-1)
                seen &= mine[:, None] == theirs[None]
            weights = tl.where(seen, weights, 0.0)
        elif CAUSAL or PADDED or T % KEYS:  # masking all tiles costs the forward a tenth
            if begin + KEYS > (start if CAUSAL else length):
                seen = _seen(queries[:, None], keys[None], length, CAUSAL, 0)
                weights = tl.where(seen, weights, 0.0)
        d_weights = tl.dot(d_mean, tl.trans(value))
        d_scores = weights * (d_weights - delta[:, None])
        d_query = tl.dot(d_scores.to(key.dtype), key, d_query)
    tl.store(d_q + at, (d_query * SCALE).to(query.dtype), within[:, None])


@triton.jit
def attention_d_keys(
    q,
    k,
    v,
    q_segments,
    k_segments,
    lengths,
    lse,
    deltas,
    d_out,
    d_k,
    d_v,
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
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write the gradients of k and v.

    A program takes KEYS of a head and walks the tiles of queries that see them, of each head of
    queries that has this head of keys. Its scores are transposed, [KEYS, QUERIES].
    """
    group: tl.constexpr = HEADS // KV_HEADS
    tiles: tl.constexpr = (T + KEYS - 1) // KEYS
    program = tl.program_id(0)
    begin = program % tiles * KEYS
    kv_head = program // tiles % KV_HEADS
    row = (program // (tiles * KV_HEADS)).to(tl.int64)
    keys, channels = begin + tl.arange(0, KEYS), tl.arange(0, H)
    within = keys < T
    at = ((row * T + keys[:, None]) * KV_HEADS + kv_head) * H + channels[None]
    key = tl.load(k + at, within[:, None], other=0.0)
    value = tl.load(v + at, within[:, None], other=0.0)
    if SEGMENTED:
        theirs = tl.load(k_segments + row * T + keys, within, other=-1)
    length = T
    if PADDED:
        length = tl.load(lengths + row)
    low, high = 0, S
    if CAUSAL:
        low = begin // QUERIES * QUERIES
    elif WINDOW:
        low = tl.maximum(begin - WINDOW + 1, 0) // QUERIES * QUERIES
    if WINDOW:
        high = tl.minimum(begin + KEYS + WINDOW - 1, S)
    if PADDED:
        high = tl.where(begin < length, high, low)
    d_key = tl.zeros([KEYS, H], tl.float32)
    d_value = tl.zeros([KEYS, H], tl.float32)
    for member in tl.static_range(group):
        head = kv_head * group + member
        for start in tl.range(low, high, QUERIES, num_stages=STAGES):
            queries = start + tl.arange(0, QUERIES)
            place = ((row * S + queries[:, None]) * HEADS + head) * H + channels[None]
            query = tl.load(q + place, (queries < S)[:, None], other=0.0)
            d_mean = tl.load(d_out + place, (queries < S)[:, None], other=0.0)
            of_rows = (row * HEADS + head) * S + queries
            # Behind the last query there is nothing to see: exp2(-inf) is 0.
            total = tl.load(lse + of_rows, queries < S, other=float("inf"))
            delta = tl.load(deltas + of_rows, queries < S, other=0.0)
            scores = tl.dot(key, tl.trans(query))
            weights = tl.exp2(scores * (SCALE * LOG2E) - total[None])
            if CAUSAL or WINDOW or SEGMENTED:
                seen = _seen(queries[None], keys[:, None], length, CAUSAL, WINDOW)
                if SEGMENTED:
                    mine = tl.load(q_segments + row * S + queries, queries < S, other=-1)
                    seen &= mine[None] == theirs[:, None]
                weights = tl.where(seen, weights, 0.0)
            d_value = tl.dot(weights.to(query.dtype), d_mean, d_value)
            d_weights = tl.dot(value, tl.trans(d_mean))
            d_scores = weights * (d_weights - delta[None])
            d_key = tl.dot(d_scores.to(query.dtype), query, d_key)
    if PADDED:  # a row of a gradient is of one key
        d_key = tl.where((keys < length)[:, None], d_key, 0.0)
        d_value = tl.where((keys < length)[:, None], d_value, 0.0)
    tl.store(d_k + at, (d_key * SCALE).to(key.dtype), within[:, None])
    tl.store(d_v + at, d_value.to(value.dtype), within[:, None])


@triton.jit
def _keys_seen(
    start,
    length,
    T: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    PADDED: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    """The keys, from a tile's first to the last and one, that QUERIES from `start` on may see."""
    low, high = 0, T
    if WINDOW:
        low = tl.maximum(start - WINDOW + 1, 0) // KEYS * KEYS
        high = tl.minimum(start + QUERIES + WINDOW - 1, T)
    if CAUSAL:
        high = tl.minimum(start + QUERIES, T)
    if PADDED:
        high = tl.minimum(high, length)
    return low, high


@triton.jit
def _seen(queries, keys, length, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Which of a row's first `length` keys each query sees."""
    seen = keys < length
    if CAUSAL:
        seen = seen & (keys <= queries)
    elif WINDOW:
        seen = seen & (keys - queries < WINDOW)
    if WINDOW:
        seen = seen & (queries - keys < WINDOW)
    return seen
