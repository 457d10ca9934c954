"""Tensor parallelism's exchanges in doubling pieces, which run under the matmuls of other pieces.

`gather_matmul` multiplies the shards that have arrived while as many more are on their way.
`matmul_scatter` sends half of the remaining sums while it multiplies the other half. Each is the
transpose of the other, so backward passes overlap too. Results and gradients are those of an
all-gather, a matmul, a reduce-scatter and their transposes. An exchange takes log2(tp) transfers.
Each is a copy between two GPUs that takes no multiprocessor, but about 0.1 ms of the host
(`plan/xla_options.py`). Barriers keep matmuls in order. The idea of a collective matmul is that of
Wang et al., ASPLOS 2023 (doi 10.1145/3567955.3567959); recursive halving and doubling are those of
Thakur et al., IJHPCA 2005.

The local `matmul(x, w)` is a parameter, because precision is its business: a function linear in x
and in w, [B, s, ...] -> a pytree of [B, s, ...], row by row. w may be a pytree.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from mjax.models.base.barriers import Tree, wait_for_all
from mjax.sharding.collectives import Parallel

# Tokens in a shard from which on this pays: shorter matmuls hide no transfer.
MIN_ROWS = 1024

Matmul = Callable[[Tree, Tree], Tree]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def gather_matmul(matmul: Matmul, x: jax.Array, w: Tree, parallel: Parallel) -> Tree:
    """matmul(all-gather of x [B, S/tp, ...] over tp, w) -> a pytree of [B, S, ...] in x's dtype."""
    y, _ = _gather(matmul, x, w, parallel.tp)
    return y


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def matmul_scatter(matmul: Matmul, h: jax.Array, w: Tree, parallel: Parallel) -> Tree:
    """Reduce-scatter over tp of matmul(h [B, S, ...], w) -> a pytree of [B, S/tp, ...]."""
    return _scatter(matmul, h, w, parallel.tp)


def _gather_forward(matmul, x, w, parallel):
    y, _ = _gather(matmul, x, w, parallel.tp)
    return y, (x, w)


def _gather_backward(matmul, parallel, residuals, dy):
    x, w = residuals
    # Gathered before dx begins: this transfer runs under what computes dy.
    gathered, dy = wait_for_all(parallel.gather_seq(x), dy)
    transposed = functools.partial(_gradient_of_rows, matmul, x)
    dx = _scatter(transposed, dy, w, parallel.tp)
    dw = _gradient_of_weight(matmul, gathered, w, dy)
    return dx, dw


def _scatter_forward(matmul, h, w, parallel):
    y = _scatter(matmul, h, w, parallel.tp)
    return y, (h, w)


def _scatter_backward(matmul, parallel, residuals, dy):
    h, w = residuals
    transposed = functools.partial(_gradient_of_rows, matmul, h)
    dh, gathered = _gather(transposed, dy, w, parallel.tp)
    dw = _gradient_of_weight(matmul, h, w, gathered)
    return dh, dw


gather_matmul.defvjp(_gather_forward, _gather_backward)
matmul_scatter.defvjp(_scatter_forward, _scatter_backward)


def _gradient_of_rows(matmul: Matmul, like: jax.Array, dy: Tree, w: Tree) -> jax.Array:
    """The gradient of `matmul` with respect to its rows, which have the width and dtype of `like`.

    A linear function's gradient does not depend on the rows' values.
    """
    batch, tokens = jax.tree.leaves(dy)[0].shape[:2]
    shape = batch, tokens, *like.shape[2:]
    rows = jnp.zeros(shape, like.dtype)

    def product(rows: jax.Array) -> Tree:
        return matmul(rows, w)

    _, vjp = jax.vjp(product, rows)
    (d_rows,) = vjp(dy)
    return d_rows


def _gradient_of_weight(matmul: Matmul, x: jax.Array, w: Tree, dy: Tree) -> Tree:
    def product(w: Tree) -> Tree:
        return matmul(x, w)

    _, vjp = jax.vjp(product, w)
    (dw,) = vjp(dy)
    return dw


def _gather(matmul: Matmul, x: Tree, w: Tree, tp: int) -> tuple[Tree, Tree]:
    """(matmul of all shards in the order of the sequence, the gathered x)."""
    held = x
    arrived = x
    products = []
    for distance in _distances(tp):
        sent = _swap(held, distance, tp)
        y = matmul(arrived, w)
        arrived, y = wait_for_all(sent, y)
        held = _concatenate(held, arrived)
        products.append(y)
    products.append(matmul(arrived, w))
    y = _concatenate(*products)
    return _in_sequence_order(y, tp), _in_sequence_order(held, tp)


def _in_sequence_order(tree: Tree, tp: int) -> Tree:
    """Shards in the order of arrival, [B, S, ...] -> in the order of the sequence."""
    # Device r holds the shards r ^ 0, r ^ 1, ..
    arrivals = jnp.arange(tp)
    places = arrivals ^ lax.axis_index("tp")

    def reorder(a: jax.Array) -> jax.Array:
        batch, _, *width = a.shape
        shards = a.reshape(batch, tp, -1, *width)
        shards = jnp.take(shards, places, 1, mode="clip")
        return shards.reshape(a.shape)

    return jax.tree.map(reorder, tree)


def _scatter(matmul: Matmul, h: Tree, w: Tree, tp: int) -> Tree:
    """The reduce-scatter of matmul(h, w): sums go to the half of the devices that needs them."""
    device = lax.axis_index("tp")
    tokens = jax.tree.leaves(h)[0].shape[1]
    shard = tokens // tp
    arrived = None  # other devices' parts of the sums of an aligned group of shards
    for distance in reversed(_distances(tp)):
        partner = device ^ distance
        group = partner // distance
        size = distance * shard
        piece = _slice_sequence(h, group * distance * shard, size)
        y = matmul(piece, w)
        y = _add_trees(y, _half(arrived, group % 2))
        h, y = wait_for_all(h, y)
        received = _swap(y, distance, tp)
        kept = _half(arrived, device // distance % 2)
        arrived = _add_trees(received, kept)
    piece = _slice_sequence(h, device * shard, shard)
    y = matmul(piece, w)
    return _add_trees(y, arrived)


def _distances(tp: int) -> list[int]:
    """1, 2, 4, .., tp / 2."""
    steps = tp.bit_length() - 1
    return [1 << step for step in range(steps)]


def _swap(tree: Tree, distance: int, tp: int) -> Tree:
    """The arrays that device r ^ `distance` holds, on device r."""
    pairs = [(device, device ^ distance) for device in range(tp)]

    def swap(a: jax.Array) -> jax.Array:
        return lax.ppermute(a, "tp", pairs)

    return jax.tree.map(swap, tree)


def _concatenate(*trees: Tree) -> Tree:
    def concatenate(*parts: jax.Array) -> jax.Array:
        return jnp.concatenate(parts, 1)

    return jax.tree.map(concatenate, *trees)


def _slice_sequence(tree: Tree, start: jax.Array, size: int) -> Tree:
    """`size` rows of [B, s, ...] from `start` on."""

    def cut(a: jax.Array) -> jax.Array:
        return lax.dynamic_slice_in_dim(a, start, size, 1)

    return jax.tree.map(cut, tree)


def _half(tree: Tree | None, which: jax.Array) -> Tree | None:
    """The first (0) or the second half (1) of the rows of [B, s, ...]; None of None."""
    if tree is None:
        return None

    def half(a: jax.Array) -> jax.Array:
        size = a.shape[1] // 2
        return lax.dynamic_slice_in_dim(a, which * size, size, 1)

    return jax.tree.map(half, tree)


def _add_trees(a: Tree, b: Tree | None) -> Tree:
    if b is None:
        return a
    return jax.tree.map(jnp.add, a, b)
