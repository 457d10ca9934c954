"""A gated feed-forward block in FP8 with delayed scaling, as one function with its own backward.

As two matmuls (`models/weight.py`) with a gate between, XLA would round what goes in and out of the
gate in passes of their own. Here the gate's kernels (`kernels/gate.py`) round while they compute,
and write the operands of the weights' gradients as cuBLASLt wants them: contracted axes last.
Invariant: equal to the two matmuls and the gate. It keeps x, transposed, in 8 bits for the
backward, and the gate's input by the name `up`.
"""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from mjax.kernels import gate
from mjax.kernels.gate import E4M3, E5M2
from mjax.kernels.quantize import SCALES, Recipe, dot8
from mjax.models.weight import (
    Weight,
    as_matrix,
    backward_operand,
    cotangent_fp8,
    forward_operand,
    kept_for_backward,
)


def supports(recipe: Recipe | None, act: str) -> bool:
    """Whether `gated_mlp_fp8` does a block with gate `act`.

    Current scaling must know a maximum before it rounds. Transformer Engine has its own passes.
    """
    if recipe is None or not recipe.delayed:
        return False
    return recipe.backend == "xla" and act in gate.GATES


def gated_mlp_fp8(x: jax.Array, up: Weight, down: Weight, act: str) -> jax.Array:
    """x [..., D] -> [..., D] in x's dtype, by weights `up` [D, 2, F] and `down` [F, D]."""
    rows = x.reshape(-1, x.shape[-1])
    return _gated_mlp(act, rows, as_matrix(up), as_matrix(down)).reshape(x.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gated_mlp(act: str, x: jax.Array, up: Weight, down: Weight) -> jax.Array:
    """x [M, D] -> [M, D]; the cotangents of weights are as in `weight.matmul`."""
    return _gated_mlp_forward(act, x, up, down)[0]


def _gated_mlp_forward(act: str, x: jax.Array, up: Weight, down: Weight) -> tuple[jax.Array, tuple]:
    x8, amax_x = gate.quantize_rows(x, up.scales[0], E4M3)
    h = checkpoint_name(_forward_product(x8, up, x.dtype), "up")
    a8, amax_a = gate.gate_forward8(h, down.scales[0], act)
    maxima = checkpoint_name(jnp.stack([amax_x, amax_a]), SCALES)
    x8, _ = gate.quantize_rows(x, up.scales[0], E4M3, plain=False, transposed=True)
    kept = kept_for_backward(up), kept_for_backward(down)
    return _forward_product(a8, down, x.dtype), (x8, h, maxima, *kept)


def _gated_mlp_backward(act: str, saved: tuple, g: jax.Array) -> tuple[jax.Array, Weight, Weight]:
    x8, h, maxima, up, down = saved
    g8, g8_transposed, amax_g = gate.quantize_rows(g, down.scales[2], E5M2, transposed=True)
    da = _backward_product(g8, down, g.dtype)
    scales = down.scales[0], up.scales[2]
    dh8, a8, dh8_transposed, amax_dh = gate.gate_backward8(h, da, *scales, act)
    dx = _backward_product(dh8, up, g.dtype)
    d_up = _weight_cotangent(x8, dh8_transposed, up, g.dtype, (maxima[0], amax_dh))
    d_down = _weight_cotangent(a8, g8_transposed, down, g.dtype, (maxima[1], amax_g))
    return dx, d_up, d_down


_gated_mlp.defvjp(_gated_mlp_forward, _gated_mlp_backward)


def _forward_product(x8: jax.Array, w: Weight, dtype: jnp.dtype) -> jax.Array:
    """x8 [M, K] times w [K, N] -> [M, N]."""
    w8, axis = forward_operand(w)
    return dot8(x8, w8, (1, axis), (w.scales[0], w.scales[1]), dtype)


def _backward_product(g8: jax.Array, w: Weight, dtype: jnp.dtype) -> jax.Array:
    """g8 [M, N] times the transpose of w [K, N] -> [M, K]."""
    scales = w.scales[2], w.scales[1]
    return dot8(g8, backward_operand(w), (1, 1), scales, dtype, precise=True)


def _weight_cotangent(
    x8: jax.Array,
    g8: jax.Array,
    w: Weight,
    dtype: jnp.dtype,
    seen: tuple[jax.Array, jax.Array],
) -> Weight:
    """The cotangent of `w` from transposed x8 [K, M], g8 [N, M] and the maxima `seen`."""
    scales = w.scales[0], w.scales[2]

    def product(dtype: jnp.dtype) -> jax.Array:
        return dot8(x8, g8, (1, 1), scales, dtype, precise=True)

    return cotangent_fp8(w, product, dtype, seen)
