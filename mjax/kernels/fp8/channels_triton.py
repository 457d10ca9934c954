"""Products of few rows with weights in 8 bits as Triton kernels; `channels.py` calls them.

A step of decoding reads all weights and computes little. So a weight's tile is the side of 64 that
tensor cores want, and the rows are the short side.
"""

import triton
import triton.language as tl


@triton.jit
def round_rows(x, values, scales, ROWS: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):
    """Write a row of x [ROWS, K] in e4m3, and the factor that gives it back; other rows are 0.

    The scale is a power of two, read off the bits of the largest magnitude.
    """
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    wide = tl.load(x + row * K + at, mask=(at < K) & (row < ROWS), other=0.0).to(tl.float32)
    top = tl.max(tl.abs(wide), 0).to(tl.int32, bitcast=True)
    power = 9 - ((top >> 23) - 126) - ((top & 0x7FFFFF) > 0x600000).to(tl.int32)
    power = tl.minimum(tl.maximum(power, -63), 63)
    scale = ((127 + power) << 23).to(tl.float32, bitcast=True)
    scaled = tl.minimum(tl.maximum(wide * scale, -448.0), 448.0)
    scaled = tl.where(wide == wide, scaled, wide)
    tl.store(values + row * K + at, scaled.to(tl.float8e4nv), mask=at < K)
    tl.store(scales + row, ((127 - power) << 23).to(tl.float32, bitcast=True))


@triton.jit
def multiply_channels(
    x,
    weight,
    row_scales,
    scales,
    y,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write y [SPLITS, ROWS, N] of x [ROWS, K] and weight [N, K]: sums over parts of K.

    SPLITS * BLOCK_K divides K.
    """
    program = tl.program_id(0)
    part, tile = program % SPLITS, program // SPLITS
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.arange(0, ROWS)
    k = part * (K // SPLITS) + tl.arange(0, BLOCK_K)
    of_weight = weight + n[:, None] * K + k[None, :]
    of_rows = x + row[None, :] * K + k[:, None]
    sums = tl.zeros((BLOCK_N, ROWS), tl.float32)
    for first in tl.range(0, K // SPLITS, BLOCK_K, num_stages=STAGES):
        a = tl.load(of_weight + first, mask=n[:, None] < N, other=0.0)
        b = tl.load(of_rows + first)
        sums = tl.dot(a, b, sums)
    sums *= tl.load(row_scales + row)[None, :]
    sums *= tl.load(scales + n, mask=n < N, other=0.0)[:, None]
    place = (part * ROWS + row[None, :]) * N + n[:, None]
    tl.store(y + place, sums.to(y.dtype.element_ty), mask=n[:, None] < N)
