"""Parts of recurrences in chunks (`ssd.py`, `gated_delta.py`): cuts, decays, blocks, states.

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


def in_blocks(function: Callable, log: jax.Array, of_chunk: tuple) -> Any:
    """`function` of each chunk, whose arguments are `of_chunk`, [B, C, ...]; so is what it gives.

    A matrix for each head of `log` [B, C, Q, H] bounds how many are computed at a time.
    """
    batch, chunks, tokens, heads = log.shape
    flat = jax.tree.map(lambda v: v.reshape(batch * chunks, *v.shape[2:]), of_chunk)
    at_a_time = max(1, BLOCK_BYTES // (heads * tokens * tokens * log.dtype.itemsize))
    if at_a_time >= batch * chunks:
        made = jax.vmap(function)(*flat)
    else:  # the backward of a block computes its matrices again
        apart = jax.checkpoint(lambda one: function(*one))
        made = lax.map(apart, flat, batch_size=at_a_time)
    return jax.tree.map(lambda v: v.reshape(batch, chunks, *v.shape[1:]), made)


# ---- states, from chunk to chunk -----------------------------------------------------------------


def pass_states(advance: Callable, chunks: Any, initial: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(the state before each chunk [B, C, ...], the last one [B, ...]).

    `advance(chunk, state)` gives the state after a chunk of each row; `chunks` is a tree of arrays
    [B, C, ...].
    """

    def step(state: jax.Array, chunk: Any) -> tuple[jax.Array, jax.Array]:
        return advance(chunk, state), state

    final, states = lax.scan(step, initial, _swapped(chunks))
    return _swapped(states), final


def pass_back(
    advance: Callable, chunks: Any, states: jax.Array, gradients: tuple[jax.Array, jax.Array]
) -> tuple[Any, jax.Array]:
    """The gradients of `chunks` and `initial`, from those of what `pass_states` gave."""
    d_states, d_final = gradients

    def step(d_after: jax.Array, of_chunk: tuple) -> tuple[jax.Array, Any]:
        chunk, before, d_before = of_chunk
        _, through = jax.vjp(advance, chunk, before)
        d_chunk, d_state = through(d_after)
        return d_before + d_state, d_chunk

    of_chunks = _swapped((chunks, states, d_states))
    d_initial, d_chunks = lax.scan(step, d_final, of_chunks, reverse=True)
    return _swapped(d_chunks), d_initial


def _swapped(tree: Any) -> Any:
    """[B, C, ...] <-> [C, B, ...]."""
    return jax.tree.map(lambda v: jnp.swapaxes(v, 0, 1), tree)
