"""NF4: weights in 4 bits, as bitsandbytes rounds them, and their product.

A weight [*lead, *inputs, *outputs] is rounded matrix by matrix. Each layer, each expert and each
half of a fused pair is a matrix of its own. The roundings are two:

- Blocks of 64 consecutive inputs of an output share their largest magnitude. A value over that
  magnitude becomes the nearest of 16 levels, quantiles of the normal distribution.
- Magnitudes, less their mean over the matrix, are rounded to 8 bits in groups of 256. Groups run
  through the blocks of output 0, then of output 1, and so on.

Values then equal bitsandbytes' to the bit, but for the last bit of the mean: its summation order
depends on the device there, and is a fixed one here. A weight takes 4.127 bits.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import register_dataclass

from mjax.kernels.base.chooser import choose
from mjax.kernels.base.triton_call import triton_call
from mjax.sharding.collectives import LOCAL, Parallel

BLOCK = 64  # weights that share a magnitude
GROUP = 256  # magnitudes that share a scale

TILE, WARPS = 128, 4  # outputs of a program of the kernel, and its warps

LEVELS = np.float32(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ]
)


def _dynamic_levels() -> np.ndarray:
    """The 256 levels of a magnitude, ascending.

    For each sign and each of the decades 1e-6 to 1e0, 2**i midpoints divide the decade evenly.
    Two levels are added: 0 and 1.
    """
    one, tenth = np.float32([1, 0.1])
    levels = [0.0, 1.0]
    for i in range(7):
        n = 2**i
        k = np.arange(n + 1, dtype=np.float64)
        step = np.float64((one - tenth) / np.float32(n))
        # Counted from the nearer end and rounded once, as by torch, whose last bits these are.
        edges = np.where(k < (n + 1) // 2, tenth + step * k, one - step * (n - k))
        edges = edges.astype(np.float32)
        middles = (edges[:-1] + edges[1:]) / np.float32(2)
        decade = np.float32(10.0 ** (i - 6)) * middles
        levels += [*decade, *-decade]
    return np.sort(np.float32(levels))


MAGNITUDES = _dynamic_levels()


@register_dataclass
@dataclass(frozen=True)
class Nf4:
    """A weight [*lead, *inputs, *outputs] in 4 bits. Slices of leading axes are again one.

    codes: uint8, shaped like the weight with its last input axis halved. A byte holds two inputs,
        the earlier one in its upper half.
    absmax: uint8 [*lead, blocks, *outputs], the rounded magnitudes.
    scales: fp32 [*lead, groups], or [*lead, 2, groups] of a pair. They are those of the whole
        matrix, also where the device holds a part of it.
    offset: fp32 [*lead] or [*lead, 2], the mean magnitude.
    inputs: how many axes are contracted. paired: whether the first output axis is a pair.
    split: the mesh whose tp devices hold parts of the matrix, or `LOCAL`. They are parts of the
        inputs if `splits_inputs`, else of the outputs, in order.
    """

    codes: jax.Array
    absmax: jax.Array
    scales: jax.Array
    offset: jax.Array
    inputs: int = field(default=1, metadata={"static": True})
    paired: bool = field(default=False, metadata={"static": True})
    split: Parallel = field(default=LOCAL, metadata={"static": True})
    splits_inputs: bool = field(default=False, metadata={"static": True})

    @property
    def lead(self) -> int:
        """How many axes enumerate matrices before the inputs."""
        return self.offset.ndim - int(self.paired)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight."""
        last = self.lead + self.inputs - 1
        shape = self.codes.shape
        return (*shape[:last], 2 * shape[last], *shape[last + 1 :])

    def dequantized(self, dtype: jnp.dtype) -> jax.Array:
        """The weight as an array in `dtype`."""
        return dequantize(self, dtype)

    def of_outputs(self, take: Callable[[jax.Array], jax.Array]) -> "Nf4":
        """The weight itself: `take` may not pick some of its outputs, which share magnitudes."""
        assert take(self.codes) is self.codes, "a base in NF4 keeps all its outputs"
        return self

    def product(self, x: jax.Array) -> jax.Array:
        """The product with x [M, K] -> [M, N] in x's dtype."""
        return nf4_matmul(x, self)


# ---- rounding ------------------------------------------------------------------------------------


def quantize(value: jax.Array, lead: int, inputs: int, paired: bool = False) -> Nf4:
    """Round a weight [*lead, *inputs, *outputs] of any float dtype.

    The product of the input axes must be a multiple of 64, and the last of them even.
    """
    shape = value.shape
    leading, outputs = shape[:lead], shape[lead + inputs :]
    width = math.prod(shape[lead : lead + inputs])
    pair = outputs[:1] if paired else (1,)
    matrices = value.reshape(-1, width, *pair, math.prod(outputs) // pair[0])
    # One after the other: what rounding needs of one is several times its size.
    codes, absmax, scales, offset = lax.map(_quantize_pair, matrices)
    halved = *shape[: lead + inputs - 1], shape[lead + inputs - 1] // 2
    pair = pair if paired else ()
    return Nf4(
        codes.reshape(*halved, *outputs),
        absmax.reshape(*leading, width // BLOCK, *outputs),
        scales.reshape(*leading, *pair, -1),
        offset.reshape(*leading, *pair),
        inputs,
        paired,
    )


def _quantize_pair(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The codes, absmax, scales [P, groups] and offset [P] of matrices [K, P, N]."""
    width, pair, outputs = x.shape
    x = x.astype(jnp.float32).reshape(-1, BLOCK, pair, outputs)
    top = jnp.max(jnp.abs(x), axis=1)
    inverse = jnp.where(top > 0, 1 / top, 0)
    x = x * inverse[:, None]
    codes = jnp.zeros(x.shape, jnp.uint8)
    for bound in (LEVELS[:-1] + LEVELS[1:]) / 2:
        codes += (x > bound).astype(jnp.uint8)
    codes = codes.reshape(width // 2, 2, pair, outputs)
    codes = (codes[:, 0] << 4) | codes[:, 1]
    absmax, scales, offset = _round_magnitudes(top.transpose(1, 2, 0).reshape(pair, -1))
    absmax = absmax.reshape(pair, outputs, -1).transpose(2, 0, 1)
    return codes, absmax, scales, offset


def _round_magnitudes(top: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Magnitudes [P, n] -> (their 8 bits [P, n], scales [P, groups], their mean [P])."""
    pair, n = top.shape
    offset = _mean(top)
    groups = jnp.pad(top - offset[:, None], ((0, 0), (0, -n % GROUP))).reshape(pair, -1, GROUP)
    scales = jnp.max(jnp.abs(groups), axis=-1)
    x = groups * jnp.where(scales > 0, 1 / scales, 0)[..., None]
    bounds = (MAGNITUDES[:-1] + MAGNITUDES[1:]) / 2
    bits = jnp.searchsorted(jnp.asarray(bounds), x, side="left", method="compare_all")
    bits = bits.astype(jnp.uint8)
    return bits.reshape(pair, -1)[:, :n], scales, offset


def _mean(x: jax.Array) -> jax.Array:
    """The mean over the last axis, in one order on every device, with sums of twice fp32's bits."""
    n = x.shape[-1]
    total, rest = x, jnp.zeros_like(x)
    while total.shape[-1] > 1:
        odd = ((0, 0),) * (x.ndim - 1) + ((0, total.shape[-1] % 2),)
        a, b = jnp.split(jnp.pad(total, odd), 2, axis=-1)
        rest = sum(jnp.split(jnp.pad(rest, odd), 2, axis=-1))
        total = a + b
        of_b = total - a
        rest += (a - (total - of_b)) + (b - of_b)
    return (total + rest)[..., 0] / n


# ---- reading -------------------------------------------------------------------------------------


def dequantize(w: Nf4, dtype: jnp.dtype) -> jax.Array:
    """The weight [*lead, *inputs, *outputs] in `dtype`, rounded once from fp32.

    It takes two passes, one over magnitudes and one over codes.
    """
    codes, magnitudes = _blocks(w)
    low_half = lax.broadcasted_iota(jnp.uint8, (2, 1), 0)
    codes = (codes[:, :, None] >> (4 - 4 * low_half)) & 15
    values = jnp.asarray(LEVELS)[codes] * magnitudes[:, None, None]
    return values.astype(dtype).reshape(w.shape)


def read(w: Nf4, dtype: jnp.dtype) -> jax.Array:
    """`dequantize` by a kernel where there is one, through which no `vmap` passes."""
    if choose("nf4", dtype, w.codes.shape).name != "triton":
        return dequantize(w, dtype)
    from mjax.kernels.nf4.values_triton import read_codes as kernel

    codes, magnitudes = _blocks(w)
    blocks, outputs = magnitudes.shape
    (values,) = triton_call(
        kernel,
        [codes, magnitudes, jnp.asarray(LEVELS)],
        [jax.ShapeDtypeStruct((blocks, BLOCK, outputs), dtype)],
        programs=blocks * -(-outputs // TILE),
        warps=WARPS,
        OUTPUTS=outputs,
        TILE=TILE,
        HALF=BLOCK // 2,
    )
    return values.reshape(w.shape)


def _blocks(w: Nf4) -> tuple[jax.Array, jax.Array]:
    """The codes [blocks, 32, outputs] and magnitudes fp32 [blocks, outputs] of all matrices."""
    products, offset = _magnitudes(w)
    # Without the barrier a compiler may round product and sum once, which bitsandbytes does twice.
    magnitudes = lax.optimization_barrier(products) + offset
    outputs = magnitudes.shape[-1]
    codes = w.codes.reshape(-1, BLOCK // 2, outputs)
    return codes, magnitudes.reshape(-1, outputs)


def _magnitudes(w: Nf4) -> tuple[jax.Array, jax.Array]:
    """(magnitudes less their offset fp32 [E, blocks, P * N], the offset [E, 1, P * N])."""
    lead = w.absmax.shape[: w.lead]
    blocks = w.absmax.shape[w.lead]
    pair = w.offset.shape[-1] if w.paired else 1
    bits = w.absmax.reshape(math.prod(lead), blocks, pair, -1)
    block, output = jnp.arange(blocks)[:, None], jnp.arange(bits.shape[-1])
    if w.splits_inputs:
        block += w.split.index("tp") * blocks
        blocks *= w.split.tp
    else:
        output += w.split.index("tp") * len(output)
    group = (output * blocks + block) // GROUP
    scales = w.scales.reshape(*bits.shape[:1], pair, -1)
    scales = jnp.moveaxis(scales[:, :, group], 1, 2)
    products = (jnp.asarray(MAGNITUDES)[bits] * scales).reshape(*bits.shape[:2], -1)
    offset = jnp.repeat(w.offset.reshape(-1, pair), bits.shape[-1], axis=-1)
    return products, offset[:, None]


@jax.custom_vjp
def nf4_matmul(x: jax.Array, w: Nf4) -> jax.Array:
    """x [M, K] times a weight of one matrix or pair -> [M, N], in x's dtype.

    The backward keeps the 4 bits and reads them again. The weight takes no gradient.
    """
    return x @ _matrix(w, x.dtype)


def _nf4_forward(x: jax.Array, w: Nf4) -> tuple[jax.Array, Nf4]:
    return nf4_matmul(x, w), w


def _nf4_backward(w: Nf4, g: jax.Array) -> tuple[jax.Array, None]:
    # Tied to the gradient, or XLA keeps the forward's matrix for it.
    w, g = lax.optimization_barrier((w, g))
    return g @ _matrix(w, g.dtype).T, None


nf4_matmul.defvjp(_nf4_forward, _nf4_backward)


def _matrix(w: Nf4, dtype: jnp.dtype) -> jax.Array:
    return read(w, dtype).reshape(math.prod(w.shape[: w.inputs]), -1)
