"""FP8 matmuls: e4m3 operands forward, e5m2 gradients, one scale a tensor.

`matmul` is the product that all dense layers of a block go through (`models/linear.py`). With a
recipe it rounds both operands to 8 bits and leaves an 8-bit `dot_general` to XLA, which makes it
one of cuBLASLt's; its backward is two more. Scales are powers of two: a scaled value then differs
from a rounded one in range only, never in precision, so that every step but the two roundings is
exact in bf16, and another mesh or micro-batch, with other maxima, rounds alike (but for values
some 2**-15 of the largest). Weights are scaled by their maximum over the whole mesh, found once a
step (`weight_amax`). Recipes for activations and gradients, after Transformer Engine:

- current: the maximum of the tensor itself, shared over tp;
- delayed: the largest maximum of the last steps, kept as `history` [L, 2, H] of each matmul. What a
  step saw is the *gradient* of its scales (Flax's overwrite-with-gradient), joined by maximum where
  gradients add: `join` over micro-batches, pmax over the mesh.

Finite values beyond the range saturate; what is not finite makes the step not finite.
"""

import functools
import math
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from mjax.errors import UserError
from mjax.sharding.collectives import AXES, LOCAL, Parallel

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2  # largest: 0.875 * 2**9, 0.875 * 2**16
SCALES = "fp8_scales"  # the name by which every remat policy keeps them
_EXPONENT = {E4M3: 9, E5M2: 16}
_LIMIT = 63  # of a scale's exponent: a product of two stays a normal number

# Largest values assumed of a tensor that no step has seen: normed or gated activations, and the
# gradient of a mean over n tokens, times n.
FIRST_GUESS = 64.0, 1024.0


@dataclass(frozen=True)
class Fp8:
    """What a forward pass needs to know. `scales`: [..., 3] for x, w and gradient of each matmul,
    {stack: {name: [L, 3]}} for a model and {name: [3]} within a block; zero where it is to be
    measured. The first and last `skip` layers stay as they are."""

    delayed: bool
    skip: int = 0
    scales: dict = field(default_factory=dict)

    def of(self, scales: dict) -> "Fp8":
        return replace(self, scales=scales)


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
) -> jax.Array:
    """Contract the last `contracted` axes of x with the first of w, in x's dtype.

    `name` picks the scales. Current scaling measures x and the gradient over tp of `parallel`.
    """
    if fp8 is None:
        return jnp.tensordot(x, w, contracted)
    lead, size = x.shape[: x.ndim - contracted], math.prod(w.shape[:contracted])
    flat = x.reshape(-1, size), w.reshape(size, -1)
    y = _matmul(fp8.delayed, parallel, *flat, fp8.scales[name])
    return y.reshape(*lead, *w.shape[contracted:])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _matmul(delayed: bool, parallel: Parallel, x, w, scales):
    """x [M, K], w [K, N], scales [3] -> [M, N]; the cotangent of `scales` is what was seen."""
    return _forward(delayed, parallel, x, w, scales)[0]


def _forward(delayed, parallel, x, w, scales):
    amax = amax_of(x)
    first = scales[0] if delayed else scale_of(parallel.pmax(amax, "tp"), E4M3)
    kept = checkpoint_name(jnp.stack([first, scales[1], scales[2], amax]), SCALES)
    x8 = quantise(x, kept[0], E4M3)
    y = _dot(x8, quantise(w, kept[1], E4M3), (1, 0), kept[0] * kept[1], x.dtype)
    return y, (x8, w, kept)


def _backward(delayed, parallel, saved, g):
    x8, w, kept = saved
    g = lax.optimization_barrier(g)  # or each reader makes it again, as a gate's two halves
    amax = amax_of(g)
    scale = kept[2] if delayed else scale_of(parallel.pmax(amax, "tp"), E5M2)
    g8, w8 = quantise(g, scale, E5M2), quantise(w, kept[1], E4M3)
    precise = lax.Precision.HIGHEST  # cuBLASLt: without its fast, 14-bit accumulation
    dx = _dot(g8, w8, (1, 1), scale * kept[1], g.dtype, precise)
    dw = _dot(x8, g8, (0, 0), scale * kept[0], w.dtype, precise)
    return dx, dw, jnp.stack([kept[3], jnp.zeros_like(amax), amax])


_matmul.defvjp(_forward, _backward)


def _dot(a, b, contract: tuple[int, int], scale, dtype, precision=None) -> jax.Array:
    """a, b of 8 bits -> their product over axes `contract`, divided by `scale`."""
    dims = ((contract[0],), (contract[1],)), ((), ())
    y = lax.dot_general(a, b, dims, precision=precision, preferred_element_type=dtype)
    return y * (1 / scale).astype(dtype)


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


def require_fp8(device: jax.Device) -> None:
    """Raise `UserError` for a GPU without FP8 matmuls; CPUs emulate them."""
    capability = getattr(device, "compute_capability", None)
    if device.platform in ("gpu", "cuda") and float(capability) < 8.9:
        raise UserError(
            f"precision.fp8: {device.device_kind} has compute capability {capability}, FP8 needs "
            "8.9 (Ada, Hopper, Blackwell); set precision.fp8=none"
        )
