"""The dispatch of tokens to the experts that a device holds: pairs of both, sorted by expert.

Invariant: every pair of a token and an expert that is held here has one row, whatever the routing.
Pairs whose expert's number no device has were dropped by the router.
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


class SortedPairs(NamedTuple):
    """All pairs of T tokens and k experts, sorted by expert; int32.

    local [T*k]: the number of each pair's expert among those held here, or how many are held.
    order [T*k]: the pairs as sorted. places [T*k]: where in that order each pair is.
    sizes [E/ep]: the pairs of each held expert.
    """

    local: jax.Array
    order: jax.Array
    places: jax.Array
    sizes: jax.Array


def sort_pairs(experts: jax.Array, first: jax.Array | int, held: int) -> SortedPairs:
    """The pairs of tokens and `experts` int32 [T, k], sorted; `first`, .. are held here."""
    local = experts.reshape(-1) - first
    is_held = (local >= 0) & (local < held)
    local = jnp.where(is_held, local, held)
    order = jnp.argsort(local, stable=True)
    order = order.astype(jnp.int32)
    row = jnp.arange(len(local), dtype=jnp.int32)
    places = jnp.zeros_like(row)
    places = places.at[order].set(row, unique_indices=True)
    sizes = jnp.zeros(held + 1, jnp.int32)
    sizes = sizes.at[local].add(1)
    return SortedPairs(local, order, places, sizes[:held])


def most_rows(experts: jax.Array, held: int) -> int:
    """The rows that any routing of tokens to `experts` int32 [T, k] fits in, on this device."""
    tokens, k = experts.shape
    return tokens * min(k, held)


def make_dispatch(
    experts: jax.Array,
    first: jax.Array | int,
    held: int,
    most: int | None = None,
) -> Dispatch:
    """The dispatch of tokens to this device's experts `first`, .. `first + held - 1`.

    `experts` int32 [T, k] are those of each token. M is `most_rows`, so any routing fits. `most`
    rows or less are made if it is given; they must suffice.
    """
    pairs = sort_pairs(experts, first, held)
    rows = most_rows(experts, held)
    if most is not None:
        rows = min(rows, most)
    nowhere = len(pairs.places)
    places = jnp.where(pairs.local < held, pairs.places, nowhere)
    return Dispatch(pairs.order[:rows], places.reshape(experts.shape), pairs.sizes)


def make_padded_dispatch(
    experts: jax.Array,
    first: jax.Array | int,
    held: int,
    rows: int,
) -> Dispatch:
    """`make_dispatch` with `rows` rows for each expert, which must suffice; M is held * rows.

    Rows that no pair takes have the pair T * k, which does not exist.
    """
    tokens, k = experts.shape
    pairs = sort_pairs(experts, first, held)
    starts = jnp.cumsum(pairs.sizes) - pairs.sizes
    row = jnp.arange(rows, dtype=jnp.int32)
    of_rows = jnp.take(pairs.order, starts[:, None] + row, mode="clip")
    is_taken = row < pairs.sizes[:, None]
    of_rows = jnp.where(is_taken, of_rows, tokens * k)
    expert = jnp.minimum(pairs.local, held - 1)
    within = pairs.places - starts[expert]
    nowhere = held * rows
    places = jnp.where(pairs.local < held, expert * rows + within, nowhere)
    sizes = jnp.full(held, rows, jnp.int32)
    return Dispatch(of_rows.reshape(-1), places.reshape(tokens, k), sizes)


def rows_of_tokens(x: jax.Array, dispatch: Dispatch) -> jax.Array:
    """The rows [M, D] of a dispatch, from one entry a token, [T, D]."""
    k = dispatch.places.shape[1]
    tokens = dispatch.pairs // k
    width = x.shape[1]
    together = 4 // x.dtype.itemsize
    if together == 1 or width % together:
        return jnp.take(x, tokens, axis=0, mode="clip")
    # XLA's gather moves an element at a time. Two as one take 0.7 of the time on an H200.
    words = width // together
    words = x.reshape(-1, words, together)
    words = jax.lax.bitcast_convert_type(words, jnp.uint32)
    rows = jnp.take(words, tokens, axis=0, mode="clip")
    rows = jax.lax.bitcast_convert_type(rows, x.dtype)
    return rows.reshape(-1, width)


def gates_of_rows(gates: jax.Array, dispatch: Dispatch) -> jax.Array:
    """The gates [M] of a dispatch, from those of all pairs, [T, k]; 0 where there is no pair."""
    of_pairs = gates.reshape(-1)
    return jnp.take(of_pairs, dispatch.pairs, mode="fill", fill_value=0)


def gates_of_pairs(of_rows: jax.Array, dispatch: Dispatch) -> jax.Array:
    """Numbers of all pairs, [T, k], from those of rows [M]; 0 where a pair has no row."""
    return jnp.take(of_rows, dispatch.places, mode="fill", fill_value=0)


def sums_of_rows(rows: jax.Array, dispatch: Dispatch) -> jax.Array:
    """[T, D]: the sum of each token's rows [M, D], in fp32 and then in their dtype."""
    of_pairs = jnp.take(rows, dispatch.places, axis=0, mode="fill", fill_value=0)
    sums = jnp.sum(of_pairs, 1, dtype=jnp.float32)
    return sums.astype(rows.dtype)
