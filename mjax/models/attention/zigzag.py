"""The order of tokens under context parallelism.

A sequence is cut into 2*cp chunks, and device r holds chunks r and 2*cp-1-r, so all devices see
equally many keys (Brandon et al., arXiv 2311.09431).
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def zigzag(size: int, cp: int) -> np.ndarray:
    """The order of the columns of a batch that puts chunks r and 2*cp-1-r on device r: int [size].

    `size` is the number of columns.
    """
    chunks = np.arange(size).reshape(2 * cp, -1)
    order = []
    for device in range(cp):
        order += [chunks[device], chunks[2 * cp - 1 - device]]
    return np.concatenate(order)


def natural(x: jax.Array, shards: int, axis: int = 1) -> jax.Array:
    """Zigzag shards, concatenated along `axis` -> the order of the sequence."""
    length = x.shape[axis] // (2 * shards)
    before = x.shape[:axis]
    behind = x.shape[axis + 1 :]
    chunks = x.reshape(*before, shards, 2, length, *behind)
    low = lax.index_in_dim(chunks, 0, axis + 1, keepdims=False)
    high = lax.index_in_dim(chunks, 1, axis + 1, keepdims=False)
    descending = jnp.flip(high, axis)
    ordered = jnp.concatenate([low, descending], axis)
    return ordered.reshape(x.shape)


def zigzag_shards(x: jax.Array, shards: int) -> jax.Array:
    """[B, S, ...] in the order of the sequence -> zigzag shards: the inverse of `natural`."""
    batch, tokens, *rest = x.shape
    chunks = x.reshape(batch, 2, shards, tokens // (2 * shards), *rest)
    low = chunks[:, 0]
    high = jnp.flip(chunks[:, 1], 1)
    return jnp.stack([low, high], 2).reshape(x.shape)
