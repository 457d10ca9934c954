"""The losses of rows of logits and their gradient as a Triton kernel; `rows.py` calls it.

A row is swept in blocks of LOADS times LANES columns: once forward, once backward. VOCAB of the
WIDTH columns are the vocabulary; blocks with others, as a rule one, are masked, and come first,
backward last.
"""

import math
from typing import NamedTuple

import triton
import triton.language as tl
from triton.language.extra import libdevice

_LOWEST = tl.constexpr(-1e30)  # where a running maximum starts
_LOG2_E = tl.constexpr(math.log2(math.e))


class Sweep(NamedTuple):
    """The constants of `loss_rows` by which all its functions are compiled."""

    WIDTH: tl.constexpr
    VOCAB: tl.constexpr
    LANES: tl.constexpr
    LOADS: tl.constexpr
    SOFTCAP: tl.constexpr
    SMOOTHING: tl.constexpr


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
    how: tl.constexpr = Sweep(WIDTH, VOCAB, LANES, LOADS, SOFTCAP, SMOOTHING)
    begin = tl.load(first)
    for at in range(tl.program_id(0), TOKENS, PROGRAMS):
        row = z + at * WIDTH
        label = tl.load(labels + at)
        weight = tl.load(masks + at)
        top, total, whole = _sums_of_row(row, how)
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
        _write_gradient(out, row, token, how)


@triton.jit
def _sums_of_row(row, how: tl.constexpr):
    """Over a row: maximum, sum of exp(z - maximum), sum of z if the loss takes it."""
    full: tl.constexpr = how.VOCAB // (how.LANES * how.LOADS)
    blocks: tl.constexpr = (how.WIDTH + how.LANES * how.LOADS - 1) // (how.LANES * how.LOADS)
    tops = tl.full((how.LANES,), _LOWEST, tl.float32)
    totals = tl.zeros((how.LANES,), tl.float32)
    sums = tl.zeros((how.LANES,), tl.float32)
    for i in range(full, blocks):
        tops, totals, sums = _add_block((tops, totals, sums), row, i, True, how)
    for i in range(full):
        tops, totals, sums = _add_block((tops, totals, sums), row, i, False, how)
    top = tl.max(tops)
    return top, tl.sum(totals * _exp(tops - top)), tl.sum(sums)


@triton.jit
def _add_block(lanes, row, block, PADDED: tl.constexpr, how: tl.constexpr):
    """`lanes`, the maximum, sum of exp(z - maximum) and sum of z of each, with those of a block."""
    tops, totals, sums = lanes
    parts = ()
    new = tops
    for i in tl.static_range(how.LOADS):
        columns = (block * how.LOADS + i) * how.LANES + tl.arange(0, how.LANES)
        part = _logits_of_columns(row, columns, "evict_last", PADDED, how)
        parts = parts + (part,)
        new = tl.maximum(new, part)
    totals *= _exp(tops - new)
    for i in tl.static_range(how.LOADS):
        totals += _exp(parts[i] - new)
        if how.SMOOTHING > 0:
            columns = (block * how.LOADS + i) * how.LANES + tl.arange(0, how.LANES)
            sums += tl.where(columns < how.VOCAB, parts[i], 0.0) if PADDED else parts[i]
    return new, totals, sums


@triton.jit
def _write_gradient(out, row, token, how: tl.constexpr):
    """Write the gradient of `weight` times the loss by a row, from its end, which was read last."""
    full: tl.constexpr = how.VOCAB // (how.LANES * how.LOADS)
    blocks: tl.constexpr = (how.WIDTH + how.LANES * how.LOADS - 1) // (how.LANES * how.LOADS)
    for i in range(full):
        j = full - 1 - i
        _write(out, row, token, j, False, how)
    for i in range(full, blocks):
        j = full + blocks - 1 - i
        _write(out, row, token, j, True, how)


@triton.jit
def _write(out, row, token, block, PADDED: tl.constexpr, how: tl.constexpr):
    """A block of the gradient."""
    label, weight, top, factor = token
    for i in tl.static_range(how.LOADS):
        columns = (block * how.LOADS + i) * how.LANES + tl.arange(0, how.LANES)
        z = _logits_of_columns(row, columns, "evict_first", PADDED, how)
        d = _exp(z - top) * factor
        d -= tl.where(columns == label, (1 - how.SMOOTHING) * weight, 0.0)
        if how.SMOOTHING > 0:
            d -= how.SMOOTHING / how.VOCAB * weight
        if how.SOFTCAP is not None:
            d *= 1.0 - (z / how.SOFTCAP) * (z / how.SOFTCAP)
        if PADDED:
            d = tl.where(columns < how.VOCAB, d, 0.0)
        d = d.to(out.dtype.element_ty)
        mask = columns < how.WIDTH if PADDED else None
        tl.store(out + columns, d, mask=mask, eviction_policy="evict_first")


@triton.jit
def _logits_of_columns(row, columns, EVICT: tl.constexpr, PADDED: tl.constexpr, how: tl.constexpr):
    """The logits of `columns`, capped; -inf beyond the vocabulary."""
    if PADDED:
        z = tl.load(row + columns, mask=columns < how.WIDTH, other=0.0, eviction_policy=EVICT)
        return tl.where(columns < how.VOCAB, _capped(z, how.SOFTCAP), float("-inf"))
    else:
        return _capped(tl.load(row + columns, eviction_policy=EVICT), how.SOFTCAP)


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
