"""Tensor parallelism's exchanges in doubling pieces, on their way while others are multiplied.

`gather_matmul` multiplies what has arrived while as much again is on its way; `matmul_scatter`
sends half of what is left while it multiplies the rest. Each is the transpose of the other, so
backward passes overlap too. Results and gradients are those of all-gather, matmul, reduce-scatter
and their transposes. An exchange takes log2(tp) transfers, each a copy between two GPUs that costs
no multiprocessor, but some 0.1 ms of the host (plan/xla_options.py). Barriers keep matmuls in
order. Collective matmul after Wang et al., ASPLOS 2023 (doi 10.1145/3567955.3567959); halving and
doubling after Thakur et al., IJHPCA 2005.

The local `matmul(x, w)` is a parameter (precision is its business): any function linear in x and in
w, [B, s, ...] -> a pytree of [B, s, ...], row by row; w may be a pytree.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from mjax.models.barriers import wait_for_all
from mjax.sharding.collectives import Parallel

# Tokens in a shard from which on this pays: shorter matmuls hide no transfer.
MIN_ROWS = 1024

Matmul = Callable[[jax.Array, jax.Array], jax.Array]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def gather_matmul(matmul: Matmul, x: jax.Array, w: jax.Array, parallel: Parallel) -> jax.Array:
    """matmul(all-gather of x [B, S/tp, ...] over tp, w) -> pytree of [B, S, ...]."""
    return _gather(matmul, x, w, parallel)[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def matmul_scatter(matmul: Matmul, h: jax.Array, w: jax.Array, parallel: Parallel) -> jax.Array:
    """Reduce-scatter over tp of matmul(h [B, S, ...], w) -> pytree of [B, S/tp, ...]."""
    return _scatter(matmul, h, w, parallel)


def _gather_forward(matmul, x, w, parallel):
    return _gather(matmul, x, w, parallel)[0], (x, w)


def _gather_backward(matmul, parallel, kept, dy):
    x, w = kept
    # Whole before dx begins: this transfer runs under what made dy.
    whole, dy = wait_for_all(parallel.gather_seq(x), dy)
    dx = _scatter(functools.partial(_by_input, matmul, x), dy, w, parallel)
    return dx, jax.vjp(functools.partial(matmul, whole), w)[1](dy)[0]


def _scatter_forward(matmul, h, w, parallel):
    return _scatter(matmul, h, w, parallel), (h, w)


def _scatter_backward(matmul, parallel, kept, dy):
    h, w = kept
    dh, whole = _gather(functools.partial(_by_input, matmul, h), dy, w, parallel)
    return dh, jax.vjp(functools.partial(matmul, h), w)[1](whole)[0]


gather_matmul.defvjp(_gather_forward, _gather_backward)
matmul_scatter.defvjp(_scatter_forward, _scatter_backward)


def _by_input(matmul: Matmul, x: jax.Array, dy: jax.Array, w: jax.Array) -> jax.Array:
    """The gradient of `matmul` with respect to rows like those of `x`, values aside."""
    rows = jnp.zeros((*jax.tree.leaves(dy)[0].shape[:2], *x.shape[2:]), x.dtype)
    return jax.vjp(lambda rows: matmul(rows, w), rows)[1](dy)[0]


def _gather(matmul, x, w, parallel):
    """(matmul of all shards in the order of the sequence, the gathered x)."""
    held, arrived, outs = x, x, []
    for k in _doubling(parallel):
        more = _swap(held, k, parallel)
        y = matmul(arrived, w)
        arrived, y = wait_for_all(more, y)
        held = _join(held, arrived)
        outs.append(y)
    outs.append(matmul(arrived, w))
    # Device r holds the shards r ^ 0, r ^ 1, ..
    places = jnp.arange(parallel.tp) ^ lax.axis_index("tp")

    def in_order(a):
        shards = a.reshape(a.shape[0], parallel.tp, -1, *a.shape[2:])
        return jnp.take(shards, places, 1, mode="clip").reshape(a.shape)

    return jax.tree.map(in_order, _join(*outs)), jax.tree.map(in_order, held)


def _scatter(matmul, h, w, parallel):
    """Sums travel to the half of the devices that owns them, then on within it."""
    r, n = lax.axis_index("tp"), parallel.tp
    rows = jax.tree.leaves(h)[0].shape[1] // n
    arrived = None  # others' parts of the sums of this device's aligned 2 k shards
    for k in reversed(_doubling(parallel)):
        theirs = (r ^ k) // k * k * rows, k * rows
        y = _add_trees(matmul(_slice_sequence(h, *theirs), w), _half(arrived, (r ^ k) // k % 2))
        h, y = wait_for_all(h, y)
        arrived = _add_trees(_swap(y, k, parallel), _half(arrived, r // k % 2))
    return _add_trees(matmul(_slice_sequence(h, r * rows, rows), w), arrived)


def _doubling(parallel: Parallel) -> list[int]:
    """1, 2, .., tp / 2."""
    return [1 << i for i in range(parallel.tp.bit_length() - 1)]


def _swap(tree, k: int, parallel: Parallel):
    """Of device r ^ k, on device r."""
    pairs = [(i, i ^ k) for i in range(parallel.tp)]
    return jax.tree.map(lambda a: lax.ppermute(a, "tp", pairs), tree)


def _join(*trees):
    return jax.tree.map(lambda *parts: jnp.concatenate(parts, 1), *trees)


def _slice_sequence(tree, start, size: int):
    return jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, start, size, 1), tree)


def _half(tree, which):
    """Rows of the first or the second half."""

    def cut(a):
        return _slice_sequence(a, which * (a.shape[1] // 2), a.shape[1] // 2)

    return None if tree is None else jax.tree.map(cut, tree)


def _add_trees(a, b):
    return a if b is None else jax.tree.map(jnp.add, a, b)
