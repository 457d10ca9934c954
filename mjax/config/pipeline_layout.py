"""The language of `mesh.pipeline_layout`: how many layers each pipeline stage has.

Layout strings follow Megatron-LM's `--pipeline-model-parallel-layout`. Which device runs a stage:
`pipeline/layout.py`.
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
    """Layers of each of the pp * virtual_stages stages.

    `layout`, if given, also decides the number of virtual stages. Otherwise stages are as equal as
    can be, the first ones longer, and `account_for` counts "embedding" and "loss" as one layer of
    the stage that holds them. Raises `UserError` for a malformed `layout`.
    """
    if layout is not None:
        return parse_layout(layout, layers, pp)
    units, stages = layers + len(account_for), pp * virtual_stages
    assert units >= stages, "an empty stage"  # refused by validate.py
    sizes = [units // stages + (stage < units % stages) for stage in range(stages)]
    sizes[0] -= "embedding" in account_for
    sizes[-1] -= "loss" in account_for
    return sizes


def parse_layout(text: str, layers: int, pp: int) -> list[int]:
    """Layers per virtual stage of a layout string such as `E|(tt|)*2,(t|)*4,L`.

    `|` separates stages; E is the embedding, t a layer, L the loss; commas and spaces mean
    nothing; `(...)*n` and `x*n` repeat. Raises `UserError` where a layer is lost or repeated.
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
    """For each slot of a stage, the kinds of layers that it has in any stage, `EMPTY` among them.

    Every stage has as many slots as the longest one has layers; the rest of its slots are unused.
    """
    slots: list[set[str]] = [set() for _ in range(max(sizes))]
    first = 0
    for size in sizes:
        for slot, found in enumerate(slots):
            found.add(kinds[first + slot] if slot < size else EMPTY)
        first += size
    return tuple(tuple(sorted(found)) for found in slots)


def stages_agree(kinds: Sequence[str], sizes: Sequence[int]) -> bool:
    """Whether slots are of one stack of parameters, or each of one kind in every stage."""
    one_kind = all(len(found) == 1 for found in slot_kinds(kinds, sizes))
    return one_kind or len({STACK_OF[kind] for kind in kinds}) == 1
