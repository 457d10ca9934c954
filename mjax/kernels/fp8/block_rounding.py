"""Rounding in blocks of 128 on GPUs: one read of a matrix, and both orientations written.

The result is that of `round_blocks`, bit for bit; where our kernel does not run, it is that.
"""

import jax
import jax.numpy as jnp
import numpy as np

from mjax.kernels.base.chooser import KERNEL_SIDE
from mjax.kernels.base.triton_call import triton_call
from mjax.kernels.fp8.blocks import Blocks, NumberFormat
from mjax.kernels.matmul.grouped_tiles import tiles_of_rows

_WARPS_OF_TILE = 8


def round_both_ways(
    x: jax.Array,
    to: NumberFormat,
    free: bool,
    sizes: jax.Array | None = None,
    *,
    plain: bool = True,
    turned: bool = True,
) -> tuple[Blocks | None, Blocks | None]:
    """x [M, N] in blocks of 128 along rows, [M, N], and along columns, [N, M to whole blocks].

    N is a multiple of 128. free: scales are any numbers, else powers of two. plain, turned: whether
    each is wanted. With `sizes` int32 [G] of groups of rows, each group's blocks along columns
    begin at its first row, and zeros fill its last one up; rows of no group are another group.
    """
    from mjax.kernels.fp8 import block_triton

    m, n = x.shape
    if sizes is None:
        tiles = np.tile(np.array([0, 0, 0, m], np.int32), (-(-m // KERNEL_SIDE), 1))
    else:
        tiles, _ = tiles_of_rows(sizes, m, KERNEL_SIDE, aligned=1)
    blocks = len(tiles)
    of_plain = ((m, n), (n // KERNEL_SIDE, m)) if plain else ((1, 1), (1, 1))
    of_turned = ((n, blocks * KERNEL_SIDE), (blocks, n)) if turned else ((1, 1), (1, 1))
    outputs = [*_rounded_outputs(to, *of_plain), *_rounded_outputs(to, *of_turned)]
    keys = {"M": m, "PADDED": blocks * KERNEL_SIDE, "PLAIN": plain, "TURNED": turned}
    kernel = block_triton.round_lines_both_ways
    made = _round_tiles(kernel, [x, tiles], outputs, blocks, to, free, keys)
    facts = {"block": (1, KERNEL_SIDE), "wide": _wide_dtype(x, free)}
    rows, columns = (Blocks(made[i], made[i + 1].T, **facts) for i in (0, 2))
    return rows if plain else None, columns if turned else None


def round_square(x: jax.Array, to: NumberFormat, free: bool, turned: bool) -> Blocks:
    """x [.., M, N] in blocks of 128 x 128, or its transpose so; M and N are multiples of 128."""
    from mjax.kernels.fp8 import block_triton

    *stack, m, n = x.shape
    shape = (*stack, n, m) if turned else x.shape
    of_factors = *stack, shape[-2] // KERNEL_SIDE, shape[-1] // KERNEL_SIDE
    outputs = _rounded_outputs(to, shape, of_factors)
    kernel, keys = block_triton.round_squares, {"M": m, "TURNED": turned}
    blocks = x.size // n // KERNEL_SIDE
    values, factors = _round_tiles(kernel, [x], outputs, blocks, to, free, keys)
    return Blocks(values, factors, block=(KERNEL_SIDE, KERNEL_SIDE), wide=_wide_dtype(x, free))


def _wide_dtype(x, free):
    return jnp.dtype(jnp.float32) if free else x.dtype


def _rounded_outputs(to, shape, of_factors):
    return jax.ShapeDtypeStruct(shape, to.dtype), jax.ShapeDtypeStruct(of_factors, jnp.float32)


def _round_tiles(kernel, operands, outputs, blocks, to, free, keys):
    """Call a kernel for so many blocks of rows of its first operand."""
    n = operands[0].shape[-1]
    keys = keys | {"N": n, "FREE": free, "TOP": to.top}
    programs = blocks * (n // KERNEL_SIDE)
    return triton_call(kernel, operands, outputs, programs=programs, warps=_WARPS_OF_TILE, **keys)
