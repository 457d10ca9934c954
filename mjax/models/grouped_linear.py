"""The matmul of all experts of a layer: rows sorted by expert, each times its expert's weight."""

import functools
import math
from dataclasses import replace

import jax

from mjax.errors import UserError
from mjax.kernels.grouped import (
    grouped_matmul,
    grouped_matmul_transposed,
    grouped_weight_gradient,
)
from mjax.models.weight import Weight


def grouped_linear(
    x: jax.Array, w: Weight, sizes: jax.Array, implementation: str = "auto"
) -> jax.Array:
    """x [M, *inputs], w [G, *inputs, *outputs], sizes int32 [G] -> [M, *outputs], in x's dtype.

    Rows are sorted by group: `sizes` counts those of each. Rows beyond sum(sizes) become zero.
    `w.inputs` counts the axes after G that are contracted. With a running sum the cotangent of `w`
    holds the next one, as that of `matmul` does.
    """
    if w.recipe is not None:
        raise UserError(
            f"precision.fp8: the grouped matmul {w.name} is built in bf16 and fp32 only; "
            "set precision.fp8=none"
        )
    matrices = grouped_matrices(w)
    rows = x.reshape(len(x), matrices.value.shape[1])
    y = _grouped_product(implementation, rows, matrices, sizes)
    return y.reshape(len(x), *w.value.shape[1 + w.inputs :])


def grouped_matrices(w: Weight) -> Weight:
    """A weight [G, *inputs, *outputs] and its running sum as matrices [G, K, N]."""
    groups, *inputs = w.value.shape[: 1 + w.inputs]
    shape = groups, math.prod(inputs), -1
    total = None if w.grad_sum is None else w.grad_sum.reshape(shape)
    return replace(w, value=w.value.reshape(shape), grad_sum=total, inputs=1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped_product(implementation: str, x: jax.Array, w: Weight, sizes: jax.Array) -> jax.Array:
    """x [M, K], w [G, K, N] -> [M, N]."""
    return grouped_matmul(x, w.value, sizes, implementation)


def _grouped_product_forward(
    implementation: str, x: jax.Array, w: Weight, sizes: jax.Array
) -> tuple[jax.Array, tuple]:
    return grouped_matmul(x, w.value, sizes, implementation), (x, w, sizes)


def _grouped_product_backward(
    implementation: str, saved: tuple, g: jax.Array
) -> tuple[jax.Array, Weight, None]:
    x, w, sizes = saved
    dx = grouped_matmul_transposed(g, w.value, sizes, implementation)
    product = grouped_weight_gradient(x, g, sizes, w.grad_sum, implementation)
    if w.grad_sum is None:
        return dx, replace(w, value=product), None
    return dx, replace(w, value=None, grad_sum=product), None


_grouped_product.defvjp(_grouped_product_forward, _grouped_product_backward)
