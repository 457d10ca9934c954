"""Attention of short rows as Triton kernels; `short.py` calls them.

Arrays are row-major: queries [B, S, N, H], keys and values [B, T, K, H]. Exponentials are to base
2. Scores, sums and log-sum-exps are fp32; products read operands of the inputs' dtype. Rows of
`lse` and `deltas`, [B, N, ROOM], begin at multiples of ROOM_OF: S numbers, then infinities and
zeros as far as a tile reaches. So a tile is one aligned read. SEGMENTED: a
query sees keys of its own segment only. PADDED: a row's keys from its length on are not seen.

PARTS: how many of queries, keys and values lie in one array. 1: they are `q`, `k` and `v`. 2: `k`
is [B, T, 2, K, H] of keys and values. 3: `q` is [B, S, 3, N, H] of all. Gradients lie likewise.
With 2 `d_k` holds both. With 3 those of keys and values go into `d_all`, which has that of queries.

BIASED: the forward kernel adds `q_bias` [N, H] to queries and writes them back: `biased` is `q`. It
adds `v_bias` [K, H] to the output and not to values, which is the same, as weights sum to 1.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
NEVER = tl.constexpr(float("-inf"))  # the score of a key that is not seen
ROOM_OF = tl.constexpr(64)  # queries
LOWEST = tl.constexpr(-1e30)  # the largest score where no key is seen: a finite number


@triton.jit
def attention_forward(
    q,
    k,
    v,
    q_segments,
    k_segments,
    lengths,
    q_bias,
    v_bias,
    out,
    lse,
    biased,
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
    """Write out [B, S, N, H] and the log-sum-exp of scores, to base 2, [B, N, ROOM].

    A program takes QUERIES of a head and walks the tiles of keys that they see.
    """
    row, head, start = _task(S, HEADS, QUERIES)
    queries = start + tl.arange(0, QUERIES)
    at, of_q = _query_places(row, queries, head, S, HEADS, H, PARTS)
    query = _biased_in_place(q, of_q, queries < S, q_bias, head, H, BIASED)
    mine = _segments(q_segments, row, queries, S, SEGMENTED)
    kv_head = head // (HEADS // KV_HEADS)
    length = _length(lengths, row, T, PADDED)
    low, high = _keys_seen(start, length, T, CAUSAL, WINDOW, PADDED, QUERIES, KEYS)
    top = tl.full([QUERIES], LOWEST, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    mean = tl.zeros([QUERIES, H], tl.float32)
    for begin in tl.range(low, high, KEYS, num_stages=STAGES):
        keys = begin + tl.arange(0, KEYS)
        key, value = _keys_values(q, k, v, row, keys, kv_head, T, KV_HEADS, H, PARTS)
        scores = tl.dot(query, tl.trans(key))
        theirs = _segments(k_segments, row, keys, T, SEGMENTED)
        is_edge = begin + KEYS > (start if CAUSAL else length)
        scores = _hidden(
            scores, NEVER, queries, keys, mine, theirs, length, is_edge, CAUSAL, WINDOW, SEGMENTED
        )
        weights, left, top, total = softmax_step(scores, top, total, SCALE)
        mean = tl.dot(weights.to(value.dtype), value, mean * left[:, None])
    total = tl.where(total > 0, total, 1.0)  # a query that sees no key has a mean of zeros
    mean = mean / total[:, None] + _bias(v_bias, kv_head, H, BIASED)
    _store_tile(out, at, mean.to(query.dtype), queries < S)
    sums = tl.where(queries < S, top + tl.log2(total), float("inf"))
    _store_numbers(lse, row, head, queries, S, HEADS, sums)


@triton.jit
def attention_d_queries(
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
    deltas,
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
    """Write the gradient of q, `deltas` [B, N, ROOM] and `d_sums` [B, tiles of queries, 2, N, H],
    which are over the queries of a tile, of the gradient of q and of d_out."""
    row, head, start = _task(S, HEADS, QUERIES)
    queries = start + tl.arange(0, QUERIES)
    at, of_q = _query_places(row, queries, head, S, HEADS, H, PARTS)
    query, d_mean = _elements(q, of_q, queries < S), _elements(d_out, at, queries < S)
    kv_head = head // (HEADS // KV_HEADS)
    mean = _elements(out, at, queries < S) - _bias(v_bias, kv_head, H, BIASED)
    delta = _stored_delta(deltas, row, head, queries, S, HEADS, mean, d_mean)
    total = _of_queries(lse, row, head, queries, S, HEADS, float("inf"))
    mine = _segments(q_segments, row, queries, S, SEGMENTED)
    length = _length(lengths, row, T, PADDED)
    low, high = _keys_seen(start, length, T, CAUSAL, WINDOW, PADDED, QUERIES, KEYS)
    # before the loop, whose memory is free yet
    _store_sums(d_sums, row, start, 1, head, d_mean, S, HEADS, QUERIES, BIASED)
    d_query = tl.zeros([QUERIES, H], tl.float32)
    for begin in tl.range(low, high, KEYS, num_stages=STAGES):
        keys = begin + tl.arange(0, KEYS)
        key, value = _keys_values(q, k, v, row, keys, kv_head, T, KV_HEADS, H, PARTS)
        weights = tl.exp2(tl.dot(query, tl.trans(key)) * (SCALE * LOG2E) - total[:, None])
        theirs = _segments(k_segments, row, keys, T, SEGMENTED)
        is_edge = begin + KEYS > (start if CAUSAL else length)
        weights = _hidden(
            weights, 0.0, queries, keys, mine, theirs, length, is_edge, CAUSAL, WINDOW, SEGMENTED
        )
        d_scores = weights * (tl.dot(d_mean, tl.trans(value)) - delta[:, None])
        d_query = tl.dot(d_scores.to(key.dtype), key, d_query)
    d_query = (d_query * SCALE).to(query.dtype)
    _store_tile(d_q, of_q, d_query, queries < S)
    _store_sums(d_sums, row, start, 0, head, d_query, S, HEADS, QUERIES, BIASED)


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
    d_all,
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
    PARTS: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write the gradients of k and v: of KEYS of a head, by the queries of its heads in tiles."""
    row, kv_head, begin = _task(T, KV_HEADS, KEYS)
    keys = begin + tl.arange(0, KEYS)
    key, value = _keys_values(q, k, v, row, keys, kv_head, T, KV_HEADS, H, PARTS)
    theirs = _segments(k_segments, row, keys, T, SEGMENTED)
    length = _length(lengths, row, T, PADDED)
    low, high = _queries_that_see(begin, length, S, CAUSAL, WINDOW, QUERIES, KEYS)
    d_key = tl.zeros([KEYS, H], tl.float32)
    d_value = tl.zeros([KEYS, H], tl.float32)
    for member in tl.static_range(HEADS // KV_HEADS):
        head = kv_head * (HEADS // KV_HEADS) + member
        for start in tl.range(low, high, QUERIES, num_stages=STAGES):
            queries = start + tl.arange(0, QUERIES)
            at, of_q = _query_places(row, queries, head, S, HEADS, H, PARTS)
            query, d_mean = _elements(q, of_q, queries < S), _elements(d_out, at, queries < S)
            total = _of_queries(lse, row, head, queries, S, HEADS, float("inf"))  # exp2(-inf) is 0
            delta = _of_queries(deltas, row, head, queries, S, HEADS, 0.0)
            scores = tl.dot(key, tl.trans(query))  # [KEYS, QUERIES]
            weights = tl.exp2(scores * (SCALE * LOG2E) - total[None])
            mine = _segments(q_segments, row, queries, S, SEGMENTED)
            if CAUSAL or WINDOW or SEGMENTED:
                seen = _seen_keys(queries, keys, mine, theirs, length, CAUSAL, WINDOW, SEGMENTED)
                weights = tl.where(tl.trans(seen), weights, 0.0)
            d_value = tl.dot(weights.to(query.dtype), d_mean, d_value)
            d_scores = weights * (tl.dot(value, tl.trans(d_mean)) - delta[None])
            d_key = tl.dot(d_scores.to(query.dtype), query, d_key)
    is_seen = (keys < length)[:, None]  # a row of a gradient is of one key
    d_keys, d_values = _arrays_of(d_all, d_k, d_v, KV_HEADS, H, PARTS)
    at = _places_of_head(row, keys, kv_head, T, PARTS * KV_HEADS, H)
    _store_tile(d_keys, at, tl.where(is_seen, d_key * SCALE, 0.0).to(key.dtype), keys < T)
    _store_tile(d_values, at, tl.where(is_seen, d_value, 0.0).to(key.dtype), keys < T)


@triton.jit
def _task(COUNT, HEADS, TILE):
    """The row, the head and the first token of this program's tile of COUNT tokens."""
    tiles: tl.constexpr = (COUNT + TILE - 1) // TILE
    program = tl.program_id(0)
    row = (program // (tiles * HEADS)).to(tl.int64)
    return row, program // tiles % HEADS, program % tiles * TILE


@triton.jit
def _places_of_head(row, tokens, head, COUNT, HEADS, H):
    """Offset of a head of a row in an array [B, COUNT, HEADS, H], and of its tile [tokens, H].

    The tile's offsets are 32-bit numbers from the head's on: 64 bits would take twice the
    registers.
    """
    first = (row * COUNT * HEADS + head) * H
    return first, tokens[:, None] * (HEADS * H) + tl.arange(0, H)[None]


@triton.jit
def _query_places(row, queries, head, S, HEADS, H, PARTS):
    """The places of a tile of a head in an array like `out`, and in `q` and its gradient."""
    at = _places_of_head(row, queries, head, S, HEADS, H)
    of_q = at
    if PARTS == 3:
        of_q = _places_of_head(row, queries, head, S, 3 * HEADS, H)
    return at, of_q


@triton.jit
def _of_queries(x, row, head, queries, S, HEADS, beyond):
    """A number for each query of a head, from `lse` or `deltas`; `beyond` the room of a row."""
    room: tl.constexpr = (S + ROOM_OF - 1) // ROOM_OF * ROOM_OF
    return tl.load(x + (row * HEADS + head) * room + queries, queries < room, other=beyond)


@triton.jit
def _store_numbers(x, row, head, queries, S, HEADS, numbers):
    """The reverse of `_of_queries`."""
    room: tl.constexpr = (S + ROOM_OF - 1) // ROOM_OF * ROOM_OF
    tl.store(x + (row * HEADS + head) * room + queries, numbers, queries < room)


@triton.jit
def _stored_delta(deltas, row, head, queries, S, HEADS, mean, d_mean):
    """The sums of mean * d_mean over H, which it writes to `deltas`."""
    delta = tl.sum(mean * d_mean.to(tl.float32), 1)
    _store_numbers(deltas, row, head, queries, S, HEADS, delta)
    return delta


@triton.jit
def _arrays_of(q, k, v, KV_HEADS, H, PARTS):
    """Pointers to the first head of keys and to the first head of values."""
    if PARTS == 3:
        found = q + KV_HEADS * H, q + 2 * KV_HEADS * H
    elif PARTS == 2:
        found = k, k + KV_HEADS * H
    else:
        found = k, v
    return found


@triton.jit
def _elements(x, places, within):
    """The elements at `places`, zeros for tokens that are not within the row."""
    return tl.load(x + places[0] + places[1], within[:, None], other=0.0)


@triton.jit
def _store_tile(x, places, tile, within):
    """The reverse of `_elements`."""
    tl.store(x + places[0] + places[1], tile, within[:, None])


@triton.jit
def _keys_values(q, k, v, row, keys, kv_head, T, KV_HEADS, H, PARTS):
    """[KEYS, H] of a head's keys, and of its values."""
    keys_at, values_at = _arrays_of(q, k, v, KV_HEADS, H, PARTS)
    places = _places_of_head(row, keys, kv_head, T, PARTS * KV_HEADS, H)
    return _elements(keys_at, places, keys < T), _elements(values_at, places, keys < T)


@triton.jit
def softmax_step(scores, top, total, SCALE):
    """A step of a softmax by tiles: (the weights, what is left of earlier ones, top, total)."""
    new_top = tl.maximum(top, tl.max(scores, 1) * (SCALE * LOG2E))
    weights = tl.exp2(scores * (SCALE * LOG2E) - new_top[:, None])
    left = tl.exp2(top - new_top)
    return weights, left, new_top, total * left + tl.sum(weights, 1)


@triton.jit
def _store_sums(d_sums, row, start, which, head, x, S, HEADS, QUERIES, BIASED):
    """Write the sums over x [QUERIES, H], from query `start` on, to [B, tiles, 2, HEADS, H].

    A product of 16 equal rows makes them, in less time than exchanges between threads take.
    """
    if BIASED:
        sums = tl.dot(tl.full([16, x.shape[0]], 1.0, x.dtype), x)
        tiles: tl.constexpr = (S + QUERIES - 1) // QUERIES
        place = ((row * tiles + start // QUERIES) * 2 + which) * HEADS + head
        rows, columns = tl.arange(0, 16)[:, None], tl.arange(0, x.shape[1])[None]
        tl.store(d_sums + place * x.shape[1] + (rows * 0 + columns), sums, rows == 0)


@triton.jit
def _bias(biases, head, H, BIASED):
    """[1, H]: the bias of a head in fp32, zeros where there is none."""
    found = tl.zeros([H], tl.float32)
    if BIASED:
        found = tl.load(biases + head * H + tl.arange(0, H)).to(tl.float32)
    return found[None]


@triton.jit
def _biased_in_place(x, places, within, biases, head, H, BIASED):
    """A tile of a head with its bias, as it is in `x` from now on."""
    tile = _elements(x, places, within)
    if BIASED:
        tile = (tile + _bias(biases, head, H, BIASED)).to(tile.dtype)
        _store_tile(x, places, tile, within)
    return tile


@triton.jit
def _segments(ids, row, tokens, COUNT, SEGMENTED):
    """The segments of tokens of a row; one for all where there are none."""
    found = tokens * 0
    if SEGMENTED:
        found = tl.load(ids + row * COUNT + tokens, tokens < COUNT, other=-1)
    return found


@triton.jit
def _length(lengths, row, T, PADDED):
    length = T
    if PADDED:
        length = tl.load(lengths + row)
    return length


@triton.jit
def _keys_seen(start, length, T, CAUSAL, WINDOW, PADDED, QUERIES, KEYS):
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
def _queries_that_see(begin, length, S, CAUSAL, WINDOW, QUERIES, KEYS):
    """The queries, from a tile's first to the last and one, that may see KEYS from `begin` on."""
    low, high = 0, S
    if CAUSAL:
        low = begin // QUERIES * QUERIES
    elif WINDOW:
        low = tl.maximum(begin - WINDOW + 1, 0) // QUERIES * QUERIES
    if WINDOW:
        high = tl.minimum(begin + KEYS + WINDOW - 1, S)
    return low, tl.where(begin < length, high, low)


@triton.jit
def _hidden(
    values, hidden, queries, keys, mine, theirs, length, is_edge, CAUSAL, WINDOW, SEGMENTED
):
    """`values` [QUERIES, KEYS], and `hidden` where a key is not seen.

    Without windows and segments a tile has such keys at an edge only: to mask all tiles would cost
    the forward pass a tenth.
    """
    if WINDOW or SEGMENTED:
        seen = _seen_keys(queries, keys, mine, theirs, length, CAUSAL, WINDOW, SEGMENTED)
        values = tl.where(seen, values, hidden)
    elif is_edge:
        seen = _seen_keys(queries, keys, mine, theirs, length, CAUSAL, 0, False)
        values = tl.where(seen, values, hidden)
    return values


@triton.jit
def _seen_keys(queries, keys, mine, theirs, length, CAUSAL, WINDOW, SEGMENTED):
    """Which of a row's first `length` keys each query sees: bool [QUERIES or 1, KEYS]."""
    seen = (keys < length)[None]
    if CAUSAL:
        seen = seen & (keys[None] <= queries[:, None])
    elif WINDOW:
        seen = seen & (keys[None] - queries[:, None] < WINDOW)
    if WINDOW:
        seen = seen & (queries[:, None] - keys[None] < WINDOW)
    if SEGMENTED:
        seen = seen & (mine[:, None] == theirs[None])
    return seen
