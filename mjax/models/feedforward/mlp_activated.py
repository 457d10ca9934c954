"""A plain feed-forward block on Hopper GPUs, with its activation function within its matmuls.

By themselves the function and its backward read and write arrays [tokens, F] from and to memory.
Here the first matmul writes act(u) and act'(u), and the backward's matmul by the second weight
multiplies by act'(u) before it writes (`kernels/matmul/activated_mosaic.py`). Invariant: outputs
and gradients are those of the two matmuls and the function, but for what is rounded: act'(u), not
u.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from mjax.kernels.base.chooser import choose
from mjax.models.base.weight import Weight, as_matrix, product_cotangent


def in_matmuls(x: jax.Array, up: Weight, bias: jax.Array | None, act: str) -> bool:
    """Whether `activated_mlp` computes a block of x [..., D] and `up` [D, F]."""
    if bias is None or up.recipe is not None:
        return False
    shape = math.prod(x.shape[:-1]), *up.value.shape
    return choose("activated_matmul", x.dtype, shape, act=act).name == "mosaic"


def activated_mlp(x: jax.Array, up: Weight, bias: jax.Array, down: Weight, act: str) -> jax.Array:
    """act(x @ up + bias) @ down: x [..., D] -> [..., D], by `up` [D, F], bias [F], `down` [F, D].

    Its backward keeps x, act(u) and act'(u), which have no names that a policy could keep.
    """
    rows = x.reshape(-1, x.shape[-1])
    return _activated_mlp(act, rows, as_matrix(up), bias, as_matrix(down)).reshape(x.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _activated_mlp(act: str, x: jax.Array, up: Weight, bias: jax.Array, down: Weight) -> jax.Array:
    return _activated_mlp_forward(act, x, up, bias, down)[0]


def _activated_mlp_forward(act, x, up, bias, down):
    from mjax.kernels.matmul.activated_mosaic import multiply_and_activate

    made = multiply_and_activate(x, up.value, bias.astype(jnp.float32), act)
    out, slope = lax.optimization_barrier(made)
    return out @ down.value, (x, out, slope, up, bias, down)


def _activated_mlp_backward(act, saved, g):
    from mjax.kernels.matmul.activated_mosaic import multiply_by_slope

    x, out, slope, up, bias, down = saved
    du, sums = multiply_by_slope(g, down.value, slope)
    d_down = product_cotangent(out, g, down)
    d_up = product_cotangent(x, du, up)
    return du @ up.value.T, d_up, sums.astype(bias.dtype), d_down


_activated_mlp.defvjp(_activated_mlp_forward, _activated_mlp_backward)
