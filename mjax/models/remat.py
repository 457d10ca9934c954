"""Memory policy: what each layer keeps of its forward for its backward, and where.

A policy names tensors; what it does not name is computed again (Chen et al., arXiv 1604.06174; by
name as `jax.checkpoint_policies`). `train.remat` gives every layer one, in layer order, with counts
as in "full*8,dots". `train.offload` names kept tensors that wait in pinned host memory instead of
the device's. Invariant: neither changes a single number, only memory and time.
"""

from collections.abc import Callable

import jax
from jax.custom_derivatives import SymbolicZero

from mjax.config.remat import POLICIES
from mjax.kernels.quantize import SCALES

# Views of an array, which a backward makes again: kept, they would be copies.
_VIEWS = frozenset(
    "slice dynamic_slice squeeze reshape broadcast_in_dim convert_element_type transpose "
    "expand_dims copy".split()
)


def remat(
    body: Callable, policy: str, offload: tuple[str, ...] = (), loop: bool = True
) -> Callable:
    """`body`, a period of blocks, keeping what `policy` says, of that `offload` on the host.

    Outside a `loop` forward and backward are in one computation, where XLA would find that the
    backward computes again what the forward did, and keep that instead: barriers hide it.
    """
    names = POLICIES[policy]
    if names is None:
        return body
    away = [name for name in names if name in offload]
    stay = [name for name in (*names, SCALES) if name not in away]
    keep = jax.checkpoint_policies
    if away:
        rule = keep.save_and_offload_only_these_names(
            names_which_can_be_saved=stay,
            names_which_can_be_offloaded=away,
            offload_src="device",
            offload_dst="pinned_host",
        )
    else:
        rule = keep.save_only_these_names(*stay)
    return jax.checkpoint(body, policy=rule, prevent_cse=not loop)


def all_but_views(body: Callable) -> Callable:
    """`body` keeping all that autodiff asks for, except what only looks at an array otherwise."""
    rule = lambda prim, *_, **__: prim.name not in _VIEWS  # noqa: E731
    return jax.checkpoint(body, policy=rule, prevent_cse=False)


@jax.custom_vjp
def in_order(x: jax.Array, weights: dict) -> tuple[jax.Array, dict]:
    """A layer's input and weights (any tree) as they are; its backward goes on to the layer before
    only when those gradients of `weights` that there are have been made.

    Left to itself, XLA puts those of all layers off to the end of a micro-batch and keeps what they
    are made of: 1.3 GB a layer for 8192 tokens of Llama-3-8B.
    """
    return x, weights


def _in_order_forward(*primals):
    return jax.tree.map(lambda p: p.value, primals, is_leaf=lambda p: hasattr(p, "perturbed")), None


def _in_order_backward(_, grads):
    leaves, tree = jax.tree.flatten(grads, is_leaf=_is_zero)
    made = iter(jax.lax.optimization_barrier([g for g in leaves if not _is_zero(g)]))
    return jax.tree.unflatten(tree, [None if _is_zero(g) else next(made) for g in leaves])


def _is_zero(g: object) -> bool:
    return isinstance(g, SymbolicZero)


in_order.defvjp(_in_order_forward, _in_order_backward, symbolic_zeros=True)


@jax.custom_vjp
def one_behind(x: jax.Array, weights: dict, behind: jax.Array) -> tuple[jax.Array, dict, jax.Array]:
    """A layer's input and its weights as stored as they are. In the backward their gradients, which
    are summed over devices, must be there when the layer before has made its own: a layer's
    exchange runs under the next one's matmuls, not after all of them. `behind`, fp32 [], is any
    number at first; its cotangents tell which gradients are there.
    """
    return x, weights, behind


def _one_behind_backward(_, grads):
    dx, d_weights, behind = grads
    dx, behind = jax.lax.optimization_barrier((dx, behind))
    leaves, tree = jax.tree.flatten(d_weights)
    told = sum(g.ravel()[0].astype(behind.dtype) for g in leaves)
    least = min(range(len(leaves)), key=lambda i: leaves[i].size)
    leaves[least] += (0 * behind).astype(leaves[least].dtype)  # what nothing reads, XLA removes
    return dx, jax.tree.unflatten(tree, leaves), told


one_behind.defvjp(lambda *primals: (primals, None), _one_behind_backward)
