"""A forward's residuals as arrays that can wait, and a choice of blocks that keeps only those.

What `jax.vjp` returns is a pytree. `take_apart` splits it into arrays to keep and a plan that says
how they and what is known anyway (weights, facts of a micro-batch) make the same function again.
Invariant: `put_together(*take_apart(vjp, known), known)` is `vjp`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Plan(NamedTuple):
    """A vjp's tree, and where each of its leaves is found again: (is it known, index)."""

    tree: jax.tree_util.PyTreeDef
    places: tuple[tuple[bool, int], ...]


def take_apart(vjp: Callable, known: list) -> tuple[Plan, list]:
    """A vjp -> plan and the residuals to keep: those that are none of the tracers `known`, once."""
    leaves, tree = jax.tree.flatten(vjp)
    again = {id(leaf): (True, i) for i, leaf in enumerate(known)}
    kept: list = []
    for leaf in leaves:
        if id(leaf) not in again:
            again[id(leaf)] = (False, len(kept))
            kept.append(leaf)
    return Plan(tree, tuple(again[id(leaf)] for leaf in leaves)), kept


def put_together(plan: Plan, known: list, kept: list) -> Callable:
    return jax.tree.unflatten(plan.tree, [(known if k else kept)[i] for k, i in plan.places])


def one_of(blocks: Sequence[Callable]) -> Callable:
    """`f(code, carry, weights, facts)` = `blocks[code](carry, weights, facts)`, the next carry.

    The gradient of `lax.switch` would hand all that a block read, its weights too, out of one
    conditional and into another: XLA copies it. Here the backward is one switch over whole
    backwards, and only what blocks keep lies between. `facts` take no gradient.
    """
    plans: dict[int, Plan] = {}

    def linearise(i: int, carry: Any, weights: Any, facts: Any) -> tuple[Any, list]:
        out, vjp = jax.vjp(lambda c, w: blocks[i](c, w, facts), carry, weights)
        plans[i], kept = take_apart(vjp, jax.tree.leaves((carry, weights, facts)))
        return out, kept

    @jax.custom_vjp
    def choose(code, carry, weights, facts):
        return lax.switch(code, blocks, carry, weights, facts)

    def forward(code, *args):
        shapes = [
            jax.eval_shape(functools.partial(linearise, i), *args)[1] for i in range(len(blocks))
        ]
        zeros = lambda shapes: [jnp.zeros(k.shape, k.dtype) for k in shapes]  # noqa: E731

        def branch(i, *args):
            out, own = linearise(i, *args)
            return out, [own if j == i else zeros(other) for j, other in enumerate(shapes)]

        branches = [functools.partial(branch, i) for i in range(len(blocks))]
        out, kept = lax.switch(code, branches, *args)
        return out, (code, args, kept)

    def backward(residuals, d_out):
        code, args, kept = residuals

        def branch(i, args, kept):
            return put_together(plans[i], jax.tree.leaves(args), kept[i])(d_out)

        branches = [functools.partial(branch, i) for i in range(len(blocks))]
        return None, *lax.switch(code, branches, args, kept), None

    choose.defvjp(forward, backward)
    return choose
