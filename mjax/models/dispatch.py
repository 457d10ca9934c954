"""The dispatch of tokens to the experts that a device holds: pairs of both, sorted by expert.

Invariant: every pair of a token and an expert that is held here has one row, whatever the routing.
Both directions gather rows; neither scatters, so sums have a fixed order.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Dispatch(NamedTuple):
    """The order in which this device's experts take M rows, each a pair of token and expert; int32.

    pairs [M]: the pair of each row, counted along [T, k]. places [T, k]: the row of each pair, M or
    more where another device holds the expert. sizes [E/ep]: the rows of each expert; rows behind
    them belong to none.
    """

    pairs: jax.Array
    places: jax.Array
    sizes: jax.Array


def make_dispatch(experts: jax.Array, first: jax.Array | int, held: int) -> Dispatch:
    """The dispatch of tokens to this device's experts `first`, .. `first + held - 1`.

    `experts` int32 [T, k] are those of each token. M is T * min(k, held), so any routing fits.
    """
    tokens, k = experts.shape
    local = experts.reshape(-1) - first
    local = jnp.where((local >= 0) & (local < held), local, held)
    order = jnp.argsort(local, stable=True).astype(jnp.int32)
    row = jnp.arange(tokens * k, dtype=jnp.int32)
    places = jnp.zeros_like(row).at[order].set(row, unique_indices=True)
    sizes = jnp.zeros(held + 1, jnp.int32).at[local].add(1)[:held]
    places = jnp.where(local < held, places, len(row))
    return Dispatch(order[: tokens * min(k, held)], places.reshape(tokens, k), sizes)


def rows_of_tokens(x: jax.Array, dispatch: Dispatch) -> jax.Array:
    """The rows [M, ...] of a dispatch, from one entry a token, [T, ...]."""
    k = dispatch.places.shape[1]
    return x[dispatch.pairs // k]


def sums_of_rows(rows: jax.Array, dispatch: Dispatch) -> jax.Array:
    """[T, D]: the sum of each token's rows [M, D], in fp32 and then in their dtype."""
    of_pairs = jnp.take(rows, dispatch.places, axis=0, mode="fill", fill_value=0)
    return jnp.sum(of_pairs, 1, dtype=jnp.float32).astype(rows.dtype)
