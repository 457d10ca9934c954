"""FP8's parts: rounding to 8 bits, one scale a tensor, and the state of scales from step to step.

Forward operands are e4m3, gradients e5m2. Scales are powers of two. A scaled value then differs
from an unscaled one in range only, never in precision. Every step but the two roundings is exact in
bf16, and another mesh or micro-batch, with other maxima, rounds alike (but for values some 2**-15
of the largest). A weight is scaled by its maximum over the whole mesh, found once a step
(`weight_amax`), and rounded once a step, where it is stored, so that ZeRO gathers bytes
(`quantize_stack`). `recipe.py` composes these parts. The matmul itself is in
`models/base/weight.py`.

Finite values beyond the range saturate. A value that is not finite makes the step not finite.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

from mjax.kernels.elementwise.gate import E4M3, E5M2
from mjax.kernels.fp8 import transformer_engine
from mjax.sharding.collectives import AXES, Parallel

SCALES = "fp8_scales"  # the name by which every remat policy keeps them
_EXPONENT = {E4M3: 9, E5M2: 16}  # the largest number is 0.875 * 2 to it
_LIMIT = 63  # of a scale's exponent: a product of two scales stays a normal number

# Largest values assumed of a tensor that no step has seen: normed or gated activations, and the
# gradient of a mean over n tokens, times n.
FIRST_GUESS = 64.0, 1024.0


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


def current_scales(amax: jax.Array) -> jax.Array:
    """Scales [L, 3] by maxima of weights [L]; 0 of what a matmul measures itself."""
    weight = scale_of(amax, E4M3)
    return jnp.stack([jnp.zeros_like(weight), weight, jnp.zeros_like(weight)], -1)


def delayed_scales(amax: jax.Array, seen: jax.Array, tokens: jax.Array | int) -> jax.Array:
    """Scales [L, 3] of activations, weights and gradients.

    `amax` holds maxima of weights [L], `seen` those of the last steps [L, 2, H]. `tokens`: those
    that count in the step.
    """
    guess = jnp.stack([jnp.float32(FIRST_GUESS[0]), FIRST_GUESS[1] / jnp.maximum(tokens, 1)])
    top = seen.max(-1)
    top = jnp.where(top > 0, top, guess)
    scales = scale_of(top[:, 0], E4M3), scale_of(amax, E4M3), scale_of(top[:, 1], E5M2)
    return jnp.stack(scales, -1)


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
