"""The layers of a chunk as the stacks that its loop reads, and as lists again."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from mjax.models.runtime.execution import LayerPlan, scan_groups, stack_rows

# Stack -> the weights of its layers.
LayerLists = dict[str, list[dict]]


def stack_groups(layers: LayerLists, plans: Sequence[LayerPlan]) -> list[dict]:
    """Lists of layers -> the stacks that a loop over `plans` reads, a dict for each scan group.

    A pipeline differentiates a chunk with respect to these. So its stash holds no copies of them.
    """
    groups = []
    for group in scan_groups(plans):
        stacks = {}
        for stack, (first, count) in stack_rows(group.period).items():
            last = first + group.repeats * count
            rows = layers[stack][first:last]
            lead = [group.repeats]
            if count > 1:
                lead.append(count)
            stacks[stack] = jax.tree.map(_stack_rows(lead), *rows)
        groups.append(stacks)
    return groups


def _stack_rows(lead: list[int]) -> Callable[..., jax.Array]:
    """Rows [...] -> [*lead, ...]."""

    def put_together(*rows: jax.Array) -> jax.Array:
        stack = jnp.stack(rows)
        shape = rows[0].shape
        return stack.reshape(*lead, *shape)

    return put_together


def unstack_groups(groups: Sequence[dict], plans: Sequence[LayerPlan]) -> LayerLists:
    """The inverse of `stack_groups`."""
    layers: LayerLists = {}
    for group, stacks in zip(scan_groups(plans), groups, strict=True):
        for stack, (_, count) in stack_rows(group.period).items():
            rows = layers.setdefault(stack, [])
            for i in range(group.repeats * count):
                place = divmod(i, count) if count > 1 else i
                layer = _entry(stacks[stack], place)
                rows.append(layer)
    return layers


def _entry(stacks: dict, place: int | tuple[int, int]) -> dict:
    return jax.tree.map(lambda stack: stack[place], stacks)
