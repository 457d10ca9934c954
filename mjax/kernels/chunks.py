"""What recurrences in chunks share (`ssd.py`, `gated_delta.py`): cuts, documents, decays, blocks.

A sequence is cut in chunks of Q tokens. Within a chunk its tokens meet in [Q, Q] matrices, which
exist for a few chunks at a time (`BLOCK_BYTES`). Letters: B batch, S sequence, C chunks, Q tokens
of a chunk, H heads, G groups of heads, R heads of a group.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

BLOCK_BYTES = 2**28  # of the fp32 matrices of the chunks that are computed at a time


def wide_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """The dtype of states and sums: fp32, or fp64 for inputs of fp64."""
    return jnp.promote_types(dtype, jnp.float32)


def cut(v: jax.Array, chunk: int) -> jax.Array:
    """[B, S, ...] -> [B, C, Q, ...], with zeros at the end."""
    padded = -v.shape[1] % chunk
    if padded:
        v = jnp.pad(v, [(0, 0), (0, padded), *[(0, 0)] * (v.ndim - 2)])
    return v.reshape(v.shape[0], -1, chunk, *v.shape[2:])


def documents_of(starts: jax.Array, chunk: int) -> jax.Array:
    """bool [B, S], the tokens that start a document -> how many did so far, int32 [B, C, Q]."""
    documents = jnp.cumsum(starts, 1, dtype=jnp.int32)
    padded = -starts.shape[1] % chunk
    documents = jnp.pad(documents, [(0, 0), (0, padded)], mode="edge")
    return documents.reshape(len(starts), -1, chunk)


def documents_before(documents: jax.Array) -> jax.Array:
    """The document of the token before each chunk: [B, C, Q] -> [B, C]."""
    return jnp.pad(documents[:, :-1, -1], [(0, 0), (1, 0)])


def by_group(x: jax.Array, groups: int) -> jax.Array:
    """[..., H, P] -> [..., G, R, P]."""
    return x.reshape(*x.shape[:-2], groups, x.shape[-2] // groups, x.shape[-1])


def decays_between(log: jax.Array, documents: jax.Array | None, groups: int) -> jax.Array:
    """How much of what token s wrote is left at token q of its chunk: [G, R, Q, Q].

    `log` [Q, H] are running sums of the logarithms of decays. It is 0 for later tokens s, and for
    those of other `documents` [Q].
    """
    tokens = len(log)
    seen = jnp.tril(jnp.ones((tokens, tokens), bool))
    if documents is not None:
        seen &= documents[:, None] == documents
    apart = log[:, None] - log
    decay = jnp.exp(jnp.where(seen[..., None], apart, -jnp.inf))
    return jnp.moveaxis(decay, -1, 0).reshape(groups, -1, tokens, tokens)


def in_blocks(function: Callable, of_chunk: Any, matrix_bytes: int) -> Any:
    """`function` of each chunk, for a tree of arrays [B, C, ...]: what it gives, [B, C, ...].

    `matrix_bytes` of a chunk bound how many are computed at a time.
    """
    batch, chunks = jax.tree.leaves(of_chunk)[0].shape[:2]
    flat = jax.tree.map(lambda v: v.reshape(batch * chunks, *v.shape[2:]), of_chunk)
    at_a_time = max(1, BLOCK_BYTES // matrix_bytes)
    if at_a_time >= batch * chunks:
        made = jax.vmap(function)(flat)
    else:  # the backward of a block computes its matrices again
        made = lax.map(jax.checkpoint(function), flat, batch_size=at_a_time)
    return jax.tree.map(lambda v: v.reshape(batch, chunks, *v.shape[1:]), made)
