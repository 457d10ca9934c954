"""A forward's residuals as arrays that can wait, and a choice of layers that keeps only those.

The result of `jax.vjp` is a pytree. `split_vjp` splits it into arrays to keep and a description of
how these and what is known anyway (weights, inputs of a micro-batch) make the same function again.
Invariant: `join_vjp(*split_vjp(vjp, known), known)` is `vjp`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mjax.models.base.barriers import Tree


class LeafSource(NamedTuple):
    """The source of a leaf of a vjp: an index of the known arrays or of the kept ones."""

    known: bool
    index: int


class VjpLayout(NamedTuple):
    """The tree of a vjp, and the source of each of its leaves."""

    tree: jax.tree_util.PyTreeDef
    sources: tuple[LeafSource, ...]


def split_vjp(vjp: Callable, known: list) -> tuple[VjpLayout, list]:
    """(the layout of a vjp, the residuals to keep: each of its leaves not among `known`, once)."""
    leaves, tree = jax.tree.flatten(vjp)
    source_of = {}
    for index, leaf in enumerate(known):
        source_of[id(leaf)] = LeafSource(True, index)
    kept: list = []
    for leaf in leaves:
        if id(leaf) not in source_of:
            source_of[id(leaf)] = LeafSource(False, len(kept))
            kept.append(leaf)
    sources = tuple(source_of[id(leaf)] for leaf in leaves)
    return VjpLayout(tree, sources), kept


def join_vjp(layout: VjpLayout, known: list, kept: list) -> Callable:
    """The vjp that `split_vjp` took apart, with the values that `known` and `kept` have now."""
    leaves = []
    for source in layout.sources:
        arrays = known if source.known else kept
        leaves.append(arrays[source.index])
    return jax.tree.unflatten(layout.tree, leaves)


def switch_layers(layers: Sequence[Callable]) -> Callable:
    """`f(choice, carry, weights, constants)` = `layers[choice](carry, weights, constants)`.

    The gradient of `lax.switch` would hand all that a layer read, its weights too, out of one
    conditional and into another: XLA copies it. Here the backward is one switch over complete
    backwards, and only what layers keep lies between. `constants`, and integers among the weights,
    take no gradient.
    """

    def switch(choice: jax.Array, carry: Tree, weights: Tree, constants: Tree) -> Tree:
        leaves, tree = jax.tree.flatten(weights)
        is_float = [jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves]
        floats, integers = [], []
        for leaf, of_floats in zip(leaves, is_float, strict=True):
            if of_floats:
                floats.append(leaf)
            else:
                integers.append(leaf)

        def with_floats_apart(layer: Callable) -> Callable:
            def apply(carry: Tree, floats: list, others: tuple[list, Tree]) -> Tree:
                integers, constants = others
                next_float, next_integer = iter(floats), iter(integers)
                leaves = []
                for of_floats in is_float:
                    leaves.append(next(next_float if of_floats else next_integer))
                weights = jax.tree.unflatten(tree, leaves)
                return layer(carry, weights, constants)

            return apply

        apart = [with_floats_apart(layer) for layer in layers]
        return _switch_of_floats(apart)(choice, carry, floats, (integers, constants))

    return switch


def _switch_of_floats(layers: Sequence[Callable]) -> Callable:
    """`switch_layers` of weights that all take gradients."""
    layouts: dict[int, VjpLayout] = {}

    def linearize(i: int, carry: Tree, weights: Tree, constants: Tree) -> tuple[Tree, list]:
        """(the output of layer i, the residuals to keep); notes the layout of its vjp."""

        def layer(carry: Tree, weights: Tree) -> Tree:
            return layers[i](carry, weights, constants)

        out, vjp = jax.vjp(layer, carry, weights)
        known = jax.tree.leaves((carry, weights, constants))
        layouts[i], kept = split_vjp(vjp, known)
        return out, kept

    def branches(branch: Callable) -> list[Callable]:
        return [functools.partial(branch, i) for i in range(len(layers))]

    @jax.custom_vjp
    def switch(choice, carry, weights, constants):
        return lax.switch(choice, layers, carry, weights, constants)

    def forward(choice, *args):
        shapes = []
        for linearize_layer in branches(linearize):
            _, kept = jax.eval_shape(linearize_layer, *args)
            shapes.append(kept)

        def branch(i, *args):
            """The output of layer i, and the residuals of all: zeros for the others'."""
            out, kept = linearize(i, *args)
            residuals = []
            for j, shapes_of_layer in enumerate(shapes):
                residuals.append(kept if j == i else _zeros(shapes_of_layer))
            return out, residuals

        out, kept = lax.switch(choice, branches(branch), *args)
        return out, (choice, args, kept)

    def backward(residuals, d_out):
        choice, args, kept = residuals

        def branch(i, args, kept):
            vjp = join_vjp(layouts[i], jax.tree.leaves(args), kept[i])
            return vjp(d_out)

        d_carry, d_weights = lax.switch(choice, branches(branch), args, kept)
        return None, d_carry, d_weights, None

    switch.defvjp(forward, backward)
    return switch


def _zeros(shapes: list[jax.ShapeDtypeStruct]) -> list[jax.Array]:
    return [jnp.zeros(shape.shape, shape.dtype) for shape in shapes]
