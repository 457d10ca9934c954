"""A gated feed-forward block in FP8 with one scale a tensor, as a function with its own backward.

As two matmuls (`models/base/weight.py`) with a gate between, XLA would round what goes into and out
of the gate in separate passes. Here the gate's kernels (`kernels/elementwise/gate.py`) round while
they compute. Current scaling measures first what they will round, in a pass that only reads. The
kernels write the operands of the weights' gradients as cuBLASLt wants them: contracted axes last.
Invariant: the result is that of the two matmuls and the gate. The block keeps x, transposed, in 8
bits for the backward, and the gate's input by the name `up`.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from mjax.kernels.elementwise import gate
from mjax.kernels.elementwise.gate import E4M3, E5M2
from mjax.kernels.fp8.quantize import SCALES, amax_of, dot8
from mjax.kernels.fp8.recipe import Recipe
from mjax.models.base.weight import (
    Weight,
    as_matrix,
    backward_operand,
    cotangent_fp8,
    forward_operand,
    kept_for_backward,
)
from mjax.sharding.collectives import LOCAL, Parallel


def supports(recipe: Recipe | None, act: str) -> bool:
    """Whether `gated_mlp_fp8` computes a block with the activation function `act`."""
    return recipe is not None and recipe.supports("gated mlp") and act in gate.GATES


def gated_mlp_fp8(
    x: jax.Array, up: Weight, down: Weight, act: str, parallel: Parallel = LOCAL
) -> jax.Array:
    """x [..., D] -> [..., D] in x's dtype, by weights `up` [D, 2, F] and `down` [F, D]."""
    rows = x.reshape(-1, x.shape[-1])
    y = _gated_mlp(parallel, act, rows, as_matrix(up), as_matrix(down))
    return y.reshape(x.shape)


# Places of scales in `Weight.scales` that current scaling measures.
OF_INPUT, OF_GRADIENT = 0, 2


class Residuals(NamedTuple):
    """Arrays that the backward reads.

    x8: e4m3 [D, M], transposed. h: [M, 2 F], the gate's input. maxima: fp32 [2], the largest
    magnitudes of x and of the gate's output.
    """

    x8: jax.Array
    h: jax.Array
    maxima: jax.Array
    up: Weight
    down: Weight


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gated_mlp(parallel: Parallel, act: str, x: jax.Array, up: Weight, down: Weight) -> jax.Array:
    """x [M, D] -> [M, D]; the cotangents of weights are as in `weight.matmul`."""
    y, _ = _gated_mlp_forward(parallel, act, x, up, down)
    return y


def _gated_mlp_forward(parallel, act, x, up, down):
    if up.input_amax is None:
        up = _measured(up, OF_INPUT, lambda: amax_of(x), parallel)
    else:
        up = _measured(up, OF_INPUT, lambda: up.input_amax, LOCAL)
    x_scale = up.scales[OF_INPUT]
    rounding = gate.to_fp8 if up.recipe.knows_scales else gate.to_fp8_both
    x8 = rounding(x, x_scale, E4M3)
    h = _forward_product(x8.plain, up, x.dtype)
    h = checkpoint_name(h, "up")
    down = _measured(down, OF_INPUT, lambda: gate.gate_amax(h, act), parallel)
    a8 = gate.gate_to_fp8(h, down.scales[OF_INPUT], act)
    maxima = jnp.stack([x8.amax, a8.amax])
    maxima = checkpoint_name(maxima, SCALES)
    transposed = x8.transposed
    if transposed is None:
        transposed = gate.to_fp8_transposed(x, x_scale, E4M3).transposed
    y = _forward_product(a8.plain, down, x.dtype)
    return y, Residuals(transposed, h, maxima, kept_for_backward(up), kept_for_backward(down))


def _gated_mlp_backward(parallel, act, residuals: Residuals, g):
    x8, h, maxima, up, down = residuals
    down = _measured(down, OF_GRADIENT, lambda: amax_of(g), parallel)
    g8 = gate.to_fp8_both(g, down.scales[OF_GRADIENT], E5M2)
    da = _backward_product(g8.plain, down, g.dtype)
    up = _measured(up, OF_GRADIENT, lambda: gate.gate_amax(h, act, da), parallel)
    activation_scale, dh_scale = down.scales[OF_INPUT], up.scales[OF_GRADIENT]
    gradients = gate.gate_gradients_to_fp8(h, da, activation_scale, dh_scale, act)
    dh8, a8 = gradients.d_input, gradients.output
    dx = _backward_product(dh8.plain, up, g.dtype)
    seen_by_up = maxima[0], dh8.amax
    seen_by_down = maxima[1], g8.amax
    d_up = _weight_cotangent(x8, dh8.transposed, up, g.dtype, seen_by_up)
    d_down = _weight_cotangent(a8.transposed, g8.transposed, down, g.dtype, seen_by_down)
    return dx, d_up, d_down


_gated_mlp.defvjp(_gated_mlp_forward, _gated_mlp_backward)


def _measured(
    w: Weight, which: int, measure: Callable[[], jax.Array], parallel: Parallel
) -> Weight:
    """`w` with a scale by the maximum that `measure` finds, where the recipe asks for it."""
    if w.recipe.knows_scales:
        return w
    dtype = E4M3 if which == OF_INPUT else E5M2
    scale = w.recipe.scale_for(measure(), w.scales[which], dtype, parallel)
    scales = w.scales.at[which].set(scale)
    return replace(w, scales=checkpoint_name(scales, SCALES))


def _forward_product(x8: jax.Array, w: Weight, dtype: jnp.dtype) -> jax.Array:
    """x8 [M, K] times w [K, N] -> [M, N]."""
    w8, contracted = forward_operand(w)
    axes = 1, contracted
    scales = w.scales[0], w.scales[1]
    return dot8(x8, w8, axes, scales, dtype)


def _backward_product(g8: jax.Array, w: Weight, dtype: jnp.dtype) -> jax.Array:
    """g8 [M, N] times the transpose of w [K, N] -> [M, K]."""
    w8 = backward_operand(w)
    scales = w.scales[2], w.scales[1]
    return dot8(g8, w8, (1, 1), scales, dtype, precise=True)


def _weight_cotangent(
    x8: jax.Array,
    g8: jax.Array,
    w: Weight,
    dtype: jnp.dtype,
    seen: tuple[jax.Array, jax.Array],
) -> Weight:
    """The cotangent of `w` from transposed x8 [K, M], g8 [N, M] and the maxima `seen`."""
    scales = w.scales[0], w.scales[2]

    def product(dtype: jnp.dtype, total: jax.Array | None) -> jax.Array:
        made = dot8(x8, g8, (1, 1), scales, dtype, precise=True)
        return made if total is None else total + made

    return cotangent_fp8(w, product, dtype, seen)
