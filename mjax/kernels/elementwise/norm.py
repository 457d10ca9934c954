"""RMSNorm and LayerNorm over the last axis.

XLA's backward reads x and its output's gradient anew for each sum that it needs (1.4 of 4.2 TB/s on
an H200). Our Triton kernel (`norm_triton.py`) reads both once: a program holds whole rows in
registers, finds their statistics again, and adds up its own part of the gradients of gain and bias;
the parts are summed afterwards, without atomics, equal bit for bit each time. So a forward keeps
its input and nothing else.
The forward of LayerNorm is a kernel, too. XLA's of RMSNorm rounds to 8 bits in the same pass, so
a kernel replaces it only where its output is measured before. Only what is differentiated calls
kernels: what is exported, or generates, never does.
Invariant: statistics, sums, gain and bias are fp32; what leaves is rounded once.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mjax.kernels.base.chooser import choose
from mjax.kernels.base.triton_call import triton_call

_SHARE = 16  # elements of a row that one thread holds
_FORWARD_WARPS = 8
# Warps in all: so many fit at a time in an H200's registers. Narrow rows take fewer of those.
_WARPS = 132 * 16
_WARPS_NARROW = 132 * 24


@dataclass(frozen=True)
class NormTile:
    """Rows that a program holds at a time, its warps, and programs in all."""

    rows: int
    warps: int
    programs: int


def norm_tile_of(width: int) -> NormTile:
    """THE rule, for rows of `width`."""
    padded = _power_of_2(width)
    warps = min(max(padded // (32 * _SHARE), 1), 32)
    in_all = _WARPS_NARROW if warps == 1 else _WARPS
    return NormTile(max(32 * _SHARE // padded, 1), warps, max(in_all // warps, 132))


def forward_tile(width: int) -> tuple[int, int]:
    """(rows, warps) of a program of the forward kernel, for rows of `width`."""
    padded = _power_of_2(width)
    warps = min(max(padded // (32 * _SHARE), _FORWARD_WARPS), 32)
    return max(32 * _SHARE * warps // padded, 1), warps


def norm_reference(
    x: jax.Array,
    gain: jax.Array,
    bias: jax.Array | None,
    eps: float,
    mean: Callable[[jax.Array], jax.Array] | None = None,
) -> jax.Array:
    """`norm` in plain JAX. `mean` takes the mean where it is not that of the last axis."""
    mean = mean or functools.partial(jnp.mean, axis=-1, keepdims=True)
    y = x.astype(jnp.float32)
    if bias is not None:
        y = y - mean(y)
    y = y * lax.rsqrt(mean(jnp.square(y)) + eps) * gain
    return (y if bias is None else y + bias).astype(x.dtype)


def norm(x: jax.Array, gain: jax.Array, bias: jax.Array | None = None, *, eps: float) -> jax.Array:
    """LayerNorm where there is a bias, else RMSNorm: x [..., D] -> [..., D] in x's dtype.

    `gain` and `bias`, fp32 [D], multiply and add as they are.
    """
    if not supports_norm(x, bias):
        return norm_reference(x, gain, bias, eps)
    return fused_norm(NormFacts(eps, norm_tile_of(x.shape[-1])), x, gain, bias)


class NormFork(NamedTuple):
    """A norm's output, its input, and perhaps the largest magnitude of the output, fp32.

    A residual stream that reads `stream` instead of the input has the two gradients of the input
    added within the kernel.
    """

    normed: jax.Array
    stream: jax.Array
    amax: jax.Array | None = None


def fork(
    x: jax.Array,
    gain: jax.Array,
    bias: jax.Array | None = None,
    *,
    eps: float,
    measured: bool = False,
) -> NormFork:
    """`norm` of x, and x. `measured` asks for the maximum, which kernels of RMSNorm find."""
    if not supports_norm(x, bias):
        return NormFork(norm_reference(x, gain, bias, eps), x)
    tile = norm_tile_of(x.shape[-1])
    facts = NormFacts(eps, tile, fork=True, measured=measured and bias is None)
    return NormFork(*fused_norm(facts, x, gain, bias))


def supports_norm(x: jax.Array, bias: jax.Array | None = None) -> bool:
    """Whether kernels do a norm of x where it is differentiated."""
    return choose("norm", x.dtype, x.shape, layernorm=bias is not None).name == "triton"


@dataclass(frozen=True)
class NormFacts:
    """Static arguments of `fused_norm`."""

    eps: float
    tile: NormTile
    fork: bool = False
    measured: bool = False


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def fused_norm(how: NormFacts, x: jax.Array, gain: jax.Array, bias: jax.Array | None):
    """`norm`, or `fork`, with kernels where it is differentiated."""
    y = norm_reference(x, gain, bias, how.eps)
    if how.measured:
        return y, x, jnp.max(jnp.abs(y)).astype(jnp.float32)
    return (y, x) if how.fork else y


def _norm_forward_rule(how, x, gain, bias):
    if how.measured:
        y, x, amax = measured_rows(x, gain, how.eps)
        return (y, x, amax), (x, gain, None)
    if bias is None:
        y = norm_reference(x, gain, None, how.eps)
    else:
        y, x = normed_rows(x, gain, bias, how.eps)
    return (y, x) if how.fork else y, (x, gain, None if bias is None else ())


def _norm_backward_rule(how, saved, grads):
    x, gain, bias = saved
    dy, *stream = grads[:2] if how.fork else (grads,)
    dx, parts = norm_gradients(how, x, gain, dy, *stream, bias=bias is not None)
    d_gain, *d_bias = jnp.sum(parts, 0)
    return dx, d_gain, *(d_bias or [None])


fused_norm.defvjp(_norm_forward_rule, _norm_backward_rule)


def normed_rows(x: jax.Array, gain: jax.Array, bias: jax.Array, eps: float) -> list[jax.Array]:
    """(LayerNorm of x [..., D], x), the second in x's own memory.

    A residual stream that a kernel gives is added by cuBLAS's matmul as it writes. XLA takes one
    that a matmul gave for a summand of one reader only, which that matmul may overwrite, and then
    copies it for the other reader: two passes more.
    """
    from mjax.kernels.elementwise import norm_triton

    found = _forward_call(norm_triton.norm_forward, x, [gain, bias], eps)
    return [a.reshape(x.shape) for a in found]


def measured_rows(x: jax.Array, gain: jax.Array, eps: float) -> list[jax.Array]:
    """(RMSNorm of x [..., D], x in its own memory likewise, the largest magnitude, fp32)."""
    from mjax.kernels.elementwise import norm_triton

    y, stream, tops = _forward_call(norm_triton.rmsnorm_forward, x, [gain], eps, measured=True)
    amax = lax.bitcast_convert_type(jnp.max(tops), jnp.float32)
    amax = lax.reduce_precision(amax, 8, jnp.finfo(x.dtype).nmant)  # rounding keeps the order
    return [y.reshape(x.shape), stream.reshape(x.shape), amax]


def _forward_call(kernel, x, weights, eps, measured=False) -> list[jax.Array]:
    """The outputs of a forward kernel: [rows, D] twice, and int32 [programs] if `measured`."""
    width, rows = x.shape[-1], math.prod(x.shape[:-1])
    tile, warps = forward_tile(width)
    programs = -(-rows // tile)
    tops = [jax.ShapeDtypeStruct((programs,), jnp.int32)] if measured else []
    return triton_call(
        kernel,
        [*weights, x.reshape(rows, width)],
        [jax.ShapeDtypeStruct((rows, width), x.dtype)] * 2 + tops,
        programs=programs,
        warps=warps,
        aliases={len(weights): 1},
        ROWS=rows,
        WIDTH=width,
        PADDED=_power_of_2(width),
        TILE=tile,
        EPS=eps,
    )


def norm_gradients(
    how: NormFacts,
    x: jax.Array,
    gain: jax.Array,
    dy: jax.Array,
    stream: jax.Array | None = None,
    *,
    bias: bool,
) -> list[jax.Array]:
    """Return the gradient of x [..., D], plus `stream` [..., D], and parts of those of the weights.

    Parts are of the gain and, where there is one, of the bias: fp32 [programs, 1 or 2, D].
    """
    from mjax.kernels.elementwise import norm_triton

    width, tile = x.shape[-1], how.tile
    rows = math.prod(x.shape[:-1])
    programs = min(tile.programs, -(-rows // tile.rows))
    flat = [a.reshape(rows, width) for a in (x, dy, dy if stream is None else stream)]
    dx, parts = triton_call(
        norm_triton.norm_backward,
        [gain, *flat],
        [
            jax.ShapeDtypeStruct((rows, width), x.dtype),
            jax.ShapeDtypeStruct((programs, 1 + bias, width), jnp.float32),
        ],
        programs=programs,
        warps=tile.warps,
        ROWS=rows,
        WIDTH=width,
        PADDED=_power_of_2(width),
        TILE=tile.rows,
        PROGRAMS=programs,
        EPS=how.eps,
        FORK=stream is not None,
        CENTERED=bias,
    )
    return [dx.reshape(x.shape), parts]


def _power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()
