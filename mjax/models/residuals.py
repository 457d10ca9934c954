"""A forward's residuals as arrays that can wait, and a choice of layers that keeps only those.

What `jax.vjp` returns is a pytree. `split_vjp` splits it into arrays to keep and a description of
how these and what is known anyway (weights, inputs of a micro-batch) make the same function again.
Invariant: `join_vjp(*split_vjp(vjp, known), known)` is `vjp`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mjax.models.barriers import Tree


class VjpLayout(NamedTuple):
    """The tree of a vjp, and where each of its leaves is found again: (is it known, index)."""

    tree: jax.tree_util.PyTreeDef
    places: tuple[tuple[bool, int], ...]


def split_vjp(vjp: Callable, known: list) -> tuple[VjpLayout, list]:
    """(the layout of a vjp, the residuals to keep: each of its leaves not among `known`, once)."""
    leaves, tree = jax.tree.flatten(vjp)
    places = {id(leaf): (True, index) for index, leaf in enumerate(known)}
    kept: list = []
    for leaf in leaves:
        if id(leaf) not in places:
            places[id(leaf)] = (False, len(kept))
            kept.append(leaf)
    return VjpLayout(tree, tuple(places[id(leaf)] for leaf in leaves)), kept


def join_vjp(layout: VjpLayout, known: list, kept: list) -> Callable:
    """The vjp that `split_vjp` took apart, with the values that `known` and `kept` have now."""
    leaves = [(known if is_known else kept)[index] for is_known, index in layout.places]
    return jax.tree.unflatten(layout.tree, leaves)


def switch_layers(layers: Sequence[Callable]) -> Callable:
    """`f(choice, carry, weights, constants)` = `layers[choice](carry, weights, constants)`.

    The gradient of `lax.switch` would hand all that a layer read, its weights too, out of one
    conditional and into another: XLA copies it. Here the backward is one switch over whole
    backwards, and only what layers keep lies between. `constants`, and integers among the weights,
    take no gradient.
    """

    def switch(choice: jax.Array, carry: Tree, weights: Tree, constants: Tree) -> Tree:
        leaves, tree = jax.tree.flatten(weights)
        is_float = [jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves]
        floats, integers = (
            [leaf for leaf, is_one in zip(leaves, is_float, strict=True) if is_one == wanted]
            for wanted in (True, False)
        )

        def of_parts(layer: Callable) -> Callable:
            def apply(carry: Tree, floats: list, constants: tuple) -> Tree:
                parts = {True: iter(floats), False: iter(constants[0])}
                weights = jax.tree.unflatten(tree, [next(parts[is_one]) for is_one in is_float])
                return layer(carry, weights, constants[1])

            return apply

        of_floats = _switch_of_floats([of_parts(layer) for layer in layers])
        return of_floats(choice, carry, floats, (integers, constants))

    return switch


def _switch_of_floats(layers: Sequence[Callable]) -> Callable:
    """`switch_layers` of weights that all take gradients."""
    layouts: dict[int, VjpLayout] = {}

    def linearize(i: int, carry: Tree, weights: Tree, constants: Tree) -> tuple[Tree, list]:
        out, vjp = jax.vjp(lambda c, w: layers[i](c, w, constants), carry, weights)
        layouts[i], kept = split_vjp(vjp, jax.tree.leaves((carry, weights, constants)))
        return out, kept

    @jax.custom_vjp
    def switch(choice, carry, weights, constants):
        return lax.switch(choice, layers, carry, weights, constants)

    def forward(choice, *args):
        shapes = [
            jax.eval_shape(functools.partial(linearize, i), *args)[1] for i in range(len(layers))
        ]

        def branch(i, *args):
            out, own = linearize(i, *args)
            return out, [own if j == i else _zeros(other) for j, other in enumerate(shapes)]

        branches = [functools.partial(branch, i) for i in range(len(layers))]
        out, kept = lax.switch(choice, branches, *args)
        return out, (choice, args, kept)

    def backward(residuals, d_out):
        choice, args, kept = residuals

        def branch(i, args, kept):
            return join_vjp(layouts[i], jax.tree.leaves(args), kept[i])(d_out)

        branches = [functools.partial(branch, i) for i in range(len(layers))]
        return None, *lax.switch(choice, branches, args, kept), None

    switch.defvjp(forward, backward)
    return switch


def _zeros(shapes: list[jax.ShapeDtypeStruct]) -> list[jax.Array]:
    return [jnp.zeros(shape.shape, shape.dtype) for shape in shapes]
