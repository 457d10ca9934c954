"""Weights in e4m3 with one scale an output, as an engine serves them, and their product.

Activations are rounded to e4m3, too, row by row as they come. Scales are powers of two, as in
`quantize.py`, so they move in and out of products and sums without rounding. A device that has a
part of the inputs scales a row by the maximum of that part, and nothing is exchanged for it: other
maxima round alike, but for values below some 2**-14 of the largest. Invariant: a row's product
depends on the row and the weight alone.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec
from jax.tree_util import register_dataclass

from mjax.kernels.base.chooser import GROUPED_8_BITS, choose, mosaic_grouped_lacks, this_device
from mjax.kernels.base.triton_call import triton_call
from mjax.kernels.elementwise.gate import E4M3
from mjax.kernels.fp8.quantize import quantize_to, scale_of
from mjax.kernels.matmul.grouped import grouped_matmul, grouped_matmul8
from mjax.sharding.spec import ParamSpec

FEWEST_ROWS = 16  # of a product of 8 bits, by cuBLASLt or our kernel
# Matmuls whose weights stay as they are. Decoding reads those of kv_b by parts, in other products;
# the others are small and make rates at which states decay.
STAY_WIDE = ("kv_b", "ssm_dt", "delta_ba")
ENOUGH_PROGRAMS = 256  # of our kernel that are enough for a GPU


@register_dataclass
@dataclass(frozen=True)
class Channels8:
    """A weight [*lead, *inputs, *outputs] in e4m3.

    values: e4m3 [*lead, *outputs, *inputs]; GPUs contract minor axes of 8-bit operands only.
    scales: fp32 [*lead, *outputs], the factors that give the weight back.
    inputs: how many axes are contracted. lead: how many enumerate matrices: 1 of experts.
    """

    values: jax.Array
    scales: jax.Array
    inputs: int = field(default=1, metadata={"static": True})
    lead: int = field(default=0, metadata={"static": True})

    @staticmethod
    def takes(spec: ParamSpec) -> bool:
        """Whether matmuls read the weight in this form."""
        return spec.takes_fp8 and spec.matmul not in STAY_WIDE and not spec.precise

    @classmethod
    def rounded(cls, value: jax.Array, inputs: int, lead: int = 0) -> "Channels8":
        """Round a weight [*lead, *inputs, *outputs] of any float dtype."""
        contracted = tuple(range(lead, lead + inputs))
        top = jnp.max(jnp.abs(value), contracted, keepdims=True)
        scale = scale_of(top.astype(jnp.float32), E4M3)
        values = quantize_to(value, scale, E4M3)
        factors = (1 / scale).squeeze(contracted)
        return cls(_outputs_first(values, inputs, lead), factors, inputs, lead)

    @classmethod
    def partition(cls, cut: PartitionSpec, spec: ParamSpec) -> "Channels8":
        """Partitions of its arrays, where the weight of a layer has the partition `cut`."""
        entries, first = (*cut, *[None] * (len(spec.shape) - len(cut))), spec.lead + spec.inputs
        outputs = *entries[: spec.lead], *entries[first:]
        values = PartitionSpec(*outputs, *entries[spec.lead : first])
        return cls(values, PartitionSpec(*outputs), spec.inputs, spec.lead)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight."""
        sizes, lead, outputs = self.values.shape, self.lead, self.scales.ndim
        return sizes[:lead] + sizes[outputs:] + sizes[lead:outputs]

    def of_outputs(self, take: Callable[[jax.Array], jax.Array]) -> "Channels8":
        """The weight of some of its outputs: `take` picks them from arrays [1 axis, *outputs]."""
        values = take(jnp.moveaxis(self.values, -1, 0))
        return replace(self, values=_outputs_first(values, 1), scales=take(self.scales[None])[0])

    def dequantized(self, dtype: jnp.dtype) -> jax.Array:
        """The weight as an array in `dtype`."""
        last = range(-self.inputs, 0)
        first = range(self.lead, self.lead + self.inputs)
        values = jnp.moveaxis(self.values.astype(dtype), last, first)
        return values * jnp.expand_dims(self.scales.astype(dtype), tuple(first))

    def product(self, x: jax.Array) -> jax.Array:
        """The product of one matrix with x [M, K] -> [M, N] in x's dtype."""
        matrix, scales = self.values.reshape(-1, x.shape[1]), self.scales.reshape(-1)
        if choose("channels8", x.dtype, (*x.shape, len(matrix))).name == "triton":
            return multiply_few(x, matrix, scales, tile_of(*matrix.shape))
        return multiply_rounded(x, matrix, scales)

    def grouped_product(self, x: jax.Array, sizes: jax.Array, implementation: str) -> jax.Array:
        """Rows [M, K], sorted by matrix, times theirs -> [M, N]; `sizes` as in `grouped_matmul`."""
        count, width = x.shape
        padded = -(-count // GROUPED_8_BITS) * GROUPED_8_BITS
        matrices = self.values.reshape(len(sizes), -1, width)
        facts = E4M3, (padded, *matrices.shape), this_device()
        if implementation == "mosaic" and mosaic_grouped_lacks(*facts):
            values = self.dequantized(x.dtype).reshape(len(sizes), width, -1)
            return grouped_matmul(x, values, sizes, implementation)
        rows, factors = _rounded_rows(x)
        rows = jnp.pad(rows, ((0, padded - count), (0, 0)))
        one = jnp.float32(1)
        y = grouped_matmul8(rows, matrices, sizes, one, x.dtype, implementation)[:count]
        of_row = jnp.sum(jnp.cumsum(sizes) <= jnp.arange(count)[:, None], -1)
        scales = jnp.take(self.scales.reshape(len(sizes), -1), of_row, axis=0, mode="clip")
        return (y * factors * scales).astype(x.dtype)


class ChannelTile(NamedTuple):
    """Sizes of a program of the kernel, its warps and loads in flight, and parts of the inputs."""

    outputs: int = 64
    inputs: int = 128
    splits: int = 1
    warps: int = 4
    stages: int = 4


def tile_of(outputs: int, inputs: int) -> ChannelTile:
    """The tile for a weight [N, K]: inputs are split until programs fill a GPU twice."""
    splits, programs = 1, -(-outputs // ChannelTile().outputs)
    while splits * programs < ENOUGH_PROGRAMS and inputs % (2 * splits * ChannelTile().inputs) == 0:
        splits *= 2
    return ChannelTile(splits=splits)


def multiply_few(
    x: jax.Array, matrix: jax.Array, scales: jax.Array, tile: ChannelTile
) -> jax.Array:
    """x [M, K] times the transpose of e4m3 [N, K] and scales fp32 [N] -> [M, N], by kernels."""
    from mjax.kernels.fp8.channels_triton import multiply_channels as kernel

    (count, width), outputs = x.shape, len(matrix)
    rows = max(FEWEST_ROWS, pl.next_power_of_2(count))
    x8, factors = round_by_kernel(x, rows)
    dtype = x.dtype if tile.splits == 1 else jnp.float32
    (y,) = triton_call(
        kernel,
        [x8, matrix, factors, scales],
        [jax.ShapeDtypeStruct((tile.splits, rows, outputs), dtype)],
        programs=-(-outputs // tile.outputs) * tile.splits,
        warps=tile.warps,
        N=outputs,
        K=width,
        ROWS=rows,
        SPLITS=tile.splits,
        BLOCK_N=tile.outputs,
        BLOCK_K=tile.inputs,
        STAGES=tile.stages,
    )
    return y.sum(0)[:count].astype(x.dtype)


def round_by_kernel(x: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
    """x [M, K] in e4m3 [rows, K], zero beyond M, and the factors [rows] that give it back."""
    from mjax.kernels.fp8.channels_triton import round_rows as kernel

    count, width = x.shape
    values = jax.ShapeDtypeStruct((rows, width), E4M3)
    return triton_call(
        kernel,
        [x],
        [values, jax.ShapeDtypeStruct((rows,), jnp.float32)],
        programs=rows,
        warps=4 if width <= 2**13 else 8,
        ROWS=count,
        K=width,
        BLOCK=pl.next_power_of_2(width),
    )


def multiply_rounded(x: jax.Array, matrix: jax.Array, scales: jax.Array) -> jax.Array:
    """`multiply_few` of any number of rows, in plain JAX."""
    count, contract = len(x), (((1,), (1,)), ((), ()))
    rows, factors = _rounded_rows(x)
    if count < FEWEST_ROWS:
        rows = jnp.pad(rows, ((0, FEWEST_ROWS - count), (0, 0)))
    # XLA would make one product of two weights for the same rows, and copy both for it each time.
    rows, matrix = lax.optimization_barrier((rows, matrix))
    y = lax.dot_general(rows, matrix, contract, preferred_element_type=x.dtype)[:count]
    return (y * factors * scales).astype(x.dtype)


def _rounded_rows(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x [M, K] in e4m3, and the factors [M, 1] that give it back."""
    scale = scale_of(jnp.max(jnp.abs(x), -1, keepdims=True).astype(jnp.float32), E4M3)
    return quantize_to(x, scale, E4M3), 1 / scale


def _outputs_first(value: jax.Array, inputs: int, lead: int = 0) -> jax.Array:
    """[*lead, *inputs, *outputs] -> [*lead, *outputs, *inputs]."""
    return jnp.moveaxis(value, range(lead, lead + inputs), range(-inputs, 0))
