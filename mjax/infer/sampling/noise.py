"""Gumbel noise as a pure function of a seed, a sample, a position and a token.

Adding it to log-probabilities and taking the largest draws from the distribution. A number does not
depend on the row that it is computed in, on other rows or on the size of the vocabulary, so a
request's tokens do not change with what runs beside it.
"""

import jax
import jax.numpy as jnp
from jax.extend.random import threefry2x32_p


def noise(seed: jax.Array, index: jax.Array, position: jax.Array, vocabulary: int) -> jax.Array:
    """Standard Gumbel noise, fp32 [R, vocabulary].

    seed: uint32 [R], of the request.
    index: int32 [R], the number of the sample among those of the request.
    position: int32 [R], the place of the new token in its text.
    """
    tag = jnp.full_like(seed, 0x6D6A6178)  # no other use of a seed begins with it
    key = _cipher((seed, tag), (index.astype(jnp.uint32), position.astype(jnp.uint32)))
    token = jnp.arange(vocabulary, dtype=jnp.uint32)[None]
    return gumbel(*_cipher((key[0][:, None], key[1][:, None]), (token, jnp.zeros_like(token))))


def gumbel(high: jax.Array, low: jax.Array) -> jax.Array:
    """Gumbel numbers, fp32, of 64 uniform random bits in two uint32 arrays.

    A number is -log(-log(1 - u)). Both u and 1 - u are computed from bits where they are small, as
    a difference to 1 in fp32 would have 24 bits: with u in steps of 2^-24 no number exceeds 16.6.
    """
    below_half = high < jnp.uint32(1 << 31)
    small = jnp.where(below_half, _middle(high, low), _middle(~high, ~low))
    exponential = jnp.where(below_half, -jnp.log1p(-small), -jnp.log(small))
    return -jnp.log(exponential)


def _middle(high: jax.Array, low: jax.Array) -> jax.Array:
    """The middle of the interval of length 2^-64 that begins at these 64 bits after the point."""
    low = low.astype(jnp.float32) * 2.0**-64 + 2.0**-65
    return high.astype(jnp.float32) * 2.0**-32 + low


def _cipher(
    key: tuple[jax.Array, jax.Array], count: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Threefry (Salmon et al., 2011) of counts under keys, broadcast: two uint32 arrays."""
    return threefry2x32_p.bind(*jnp.broadcast_arrays(*key, *count))
