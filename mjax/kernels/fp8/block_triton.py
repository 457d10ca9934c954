"""Rounding in blocks of 128 to 8 bits as a Triton kernel; `block_rounding.py` calls it.

A program takes a tile of 128 x 128, all that a block along either axis holds. It takes every fourth
row, then the next ones, so that the four bytes of a column's neighbors make a word.
"""

import triton
import triton.language as tl


@triton.jit
def round_lines_both_ways(
    x,
    tiles,
    values,
    factors,
    turned,
    turned_factors,
    M: tl.constexpr,
    N: tl.constexpr,
    PADDED: tl.constexpr,
    PLAIN: tl.constexpr,
    TURNED: tl.constexpr,
    FREE: tl.constexpr,
    TOP: tl.constexpr,
):
    """x [M, N] in blocks along rows, if PLAIN: `values` [M, N], `factors` [N / 128, M]; along
    columns, if TURNED: `turned` [N, PADDED], `turned_factors` [PADDED / 128, N].

    `tiles` int32 [PADDED / 128, 4] are those of `tiles_of_rows`: 128 rows each, of which those of
    another group are zeros. TOP: the largest number. FREE: scales are any numbers, else powers of
    two.
    """
    i, j = _tile_of_64_bits(N)
    columns = j * 128 + tl.arange(0, 128)
    start, stop = i * 128 + tl.load(tiles + 4 * i + 1), tl.load(tiles + 4 * i + 3)
    x0, x1, x2, x3 = _rows_by_four(x, start, columns, stop, N)
    if PLAIN:
        for r in tl.static_range(4):
            part = x0 if r == 0 else (x1 if r == 1 else (x2 if r == 2 else x3))
            scale, factor = _scale_of_bits(tl.max(_magnitude_bits(part), 1), FREE, TOP)
            rows = start + 4 * tl.arange(0, 32) + r
            tl.store(factors + j * M + rows, factor, mask=rows < stop)
            _store_fourths(values, part, scale[:, None], start, columns, r, stop, N)
    if TURNED:
        top = tl.max(_top_magnitudes(x0, x1, x2, x3), 0)
        scale, factor = _scale_of_bits(top, FREE, TOP)
        tl.store(turned_factors + i * N + columns, factor)
        _store_turned(turned, x0, x1, x2, x3, scale[None], i, j, PADDED)


@triton.jit
def round_squares(
    x,
    values,
    factors,
    M: tl.constexpr,
    N: tl.constexpr,
    TURNED: tl.constexpr,
    FREE: tl.constexpr,
    TOP: tl.constexpr,
):
    """x [.., M, N] in blocks of 128 x 128, or its transpose if TURNED: `values`, a factor each."""
    i, j = _tile_of_64_bits(N)
    columns = j * 128 + tl.arange(0, 128)
    matrix, i = i // (M // 128), i % (M // 128)
    x, values = x + matrix * M * N, values + matrix * M * N
    factors += matrix * (M // 128) * (N // 128)
    x0, x1, x2, x3 = _rows_by_four(x, i * 128, columns, M, N)
    top = tl.max(tl.max(_top_magnitudes(x0, x1, x2, x3), 1), 0)
    scale, factor = _scale_of_bits(top, FREE, TOP)
    if TURNED:
        tl.store(factors + j * (M // 128) + i, factor)
        _store_turned(values, x0, x1, x2, x3, scale, i, j, M)
    else:
        tl.store(factors + i * (N // 128) + j, factor)
        for r in tl.static_range(4):
            part = x0 if r == 0 else (x1 if r == 1 else (x2 if r == 2 else x3))
            _store_fourths(values, part, scale, i * 128, columns, r, M, N)


@triton.jit
def _tile_of_64_bits(N: tl.constexpr):
    """(which down, which across) this program's tile is; offsets pass 2**31."""
    program = tl.program_id(0).to(tl.int64)
    return program // (N // 128), program % (N // 128)


@triton.jit
def _rows_by_four(x, start, columns, stop, N: tl.constexpr):
    """Rows 0, 4, .. of a tile, rows 1, 5, .., and so on."""
    x0 = _every_fourth_row(x, start, columns, stop, N)
    x1 = _every_fourth_row(x, start + 1, columns, stop, N)
    x2 = _every_fourth_row(x, start + 2, columns, stop, N)
    return x0, x1, x2, _every_fourth_row(x, start + 3, columns, stop, N)


@triton.jit
def _every_fourth_row(x, first, columns, stop, N: tl.constexpr):
    """Rows first, first + 4, .. of a tile, in fp32; from `stop` on, they are zeros."""
    rows = (first + 4 * tl.arange(0, 32))[:, None]
    return tl.load(x + rows * N + columns[None], mask=rows < stop, other=0.0).to(tl.float32)


@triton.jit
def _magnitude_bits(x):
    """As integers, magnitudes are in order, and NaN is the largest."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _top_magnitudes(x0, x1, x2, x3):
    """The largest of four, as integers."""
    first = tl.maximum(_magnitude_bits(x0), _magnitude_bits(x1))
    return tl.maximum(first, tl.maximum(_magnitude_bits(x2), _magnitude_bits(x3)))


@triton.jit
def _scale_of_bits(top, FREE: tl.constexpr, TOP: tl.constexpr):
    """The scale for a largest magnitude, and its inverse, which is NaN if that is not finite."""
    is_finite = top < 0x7F800000
    if FREE:
        amax = top.to(tl.float32, bitcast=True)
        scale = tl.minimum(tl.div_rn(amax * 0 + TOP, amax), 3.4028234663852886e38)
        scale = tl.where((top > 0) & is_finite, scale, 1.0)
        factor = tl.div_rn(scale * 0 + 1.0, scale)
    else:  # the largest numbers are 1.75 * 2**8 and 1.75 * 2**15: exponents say all
        exponent: tl.constexpr = 8 if TOP == 448.0 else 15
        power = 254 + exponent - (top >> 23) - ((top & 0x7FFFFF) > 0x600000).to(tl.int32)
        power = tl.where((top > 0) & is_finite, tl.minimum(power, 254), 127)
        scale = (power << 23).to(tl.float32, bitcast=True)
        inverse = tl.where(power == 254, 0x400000, (254 - power) << 23)
        factor = inverse.to(tl.float32, bitcast=True)
    return scale, tl.where(is_finite, factor, float("nan"))


@triton.jit
def _store_fourths(
    values,
    x,
    scale,
    start,
    columns,
    r: tl.constexpr,
    stop,
    N: tl.constexpr,
):
    """Rows r, r + 4, .. of a tile times `scale`."""
    rows = (start + 4 * tl.arange(0, 32) + r)[:, None]
    made8 = (x * scale).to(values.dtype.element_ty)  # which saturates
    tl.store(values + rows * N + columns[None], made8, mask=rows < stop)


@triton.jit
def _store_turned(turned, x0, x1, x2, x3, scale, i, j, PADDED: tl.constexpr):
    """Four rows' bytes a word [32, 128], turned, into `turned` [N, PADDED] of bytes."""
    word = _word_of(x0, scale, turned) | (_word_of(x1, scale, turned) << 8)
    word |= _word_of(x2, scale, turned) << 16
    word |= _word_of(x3, scale, turned) << 24
    words = turned.to(tl.pointer_type(tl.int32), bitcast=True)
    lines = (j * 128 + tl.arange(0, 128))[:, None]
    places = lines * (PADDED // 4) + (i * 32 + tl.arange(0, 32))[None]
    tl.store(words + places, tl.trans(word))


@triton.jit
def _word_of(x, scale, out):
    """The 8 bits of x * scale as the lowest of a word."""
    made8 = (x * scale).to(out.dtype.element_ty)
    return made8.to(tl.uint8, bitcast=True).to(tl.int32)
