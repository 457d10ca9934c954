"""The language of `mesh.pipeline_layout`: how many layers each pipeline stage has.

Layout strings follow Megatron-LM's `--pipeline-model-parallel-layout`. `pipeline/layout.py` says
which device runs a stage.
"""

import re
from collections.abc import Sequence

from mjax.config.pattern import STACK_OF
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


def slot_kinds(kinds: Sequence[str], sizes: Sequence[int]) -> tuple[tuple[str, ...], ...]:
    """The kinds of layers that each slot of a stage has in any stage, `EMPTY` among them.

    Every stage has as many slots as the longest one has layers; the rest of its slots are unused.
    """
    kinds_of_slots: list[set[str]] = [set() for _ in range(max(sizes))]
    first = 0
    for size in sizes:
        for slot, kinds_of_slot in enumerate(kinds_of_slots):
            kinds_of_slot.add(kinds[first + slot] if slot < size else EMPTY)
        first += size
    return tuple(tuple(sorted(kinds_of_slot)) for kinds_of_slot in kinds_of_slots)


def stages_agree(kinds: Sequence[str], sizes: Sequence[int]) -> bool:
    """Whether slots are of one stack of parameters, or each of one kind in every stage."""
    one_kind = all(len(kinds_of_slot) == 1 for kinds_of_slot in slot_kinds(kinds, sizes))
    stacks = {STACK_OF[kind] for kind in kinds}
    return one_kind or len(stacks) == 1
