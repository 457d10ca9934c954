"""Rounding in blocks of 128 on GPUs: one read of a matrix, and both orientations written.

The result is that of `round_blocks`, bit for bit; where our kernel does not run, it is that.
"""

import jax
import jax.numpy as jnp

from mjax.kernels.base.chooser import KERNEL_SIDE
from mjax.kernels.base.triton_call import triton_call
from mjax.kernels.fp8.blocks import Blocks, NumberFormat

_WARPS_OF_TILE = 8


def round_both_ways(x: jax.Array, to: NumberFormat, free: bool) -> tuple[Blocks, Blocks]:
    """x [M, N] in blocks of 128 along rows, [M, N], and along columns, [N, M to whole blocks].

    N is a multiple of 128. free: scales are any numbers, else powers of two.
    """
    from mjax.kernels.fp8 import block_triton

    m, n = x.shape
    padded = m + -m % KERNEL_SIDE
    outputs = [
        *_rounded_outputs(to, (m, n), (n // KERNEL_SIDE, m)),
        *_rounded_outputs(to, (n, padded), (padded // KERNEL_SIDE, n)),
    ]
    kernel, keys = block_triton.round_lines_both_ways, {"PADDED": padded}
    values, factors, turned, of_turned = _round_tiles(kernel, x, outputs, to, free, keys)
    facts = {"block": (1, KERNEL_SIDE), "wide": _wide_dtype(x, free)}
    return Blocks(values, factors.T, **facts), Blocks(turned, of_turned.T, **facts)


def round_square(x: jax.Array, to: NumberFormat, free: bool, turned: bool) -> Blocks:
    """x [M, N] in blocks of 128 x 128, or its transpose so; both sides are multiples of 128."""
    from mjax.kernels.fp8 import block_triton

    shape = x.shape[::-1] if turned else x.shape
    outputs = _rounded_outputs(to, shape, (shape[0] // KERNEL_SIDE, shape[1] // KERNEL_SIDE))
    kernel, keys = block_triton.round_squares, {"TURNED": turned}
    values, factors = _round_tiles(kernel, x, outputs, to, free, keys)
    return Blocks(values, factors, block=(KERNEL_SIDE, KERNEL_SIDE), wide=_wide_dtype(x, free))


def _wide_dtype(x, free):
    return jnp.dtype(jnp.float32) if free else x.dtype


def _rounded_outputs(to, shape, of_factors):
    return jax.ShapeDtypeStruct(shape, to.dtype), jax.ShapeDtypeStruct(of_factors, jnp.float32)


def _round_tiles(kernel, x, outputs, to, free, keys):
    m, n = x.shape
    programs = -(-m // KERNEL_SIDE) * (n // KERNEL_SIDE)
    keys = keys | {"M": m, "N": n, "FREE": free, "TOP": to.top}
    return triton_call(kernel, [x], outputs, programs=programs, warps=_WARPS_OF_TILE, **keys)
