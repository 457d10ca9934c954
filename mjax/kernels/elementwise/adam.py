"""AdamW for one parameter: fp32 arithmetic, moments stored in dtypes of their own.

Decoupled weight decay and bias correction as in Loshchilov & Hutter (arXiv:1711.05101) and
`optax.adamw`. The update is elementwise, so it applies to a shard of a parameter as it is.
`update_stack_row` updates one row of a stack where it lies. XLA writes the new moments to memory of
their own first, 52 bytes an entry, and to put gradients of layers into a stack takes 36. Our Triton
kernel (`adam_triton.py`) takes 28: each array is read once, and written once.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mjax.kernels.base.chooser import choose
from mjax.kernels.base.triton_call import triton_call

BLOCK, WARPS = 1024, 4  # elements of a program


class Betas(NamedTuple):
    """The static numbers of AdamW."""

    b1: float
    b2: float
    eps: float


class AdamNumbers(NamedTuple):
    """The numbers of a step, fp32 [] each.

    lr: learning rate. decay: decoupled weight decay. scale: a factor on the gradient. count: of the
    step, from 1. keep: whether anything changes.
    """

    lr: jax.Array
    decay: jax.Array
    scale: jax.Array
    count: jax.Array
    keep: jax.Array


Stacks = tuple[jax.Array, jax.Array, jax.Array]  # parameter, mu, nu: [L, ...] each


def update_stack_row(
    stacks: Stacks, grad: jax.Array, row: int, numbers: AdamNumbers, betas: Betas
) -> Stacks:
    """The stacks after a step of row `row` by `grad` [...], in their dtypes."""
    if choose("adam_row", grad.dtype, grad.shape).name == "triton":
        return _update_by_kernel(stacks, grad, row, numbers, betas)
    old = [lax.dynamic_index_in_dim(stack, row, 0, keepdims=False) for stack in stacks]
    grad = grad.astype(jnp.float32) * numbers.scale
    mu, nu = adam_moments(grad, *old[1:], betas.b1, betas.b2)
    param = old[0].astype(jnp.float32)
    direction = adam_direction(mu, nu, numbers.count, *betas)
    param = param - numbers.lr * (direction + numbers.decay * param)
    stored = []
    for stack, before, after in zip(stacks, old, (param, mu, nu), strict=True):
        after = jnp.where(numbers.keep, after.astype(stack.dtype), before)
        stored.append(lax.dynamic_update_index_in_dim(stack, after, row, 0))
    return tuple(stored)


def _update_by_kernel(
    stacks: Stacks, grad: jax.Array, row: int, numbers: AdamNumbers, betas: Betas
) -> Stacks:
    from mjax.kernels.elementwise.adam_triton import update_row as kernel

    corrections = bias_corrections(numbers.count, betas.b1, betas.b2)
    floats = numbers.lr, numbers.decay, numbers.scale, *corrections, numbers.keep
    floats = jnp.stack([jnp.asarray(x, jnp.float32) for x in floats])
    made = triton_call(
        kernel,
        [*stacks, grad, jnp.full(1, row, jnp.int32), floats],
        [jax.ShapeDtypeStruct(stack.shape, stack.dtype) for stack in stacks],
        programs=-(-grad.size // BLOCK),
        warps=WARPS,
        aliases={0: 0, 1: 1, 2: 2},
        SIZE=grad.size,
        BLOCK=BLOCK,
        B1=betas.b1,
        B2=betas.b2,
        EPS=betas.eps,
    )
    return tuple(made)


# ---- arithmetic --------------------------------------------------------------------------------


def adam_moments(
    grad: jax.Array, mu: jax.Array, nu: jax.Array, b1: float, b2: float
) -> tuple[jax.Array, jax.Array]:
    """(new average of the gradient, new average of its square), fp32; any shape."""
    grad = grad.astype(jnp.float32)
    mu = mu.astype(jnp.float32)
    nu = nu.astype(jnp.float32)
    mu = b1 * mu + (1 - b1) * grad
    nu = b2 * nu + (1 - b2) * jnp.square(grad)
    return mu, nu


def adam_direction(
    mu: jax.Array, nu: jax.Array, count: jax.Array, b1: float, b2: float, eps: float
) -> jax.Array:
    """The step of AdamW per unit of learning rate, without decay, fp32; to be subtracted.

    `count` is the number of the step, 1 at first. The bias corrections are scalar factors, because
    the compiler rewrites divisors, and in a loop it does so otherwise than outside.
    """
    mu_correction, nu_correction = bias_corrections(count, b1, b2)
    return mu * mu_correction / (jnp.sqrt(nu * nu_correction) + eps)


def bias_corrections(count: jax.Array, b1: float, b2: float) -> tuple[jax.Array, jax.Array]:
    """The factors on mu and nu in step `count`."""
    t = count.astype(jnp.float32)
    return 1 / (1 - b1**t), 1 / (1 - b2**t)
