"""AdamW for one parameter: fp32 arithmetic, moments stored in dtypes of their own.

Decoupled weight decay and bias correction as in Loshchilov & Hutter (arXiv:1711.05101) and
`optax.adamw`. Elementwise, so a shard of a parameter is updated like the whole.
"""

import jax
import jax.numpy as jnp


def adam_moments(
    grad: jax.Array, mu: jax.Array, nu: jax.Array, b1: float, b2: float
) -> tuple[jax.Array, jax.Array]:
    """Averages of the gradient and its square, in fp32; any shape."""
    grad, mu, nu = (x.astype(jnp.float32) for x in (grad, mu, nu))
    return b1 * mu + (1 - b1) * grad, b2 * nu + (1 - b2) * jnp.square(grad)


def adam_direction(
    mu: jax.Array, nu: jax.Array, count: jax.Array, b1: float, b2: float, eps: float
) -> jax.Array:
    """What AdamW subtracts per unit of learning rate, without decay; `count` is 1 at first."""
    t = count.astype(jnp.float32)
    mu_hat, nu_hat = mu / (1 - b1**t), nu / (1 - b2**t)
    return mu_hat / (jnp.sqrt(nu_hat) + eps)
