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
    """What AdamW subtracts per unit of learning rate, without decay; `count` is 1 at first.

    The bias corrections are scalar factors, not divisors: those the compiler would rewrite, in a
    loop otherwise than outside, and the bits would differ.
    """
    t = count.astype(jnp.float32)
    to_mu_hat, to_nu_hat = 1 / (1 - b1**t), 1 / (1 - b2**t)
    return mu * to_mu_hat / (jnp.sqrt(nu * to_nu_hat) + eps)
