"""Attention to pages as Triton kernels; `paged.py` calls them and says what their arrays are.

Exponentials are to base 2. Scores, sums and log-sum-exps are fp32; products read operands of the
queries' dtype. A tile of queries is packed: number m of a row and kv head is head m % GROUP of the
row's new token m // GROUP. So keys are read once for all heads that share them.

MAIN, TAIL: channels of keys, in two tiles where their number is no power of 2 (TAIL: 0 or the
second). LATENT: the first VALUES = MAIN channels of keys are the values. SCALED: keys and values
have 8 bits and a scale for each token and head. SOFTCAP, WINDOW: 0 where there is none.
"""

import triton
import triton.language as tl

from mjax.kernels.attention.short_triton import LOG2E, LOWEST, NEVER, softmax_step


@triton.jit
def paged_splits(
    q,
    keys,
    values,
    key_scales,
    value_scales,
    sinks,
    tables,
    lengths,
    means,
    sums,
    M: tl.constexpr,
    EACH: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    MAIN: tl.constexpr,
    TAIL: tl.constexpr,
    VALUES: tl.constexpr,
    PAGE: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    SCALED: tl.constexpr,
    LATENT: tl.constexpr,
    SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,
    WALKERS: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write means [T, N, SPLITS, VALUES] and log-sum-exps, to base 2, of splits that a row has.

    Every row has EACH new tokens. A split is SPLIT keys; its part of the output depends on nothing
    else. WALKERS programs of a row and a kv head take its splits by turns.
    """
    tiles: tl.constexpr = (EACH * GROUP + QUERIES - 1) // QUERIES
    program = tl.program_id(0)
    kv_head, tile = program % KV_HEADS, program // KV_HEADS % tiles
    walker = program // (KV_HEADS * tiles) % WALKERS
    row = program // (KV_HEADS * tiles * WALKERS)
    length = tl.load(lengths + row)
    low, first, last = _splits_of_row(length, EACH, WINDOW, SPLIT)
    if first + walker >= last:
        return
    packed = tile * QUERIES + tl.arange(0, QUERIES)
    within, position = packed < EACH * GROUP, length - EACH + packed // GROUP
    head = kv_head * GROUP + packed % GROUP
    place = (row * EACH + packed // GROUP).to(tl.int64) * (KV_HEADS * GROUP) + head
    query, query_tail = _queries(q, place, within, MAIN, TAIL)
    whole = length - EACH + tile * QUERIES // GROUP + 1
    for split in tl.range(first + walker, last, WALKERS):
        begin = tl.maximum(split * SPLIT, low // KEYS * KEYS)
        end = tl.minimum((split + 1) * SPLIT, length)
        top, total = _start_of_softmax(sinks, head, within, split == first, SINKS, QUERIES)
        mean, top, total = _walk(
            query, query_tail, position, tables + row * M, begin, end, whole, top, total,
            keys, values, key_scales, value_scales, kv_head, KV_HEADS, MAIN, TAIL, VALUES,
            PAGE, SCALE, SOFTCAP, WINDOW, SCALED, LATENT, KEYS, STAGES,
        )  # fmt: skip
        at = place * SPLITS + split
        tl.store(sums + at, top + tl.log2(total), within)
        columns = tl.arange(0, VALUES)[None]
        tl.store(means + at[:, None] * VALUES + columns, mean, within[:, None])


@triton.jit
def merge_splits(
    means,
    sums,
    lengths,
    out,
    EACH: tl.constexpr,
    HEADS: tl.constexpr,
    VALUES: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,
    ROOM: tl.constexpr,
):
    """Write out [T, N, VALUES]: the mean of the splits of a token's row, weighted by their sums.

    A program takes a head of a token. ROOM is a power of 2, at least SPLITS.
    """
    program = tl.program_id(0)
    length = tl.load(lengths + program // (HEADS * EACH))
    _, first, last = _splits_of_row(length, EACH, WINDOW, SPLIT)
    split = tl.arange(0, ROOM)
    is_own = (split >= first) & (split < last)
    at = program.to(tl.int64) * SPLITS + split
    columns = tl.arange(0, VALUES)
    part = tl.load(sums + at, is_own, other=NEVER)
    mean = tl.load(means + at[:, None] * VALUES + columns[None], is_own[:, None], other=0.0)
    weight = tl.exp2(part - tl.maximum(tl.max(part, 0), LOWEST))
    total = tl.sum(weight, 0)
    mean = tl.sum(mean * weight[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out + program.to(tl.int64) * VALUES + columns, mean.to(out.dtype.element_ty))


@triton.jit
def paged_tiles(
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
    M: tl.constexpr,
    T: tl.constexpr,
    ROWS: tl.constexpr,
    ROOM: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    MAIN: tl.constexpr,
    TAIL: tl.constexpr,
    VALUES: tl.constexpr,
    PAGE: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    SCALED: tl.constexpr,
    LATENT: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write out [T, N, VALUES]; zeros for padding, which is a last row that has no keys.

    A program takes a tile of a row and a kv head; later tiles, which see more keys, come first.
    ROOM is a power of 2, more than ROWS.
    """
    kv_head = tl.program_id(0) % KV_HEADS
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)) // KV_HEADS
    row = _row_of_tile(starts, tile, ROWS, ROOM, GROUP, QUERIES)
    start = tl.load(starts + row)
    new = tl.load(starts + row + 1, row < ROWS, other=T) - start
    length = tl.load(lengths + row, row < ROWS, other=0)
    tile = tile - (start * GROUP // QUERIES + row)
    if tile * QUERIES >= new * GROUP:
        return
    packed = tile * QUERIES + tl.arange(0, QUERIES)
    within, position = packed < new * GROUP, length - new + packed // GROUP
    head = kv_head * GROUP + packed % GROUP
    place = (start + packed // GROUP).to(tl.int64) * (KV_HEADS * GROUP) + head
    query, query_tail = _queries(q, place, within, MAIN, TAIL)
    whole = length - new + tile * QUERIES // GROUP + 1
    begin = 0
    if WINDOW:
        begin = tl.maximum(whole - WINDOW, 0) // KEYS * KEYS
    end = tl.minimum(length, length - new + (tile * QUERIES + QUERIES - 1) // GROUP + 1)
    top, total = _start_of_softmax(sinks, head, within, True, SINKS, QUERIES)
    mean, top, total = _walk(
        query, query_tail, position, tables + row * M, begin, end, whole, top, total,
        keys, values, key_scales, value_scales, kv_head, KV_HEADS, MAIN, TAIL, VALUES,
        PAGE, SCALE, SOFTCAP, WINDOW, SCALED, LATENT, KEYS, STAGES,
    )  # fmt: skip
    at = place[:, None] * VALUES + tl.arange(0, VALUES)[None]
    tl.store(out + at, mean.to(out.dtype.element_ty), within[:, None])


@triton.jit
def _splits_of_row(length, EACH, WINDOW, SPLIT):
    """(the first key that a row's new tokens see, its split, the last split and one)."""
    low = 0
    if WINDOW:
        low = tl.maximum(length - EACH + 1 - WINDOW, 0)
    return low, low // SPLIT, (length + SPLIT - 1) // SPLIT


@triton.jit
def _row_of_tile(starts, tile, ROWS, ROOM, GROUP, QUERIES):
    """The row of a tile. Row r begins at tile starts[r] * GROUP // QUERIES + r, so all fit."""
    row = tl.arange(0, ROOM)
    first = tl.load(starts + row, row <= ROWS, other=0) * GROUP // QUERIES + row
    return tl.sum(((first <= tile) & (row <= ROWS)).to(tl.int32), 0) - 1


@triton.jit
def _queries(q, place, within, MAIN, TAIL):
    """Both parts of a tile of queries; without a second one, the first twice."""
    at = q + place[:, None] * (MAIN + TAIL) + tl.arange(0, MAIN)[None]
    query = tl.load(at, within[:, None], other=0.0)
    rest = query
    if TAIL:
        at = q + place[:, None] * (MAIN + TAIL) + MAIN + tl.arange(0, TAIL)[None]
        rest = tl.load(at, within[:, None], other=0.0)
    return query, rest


@triton.jit
def _start_of_softmax(sinks, head, within, is_first, SINKS, QUERIES):
    """(the largest score, the sum of exponentials) before any key: of the sinks, if any."""
    top = tl.full([QUERIES], LOWEST, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    if SINKS:
        has = within & is_first
        top = tl.where(has, tl.load(sinks + head, within, other=0.0) * LOG2E, top)
        total = tl.where(has, 1.0, total)
    return top, total


@triton.jit
def _page(table, start, end, PAGE, KEYS):
    """The page of the keys from `start` on, or of each where a tile has several pages."""
    if KEYS <= PAGE:
        found = tl.load(table + start // PAGE, start < end, other=0)
    else:
        slot = start + tl.arange(0, KEYS)
        found = tl.load(table + slot // PAGE, slot < end, other=0)
    return found


@triton.jit
def _places(page, start, kv_head, KV_HEADS, PAGE, KEYS):
    """(the first token, the others from it on) of a tile of keys, among all of [P, K, PAGE]."""
    slot = tl.arange(0, KEYS)
    if KEYS <= PAGE:
        found = page.to(tl.int64) * (KV_HEADS * PAGE) + (kv_head * PAGE + start % PAGE), slot
    else:
        found = kv_head * PAGE, page.to(tl.int64) * (KV_HEADS * PAGE) + slot % PAGE
    return found


@triton.jit
def _channels(x, places, FIRST, COUNT, WIDTH):
    """Pointers to channels from FIRST on of a tile of tokens, in pages of WIDTH channels."""
    columns = FIRST + tl.arange(0, COUNT)[None]
    return x + places[0] * WIDTH + (places[1][:, None] * WIDTH + columns)


@triton.jit
def _widened(x, query):
    """A tile of keys or values in the dtype of queries."""
    if x.dtype == tl.float8e4nv:
        # steps that run at full speed; a GPU takes far longer from fp16 to bf16
        x = x.to(tl.float16).to(tl.float32)
    return x.to(query.dtype)


@triton.jit
def _walk(
    query,
    query_tail,
    position,
    table,
    begin,
    end,
    whole,
    top,
    total,
    keys,
    values,
    key_scales,
    value_scales,
    kv_head,
    KV_HEADS,
    MAIN,
    TAIL,
    VALUES,
    PAGE,
    SCALE,
    SOFTCAP,
    WINDOW,
    SCALED,
    LATENT,
    KEYS,
    STAGES,
):
    """(the mean of values, the largest score, the sum of exponentials) of keys begin .. end - 1.

    All queries see the keys before `whole`, but for the window. A page is asked for a turn early.
    """
    WIDTH: tl.constexpr = MAIN + TAIL
    mean = tl.zeros([query.shape[0], VALUES], tl.float32)
    page = _page(table, begin, end, PAGE, KEYS)
    for start in tl.range(begin, end, KEYS, num_stages=STAGES):
        slot = start + tl.arange(0, KEYS)
        is_there = slot < end
        places = _places(page, start, kv_head, KV_HEADS, PAGE, KEYS)
        page = _page(table, start + KEYS, end, PAGE, KEYS)
        # later slots may hold NaN, of which zero times is NaN
        key = tl.load(_channels(keys, places, 0, MAIN, WIDTH), is_there[:, None], other=0.0)
        key = _widened(key, query)
        scores = tl.dot(query, tl.trans(key))
        if TAIL:
            rest = tl.load(_channels(keys, places, MAIN, TAIL, WIDTH), is_there[:, None], other=0.0)
            scores = tl.dot(query_tail, tl.trans(_widened(rest, query)), scores)
        if SCALED:
            scores *= tl.load(key_scales + places[0] + places[1], is_there, other=0.0)[None]
        if SOFTCAP != 0:
            # tanh(y) = 1 - 2 / (1 + exp(2y))
            power = tl.exp2(scores * (2 * SCALE / SOFTCAP * LOG2E))
            scores = SOFTCAP - 2 * SOFTCAP / (1 + power)
        if WINDOW or start + KEYS > whole:
            seen = slot[None] <= position[:, None]
            if WINDOW:
                seen = seen & (position[:, None] - slot[None] < WINDOW)
            scores = tl.where(seen, scores, NEVER)
        factor: tl.constexpr = SCALE if SOFTCAP == 0 else 1.0  # a cap is on scaled scores
        weights, left, top, total = softmax_step(scores, top, total, factor)
        if LATENT:
            value = key
        else:
            at = _channels(values, places, 0, VALUES, VALUES)
            value = _widened(tl.load(at, is_there[:, None], other=0.0), query)
        if SCALED:
            weights *= tl.load(value_scales + places[0] + places[1], is_there, other=0.0)[None]
        mean = tl.dot(weights.to(query.dtype), value, mean * left[:, None])
    return mean / tl.where(total > 0, total, 1.0)[:, None], top, total
