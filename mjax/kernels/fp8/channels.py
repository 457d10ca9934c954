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

from mjax.kernels.base.chooser import choose
from mjax.kernels.base.triton_call import triton_call
from mjax.kernels.elementwise.gate import E4M3
from mjax.kernels.fp8.quantize import quantize_to, scale_of
from mjax.sharding.spec import ParamSpec

FEWEST_ROWS = 16  # of a product of 8 bits, by cuBLASLt or our kernel
PROGRAMS = 256  # of our kernel that are enough for a GPU


@register_dataclass
@dataclass(frozen=True)
class Channels8:
    """A weight [*inputs, *outputs] in e4m3.

    values: e4m3 [*outputs, *inputs]; GPUs contract minor axes of 8-bit operands only.
    scales: fp32 [*outputs], the factors that give the weight back.
    inputs: how many axes are contracted.
    """

    values: jax.Array
    scales: jax.Array
    inputs: int = field(default=1, metadata={"static": True})

    @staticmethod
    def takes(spec: ParamSpec) -> bool:
        """Whether the weight has this form: of matmuls that are not of experts or in fp32."""
        return spec.takes_fp8 and not (spec.is_of_experts or spec.precise or spec.counts)

    @classmethod
    def rounded(cls, value: jax.Array, inputs: int) -> "Channels8":
        """Round a weight [*inputs, *outputs] of any float dtype."""
        contracted = tuple(range(inputs))
        scale = scale_of(jnp.max(jnp.abs(value), contracted).astype(jnp.float32), E4M3)
        values = quantize_to(value, scale, E4M3)
        return cls(_outputs_first(values, inputs), 1 / scale, inputs)

    @classmethod
    def partition(cls, cut: PartitionSpec, spec: ParamSpec) -> "Channels8":
        """Partitions of its arrays, where the weight of a layer has the partition `cut`."""
        entries = *cut, *[None] * (len(spec.shape) - len(cut))
        inputs, outputs = entries[: spec.inputs], entries[spec.inputs :]
        return cls(PartitionSpec(*outputs, *inputs), PartitionSpec(*outputs), spec.inputs)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight."""
        outputs = self.scales.ndim
        return self.values.shape[outputs:] + self.values.shape[:outputs]

    def of_outputs(self, take: Callable[[jax.Array], jax.Array]) -> "Channels8":
        """The weight of some of its outputs: `take` picks them from arrays [1 axis, *outputs]."""
        values = take(jnp.moveaxis(self.values, -1, 0))
        return replace(self, values=_outputs_first(values, 1), scales=take(self.scales[None])[0])

    def dequantized(self, dtype: jnp.dtype) -> jax.Array:
        """The weight as an array [*inputs, *outputs] in `dtype`."""
        axes = tuple(range(self.scales.ndim))
        values = jnp.moveaxis(self.values, axes, tuple(a + self.inputs for a in axes))
        return (values.astype(dtype) * self.scales.astype(dtype)).astype(dtype)

    def product(self, x: jax.Array) -> jax.Array:
        """The product with x [M, K] -> [M, N] in x's dtype."""
        matrix, scales = self.values.reshape(-1, x.shape[1]), self.scales.reshape(-1)
        if choose("channels8", x.dtype, (*x.shape, len(matrix))).name == "triton":
            return multiply_few(x, matrix, scales, tile_of(*matrix.shape))
        return _multiply(x, matrix, scales)


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
    while splits * programs < PROGRAMS and inputs % (2 * splits * ChannelTile().inputs) == 0:
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


def _multiply(x: jax.Array, matrix: jax.Array, scales: jax.Array) -> jax.Array:
    """`multiply_few` of any number of rows, in plain JAX."""
    count, contract = len(x), (((1,), (1,)), ((), ()))
    scale = scale_of(jnp.max(jnp.abs(x), -1, keepdims=True).astype(jnp.float32), E4M3)
    rows = quantize_to(x, scale, E4M3)
    if count < FEWEST_ROWS:
        rows = jnp.pad(rows, ((0, FEWEST_ROWS - count), (0, 0)))
    y = lax.dot_general(rows, matrix, contract, preferred_element_type=x.dtype)[:count]
    return (y * (1 / scale) * scales).astype(x.dtype)


def _outputs_first(value: jax.Array, inputs: int) -> jax.Array:
    """[*inputs, *outputs] -> [*outputs, *inputs]."""
    axes = tuple(range(inputs))
    return jnp.moveaxis(value, axes, tuple(a - inputs for a in axes))
