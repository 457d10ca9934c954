"""FP8: rounding to 8 bits, one scale a tensor, and the state of scales from step to step.

Forward operands are e4m3, gradients e5m2. Scales are powers of two. A scaled value then differs
from an unscaled one in range only, never in precision. Every step but the two roundings is exact in
bf16, and another mesh or micro-batch, with other maxima, rounds alike (but for values some 2**-15
of the largest). A weight is scaled by its maximum over the whole mesh, found once a step
(`weight_amax`), and rounded once a step, where it is stored, so that ZeRO gathers bytes
(`quantize_stack`). The matmul itself is in `models/base/weight.py`.

Recipes for activations and gradients follow Transformer Engine:

- current: the scale comes from the maximum of the tensor itself, shared over tp;
- delayed: the scale comes from the largest maximum of the last steps, kept as `history` [L, 2, H]
  of each matmul. The maxima that a step saw are the *gradient* of its scales (Flax's
  overwrite-with-gradient). They are joined by maximum where gradients add: `remember` joins them
  over the mesh.

Finite values beyond the range saturate. A value that is not finite makes the step not finite.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from mjax.errors import UserError
from mjax.kernels.base.chooser import choose
from mjax.kernels.elementwise import gate
from mjax.kernels.elementwise.gate import E4M3, E5M2
from mjax.kernels.fp8 import transformer_engine
from mjax.sharding.collectives import AXES, Parallel

SCALES = "fp8_scales"  # the name by which every remat policy keeps them
_EXPONENT = {E4M3: 9, E5M2: 16}  # the largest number is 0.875 * 2 to it
_LIMIT = 63  # of a scale's exponent: a product of two scales stays a normal number

# Largest values assumed of a tensor that no step has seen: normed or gated activations, and the
# gradient of a mean over n tokens, times n.
FIRST_GUESS = 64.0, 1024.0


@dataclass(frozen=True)
class Recipe:
    """How matmuls round to 8 bits: by delayed or current scaling, with XLA's or TE's kernels."""

    delayed: bool
    backend: str = "xla"


def scale_of(amax: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The largest power of two that keeps `amax` (fp32, any shape) within `dtype`.

    It is NaN for a maximum that is not finite.
    """
    mantissa, exponent = jnp.frexp(amax)
    power = jnp.clip(_EXPONENT[dtype] - exponent - (mantissa > 0.875), -_LIMIT, _LIMIT)
    return jnp.where(jnp.isfinite(amax), jnp.ldexp(jnp.float32(1), power), jnp.nan)


def quantize_to(x: jax.Array, scale: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """x * scale rounded to `dtype`, saturating."""
    top = float(jnp.finfo(dtype).max)
    return jnp.clip(x * scale.astype(x.dtype), -top, top).astype(dtype)


def amax_of(x: jax.Array) -> jax.Array:
    """The largest magnitude in x, fp32; NaN if x holds one."""
    return jnp.max(jnp.abs(x)).astype(jnp.float32)


def quantize_tensor(
    recipe: Recipe, x: jax.Array, scale: jax.Array, dtype: jnp.dtype, parallel: Parallel
) -> tuple[jax.Array, jax.Array]:
    """(x in 8 bits, fp32 [2] of its scale and its maximum).

    `scale` is what delayed scaling knows of x. Current scaling measures x over tp of `parallel`.
    """
    use_te = recipe.backend == "te"
    if use_te and recipe.delayed:  # in one pass
        x8, amax = transformer_engine.quantize_by_te(x, scale, dtype)
        return x8, checkpoint_name(jnp.stack([scale, amax]), SCALES)
    amax = amax_of(x)
    if not recipe.delayed:
        scale = scale_of(parallel.pmax(amax, "tp"), dtype)
    used = checkpoint_name(jnp.stack([scale, amax]), SCALES)
    if use_te:
        return transformer_engine.quantize_by_te(x, used[0], dtype)[0], used
    return quantize_to(x, used[0], dtype), used


def quantize_gradient(
    recipe: Recipe, g: jax.Array, scale: jax.Array, parallel: Parallel
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A gradient g [M, N] as (e5m2 [M, N], its transpose [N, M], fp32 [2] of scale and maximum)."""
    choice = choose("quantize", g.dtype, g.shape, delayed=recipe.delayed, backend=recipe.backend)
    if choice.name == "triton":
        g8 = gate.to_fp8_both(g, scale, E5M2)
        return g8.plain, g8.transposed, jnp.stack([scale, g8.amax])
    g = lax.optimization_barrier(g)  # or each reader computes it again, as a gate's two halves
    g8, used = quantize_tensor(recipe, g, scale, E5M2, parallel)
    return g8, g8.T, used


def quantize_by(
    rounding: Callable[..., gate.Rounded],
    recipe: Recipe,
    x: jax.Array,
    scale: jax.Array,
    dtype: jnp.dtype,
    parallel: Parallel,
) -> tuple[gate.Rounded, jax.Array]:
    """(x [M, K] by a `rounding` of `gate.py`, fp32 [2] of scale and maximum), for any backend."""
    amax = None
    if not recipe.delayed:
        amax = amax_of(x)
        scale = scale_of(parallel.pmax(amax, "tp"), dtype)
    rounded = rounding(x, scale, dtype)
    return rounded, jnp.stack([scale, rounded.amax if amax is None else amax])


def dot8(
    a: jax.Array,
    b: jax.Array,
    contract: tuple[int, int],
    scales: tuple[jax.Array, jax.Array],
    dtype: jnp.dtype,
    *,
    precise: bool = False,
    backend: str = "xla",
) -> jax.Array:
    """The product of 8-bit matrices over axes `contract`, in `dtype`, divided by both `scales`.

    `precise`: without cuBLASLt's fast, 14-bit accumulation.
    """
    if backend == "te":
        return transformer_engine.dot(a, b, contract, scales, dtype, precise)
    dims = ((contract[0],), (contract[1],)), ((), ())
    precision = lax.Precision.HIGHEST if precise else None
    y = lax.dot_general(a, b, dims, precision=precision, preferred_element_type=dtype)
    return y * (1 / (scales[0] * scales[1])).astype(dtype)


# ---- weights ---------------------------------------------------------------------------------


def quantize_stack(weights: jax.Array, scales: jax.Array) -> jax.Array:
    """Weights of L layers [L, ...] in e4m3, as their bits.

    `weights` may be any shard that has all L layers. `scales` fp32 [L, 3] are those of the step.
    The result is uint8: integers take no gradient, and travel as they are.
    """
    scale = scales[:, 1].reshape(-1, *[1] * (weights.ndim - 1))
    return lax.bitcast_convert_type(quantize_to(weights, scale, E4M3), jnp.uint8)


def transposed_bits(bits: jax.Array, inputs: int, of_experts: bool = False) -> jax.Array:
    """Bits of a weight whose first `inputs` axes are contracted -> its transpose [N, K].

    Weights `of_experts` have a leading axis E, and the result is [E, N, K]. The forward product
    reads it: GPUs contract minor axes of 8-bit operands only, and XLA would transpose in every
    micro-batch.
    """
    lead = bits.shape[: int(of_experts)]
    k = math.prod(bits.shape[len(lead) :][:inputs])
    return jnp.swapaxes(bits.reshape(*lead, k, -1), -1, -2)


def bits_as_e4m3(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits, E4M3)


# ---- the state of scales -----------------------------------------------------------------------

_ALL_BUT_PP = tuple(axis for axis in AXES if axis != "pp")


def weight_amax(weights: dict, dtype: jnp.dtype, parallel: Parallel) -> dict:
    """Largest magnitudes [L] over the mesh of stacked weights [L, ...], as `dtype` rounds them.

    The weights may lie in any sharding that cuts L over pp alone.
    """

    def one(w: jax.Array) -> jax.Array:
        top = jnp.max(jnp.abs(w), axis=tuple(range(1, w.ndim)))
        return top.astype(dtype).astype(jnp.float32)

    return parallel.pmax(jax.tree.map(one, weights), *_ALL_BUT_PP)


def step_scales(amax: dict, history: dict, tokens: jax.Array | int) -> dict:
    """Scales [L, 3] of a step: of activations, weights and gradients.

    `amax` holds maxima of weights [L]; `history` holds maxima [L, 2, H] of the last steps and is
    empty for current scaling, whose scales are 0 where the matmul measures.
    """

    def current(amax: jax.Array) -> jax.Array:
        weight = scale_of(amax, E4M3)
        return jnp.stack([jnp.zeros_like(weight), weight, jnp.zeros_like(weight)], -1)

    def delayed(amax: jax.Array, seen: jax.Array) -> jax.Array:
        guess = jnp.stack([jnp.float32(FIRST_GUESS[0]), FIRST_GUESS[1] / jnp.maximum(tokens, 1)])
        top = seen.max(-1)
        top = jnp.where(top > 0, top, guess)
        scales = scale_of(top[:, 0], E4M3), scale_of(amax, E4M3), scale_of(top[:, 1], E5M2)
        return jnp.stack(scales, -1)

    return jax.tree.map(delayed, amax, history) if history else jax.tree.map(current, amax)


def empty_history(weights: dict, length: int) -> dict:
    """The history of stacked weights [L, ...] before the first step: zeros [L, 2, length]."""
    return jax.tree.map(lambda w: jnp.zeros((w.shape[0], 2, length), jnp.float32), weights)


def remember(history: dict, seen: dict, parallel: Parallel) -> tuple[dict, jax.Array]:
    """(histories [L, 2, H] with what this step saw in front, whether all of it was finite).

    `seen` holds the maxima [L, 3] that this device saw.
    """
    finite = jnp.stack([jnp.isfinite(s).all() for s in jax.tree.leaves(seen)]).all()
    finite = parallel.psum(1 - finite.astype(jnp.float32), *AXES) == 0
    seen = parallel.pmax(seen, *_ALL_BUT_PP)

    def push(history: jax.Array, seen: jax.Array) -> jax.Array:
        return jnp.concatenate([seen[:, ::2, None], history[..., :-1]], -1)

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
        transformer_engine.require_te(device)
