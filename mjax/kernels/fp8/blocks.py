"""Numbers in few bits with a factor for each block of a matrix: rounding, products; in plain JAX.

Each rule of scales is exact to the bit: 128-blocks and MXFP8 as Transformer Engine rounds them, and
the floor of the OCP MX specification 1.0 (section 6.3). Rounding is arithmetic in fp32, so it holds
for formats that a device lacks, and no compiler drops a cast. Products are those of the numbers
that the bits are, summed in fp32. They run anywhere, and kernels are measured against them.

Finite values beyond the range saturate. A block with a value that is not finite gets a factor that
is none, where Transformer Engine has 1, so that the step is not finite. CPUs take numbers below
2**-126 for zero.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import register_dataclass

from mjax.kernels.elementwise.gate import E4M3, E5M2

_EXPONENT_BITS = 0x7F800000  # of fp32
_MANTISSA_BITS = 0x007FFFFF


class NumberFormat(NamedTuple):
    """A float format of few bits.

    top: the largest number. mantissa: its bits. least: the exponent of the smallest normal number.
    dtype: of at least these numbers, to hold them.
    """

    top: float
    mantissa: int
    least: int
    dtype: jnp.dtype


FORMATS = {
    "e4m3": NumberFormat(448.0, 3, -6, E4M3),
    "e5m2": NumberFormat(57344.0, 2, -14, E5M2),
    "e2m1": NumberFormat(6.0, 1, 0, E4M3),
}


@register_dataclass
@dataclass(frozen=True)
class Blocks:
    """A matrix in few bits.

    values: [R, C]. factors: fp32, one for each block; values times factors are the numbers.
    amax: fp32 [], by which a product of `four_bits.py` is scaled as a whole, or None.
    block: the rows and columns of a block. wide: a dtype that has the numbers exactly.
    """

    values: jax.Array
    factors: jax.Array
    amax: jax.Array | None = None
    block: tuple[int, int] = field(default=(1, 1), metadata={"static": True})
    wide: jnp.dtype = field(default=jnp.float32, metadata={"static": True})

    def numbers(self) -> jax.Array:
        """The numbers [R, C] that the bits are, in `wide`."""
        factors = spread(self.factors, self.block, self.values.shape)
        return (self.values.astype(jnp.float32) * factors).astype(self.wide)


# (largest magnitudes of blocks in fp32, the format) -> (what values are multiplied with before they
# are rounded, what gives them back)
ScaleRule = Callable[[jax.Array, NumberFormat], tuple[jax.Array, jax.Array]]


# ---- rounding ------------------------------------------------------------------------------------


def round_to_format(x: jax.Array, to: NumberFormat, noise: jax.Array | None = None) -> jax.Array:
    """Fp32 x rounded to numbers of a format, saturating; in fp32.

    Ties go to even. With `noise`, uniform in [0, 1), a value goes to one of its two neighbors, each
    as likely as the value is near.
    """
    x = jnp.clip(x, -to.top, to.top)
    bits = lax.bitcast_convert_type(x, jnp.uint32) & _EXPONENT_BITS
    binade = lax.bitcast_convert_type(bits, jnp.float32)
    step = jnp.maximum(binade, 2.0**to.least) * 2.0**-to.mantissa
    if noise is None:
        return lax.round(x / step, lax.RoundingMethod.TO_NEAREST_EVEN) * step
    return jnp.copysign(jnp.floor(jnp.abs(x) / step + noise) * step, x)


def block_maxima(x: jax.Array, block: tuple[int, int]) -> jax.Array:
    """The largest magnitude of each block of x [R, C], fp32; the last ones may be cut."""
    counts = [-(-n // side) for n, side in zip(x.shape, block, strict=True)]
    missing = [(0, c * s - n) for n, c, s in zip(x.shape, counts, block, strict=True)]
    x = jnp.pad(jnp.abs(x), missing)
    return x.reshape(counts[0], block[0], counts[1], block[1]).max((1, 3)).astype(jnp.float32)


def spread(factors: jax.Array, block: tuple[int, int], shape: tuple[int, int]) -> jax.Array:
    """Factors of blocks, one for each element of a matrix of `shape`."""
    for axis, (side, size) in enumerate(zip(block, shape, strict=True)):
        if side > 1:
            factors = lax.slice_in_dim(jnp.repeat(factors, side, axis), 0, size, axis=axis)
    return factors


def round_blocks(
    x: jax.Array, block: tuple[int, int], rule: ScaleRule, to: NumberFormat, exact: bool = True
) -> Blocks:
    """x [R, C] in a format, each block by its own scale.

    `exact`: scales are powers of two, so that x's dtype has the numbers.
    """
    scales, factors = rule(block_maxima(x, block), to)
    scaled = x.astype(jnp.float32) * spread(scales, block, x.shape)
    values = round_to_format(scaled, to).astype(to.dtype)
    wide = x.dtype if exact else jnp.dtype(jnp.float32)
    return Blocks(values, factors, block=block, wide=wide)


def round_within_groups(
    x: jax.Array, sizes: jax.Array, side: int, rule: ScaleRule, to: NumberFormat
) -> jax.Array:
    """Rows x [M, C], sorted by group, rounded in blocks of `side` rows and one column.

    Each group's blocks begin at its first row. `sizes` int32 [G] count its rows. The result has the
    numbers, in x's dtype. Rows of no group are zero, whatever they hold.
    """
    ends = jnp.cumsum(sizes)
    row = jnp.arange(len(x), dtype=jnp.int32)
    group = jnp.sum(row[:, None] >= ends, -1)
    has_group = (group < len(sizes))[:, None]
    group = jnp.minimum(group, len(sizes) - 1)
    counts = -(-sizes // side)
    block = (jnp.cumsum(counts) - counts)[group] + (row - (ends - sizes)[group]) // side
    block = jnp.where(has_group[:, 0], block, jnp.sum(counts))
    x = jnp.where(has_group, x, 0)
    most = len(x) // side + len(sizes) + 1
    magnitudes = jnp.abs(x).astype(jnp.float32)
    maxima = jax.ops.segment_max(magnitudes, block, most, indices_are_sorted=True)
    scales, factors = rule(maxima, to)
    values = round_to_format(x.astype(jnp.float32) * scales[block], to)
    return jnp.where(has_group, values * factors[block], 0).astype(x.dtype)


# ---- scales --------------------------------------------------------------------------------------


def free_scales(amax: jax.Array, to: NumberFormat) -> tuple[jax.Array, jax.Array]:
    """Scales that take the largest magnitude to the largest number, with all bits of fp32."""
    scale = jnp.minimum(to.top / amax, jnp.finfo(jnp.float32).max)
    scale = jnp.where((amax > 0) & jnp.isfinite(amax), scale, 1)
    return scale, jnp.where(jnp.isfinite(amax), 1 / scale, jnp.nan)


def scales_of_powers(amax: jax.Array, to: NumberFormat) -> tuple[jax.Array, jax.Array]:
    """`free_scales` rounded down to powers of two; those of bf16 and of fp32 are the same."""
    scale, _ = free_scales(amax, to)
    bits = lax.bitcast_convert_type(scale, jnp.uint32) & _EXPONENT_BITS
    scale = lax.bitcast_convert_type(bits, jnp.float32)
    return scale, jnp.where(jnp.isfinite(amax), 1 / scale, jnp.nan)


def e8m0_up(amax: jax.Array, to: NumberFormat) -> jax.Array:
    """The bytes, int32, of powers of two that are no less than amax over the largest number."""
    ratio = amax * jnp.float32(1 / to.top)
    bits = lax.bitcast_convert_type(ratio, jnp.int32)
    exponent, mantissa = bits >> 23, bits & _MANTISSA_BITS
    is_more = jnp.where(exponent == 0, mantissa > 0x400000, mantissa > 0)
    byte = jnp.minimum(exponent + is_more, 254)
    return jnp.where(jnp.isnan(amax), 255, byte)


def e8m0_down(amax: jax.Array, to: NumberFormat) -> jax.Array:
    """The bytes, int32, of the OCP rule: the exponent of amax less that of the largest number."""
    exponent = lax.bitcast_convert_type(amax, jnp.int32) >> 23
    of_top = math.frexp(to.top)[1] - 1
    byte = jnp.where(exponent == 255, 254, jnp.maximum(exponent - of_top, 0))
    return jnp.where(jnp.isnan(amax), 255, byte)


def scales_of_bytes(byte: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The scale 2**(127 - byte) and its inverse, by bytes as E8M0 has them; 255 is NaN."""
    inverse = jnp.where(byte == 0, 0x400000, byte << 23)  # 2**-127 has no exponent
    scale = jnp.where(byte == 254, 0x400000, (254 - byte) << 23)

    def of_bits(bits: jax.Array) -> jax.Array:
        power = lax.bitcast_convert_type(bits.astype(jnp.int32), jnp.float32)
        return jnp.where(byte == 255, jnp.nan, power)

    return of_bits(scale), of_bits(inverse)


def rounded_up(amax: jax.Array, to: NumberFormat) -> tuple[jax.Array, jax.Array]:
    """Scales of MXFP8 as it is trained."""
    return scales_of_bytes(e8m0_up(amax, to))


def rounded_down(amax: jax.Array, to: NumberFormat) -> tuple[jax.Array, jax.Array]:
    """Scales of MXFP8 as the OCP text has them."""
    return scales_of_bytes(e8m0_down(amax, to))


# ---- products ------------------------------------------------------------------------------------


def multiply_blocks(
    a: Blocks, b: Blocks, dtype: jnp.dtype, promoted: int | None = None
) -> jax.Array:
    """The product [M, N] in `dtype` of a [M, K] and the transpose of b [N, K], summed in fp32.

    `promoted`: after so many terms a sum is added to the total, as kernels for Hopper do.
    """
    left, right = a.numbers(), b.numbers()
    if promoted is None or left.shape[1] <= promoted:
        y = _product_of_parts(left, right)
    else:
        parts = [_parts_of_rows(x, promoted) for x in (left, right)]

        def add(total: jax.Array, part: tuple) -> tuple[jax.Array, None]:
            return total + _product_of_parts(*part), None

        zero = jnp.zeros((len(left), len(right)), jnp.float32)
        y, _ = lax.scan(add, zero, tuple(parts))
    return divided_by_tensor_scales(y, a, b).astype(dtype)


def divided_by_tensor_scales(y: jax.Array, a: Blocks, b: Blocks) -> jax.Array:
    """The product y of a and b in fp32 without the scales of both tensors, if they have any."""
    if a.amax is None:
        return y
    return y * (a.amax * b.amax / (6.0 * 6.0 * 448.0 * 448.0))


def _parts_of_rows(x: jax.Array, size: int) -> jax.Array:
    """[M, K] -> [K / size, M, size], the last one filled up with zeros."""
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % size)))
    return jnp.swapaxes(x.reshape(len(x), -1, size), 0, 1)


def _product_of_parts(a: jax.Array, b: jax.Array) -> jax.Array:
    contract = ((1,), (1,)), ((), ())
    return lax.dot_general(
        a, b, contract, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
