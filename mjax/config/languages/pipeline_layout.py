"""The language of `mesh.pipeline_layout`: how many layers each pipeline stage has.

Layout strings follow Megatron-LM's `--pipeline-model-parallel-layout`. `pipeline/layout.py` says
which device runs a stage.
"""

import re
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from mjax.config.languages.layer_pattern import stack_of
from mjax.errors import UserError

EMPTY = ""  # the kind of an unused slot


def stage_sizes(
    layers: int,
    pp: int,
    virtual_stages: int = 1,
    layout: str | None = None,
    account_for: Sequence[str] = (),
) -> list[int]:
    """The number of layers of each of the pp * virtual_stages stages.

    `layout`, if given, also decides the number of virtual stages. Otherwise stages are as equal as
    can be, the first ones longer, and `account_for` counts "embedding" and "loss" as one layer of
    the stage that holds them. Raises `UserError` for a malformed `layout`.
    """
    if layout is not None:
        return parse_layout(layout, layers, pp)
    stages = pp * virtual_stages
    each, longer = divmod(layers + len(account_for), stages)
    assert each > 0, "an empty stage"  # refused by validate.py
    sizes = [each + 1] * longer + [each] * (stages - longer)
    sizes[0] -= "embedding" in account_for
    sizes[-1] -= "loss" in account_for
    return sizes


def parse_layout(text: str, layers: int, pp: int) -> list[int]:
    """The number of layers of each virtual stage of a string such as `E|(tt|)*2,(t|)*4,L`.

    `|` separates stages. E is the embedding, t a layer, L the loss. Commas and spaces mean nothing;
    `(...)*n` and `x*n` repeat. Raises `UserError` where a layer is missing or repeated.
    """

    def refuse(what: str) -> UserError:
        return UserError(
            f"mesh.pipeline_layout={text!r} {what}; write stages of E (embedding), t (layer), "
            "L (loss) apart by |, with repeats as in 'E|(tt|)*2,(t|)*4,L'"
        )

    flat = re.sub(r"[\s,]", "", text)
    repeat = re.compile(r"\(([^()]*)\)(?:\*(\d+))?|([EtmL|])\*(\d+)")
    while repeat.search(flat):
        flat = repeat.sub(lambda m: (m[1] or m[3] or "") * int(m[2] or m[4] or 1), flat)
    unknown = sorted(set(flat) - set("EtL|"))
    if unknown:
        raise refuse(f"has no part called {unknown[0]!r}")
    stages = flat.split("|")
    if flat.count("E") != 1 or not flat.startswith("E"):
        raise refuse("must have E once, at the start")
    if flat.count("L") != 1 or not flat.endswith("L"):
        raise refuse("must have L once, at the end")
    if flat.count("t") != layers:
        raise refuse(f"places {flat.count('t')} layers of model.num_hidden_layers={layers}")
    if len(stages) % pp:
        raise refuse(f"has {len(stages)} stages, which mesh.pp={pp} does not divide")
    return [stage.count("t") for stage in stages]


class Slots(NamedTuple):
    """The slots of a stage, equal for all stages.

    stacks: the stack of each slot, whose layers alone it can hold.
    layers: for each stage and slot the number of the layer in it, -1 where the stage leaves it
        empty.
    """

    stacks: tuple[str, ...]
    layers: tuple[tuple[int, ...], ...]

    def kinds(self, kinds: Sequence[str]) -> tuple[tuple[str, ...], ...]:
        """The kinds of layers that each slot has in any stage, `EMPTY` among them."""
        named = (*kinds, EMPTY)  # -1 is the last
        columns = zip(*self.layers, strict=True)
        return tuple(tuple(sorted({named[layer] for layer in column})) for column in columns)


def assign_slots(kinds: Sequence[str], sizes: Sequence[int]) -> Slots:
    """The slots of stages of these `sizes`, in order of the layers of `kinds`.

    The slots' stacks are a short sequence that has those of every stage's layers in order. So
    stages of equal layers, or of one stack, have as many slots as the longest has layers.
    """
    stacks = [stack_of(kind) for kind in kinds]
    firsts = [sum(sizes[:i]) for i in range(len(sizes))]
    stages = [stacks[first : first + size] for first, size in zip(firsts, sizes, strict=True)]
    slots: list[str] = []
    for stage in sorted(stages, key=len, reverse=True):
        slots = _merge(slots, stage)
    rows = []
    for first, stage in zip(firsts, stages, strict=True):
        row, layer = [], first
        for stack in slots:
            holds = layer < first + len(stage) and stacks[layer] == stack
            row.append(layer if holds else -1)
            layer += holds
        rows.append(tuple(row))
    return Slots(tuple(slots), tuple(rows))


def _merge(a: Sequence[str], b: Sequence[str]) -> list[str]:
    """A shortest sequence that has both `a` and `b` in order."""
    common = np.zeros((len(a) + 1, len(b) + 1), int)  # lengths in common from i and j on
    for i, j in product(reversed(range(len(a))), reversed(range(len(b)))):
        if a[i] == b[j]:
            common[i, j] = common[i + 1, j + 1] + 1
        else:
            common[i, j] = max(common[i + 1, j], common[i, j + 1])
    merged: list[str] = []
    i = j = 0
    while i < len(a) and j < len(b):
        if a[i] == b[j]:
            merged.append(a[i])
            i, j = i + 1, j + 1
        elif common[i + 1, j] >= common[i, j + 1]:
            merged.append(a[i])
            i += 1
        else:
            merged.append(b[j])
            j += 1
    return [*merged, *a[i:], *b[j:]]
