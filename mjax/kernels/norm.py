"""RMSNorm and LayerNorm over the last axis: a forward by XLA, a backward in one pass on GPUs.

XLA's backward reads x and its output's gradient anew for each sum that it needs (1.4 of 4.2 TB/s on
an H200). Our kernel, in Pallas' Triton dialect, reads both once: a program holds whole rows in
registers, finds their statistics again, and adds up its own part of the gradients of gain and bias;
the parts are summed afterwards, without atomics, equal bit for bit each time. So a forward keeps
its input and nothing else. Only a backward calls the kernel: what is exported, or generates, never
does. Invariant: statistics, sums, gain and bias are fp32; what leaves is rounded once.

jax 0.11 calls Pallas' Triton deprecated; 0.12 has it. Mosaic or jax-triton are where to go.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from mjax.kernels.chooser import choose

_SHARE = 16  # elements of a row that one thread holds
_WARPS = 132 * 16  # in all: of an H200, so many fit at a time


@dataclass(frozen=True)
class Tile:
    """Rows that a program holds at a time, its warps, and programs in all."""

    rows: int
    warps: int
    programs: int


def tile_of(width: int) -> Tile:
    """THE rule, for rows of `width`."""
    padded = _power_of_2(width)
    warps = min(max(padded // (32 * _SHARE), 1), 32)
    return Tile(max(32 * _SHARE // padded, 1), warps, max(_WARPS // warps, 132))


def reference(
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
    if not supports(x, bias):
        return reference(x, gain, bias, eps)
    return fused(How(eps, tile_of(x.shape[-1])), x, gain, bias)


def fork(
    x: jax.Array, gain: jax.Array, bias: jax.Array | None = None, *, eps: float
) -> tuple[jax.Array, jax.Array]:
    """(`norm` of x, x). Whoever reads the second instead of x, as a residual stream does, has the
    two gradients of x added within the kernel."""
    if not supports(x, bias):
        return reference(x, gain, bias, eps), x
    return fused(How(eps, tile_of(x.shape[-1]), fork=True), x, gain, bias)


def supports(x: jax.Array, bias: jax.Array | None = None) -> bool:
    """Whether the kernel does the backward of a norm of x."""
    return choose("norm", x.dtype, x.shape, layernorm=bias is not None).name == "triton"


@dataclass(frozen=True)
class How:
    """Static arguments of `fused`; `interpret` runs the kernel on a CPU, for tests."""

    eps: float
    tile: Tile
    fork: bool = False
    interpret: bool = False


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def fused(how: How, x: jax.Array, gain: jax.Array, bias: jax.Array | None):
    """`norm`, or `fork`, with the kernel for a backward."""
    y = reference(x, gain, bias, how.eps)
    return (y, x) if how.fork else y


def _fused_forward(how, x, gain, bias):
    return fused(how, x, gain, bias), (x, gain, None if bias is None else ())


def _fused_backward(how, saved, grads):
    x, gain, bias = saved
    dy, *stream = grads if how.fork else (grads,)
    dx, *parts = norm_backward(how, x, gain, dy, *stream, bias=bias is not None)
    return dx, *(jnp.sum(part, 0) for part in parts), *((None,) if bias is None else ())


fused.defvjp(_fused_forward, _fused_backward)


def norm_backward(
    how: How,
    x: jax.Array,
    gain: jax.Array,
    dy: jax.Array,
    stream: jax.Array | None = None,
    *,
    bias: bool,
) -> list[jax.Array]:
    """The gradient of x [..., D], plus `stream` [..., D]; then fp32 parts [programs, D] of that of
    the gain and, where there is one, of the bias."""
    import jax.experimental.pallas as pl
    import jax.experimental.pallas.triton as plt

    width, tile = x.shape[-1], how.tile
    rows, padded = math.prod(x.shape[:-1]), _power_of_2(width)
    programs = min(tile.programs, pl.cdiv(rows, tile.rows))
    steps = pl.cdiv(rows, tile.rows * programs)
    inputs = [a.reshape(rows, width) for a in (x, dy, stream) if a is not None]

    def kernel(gain_ref, *refs):
        in_refs, (dx_ref, *part_refs) = refs[: len(inputs)], refs[len(inputs) :]
        program = pl.program_id(0)
        columns = jnp.arange(padded, dtype=jnp.int32)[None]
        real = columns < width

        def body(i, sums):
            own = (program + i * programs) * tile.rows + jnp.arange(tile.rows, dtype=jnp.int32)
            place, mask = (own[:, None], columns), (own < rows)[:, None] & real
            read = [plt.load(ref.at[place], mask=mask, other=0.0) for ref in in_refs]
            # each time anew, from the cache: registers are what limits the rows in flight
            g = plt.load(gain_ref.at[columns], mask=real, other=0.0)
            x, dy, *rest = (a.astype(jnp.float32) for a in read)
            dx, *more = _of_rows(x, dy, g, how.eps, width, real if bias else None)
            plt.store(dx_ref.at[place], sum(rest, dx).astype(dx_ref.dtype), mask=mask)
            return tuple(s + m for s, m in zip(sums, more, strict=True))

        zero = jnp.zeros((tile.rows, padded), jnp.float32)
        sums = lax.fori_loop(0, steps, body, (zero,) * (1 + bias))
        for ref, total in zip(part_refs, sums, strict=True):
            plt.store(ref.at[program, columns[0]], jnp.sum(total, 0), mask=columns[0] < width)

    part = jax.ShapeDtypeStruct((programs, width), jnp.float32)
    dx, *parts = pl.pallas_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct((rows, width), x.dtype), *[part] * (1 + bias)],
        grid=(programs,),
        compiler_params=plt.CompilerParams(num_warps=tile.warps),
        interpret=how.interpret,
        name="norm_backward",
    )(gain, *inputs)
    return [dx.reshape(x.shape), *parts]


def _of_rows(x, dy, gain, eps, width, real):
    """(dx, dgain[, dbias]) of each row, fp32, zero where x and dy are padded with zeros. `real`:
    the columns that are not, given for LayerNorm alone."""

    def over(a):
        return jnp.sum(a, 1, keepdims=True) * (1 / width)

    w = dy * gain
    z = x if real is None else jnp.where(real, x - over(x), 0.0)
    r = lax.rsqrt(over(z * z) + eps)
    dx = w - z * (over(w * z) * r * r)
    if real is None:
        return dx * r, dy * (z * r)
    return (dx - over(w)) * r, dy * (z * r), dy


def _power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()
