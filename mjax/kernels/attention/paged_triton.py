"""Attention to pages as Triton kernels; `paged.py` calls them and says what their arrays are.

Exponentials are to base 2. Scores, sums and log-sum-exps are fp32; products read operands of the
queries' dtype, or fp16 beside pages of 8 bits, even and odd channels apart. A tile of queries is
packed: number m of a row and kv head is head m % GROUP of the row's new token m // GROUP. So keys
are read once for all heads that share them.

WIDTH: channels of keys. Values have as many, but for a TAIL: then attention is latent, and the
first H channels of keys are the values. H: a power of 2, no less than the channels of values.
SOFTCAP, WINDOW: 0 where there is none. SINKS: 0 where all heads have one. SPLIT: keys of a split,
or 0: a program takes all keys that its tile sees. WALKERS programs of a tile take its splits by
turns. Padding is a last row without keys.
"""

import triton
import triton.language as tl

from mjax.kernels.attention.short_triton import LOG2E, LOWEST, NEVER, softmax_step

LEAST_SCALE = tl.constexpr(1e-30)  # of values: no tile is divided by 0


@triton.jit
def attend_to_pages(
    q,
    keys,
    values,
    key_scales,
    value_scales,
    sinks,
    tables,
    lengths,
    starts,
    out,
    sums,
    M: tl.constexpr,
    T: tl.constexpr,
    ROWS: tl.constexpr,
    ROOM: tl.constexpr,
    EACH: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    H: tl.constexpr,
    WIDTH: tl.constexpr,
    TAIL: tl.constexpr,
    PAGE: tl.constexpr,
    SINKS: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,
    WALKERS: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write out [T, N, SPLITS, H] and log-sum-exps [T, N, SPLITS] of splits that a row has."""
    row, start, new, kv_head, tile, walker = _paged_task(
        starts, T, ROWS, ROOM, EACH, KV_HEADS, GROUP, WALKERS, QUERIES
    )
    length = tl.load(lengths + row, row < ROWS, other=0)
    first, last = _splits_of_row(length, new, WINDOW, SPLIT)
    if (tile * QUERIES >= new * GROUP) | (first + walker >= last):
        return
    packed = tile * QUERIES + tl.arange(0, QUERIES)
    within, position = packed < new * GROUP, length - new + packed // GROUP
    head = kv_head * GROUP + packed % GROUP
    place = (start + packed // GROUP).to(tl.int64) * (KV_HEADS * GROUP) + head
    queries = _queries(q, keys, place, within, H, WIDTH, TAIL)
    sink = tl.load(sinks + head * SINKS, within, other=NEVER) * LOG2E
    for split in tl.range(first + walker, last, WALKERS):
        mean, total = _walk(
            queries, position, tl.where(split == first, sink, NEVER), tables + row * M,
            _keys_of_tile(length, new, tile, split, GROUP, WINDOW, SPLIT, QUERIES, KEYS),
            keys, values, key_scales, value_scales, kv_head, KV_HEADS, H, WIDTH, TAIL,
            PAGE, SCALE, SOFTCAP, WINDOW, KEYS, STAGES,
        )  # fmt: skip
        at = place * SPLITS + split
        to, is_own = _tile_of(out, at, within, 0, H, WIDTH - TAIL)
        tl.store(to, mean.to(out.dtype.element_ty), is_own)
        if SPLIT:
            tl.store(sums + at, total, within)


@triton.jit
def merge_splits(
    means,
    sums,
    lengths,
    out,
    EACH: tl.constexpr,
    HEADS: tl.constexpr,
    H: tl.constexpr,
    SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,
    ROOM: tl.constexpr,
):
    """Write out [T, N, SIZE]: the mean of the splits of a token's row, weighted by their sums.

    A program takes a head of a token. Powers of 2: ROOM, at least SPLITS, and H, at least SIZE.
    """
    program = tl.program_id(0)
    length = tl.load(lengths + program // (HEADS * EACH))
    first, last = _splits_of_row(length, EACH, WINDOW, SPLIT)
    split = tl.arange(0, ROOM)
    is_own = (split >= first) & (split < last)
    at = program.to(tl.int64) * SPLITS + split
    part = tl.load(sums + at, is_own, other=NEVER)
    of_splits, mask = _tile_of(means, at, is_own, 0, H, SIZE)
    mean = tl.load(of_splits, mask, other=0.0)
    weight = tl.exp2(part - tl.maximum(tl.max(part, 0), LOWEST))
    total = tl.sum(weight, 0)
    mean = tl.sum(mean * weight[:, None], 0) / tl.where(total > 0, total, 1.0)
    column = tl.arange(0, H)
    at = out + program.to(tl.int64) * SIZE + column
    tl.store(at, mean.to(out.dtype.element_ty), column < SIZE)


@triton.jit
def _paged_task(starts, T, ROWS, ROOM, EACH, KV_HEADS, GROUP, WALKERS, QUERIES):
    """(row, its first new token, its new tokens, kv head, tile of the row, walker) of a program.

    Later tiles, which see more keys, come first, but where every row has EACH new tokens. Row r
    has the tiles from starts[r] * GROUP // QUERIES + r on, so all fit. ROOM: a power of 2 > ROWS.
    """
    kv_head, tile = tl.program_id(0) % KV_HEADS, tl.program_id(0) // KV_HEADS
    walker = 0
    if EACH:
        tiles: tl.constexpr = (EACH * GROUP + QUERIES - 1) // QUERIES
        row, walker, tile = tile // (tiles * WALKERS), tile // tiles % WALKERS, tile % tiles
        start, new = row * EACH, EACH
    else:
        tile = tl.num_programs(0) // KV_HEADS - 1 - tile
        rows = tl.arange(0, ROOM)
        firsts = tl.load(starts + rows, rows <= ROWS, other=0) * GROUP // QUERIES + rows
        row = tl.sum(((firsts <= tile) & (rows <= ROWS)).to(tl.int32), 0) - 1
        start = tl.load(starts + row)
        new = tl.load(starts + row + 1, row < ROWS, other=T) - start
        tile -= start * GROUP // QUERIES + row
    return row, start, new, kv_head, tile, walker


@triton.jit
def _splits_of_row(length, new, WINDOW, SPLIT):
    """(the first split that a row's new tokens see, the last one and one)."""
    first, last = 0, 1
    if SPLIT:
        last = (length + SPLIT - 1) // SPLIT
        if WINDOW:
            first = tl.maximum(length - new + 1 - WINDOW, 0) // SPLIT
    return first, last


@triton.jit
def _keys_of_tile(length, new, tile, split, GROUP, WINDOW, SPLIT, QUERIES, KEYS):
    """(the first key of a tile, the last and one, the first that not all of its queries see)."""
    behind = length - new + 1
    whole = behind + tile * QUERIES // GROUP
    begin = split * SPLIT
    end = tl.minimum(length, behind + (tile * QUERIES + QUERIES - 1) // GROUP)
    if WINDOW:
        begin = tl.maximum(begin, (whole - WINDOW) // KEYS * KEYS)
    if SPLIT:
        end = tl.minimum(end, (split + 1) * SPLIT)
    return begin, end, whole


@triton.jit
def _tile_of(x, rows, is_there, FIRST, COUNT, WIDTH):
    """(pointers, mask) of rows of x, WIDTH wide: up to COUNT channels from FIRST on."""
    channel = FIRST + tl.arange(0, COUNT)[None]
    mask = is_there[:, None]
    if FIRST + COUNT > WIDTH:
        mask = mask & (channel < WIDTH)
    return x + (rows[:, None] * WIDTH + channel), mask


@triton.jit
def _queries(q, keys, place, within, H, WIDTH, TAIL):
    """Tiles of queries: [first part, tail], each of even and of odd channels. And magnitudes.

    Without a tail it is the first part, and beside keys that are no pairs of codes odd is even.
    Codes are exact in fp16. So their queries are fp16, divided by their magnitudes, which keeps
    more bits than bf16 has.
    """
    EACH: tl.constexpr = 2 if keys.dtype.element_ty == tl.float8e4nv else 1
    even = _channels_of(q, place, within, 0, H, WIDTH, EACH, 0)
    odd, even_tail, odd_tail, size = even, even, even, 1.0
    if TAIL:
        even_tail = _channels_of(q, place, within, H, TAIL, WIDTH, EACH, 0)
    if EACH == 2:
        odd, odd_tail = _channels_of(q, place, within, 0, H, WIDTH, 2, 1), odd
        size = tl.maximum(_largest_of_rows(even), _largest_of_rows(odd))
        if TAIL:
            odd_tail = _channels_of(q, place, within, H, TAIL, WIDTH, 2, 1)
            size = tl.maximum(
                size, tl.maximum(_largest_of_rows(even_tail), _largest_of_rows(odd_tail))
            )
        size = tl.where(size > 0, size, 1.0)[:, None]
        even, odd = (even / size).to(tl.float16), (odd / size).to(tl.float16)
        even_tail = (even_tail / size).to(tl.float16)
        odd_tail = (odd_tail / size).to(tl.float16)
    return even, odd, even_tail, odd_tail, size


@triton.jit
def _channels_of(q, place, within, FIRST, COUNT, WIDTH, EACH, WHICH):
    """All channels of a tile of queries, or each second from `WHICH` on."""
    channel = FIRST + WHICH + EACH * tl.arange(0, COUNT // EACH)[None]
    mask = within[:, None] & (channel < WIDTH)
    return tl.load(q + (place[:, None] * WIDTH + channel), mask, other=0.0)


@triton.jit
def _largest_of_rows(x):
    return tl.max(tl.abs(x.to(tl.float32)), 1)


@triton.jit
def _channels(x, first, is_there, like, FIRST, COUNT, WIDTH):
    """A tile of tokens from `first` on, of even and of odd channels, in the dtype of `like`.

    Slots after a row's last may hold NaN, of which zero times is NaN: they are read as zeros.
    A tensor core wants the values of two tokens in a register, and what turns them so moves pairs
    of bytes. So codes are read in pairs.
    """
    token = tl.arange(0, is_there.shape[0])
    if x.dtype.element_ty == tl.float8e4nv:
        pairs = x.to(tl.pointer_type(tl.int16), bitcast=True) + first * (WIDTH // 2)
        at, mask = _tile_of(pairs, token, is_there, FIRST // 2, COUNT // 2, WIDTH // 2)
        codes = tl.load(at, mask, other=0)
        even, odd = half_of_codes(codes, "low"), half_of_codes(codes, "high")
    else:
        at, mask = _tile_of(x + first * WIDTH, token, is_there, FIRST, COUNT, WIDTH)
        even = tl.load(at, mask, other=0.0).to(like.dtype)
        odd = even
    return even, odd


@triton.jit
def half_of_codes(codes, HALF: tl.constexpr):
    """The lower ("low") or upper ("high") bytes, e4m3, of int16 as fp16, exactly."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 t; .reg .b16 low, high; prmt.b32 t, $1, 0, 0x3120; mov.b32 {low, high}, t;"
        " cvt.rn.f16x2.e4m3x2 $0, " + HALF + "; }",
        "=r,r", [codes], dtype=tl.float16, is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def _unseen_hidden(scores, slot, position, WINDOW):
    seen = slot[None] <= position[:, None]
    if WINDOW:
        seen = seen & (position[:, None] - slot[None] < WINDOW)
    return tl.where(seen, scores, NEVER)


@triton.jit
def _walk(
    queries, position, sink, table, ends,
    keys, values, key_scales, value_scales, kv_head, KV_HEADS, H, WIDTH, TAIL,
    PAGE, SCALE, SOFTCAP, WINDOW, KEYS, STAGES,
):  # fmt: skip
    """(the mean of values, the log-sum-exp of scores) of keys between `ends`.

    A tile lies in one page, which is asked for a turn early. Weights are at most 1 in fp16,
    whatever the scales of values are.
    """
    PAIRS: tl.constexpr = keys.dtype.element_ty == tl.float8e4nv
    factor: tl.constexpr = SCALE if SOFTCAP == 0 else 1.0  # a cap is on scaled scores
    even_query, odd_query, even_tail, odd_tail, size = queries
    begin, end, whole = ends
    top = tl.maximum(sink, LOWEST)
    total = tl.exp2(sink - top)
    mean = tl.zeros([even_query.shape[0], H // 2 if PAIRS else H], tl.float32)
    odd_mean = mean
    page = tl.load(table + begin // PAGE, begin < end, other=0)
    for start in tl.range(begin, end, KEYS, num_stages=STAGES):
        slot = start + tl.arange(0, KEYS)
        there = slot < end
        first = (page.to(tl.int64) * KV_HEADS + kv_head) * PAGE + start % PAGE
        page = tl.load(table + (start + KEYS) // PAGE, start + KEYS < end, other=0)
        even, odd = _channels(keys, first, there, even_query, 0, H, WIDTH)
        scores = tl.dot(even_query, tl.trans(even))
        if PAIRS:
            scores = tl.dot(odd_query, tl.trans(odd), scores)
        if TAIL:
            even_rest, odd_rest = _channels(keys, first, there, even_query, H, TAIL, WIDTH)
            scores = tl.dot(even_tail, tl.trans(even_rest), scores)
            if PAIRS:
                scores = tl.dot(odd_tail, tl.trans(odd_rest), scores)
        if PAIRS:
            scores *= tl.load(key_scales + first + slot - start, there, other=0.0)[None] * size
        if SOFTCAP != 0:
            power = tl.exp2(scores * (2 * SCALE / SOFTCAP * LOG2E))
            scores = SOFTCAP - 2 * SOFTCAP / (1 + power)  # tanh(y) = 1 - 2 / (1 + exp(2y))
        if WINDOW or start + KEYS > whole:
            scores = _unseen_hidden(scores, slot, position, WINDOW)
        weights, left, top, total = softmax_step(scores, top, total, factor)
        if TAIL == 0:
            even, odd = _channels(values, first, there, even_query, 0, H, WIDTH)
        mean *= left[:, None]
        if PAIRS:
            scale = tl.load(value_scales + first + slot - start, there, other=0.0)
            largest = tl.maximum(tl.max(scale, 0), LEAST_SCALE)
            weights = (weights * (scale / largest)[None]).to(tl.float16)
            mean += tl.dot(weights, even) * largest
            odd_mean = odd_mean * left[:, None] + tl.dot(weights, odd) * largest
        else:
            mean = tl.dot(weights.to(even.dtype), even, mean)
    if PAIRS:
        mean = tl.interleave(mean, odd_mean)
    total = tl.where(total > 0, total, 1.0)
    return mean / total[:, None], top + tl.log2(total)
