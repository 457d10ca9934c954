"""Weights of experts as grouped matmuls read them, and the cotangent that their gradient makes."""

from dataclasses import replace

import jax

from mjax.kernels.grouped import grouped_weight_gradient
from mjax.models.weight import Weight


def matrices_of(w: Weight) -> jax.Array:
    """The value [E, inputs, *outputs] of experts' weights as matrices [E, inputs, outputs]."""
    return w.value.reshape(*w.value.shape[:2], -1)


def weight_cotangent(
    w: Weight, x: jax.Array, g: jax.Array, sizes: jax.Array, kernel: str
) -> Weight:
    """The cotangent of experts' weights: their gradient, or their running sum with it added.

    x [M, inputs] and g [M, outputs] are the rows of the experts and their gradients.
    """
    total = w.grad_sum
    if total is None:
        product = grouped_weight_gradient(x, g, sizes, None, kernel)
        return replace(w, value=product.reshape(w.value.shape))
    matrices = total.reshape(matrices_of(w).shape)
    product = grouped_weight_gradient(x, g, sizes, matrices, kernel)
    return replace(w, value=None, grad_sum=product.reshape(total.shape))
