"""Tensor parallelism's exchanges as rings whose transfers run under the matmuls.

`gather_matmul` multiplies the shard at hand while the next one arrives; `matmul_scatter` multiplies
the next part while partial sums travel. Each is the transpose of the other, so backward passes are
rings too. Results and gradients are those of all-gather, matmul, reduce-scatter and their
transposes; sums over devices are rounded to the activations' dtype at every hop, as NCCL does.
Barriers pin the order: XLA's scheduler would start all transfers first. Collective matmul after
Wang et al., ASPLOS 2023 (doi 10.1145/3567955.3567959).

The local `matmul(x, w)` is a parameter (precision is its business): any function linear in x and in
w, [B, s, ...] -> a pytree of [B, s, ...], row by row; w may be a pytree.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from mjax.sharding.collectives import Parallel

# Shards of fewer tokens are not worth a ring: their matmuls are shorter than a transfer's latency.
RING_ROWS = 1024

Matmul = Callable[[jax.Array, jax.Array], jax.Array]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def gather_matmul(matmul: Matmul, x: jax.Array, w: jax.Array, parallel: Parallel) -> jax.Array:
    """matmul(all-gather of x [B, S/tp, ...] over tp, w) -> pytree of [B, S, ...]."""
    return _gather_ring(matmul, x, w, parallel)[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def matmul_scatter(matmul: Matmul, h: jax.Array, w: jax.Array, parallel: Parallel) -> jax.Array:
    """Reduce-scatter over tp of matmul(h [B, S, ...], w) -> [B, S/tp, ...]."""
    return _scatter_ring(matmul, h, w, parallel)


def _gather_forward(matmul, x, w, parallel):
    return _gather_ring(matmul, x, w, parallel)[0], (x, w)


def _gather_backward(matmul, parallel, kept, dy):
    x, w = kept
    # Whole before dx's ring starts: its transfer runs under what made dy, not between two rings.
    whole, dy = lax.optimization_barrier((parallel.gather_seq(x), dy))
    dx = _scatter_ring(functools.partial(_by_input, matmul, x), dy, w, parallel)
    return dx, jax.vjp(functools.partial(matmul, whole), w)[1](dy)[0]


def _scatter_forward(matmul, h, w, parallel):
    return _scatter_ring(matmul, h, w, parallel), (h, w)


def _scatter_backward(matmul, parallel, kept, dy):
    h, w = kept
    dh, whole = _gather_ring(functools.partial(_by_input, matmul, h), dy, w, parallel)
    return dh, jax.vjp(functools.partial(matmul, h), w)[1](whole)[0]


gather_matmul.defvjp(_gather_forward, _gather_backward)
matmul_scatter.defvjp(_scatter_forward, _scatter_backward)


def _by_input(matmul: Matmul, x: jax.Array, dy: jax.Array, w: jax.Array) -> jax.Array:
    """The gradient of `matmul` with respect to rows like those of `x`, whose values it needs not."""
    rows = jnp.zeros((*jax.tree.leaves(dy)[0].shape[:2], *x.shape[2:]), x.dtype)
    return jax.vjp(lambda rows: matmul(rows, w), rows)[1](dy)[0]


def _gather_ring(matmul, x, w, parallel):
    """(matmul of all shards in the order of the sequence, the gathered x)."""
    n, held, outs = parallel.tp, [x], []
    to_previous = [(i, (i - 1) % n) for i in range(n)]
    for step in range(n):
        if step + 1 < n:
            held.append(lax.ppermute(held[step], "tp", to_previous))
        y = matmul(held[step], w)
        if step + 1 < n:
            held[step + 1], y = lax.optimization_barrier((held[step + 1], y))
        outs.append(y)
    # Device r now has the shards r, r + 1, ..: turn them round to 0, 1, ..
    start = (n - lax.axis_index("tp")) % n * x.shape[1]

    def in_order(*parts):
        twice = jnp.concatenate([*parts, *parts[:-1]], 1)
        return lax.dynamic_slice_in_dim(twice, start, n * parts[0].shape[1], 1)

    return jax.tree.map(in_order, *outs), in_order(*held)


def _scatter_ring(matmul, h, w, parallel):
    """Sums travel towards their owner: device r first multiplies the part of device r - 1."""
    n, r = parallel.tp, lax.axis_index("tp")
    to_next = [(i, (i + 1) % n) for i in range(n)]
    total = None
    for step in range(n):
        if step:  # the matmul may not start before the sum it hides is ready to leave
            h, total = lax.optimization_barrier((h, total))
            total = lax.ppermute(total, "tp", to_next)
        place = (r - 1 - step) % n

        def part(a, place=place):
            size = a.shape[1] // n
            return lax.dynamic_slice_in_dim(a, place * size, size, 1)

        y = matmul(jax.tree.map(part, h), w)
        total = y if total is None else jax.tree.map(jnp.add, total, y)
    return total
