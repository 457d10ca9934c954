"""The scheduling barriers of a program: what XLA may not move, merge or put off.

XLA orders instructions by their operands alone, and left to itself it puts whatever nothing waits
for at the end of the program. A barrier makes one value wait for others. Invariant: no barrier
changes a number. Every barrier of the models and the step stands here, under the name of what it
orders; the one within a kernel's own operands is in `kernels/fp8/quantize.py`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.flatten_util import ravel_pytree

# A pytree of arrays.
Tree = Any

# More arrays than _FEW of a dtype, each of at most _SMALL elements, wait as one.
_FEW, _SMALL = 4, 1 << 14


def wait_for_all(*trees: Tree) -> tuple:
    """The trees as they are. None of them can be read before all are there.

    An exchange in pieces passes each transfer and the matmul beside it through: the next transfer
    starts after both.
    """
    return lax.optimization_barrier(trees)


def write_once(array: jax.Array) -> jax.Array:
    """The array as it is, computed once and read from memory by all that need it.

    XLA may otherwise compute it again within each reader. A stack that is put together from layers
    would so split the update of a parameter into kernels for the master and each moment.
    """
    return lax.optimization_barrier(array)


def compute_again(*arrays: Tree) -> tuple:
    """Inputs of a backward that computes its forward again.

    Without the barrier XLA finds what the forward computed from the same inputs, and keeps that.
    """
    return lax.optimization_barrier(arrays)


@jax.custom_vjp
def gradients_before_previous_layer(x: jax.Array, weights: Tree) -> tuple[jax.Array, Tree]:
    """A layer's input and weights as they are.

    Its backward goes on to the layer before only when those gradients of `weights` that exist have
    been computed. XLA would put the gradients of all layers off to the end of a micro-batch and
    keep what they are computed from: 1.3 GB a layer for 8192 tokens of Llama-3-8B.
    """
    return x, weights


def _gradients_before_forward(*primals):
    values = jax.tree.map(lambda p: p.value, primals, is_leaf=lambda p: hasattr(p, "perturbed"))
    return values, None


def _gradients_before_backward(_, cotangents):
    leaves, tree = jax.tree.flatten(cotangents, is_leaf=_is_zero)
    computed = iter(_wait_as_few([ct for ct in leaves if not _is_zero(ct)]))
    return jax.tree.unflatten(tree, [None if _is_zero(ct) else next(computed) for ct in leaves])


def _wait_as_few(arrays: list[jax.Array]) -> list[jax.Array]:
    """The arrays as they are, when all are there; many small ones of one dtype wait as one array.

    XLA copies a slice that waits by itself, and a layer with biases has a dozen gradients that are
    slices of sums: so they cost one kernel instead of one each.
    """
    small: dict[jnp.dtype, dict[int, jax.Array]] = {}
    for i, array in enumerate(arrays):
        if array.size <= _SMALL:
            small.setdefault(array.dtype, {})[i] = array
    many = [own for own in small.values() if len(own) > _FEW]
    packs = [ravel_pytree(own) for own in many]
    waiting = dict(enumerate(arrays))
    for own in many:
        for i in own:
            del waiting[i]
    flat = [pack for pack, _ in packs]
    waiting, flat = lax.optimization_barrier((waiting, flat))
    for pack, (_, unravel) in zip(flat, packs, strict=True):
        waiting |= unravel(pack)
    return [waiting[i] for i in range(len(arrays))]


def _is_zero(cotangent: object) -> bool:
    return isinstance(cotangent, SymbolicZero)


gradients_before_previous_layer.defvjp(
    _gradients_before_forward, _gradients_before_backward, symbolic_zeros=True
)


@jax.custom_vjp
def reduce_under_previous_layer(
    x: jax.Array, weights: Tree, ready: jax.Array
) -> tuple[jax.Array, Tree, jax.Array]:
    """A layer's input, its stored weights and `ready`, fp32 [], as they are.

    In the backward the gradients of `weights` are summed over devices. They must be there when the
    layer before has computed its own, so a layer's exchange runs under the matmuls of the layer
    before, not after all of them. `ready` may be any number at first; its cotangent depends on the
    gradients of the layer behind.
    """
    return x, weights, ready


def _reduce_under_backward(_, cotangents):
    dx, d_weights, ready = cotangents
    dx, ready = lax.optimization_barrier((dx, ready))
    leaves, tree = jax.tree.flatten(d_weights)
    if not leaves:  # all frozen
        return dx, d_weights, ready
    told = sum(g.ravel()[0].astype(ready.dtype) for g in leaves)
    smallest = min(range(len(leaves)), key=lambda i: leaves[i].size)
    # XLA removes what nothing reads, so one gradient reads it.
    leaves[smallest] += (0 * ready).astype(leaves[smallest].dtype)
    return dx, jax.tree.unflatten(tree, leaves), told


reduce_under_previous_layer.defvjp(lambda *primals: (primals, None), _reduce_under_backward)
