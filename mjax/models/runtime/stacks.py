"""Stacks of layers [L, ...] and lists of L layers: how one is made from the other.

A function here moves weights, or their gradients, and computes nothing. `Layers` and the pipeline
pick the form that their program needs.
"""

from collections.abc import Callable, Sequence

import jax

from mjax.models.runtime.execution import ScanGroup, stack_rows

Cut = Callable[[jax.Array], jax.Array]


def stack_in_place(layers: Sequence[jax.Array]) -> jax.Array:
    """Arrays of L layers -> [L, ...], each copied into its place once it is there, the last first.

    GPUs do that beside other work. `jnp.stack` waits for all, and looks up for each element which
    array holds it (GPT 1.3B: 5.7 ms of a step of 265).
    """
    count, like = len(layers), layers[0]
    stack = jax.lax.empty((count, *like.shape), like.dtype)
    for i in reversed(range(count)):
        stack = jax.lax.dynamic_update_index_in_dim(stack, layers[i], i, 0)
    return stack


def stacked(gradients: dict, dtype: str) -> dict:
    """A tree of stacks and lists of layers, all as stacks in `dtype`."""

    def stack(gradient: jax.Array | list[jax.Array]) -> jax.Array:
        made = gradient
        if isinstance(gradient, list):
            made = stack_in_place(gradient)
        return made.astype(dtype)

    return jax.tree.map(stack, gradients, is_leaf=_is_list)


def layers_of_stack(weights: dict | list[dict]) -> list[dict]:
    """The weights of each layer of a stack, whose matmul weights are lists and the rest stacks."""
    if isinstance(weights, list):
        return weights
    lists = jax.tree.map(_as_list, weights, is_leaf=_is_list)
    count = len(jax.tree.leaves(lists, is_leaf=_is_list)[0])

    layers = []
    for i in range(count):
        layer = jax.tree.map(lambda rows: rows[i], lists, is_leaf=_is_list)  # noqa: B023
        layers.append(layer)
    return layers


def _is_list(entry: object) -> bool:
    return isinstance(entry, list)


def _as_list(entry: list | jax.Array) -> list:
    return entry if _is_list(entry) else split_rows(entry)


def split_rows(stack: jax.Array) -> list[jax.Array]:
    """[L, ...] -> L arrays, whose gradients are put together by one concatenation."""
    sizes = [1] * stack.shape[0]
    rows = jax.lax.split(stack, sizes)
    return [row[0] for row in rows]


# ---- loops: the rows of each scan group ----------------------------------------------------------


def rows_of_group(first: int, repeats: int, count: int) -> Cut:
    """[L, ...] -> [repeats, count, ...] of the rows from `first` on."""
    select = _select_rows(first, first + repeats * count)

    def cut(stack: jax.Array) -> jax.Array:
        rows = select(stack)
        shape = stack.shape[1:]
        return rows.reshape(repeats, count, *shape)

    return cut


def _select_rows(first: int, last: int) -> Cut:
    """[L, ...] -> [last - first, ...]; a whole stack stays the array that it is."""

    def cut(stack: jax.Array) -> jax.Array:
        if last - first == stack.shape[0]:
            return stack
        return stack[first:last]

    return cut


def cut_group(weights: dict, group: ScanGroup) -> dict:
    """The stacks of one group: [repeats, ...], or [repeats, count, ...] of `count` in a period."""
    stacks = {}
    for stack, (first, count) in stack_rows(group.period).items():
        if count > 1:
            cut = rows_of_group(first, group.repeats, count)
        else:
            cut = _select_rows(first, first + group.repeats)
        stacks[stack] = jax.tree.map(cut, weights[stack])
    return stacks
