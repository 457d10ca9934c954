"""Weights of experts as grouped matmuls read them, and the cotangent that their gradient makes."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp

from mjax.kernels.fp8.block_recipes import OperandRole
from mjax.kernels.fp8.blocks import Blocks
from mjax.kernels.fp8.channels import Channels8
from mjax.kernels.matmul.grouped import (
    grouped_matmul,
    grouped_weight_gradient,
    grouped_weight_gradient8,
)
from mjax.kernels.nf4.values import read
from mjax.models.base.weight import Weight


def matrices_of(w: Weight, dtype: jnp.dtype) -> jax.Array:
    """The value [E, inputs, *outputs] of experts' weights as matrices [E, inputs, outputs].

    One in NF4 is read in `dtype`.
    """
    value = read(w.value, dtype) if w.is_coded else w.value
    return value.reshape(*w.value.shape[:2], -1)


def rounded_rows(
    x: jax.Array | Blocks, w: Weight, sizes: jax.Array | None, role: OperandRole, **ways: bool
) -> tuple[jax.Array | Blocks, jax.Array | Blocks]:
    """Rows [M, C] of experts as products over C with `w`, and over each one's rows, read them.

    Rows that came in blocks are not rounded again, and have the first alone.
    ways: `plain=False` or `turned=False`, where one is not wanted; the first needs no sizes.
    """
    if isinstance(x, Blocks):
        return w.recipe.read_rows(x, _sides(w)), None
    if w.recipe is None:
        return x, x
    return w.recipe.round_experts(x, sizes, role, _sides(w), **ways)


def _sides(w: Weight) -> tuple[int, int]:
    return w.value.shape[1], math.prod(w.value.shape[2:])


def product_of_rows(
    x: jax.Array | Blocks, w: Weight, sizes: jax.Array, kernel: str, contracted: int
) -> jax.Array:
    """Rows that `rounded_rows` made times their expert's matrix (0), or its transpose (1)."""
    if isinstance(w.value, Channels8):
        return w.value.grouped_product(x, sizes, kernel)
    dtype = w.value.dtype if isinstance(x, Blocks) else x.dtype
    matrices = matrices_of(w, dtype)
    if w.recipe is not None:
        matrices = w.recipe.weights_of_experts(matrices, contracted)
    if isinstance(x, Blocks):
        from mjax.kernels.fp8.block_mosaic import multiply_rows_of_groups

        return multiply_rows_of_groups(x, matrices, sizes, dtype)
    return grouped_matmul(x, matrices, sizes, kernel, transposed=contracted == 1)


def weight_cotangent(
    w: Weight, x: jax.Array, g: jax.Array | Blocks, sizes: jax.Array, kernel: str
) -> Weight | None:
    """The cotangent of experts' weights: their gradient, or their running sum with it added.

    Weights in few bits have none.

    x [M, inputs] are the rows of the experts, g their products' gradients, rounded over rows.
    """
    total, dtype = w.grad_sum, x.dtype
    if w.is_coded:
        return None
    if w.recipe is not None:
        _, x = rounded_rows(x, w, sizes, "input", plain=False)
        nothing = jnp.zeros_like(w.scales)
        w = replace(w, scales=nothing)
    matrices = None if total is None else total.reshape(len(sizes), *_sides(w))
    if isinstance(x, Blocks):
        from mjax.kernels.fp8.block_mosaic import weight_gradient_of_groups

        product = weight_gradient_of_groups(x, g, sizes, dtype, matrices)
    else:
        product = grouped_weight_gradient(x, g, sizes, matrices, kernel)
    if total is None:
        gradient = product.reshape(w.value.shape)
        return replace(w, value=gradient)
    total = product.reshape(total.shape)
    return replace(w, value=None, grad_sum=total)


def weight_cotangent8(
    w: Weight,
    x: tuple[jax.Array, jax.Array],
    g: tuple[jax.Array, jax.Array],
    sizes: jax.Array,
    kernel: str,
    dtype: jnp.dtype,
) -> Weight:
    """`weight_cotangent` in FP8, with the maxima: from (e4m3 [inputs, M], fp32 [2]) of the rows.

    `g` are the same of their gradients: (e5m2 [outputs, M], fp32 [2] of scale and maximum). The
    gradient is in `dtype` where no sum takes it.
    """
    x8, used_x = x
    g8, used_g = g
    shape = len(sizes), len(x8), len(g8)
    scale = 1 / (used_x[0] * used_g[0])
    total = w.grad_sum
    matrices = None if total is None else total.reshape(shape)
    product = grouped_weight_gradient8(x8, g8, sizes, scale, dtype, matrices, kernel)
    like = w.value if w.bits is None else w.bits
    product = product.reshape(like.shape)
    maxima = jnp.stack([used_x[1], jnp.zeros_like(used_x[1]), used_g[1]])
    w = replace(w, value=None, bits=None, transposed=None, scales=maxima)
    if total is None:
        return replace(w, value=product)
    return replace(w, grad_sum=product)
