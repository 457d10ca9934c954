"""FP8 matmuls: e4m3 operands forward, e5m2 gradients, one scale a tensor.

`matmul` is the product that all dense layers of a block go through (`models/linear.py`). With a
recipe it rounds both operands to 8 bits and leaves an 8-bit `dot_general` to XLA, which makes it
one of cuBLASLt's; its backward is two more. Scales are powers of two: a scaled value then differs
from a rounded one in range only, never in precision, so that every step but the two roundings is
exact in bf16, and another mesh or micro-batch, with other maxima, rounds alike (but for values
some 2**-15 of the largest). Weights are scaled by their maximum over the whole mesh, found once a
step (`weight_amax`), and rounded once a step, where they are stored, so that ZeRO gathers bytes
(`round_weights`). Recipes for activations and gradients, after Transformer Engine:

- current: the maximum of the tensor itself, shared over tp;
- delayed: the largest maximum of the last steps, kept as `history` [L, 2, H] of each matmul. What a
  step saw is the *gradient* of its scales (Flax's overwrite-with-gradient), joined by maximum where
  gradients add: `join` over micro-batches, pmax over the mesh.

Finite values beyond the range saturate; what is not finite makes the step not finite.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from mjax.errors import UserError
from mjax.kernels import gate, te
from mjax.kernels.gate import E4M3, E5M2
from mjax.sharding.collectives import AXES, LOCAL, Parallel

SCALES = "fp8_scales"  # the name by which every remat policy keeps them
_EXPONENT = {E4M3: 9, E5M2: 16}  # the largest is 0.875 * 2 to it
_LIMIT = 63  # of a scale's exponent: a product of two stays a normal number

# Largest values assumed of a tensor that no step has seen: normed or gated activations, and the
# gradient of a mean over n tokens, times n.
FIRST_GUESS = 64.0, 1024.0


@dataclass(frozen=True)
class Fp8:
    """What a forward pass needs to know. `scales`: [..., 3] for x, w and gradient of each matmul,
    {stack: {name: [L, 3]}} for a model and {name: [3]} within a block; zero where it is to be
    measured. `rounded`: likewise bits of weights (`round_weights`), read in place of the weights,
    which then only take gradients. The first and last `skip` layers stay as they are."""

    delayed: bool
    skip: int = 0
    scales: dict = field(default_factory=dict)
    rounded: dict = field(default_factory=dict)
    backend: str = "xla"

    def of(self, scales: dict, rounded: dict) -> "Fp8":
        return replace(self, scales=scales, rounded=rounded)

    def stack(self, name: str) -> tuple[dict, dict]:
        """`scales` and `rounded` of a stack of layers."""
        return self.scales.get(name, {}), self.rounded.get(name, {})


def scale_of(amax: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The largest power of two that keeps `amax` (fp32, any shape) within `dtype`; NaN for a
    maximum that is not finite."""
    mantissa, exponent = jnp.frexp(amax)
    power = jnp.clip(_EXPONENT[dtype] - exponent - (mantissa > 0.875), -_LIMIT, _LIMIT)
    return jnp.where(jnp.isfinite(amax), jnp.ldexp(jnp.float32(1), power), jnp.nan)


def quantise(x: jax.Array, scale: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """x * scale rounded to `dtype`, saturating."""
    top = float(jnp.finfo(dtype).max)
    return jnp.clip(x * scale.astype(x.dtype), -top, top).astype(dtype)


def amax_of(x: jax.Array) -> jax.Array:
    """Largest magnitude, fp32; NaN if there is one."""
    return jnp.max(jnp.abs(x)).astype(jnp.float32)


def matmul(
    x: jax.Array,
    w: jax.Array,
    contracted: int,
    fp8: Fp8 | None = None,
    name: str = "",
    parallel: Parallel = LOCAL,
    total: jax.Array | None = None,
) -> jax.Array:
    """Contract the last `contracted` axes of x with the first of w, in x's dtype.

    `name` picks the scales and the rounded weight. Current scaling measures x and the gradient over
    tp of `parallel`. `total`, shaped like w, is a running sum of w's gradients: its gradient is the
    sum with w's added, by the matmul itself, and w's is nothing.
    """
    if fp8 is None and total is None:
        return jnp.tensordot(x, w, contracted)
    lead, size = x.shape[: x.ndim - contracted], math.prod(w.shape[:contracted])
    flat = lambda a: None if a is None else a.reshape(size, -1)  # noqa: E731
    rows, w2, total = x.reshape(-1, size), flat(w), flat(total)
    if fp8 is None:
        y = _summing(rows, w2, total)
    else:
        way = Way(fp8.delayed, fp8.backend, parallel)
        bits = flat(fp8.rounded.get(name)), fp8.rounded.get(flipped(name))
        y = _matmul(way, rows, w2, bits, fp8.scales[name], total)
    return y.reshape(*lead, *w.shape[contracted:])


@jax.custom_vjp
def _summing(x, w, total):
    """x [M, K], w [K, N], total [K, N] -> [M, N]; the gradient of `total` is the next total."""
    return x @ w


def _summing_backward(saved, g):
    x, w, total = saved
    more = lax.dot_general(x, g, (((0,), (0,)), ((), ())), preferred_element_type=total.dtype)
    return g @ w.T, None, total + more


_summing.defvjp(lambda x, w, total: (x @ w, (x, w, total)), _summing_backward)


class Way(NamedTuple):
    """What is static in a product."""

    delayed: bool
    backend: str
    parallel: Parallel


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(way: Way, x, w, bits, scales, total):
    """x [M, K], w [K, N], its bits [K, N] and [N, K] or None, scales [3], a sum [K, N] or None ->
    [M, N]; the cotangent of `scales` is what was seen."""
    return _forward(way, x, w, bits, scales, total)[0]


def _forward(way, x, w, bits, scales, total):
    x8, kept = _rounded(way, x, scales[0], E4M3)
    b, axis = forward_weight8(w, *bits, scales)
    y = _dot(way, x8, b, (1, axis), (kept[0], scales[1]), x.dtype)
    return y, (x8, w if bits[0] is None else None, bits[0], kept, scales, total)


def _backward(way, saved, g):
    x8, w, w8, kept, scales, total = saved
    g8, g8_turned, seen = _both_ways(way, g, scales[2])
    w8 = weight8(w, w8, scales)
    dx = _dot(way, g8, w8, (1, 1), (seen[0], scales[1]), g.dtype, precise=True)

    def product(dtype):
        dtype = g.dtype if way.backend == "te" else dtype  # TE's matmul of fp32 is untried
        return _dot(way, x8, g8_turned, (0, 1), (kept[0], seen[0]), dtype, precise=True)

    dw, total = weight_gradient(product, total, g.dtype)
    return dx, dw, None, jnp.stack([kept[1], jnp.zeros_like(kept[1]), seen[1]]), total


_matmul.defvjp(_forward, _backward)


def _rounded(way: Way, x, scale, dtype) -> tuple[jax.Array, jax.Array]:
    """x in 8 bits, [its scale, its maximum]; `scale` is what delayed scaling knows of it."""
    use_te = way.backend == "te"
    if use_te and way.delayed:  # in one pass
        x8, amax = te.quantise(x, scale, dtype)
        return x8, checkpoint_name(jnp.stack([scale, amax]), SCALES)
    amax = amax_of(x)
    if not way.delayed:
        scale = scale_of(way.parallel.pmax(amax, "tp"), dtype)
    kept = checkpoint_name(jnp.stack([scale, amax]), SCALES)
    if use_te:
        return te.quantise(x, kept[0], dtype)[0], kept
    return quantise(x, kept[0], dtype), kept


def _both_ways(way: Way, g, scale) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A gradient [M, N] in 8 bits, that turned [N, M], [its scale, its maximum]."""
    if way.delayed and way.backend == "xla" and gate.supports(g, rows=2):
        g8, turned, amax = gate.quantise(g, scale, E5M2, turned=True)
        return g8, turned, jnp.stack([scale, amax])
    g = lax.optimization_barrier(g)  # or each reader makes it again, as a gate's two halves
    g8, seen = _rounded(way, g, scale, E5M2)
    return g8, g8.T, seen


def weight8(w: jax.Array | None, bits: jax.Array | None, scales: jax.Array) -> jax.Array:
    """A weight in 8 bits, from its bits where there are."""
    return quantise(w, scales[1], E4M3) if bits is None else lax.bitcast_convert_type(bits, E4M3)


def forward_weight8(w, bits, turned, scales) -> tuple[jax.Array, int]:
    """(a weight in 8 bits, its axis that a forward contracts): transposed where there are bits of
    that."""
    if turned is None:
        return weight8(w, bits, scales), 0
    return weight8(w, turned, scales), 1


def weight_gradient(
    product: Callable[[jnp.dtype], jax.Array], total: jax.Array | None, dtype: jnp.dtype
) -> tuple[jax.Array | None, jax.Array | None]:
    """The cotangents of a weight and of the sum `total` of its gradients, one of which there is, by
    the gradient as a `product` in a dtype: `dtype` for a weight's own."""
    if total is None:
        return product(dtype), None
    return None, total + product(total.dtype)


def _dot(way, a, b, contract, scales, dtype, precise=False):
    if way.backend == "te":
        return te.dot(a, b, contract, scales, dtype, precise)
    return dot8(a, b, contract, scales, dtype, precise)


def dot8(
    a: jax.Array,
    b: jax.Array,
    contract: tuple[int, int],
    scales: tuple[jax.Array, jax.Array],
    dtype: jnp.dtype,
    precise: bool = False,
) -> jax.Array:
    """a, b of 8 bits -> their product over axes `contract`, divided by both `scales`. `precise`:
    without cuBLASLt's fast, 14-bit accumulation."""
    dims = ((contract[0],), (contract[1],)), ((), ())
    precision = lax.Precision.HIGHEST if precise else None
    y = lax.dot_general(a, b, dims, precision=precision, preferred_element_type=dtype)
    return y * (1 / (scales[0] * scales[1])).astype(dtype)


# ---- what passes from step to step -----------------------------------------------------------

_ALL_BUT_PP = tuple(axis for axis in AXES if axis != "pp")


def weight_amax(weights: dict, dtype: jnp.dtype, parallel: Parallel) -> dict:
    """Stacked weights [L, ...], in any sharding but of L over pp -> [L] maxima over the mesh."""

    def one(w):
        top = jnp.max(jnp.abs(w), axis=tuple(range(1, w.ndim)))
        return top.astype(dtype).astype(jnp.float32)

    return parallel.pmax(jax.tree.map(one, weights), *_ALL_BUT_PP)


def scales_of(weights: dict, history: dict, tokens: jax.Array) -> dict:
    """Maxima of weights [L] and histories [L, 2, H] (none: current scaling) -> scales [L, 3]."""

    def one(amax, seen=None):
        w = scale_of(amax, E4M3)
        if seen is None:
            return jnp.stack([jnp.zeros_like(w), w, jnp.zeros_like(w)], -1)
        guess = jnp.stack([jnp.float32(FIRST_GUESS[0]), FIRST_GUESS[1] / jnp.maximum(tokens, 1)])
        top = seen.max(-1)
        top = jnp.where(top > 0, top, guess)
        return jnp.stack([scale_of(top[:, 0], E4M3), w, scale_of(top[:, 1], E5M2)], -1)

    return jax.tree.map(one, weights, history) if history else jax.tree.map(one, weights)


def round_weights(weights: dict, scales: dict) -> dict:
    """Stacked weights [L, ...], in any sharding but of L over pp, and scales [L, 3] -> the bits of
    what `matmul` rounds them to. Integers: they take no gradient, and travel as they are."""

    def one(w, scale):
        w8 = quantise(w, scale[:, 1].reshape(-1, *[1] * (w.ndim - 1)), E4M3)
        return lax.bitcast_convert_type(w8, jnp.uint8)

    return jax.tree.map(one, weights, scales)


def flipped(name: str) -> str:
    """What the transposed bits of a weight are called beside its bits."""
    return f"{name}.T"


def flip_weights(rounded: dict, specs: dict) -> dict:
    """Bits of weights, of layers apart, and the weights' declarations -> with them their transposes
    [N, K]. The forward product reads those: cuBLASLt contracts minor axes of 8-bit operands only,
    and XLA would transpose in every micro-batch."""

    def flip(spec, layers):
        return tuple(a.reshape(math.prod(a.shape[: spec.inputs]), -1).T for a in layers)

    def one(stack):
        more = jax.tree.map(flip, specs[stack], rounded[stack])
        return rounded[stack] | {flipped(name): bits for name, bits in more.items()}

    return {stack: one(stack) for stack in rounded}


def empty_history(weights: dict, length: int) -> dict:
    """Of stacked weights [L, ...]: no step seen."""
    return jax.tree.map(lambda w: jnp.zeros((w.shape[0], 2, length), jnp.float32), weights)


def join(a: dict, b: dict) -> dict:
    """What two micro-batches saw, together."""
    return jax.tree.map(jnp.maximum, a, b)


def remember(history: dict, seen: dict, parallel: Parallel) -> tuple[dict, jax.Array]:
    """Histories [L, 2, H] with what this step saw ([L, 3], on this device) in front; was all of it
    finite?"""
    finite = jnp.stack([jnp.isfinite(s).all() for s in jax.tree.leaves(seen)]).all()
    finite = parallel.psum(1 - finite.astype(jnp.float32), *AXES) == 0
    seen = parallel.pmax(seen, *_ALL_BUT_PP)
    push = lambda h, s: jnp.concatenate([s[:, ::2, None], h[..., :-1]], -1)  # noqa: E731
    return jax.tree.map(push, history, seen), finite


def require_fp8(device: jax.Device, backend: str = "xla") -> None:
    """Raise `UserError` for a GPU without FP8 matmuls, or without `backend`; CPUs emulate XLA's."""
    capability = getattr(device, "compute_capability", None)
    if device.platform in ("gpu", "cuda") and float(capability) < 8.9:
        raise UserError(
            f"precision.fp8: {device.device_kind} has compute capability {capability}, FP8 needs "
            "8.9 (Ada, Hopper, Blackwell); set precision.fp8=none"
        )
    if backend == "te":
        te.require_te(device)
