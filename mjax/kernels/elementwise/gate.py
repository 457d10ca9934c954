"""Activation functions, gates and rounding to 8 bits, each in one pass over its tensors on GPUs.

XLA reads a tensor anew for its maximum, for what it rounds it to, and for the transpose that the
weight's gradient needs; its GELU takes more time for arithmetic than for memory. Our Triton kernels
(`gate_triton.py`) read each tensor once: a program takes a tile, computes in fp32, writes its
results, plain and transposed, and the largest magnitude within or sums over rows; they are joined
afterwards, without atomics, equal bit for bit each time. Transposed tiles of 8 bits move as words
of two rows, which the hardware transposes. If a kernel does not pay or fit (`supports`), the same
function is plain JAX, written out beside its call. Invariant: results are rounded from fp32 to the
inputs' dtype, and then, where wanted, to 8 bits: saturating, while NaN stays NaN.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mjax.kernels.base.chooser import GATES, choose
from mjax.kernels.base.triton_call import triton_call

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2


@dataclass(frozen=True)
class GateTile:
    """Rows and columns that a program takes, and its warps; powers of 2."""

    rows: int
    columns: int
    warps: int


# Fastest on an H200: long rows, if transposed long columns too, few values to a thread.
ROWS = GateTile(8, 128, 4)
ROW_BY_ROW = GateTile(64, 1024, 4)
ONE_ROW = GateTile(1, 1024, 4)  # compiled, but not timed
TURNED = GateTile(64, 128, 8)
TURNED_GATE = GateTile(64, 128, 16)


def supports(x: jax.Array, name: str = GATES[0], rows: int = 1) -> bool:
    """Whether the kernel takes x, the widest input (of gate `name`), by so many rows."""
    return choose("gate", x.dtype, x.shape, act=name, rows=rows).name == "triton"


# ---- in the inputs' dtype ----------------------------------------------------------------------


def activation_forward(h: jax.Array, bias: jax.Array | None, name: str) -> jax.Array:
    """h [..., F], bias [F] -> act(h + bias)."""
    x, *more = inputs = _flat_rows(h, bias)
    if supports(x):
        both, out = [x, more[0] if more else x], jax.ShapeDtypeStruct(x.shape, x.dtype)
        keys = {"ACT": name, "BIASED": bias is not None}
        (out,) = in_tiles("act_forward", ROWS, x.shape, both, [out], **keys)
    else:
        out = _act_times_up(name, sum(map(_wide, inputs)), 1.0).astype(h.dtype)
    return out.reshape(h.shape)


def activation_backward(
    h: jax.Array, bias: jax.Array | None, d: jax.Array, name: str
) -> tuple[jax.Array, jax.Array | None]:
    """h, d [..., F], bias [F]; d is the gradient of act(h + bias) -> those of h and of bias."""
    x, d, *more = _flat_rows(h, d, bias)
    biased = bias is not None
    if supports(x):
        inputs, out = [x, d, *(more or [x])], jax.ShapeDtypeStruct(x.shape, x.dtype)
        keys = {"ACT": name} | ({} if biased else {"sums": None})
        tile = ROW_BY_ROW if biased else ONE_ROW
        dh, *sums = in_tiles("act_backward", tile, x.shape, inputs, [out], summed=biased, **keys)
    else:
        wide = _gate_gradients(name, sum(map(_wide, more), _wide(x)), 1.0, _wide(d))[1]
        dh, sums = wide.astype(h.dtype), [jnp.sum(wide, 0)]
    return dh.reshape(h.shape), sums[0].astype(bias.dtype) if biased else None


def gate_gradient(h: jax.Array, d: jax.Array, name: str) -> jax.Array:
    """h [..., 2, F] (gate, up) and the gradient d [..., F] of act(gate) * up -> that of h."""
    halves, flat = h.reshape(-1, 2 * d.shape[-1]), d.reshape(-1, d.shape[-1])
    if supports(halves):
        out = jax.ShapeDtypeStruct(halves.shape, h.dtype)
        (dh,) = in_tiles("gate_backward", ROWS, flat.shape, [halves, flat], [out], ACT=name)
    else:
        parts = _gate_gradients(name, *jnp.split(_wide(halves), 2, axis=1), _wide(flat))[1:]
        dh = jnp.concatenate(parts, 1).astype(h.dtype)
    return dh.reshape(h.shape)


# ---- to 8 bits ---------------------------------------------------------------------------------


class Rounded(NamedTuple):
    """An array [M, K] in 8 bits.

    plain: [M, K], or None.
    transposed: [K, M], or None.
    amax: fp32 [], the largest magnitude before rounding, or None.
    """

    plain: jax.Array | None
    transposed: jax.Array | None
    amax: jax.Array | None


class GateGradients(NamedTuple):
    """The operands that the gradients of a gated block's weights need.

    d_input: the gradient of the gate's input [M, 2 * F], e5m2, both ways.
    output: act(gate) * up again, e4m3, transposed only.
    d_weights: fp32 [M], the gradients of the rows' weights if there are any.
    """

    d_input: Rounded
    output: Rounded
    d_weights: jax.Array | None


def gate_to_fp8(
    h: jax.Array, scale: jax.Array, name: str, weights: jax.Array | None = None
) -> Rounded:
    """h [M, 2 * F] -> act(gate) * up in e4m3 [M, F], plain.

    Rows are multiplied by `weights` fp32 [M], if there are any.
    """
    size = h.shape[0], h.shape[1] // 2
    if supports(h):
        out, scales = jax.ShapeDtypeStruct(size, E4M3), [scale]
        keys = {"ACT": name, "WEIGHTED": weights is not None}
        both = [h, h if weights is None else weights]
        a8, amax = in_tiles("gate_forward8", ROWS, size, both, [out], scales, **keys)
        return Rounded(a8, None, amax)
    a = _act_times_up(name, *jnp.split(_wide(h), 2, axis=1))
    a = _as(h.dtype, a if weights is None else a * weights[:, None])
    return Rounded(_saturated(a, scale, E4M3), None, jnp.max(jnp.abs(a)))


def gate_gradients_to_fp8(
    h: jax.Array,
    d: jax.Array,
    scale: jax.Array,
    scale_dh: jax.Array,
    name: str,
    weights: jax.Array | None = None,
) -> GateGradients:
    """h [M, 2 * F] and the gradient d [M, F] of act(gate) * up, by `weights` fp32 [M] if given."""
    weighted = weights is not None
    if supports(h, rows=2):
        outs = [jax.ShapeDtypeStruct(h.shape, E5M2), _words(d.shape), _words(h.shape)]
        keys = {"ACT": name, "row_sums": weighted} | ({} if weighted else {"sums": None})
        inputs, scales = [h, d, weights if weighted else h], [scale, scale_dh]
        dh8, a_words, dh_words, *sums, amax = in_tiles(
            "gate_backward8", TURNED_GATE, d.shape, inputs, outs, scales, **keys
        )
        output = Rounded(None, _bytes_of_words(a_words, E4M3), None)
        d_input = Rounded(dh8, _bytes_of_words(dh_words, E5M2), amax)
        return GateGradients(d_input, output, sums[0] if weighted else None)
    d, weight = _wide(d), weights[:, None] if weighted else 1
    a, *dh = _gate_gradients(name, *jnp.split(_wide(h), 2, axis=1), d * weight)
    dh = jnp.concatenate([_as(h.dtype, part) for part in dh], 1)
    a8, dh8 = _saturated(_as(h.dtype, a * weight), scale, E4M3), _saturated(dh, scale_dh, E5M2)
    d_input = Rounded(dh8, dh8.T, jnp.max(jnp.abs(dh)))
    d_weights = jnp.sum(a * d, 1) if weighted else None
    return GateGradients(d_input, Rounded(None, a8.T, None), d_weights)


def gate_amax(h: jax.Array, name: str, d: jax.Array | None = None) -> jax.Array:
    """The largest magnitude, fp32, of what `gate_to_fp8` rounds; nothing else is written.

    With the gradient d [M, F] of its output it is that of what `gate_gradients_to_fp8` rounds.
    """
    if supports(h):
        size, both = (h.shape[0], h.shape[1] // 2), [h, h if d is None else d]
        keys = {"ACT": name, "BACKWARD": d is not None}
        (amax,) = in_tiles("gate_tops", ROWS, size, both, [], measured=True, **keys)
    else:
        halves = jnp.split(_wide(h), 2, axis=1)
        if d is None:
            parts = [_act_times_up(name, *halves)]
        else:
            parts = _gate_gradients(name, *halves, _wide(d))[1:]
        amax = jnp.max(jnp.stack([jnp.max(jnp.abs(part)) for part in parts]))
    return _as(h.dtype, amax)  # rounding keeps the order


def to_fp8(x: jax.Array, scale: jax.Array, dtype: jnp.dtype) -> Rounded:
    """x [M, K] in an 8-bit dtype, plain."""
    if not supports(x):
        x8, amax = _to_fp8_in_jax(x, scale, dtype)
        return Rounded(x8, None, amax)
    out = jax.ShapeDtypeStruct(x.shape, dtype)
    x8, amax = in_tiles("quantize", ROWS, x.shape, [x], [out], [scale])
    return Rounded(x8, None, amax)


def to_fp8_transposed(x: jax.Array, scale: jax.Array, dtype: jnp.dtype) -> Rounded:
    """x [M, K] in an 8-bit dtype, transposed only."""
    if not supports(x, rows=2):
        x8, amax = _to_fp8_in_jax(x, scale, dtype)
        return Rounded(None, x8.T, amax)
    words, amax = _to_fp8_by_kernel(x, scale, dtype, [], out=None)
    return Rounded(None, _bytes_of_words(words, dtype), amax)


def to_fp8_both(x: jax.Array, scale: jax.Array, dtype: jnp.dtype) -> Rounded:
    """x [M, K] in an 8-bit dtype, plain and transposed, in one pass."""
    if not supports(x, rows=2):
        x8, amax = _to_fp8_in_jax(x, scale, dtype)
        return Rounded(x8, x8.T, amax)
    out = jax.ShapeDtypeStruct(x.shape, dtype)
    words, x8, amax = _to_fp8_by_kernel(x, scale, dtype, [out])
    return Rounded(x8, _bytes_of_words(words, dtype), amax)


def _to_fp8_in_jax(x, scale, dtype) -> tuple[jax.Array, jax.Array]:
    return _saturated(_wide(x), scale, dtype), jnp.max(jnp.abs(_wide(x)))


def _to_fp8_by_kernel(x, scale, dtype, outputs, **keys) -> list[jax.Array]:
    keys |= {"OUT": jnp.dtype(dtype).name}
    outs = [_words(x.shape), *outputs]
    return in_tiles("quantize_transposed", TURNED, x.shape, [x], outs, [scale], **keys)


def in_tiles(
    name: str,
    tile: GateTile,
    size: tuple[int, int],
    inputs: list[jax.Array],
    outputs: list[jax.ShapeDtypeStruct],
    scales: list[jax.Array] | None = None,
    *,
    measured: bool = False,
    summed: bool = False,
    row_sums: bool = False,
    **constants: str | bool | None,
) -> list[jax.Array]:
    """Run kernel `name` of `gate_triton.py` over tiles of arrays of `size` [M, F].

    Returns `outputs`, then the sums of each row, fp32 [M], with `row_sums`, or the sums over rows,
    fp32 [F], if `summed`; last the fp32 maximum if there are `scales` or it is `measured`.
    """
    from mjax.kernels.elementwise import gate_triton

    m, f = size
    down, across = -(-m // tile.rows), -(-f // tile.columns)
    tops = [jax.ShapeDtypeStruct((down * across,), jnp.int32)] if scales or measured else []
    sums = [jax.ShapeDtypeStruct((down, f), jnp.float32)] if summed else []
    if row_sums:
        sums = [jax.ShapeDtypeStruct((across, m), jnp.float32)]
    made = triton_call(
        getattr(gate_triton, name),
        [*(scale.reshape(1) for scale in scales or ()), *inputs],
        [*tops, *outputs, *sums],
        programs=down * across,
        warps=tile.warps,
        M=m,
        F=f,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        **constants,
    )
    top, made = made[: len(tops)], made[len(tops) :]
    if sums:
        made = [*made[:-1], jnp.sum(made[-1], 0)]
    return [*made, *(lax.bitcast_convert_type(jnp.max(t), jnp.float32) for t in top)]


def _words(size: tuple[int, int]) -> jax.ShapeDtypeStruct:
    """The transpose of an array of bytes [M, N]: two rows make a word."""
    return jax.ShapeDtypeStruct((size[1], size[0] // 2), jnp.int16)


def _bytes_of_words(words: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Words [N, M / 2] as [N, M] of an 8-bit dtype."""
    return lax.bitcast_convert_type(words, dtype).reshape(words.shape[0], -1)


# ---- plain JAX ---------------------------------------------------------------------------------


def _flat_rows(*arrays: jax.Array | None) -> list[jax.Array]:
    """[..., F] each -> [M, F], those that there are."""
    return [a.reshape(-1, a.shape[-1]) for a in arrays if a is not None]


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


def _share_and_slope(name, x):
    """s of act(x) = x * s(x), and its derivative."""
    if name == "gelu":
        return 0.5 * lax.erfc(-math.sqrt(0.5) * x), jnp.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    if name == "silu":
        s = lax.logistic(x)
        return s, s * (1 - s)
    if name == "quick_gelu":
        s = lax.logistic(1.702 * x)
        return s, 1.702 * s * (1 - s)
    outer, cube = 2 * math.sqrt(2 / math.pi), 0.044715  # (1 + tanh(y)) / 2 = sigmoid(2 * y)
    s = lax.logistic(outer * (x + cube * x * x * x))
    return s, outer * (1 + 3 * cube * x * x) * s * (1 - s)


def _act_times_up(name, gate, up):
    return gate * _share_and_slope(name, gate)[0] * up


def _gate_gradients(name, gate, up, d):
    """act(gate) * up; by d, the gradients of gate and of up."""
    share, slope = _share_and_slope(name, gate)
    act = gate * share
    return act * up, d * up * (share + gate * slope), d * act


def _as(dtype: jnp.dtype, x: jax.Array) -> jax.Array:
    """fp32 x with the precision of `dtype`. A cast there and back XLA would drop."""
    return lax.reduce_precision(x, 8, jnp.finfo(dtype).nmant)


def _saturated(x: jax.Array, scale: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """fp32 x * scale in an 8-bit dtype; NaN stays NaN."""
    x, top = x * scale, float(jnp.finfo(dtype).max)
    return jnp.where(x > top, top, jnp.where(x < -top, -top, x)).astype(dtype)
