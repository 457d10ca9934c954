"""AdamW for one parameter: fp32 arithmetic, moments stored in dtypes of their own.

Decoupled weight decay and bias correction as in Loshchilov & Hutter (arXiv:1711.05101) and
`optax.adamw`. The update is elementwise, so it applies to a shard of a parameter as it is.
"""

import jax
import jax.numpy as jnp


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
    t = count.astype(jnp.float32)
    mu_correction = 1 / (1 - b1**t)
    nu_correction = 1 / (1 - b2**t)
    return mu * mu_correction / (jnp.sqrt(nu * nu_correction) + eps)
