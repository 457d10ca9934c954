"""The losses of rows of logits and their gradient as a Triton kernel; `loss_rows.py` calls it.

A row is swept in blocks of LOADS times LANES columns: once forward, once backward. VOCAB of the
WIDTH columns are the vocabulary; blocks with others, as a rule one, are masked, and come first,
backward last.
"""

import math

import triton
import triton.language as tl
from triton.language.extra import libdevice

_LOWEST = tl.constexpr(-1e30)  # where a running maximum starts
_LOG2_E = tl.constexpr(math.log2(math.e))


@triton.jit
def loss_rows(
    z,
    labels,
    masks,
    first,
    d_z,
    losses,
    d_z_again,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    VOCAB: tl.constexpr,
    PROGRAMS: tl.constexpr,
    LANES: tl.constexpr,
    LOADS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SMOOTHING: tl.constexpr,
    Z_LOSS: tl.constexpr,
):
    """Every PROGRAMS-th of the TOKENS rows; the gradient's begin at row `first` of `d_z`, which is
    an output too (`d_z_again`, if not None). SOFTCAP may be None."""
    begin = tl.load(first)
    for at in range(tl.program_id(0), TOKENS, PROGRAMS):
        row = z + at * WIDTH
        label = tl.load(labels + at)
        weight = tl.load(masks + at)
        top, total, whole = _sums(row, WIDTH, VOCAB, LANES, LOADS, SOFTCAP, SMOOTHING)
        here = (label >= 0) & (label < WIDTH)
        target = _capped(tl.load(row + tl.minimum(tl.maximum(label, 0), WIDTH - 1)), SOFTCAP)
        log_z = top + tl.log(total)
        loss = log_z - (1 - SMOOTHING) * tl.where(here, target, 0.0)
        scale = 1 / total
        if SMOOTHING > 0:
            loss -= SMOOTHING * (whole / VOCAB)
        if Z_LOSS > 0:
            loss += Z_LOSS * (log_z * log_z)
            scale *= 1 + 2 * Z_LOSS * log_z
        tl.store(losses + at, loss * weight)
        token = label, weight, top, scale * weight
        out = d_z + (begin + at) * WIDTH
        _gradient(out, row, token, WIDTH, VOCAB, LANES, LOADS, SOFTCAP, SMOOTHING)


@triton.jit
def _sums(
    row,
    WIDTH: tl.constexpr,
    VOCAB: tl.constexpr,
    LANES: tl.constexpr,
    LOADS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SMOOTHING: tl.constexpr,
):
    """Over a row: maximum, sum of exp(z - maximum), sum of z if the loss takes it."""
    full: tl.constexpr = VOCAB // (LANES * LOADS)
    blocks: tl.constexpr = (WIDTH + LANES * LOADS - 1) // (LANES * LOADS)
    tops = tl.full((LANES,), _LOWEST, tl.float32)
    totals = tl.zeros((LANES,), tl.float32)
    sums = tl.zeros((LANES,), tl.float32)
    for i in range(full, blocks):
        lanes = tops, totals, sums
        tops, totals, sums = _add(
            lanes, row, i, True, WIDTH, VOCAB, LANES, LOADS, SOFTCAP, SMOOTHING
        )
    for i in range(full):
        lanes = tops, totals, sums
        tops, totals, sums = _add(
            lanes, row, i, False, WIDTH, VOCAB, LANES, LOADS, SOFTCAP, SMOOTHING
        )
    top = tl.max(tops)
    return top, tl.sum(totals * _exp(tops - top)), tl.sum(sums)


@triton.jit
def _add(
    lanes,
    row,
    block,
    PADDED: tl.constexpr,
    WIDTH: tl.constexpr,
    VOCAB: tl.constexpr,
    LANES: tl.constexpr,
    LOADS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SMOOTHING: tl.constexpr,
):
    """`lanes`, the maximum, sum of exp(z - maximum) and sum of z of each, with those of a block."""
    tops, totals, sums = lanes
    parts = ()
    new = tops
    for i in tl.static_range(LOADS):
        columns = (block * LOADS + i) * LANES + tl.arange(0, LANES)
        part = _logits(row, columns, "evict_last", PADDED, WIDTH, VOCAB, SOFTCAP)
        parts = parts + (part,)
        new = tl.maximum(new, part)
    totals *= _exp(tops - new)
    for i in tl.static_range(LOADS):
        totals += _exp(parts[i] - new)
        if SMOOTHING > 0:
            columns = (block * LOADS + i) * LANES + tl.arange(0, LANES)
            sums += tl.where(columns < VOCAB, parts[i], 0.0) if PADDED else parts[i]
    return new, totals, sums


@triton.jit
def _gradient(
    out,
    row,
    token,
    WIDTH: tl.constexpr,
    VOCAB: tl.constexpr,
    LANES: tl.constexpr,
    LOADS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SMOOTHING: tl.constexpr,
):
    """Of `weight` times the loss, by a row of logits, from its end, which was read last."""
    full: tl.constexpr = VOCAB // (LANES * LOADS)
    blocks: tl.constexpr = (WIDTH + LANES * LOADS - 1) // (LANES * LOADS)
    for i in range(full):
        j = full - 1 - i
        _write(out, row, token, j, False, WIDTH, VOCAB, LANES, LOADS, SOFTCAP, SMOOTHING)
    for i in range(full, blocks):
        j = full + blocks - 1 - i
        _write(out, row, token, j, True, WIDTH, VOCAB, LANES, LOADS, SOFTCAP, SMOOTHING)


@triton.jit
def _write(
    out,
    row,
    token,
    block,
    PADDED: tl.constexpr,
    WIDTH: tl.constexpr,
    VOCAB: tl.constexpr,
    LANES: tl.constexpr,
    LOADS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SMOOTHING: tl.constexpr,
):
    """A block of the gradient."""
    label, weight, top, factor = token
    for i in tl.static_range(LOADS):
        columns = (block * LOADS + i) * LANES + tl.arange(0, LANES)
        z = _logits(row, columns, "evict_first", PADDED, WIDTH, VOCAB, SOFTCAP)
        d = _exp(z - top) * factor
        d -= tl.where(columns == label, (1 - SMOOTHING) * weight, 0.0)
        if SMOOTHING > 0:
            d -= SMOOTHING / VOCAB * weight
        if SOFTCAP is not None:
            d *= 1.0 - (z / SOFTCAP) * (z / SOFTCAP)
        if PADDED:
            d = tl.where(columns < VOCAB, d, 0.0)
        d = d.to(out.dtype.element_ty)
        mask = columns < WIDTH if PADDED else None
        tl.store(out + columns, d, mask=mask, eviction_policy="evict_first")


@triton.jit
def _logits(
    row,
    columns,
    EVICT: tl.constexpr,
    PADDED: tl.constexpr,
    WIDTH: tl.constexpr,
    VOCAB: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Those of `columns`, capped; -inf beyond the vocabulary."""
    if PADDED:
        z = tl.load(row + columns, mask=columns < WIDTH, other=0.0, eviction_policy=EVICT)
        return tl.where(columns < VOCAB, _capped(z, SOFTCAP), float("-inf"))
    else:
        return _capped(tl.load(row + columns, eviction_policy=EVICT), SOFTCAP)


@triton.jit
def _capped(z, SOFTCAP: tl.constexpr):
    if SOFTCAP is None:
        return z
    else:
        return SOFTCAP * tanh(z / SOFTCAP)


@triton.jit
def tanh(x):
    return libdevice.tanh(x)


@triton.jit
def _exp(a):
    return tl.exp2(a * _LOG2_E)  # one instruction, where exp takes a subroutine
