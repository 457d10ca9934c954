"""A mixer of integers: random bits that are a pure function of what is mixed.

It takes a few integer operations, which fuse into any kernel; no random array exists. It is C.
Wellons' lowbias32 (https://nullprogram.com/blog/2018/07/31/).
"""

import jax
import jax.numpy as jnp


def mix(x: jax.Array) -> jax.Array:
    """A bijection of uint32 in which every bit of the argument moves every bit of the result."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
