"""Which layers live on which pipeline device: the single home of the pipeline's layout.

A model is split into pp * v virtual stages of consecutive layers. Virtual stage i is chunk i // pp
of device i % pp (circular, as in Megatron-LM's interleaved schedule). Stages may differ in length
and in their layers: every chunk has the same slots, each for layers of one stack, and unused slots
are padding (`config/languages/pipeline_layout.py`). Invariant: every layer is in exactly one slot,
in order. Layout strings follow Megatron-LM's `--pipeline-model-parallel-layout`. `storage.py` says
where the parameters of a slot are.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mjax.config.languages.layer_pattern import stack_index, stacks_of
from mjax.config.languages.pipeline_layout import Slots, assign_slots, stage_sizes
from mjax.config.schema.run import Config


@dataclass(frozen=True)
class Layout:
    """`stages[i]`: numbers of the layers of virtual stage i; `kinds`: kind of every layer."""

    pp: int
    v: int
    stages: tuple[tuple[int, ...], ...]
    kinds: tuple[str, ...]

    def __post_init__(self) -> None:
        placed = [layer for stage in self.stages for layer in stage]
        assert len(self.stages) == self.pp * self.v, self
        assert placed == list(range(len(self.kinds))), f"not every layer exactly once: {self}"

    @property
    def stacks(self) -> tuple[str, ...]:
        """Stacks of parameters that the layers live in."""
        return stacks_of(self.kinds)

    @functools.cached_property
    def slots(self) -> Slots:
        """The slots of a chunk, and the layers in them."""
        return assign_slots(self.kinds, [len(stage) for stage in self.stages])

    def table(self) -> np.ndarray:
        """int32 [pp, v, slots]: the layer in each slot, -1 where it is padding."""
        stages = np.asarray(self.slots.layers, np.int32)
        return stages.reshape(self.v, self.pp, -1).swapaxes(0, 1)

    @property
    def uniform(self) -> bool:
        """Whether all devices run layers of the same kinds at the same time."""
        return all(len(kinds) == 1 for kinds in self.slot_kinds())

    def slot_kinds(self) -> tuple[tuple[str, ...], ...]:
        """For each slot, the kinds it has on any device in any chunk, `EMPTY` among them."""
        return self.slots.kinds(self.kinds)

    def storage_rows(self, stack: str) -> np.ndarray:
        """int32 [pp * v * slots of the stack]: the row of `stack` stored there, -1: padding."""
        slots = [slot for slot, of in enumerate(self.slots.stacks) if of == stack]
        row_of_layer = np.array([*stack_index(self.kinds), -1], np.int32)
        return row_of_layer[self.table()[..., slots]].reshape(-1)


def make_layout(
    kinds: Sequence[str],
    pp: int,
    virtual_stages: int = 1,
    layout: str | None = None,
    account_for: Sequence[str] = (),
) -> Layout:
    """The layout of the layers of `kinds` in pp * virtual_stages stages.

    `layout` is Megatron's string, which also decides the number of virtual stages. Without it
    stages are as equal as can be, the first ones longer. `account_for` counts "embedding" and
    "loss" as one layer of the stage that holds them. Raises `UserError` for a malformed `layout`.
    """
    stages = []
    first = 0
    for size in stage_sizes(len(kinds), pp, virtual_stages, layout, account_for):
        stages.append(tuple(range(first, first + size)))
        first += size
    return Layout(pp, len(stages) // pp, tuple(stages), tuple(kinds))


def layout_of(cfg: Config) -> Layout:
    """The layout a config asks for. Raises `UserError`."""
    mesh = cfg.mesh
    account_for = mesh.pipeline_account_for
    kinds = cfg.model.layer_kinds
    return make_layout(kinds, mesh.pp, mesh.virtual_stages, mesh.pipeline_layout, account_for)


# ---- for people ------------------------------------------------------------------------------


def stage_lines(layout: Layout) -> list[str]:
    """A line for each device: its layers, chunk by chunk."""
    names = [_span(stage) for stage in layout.stages]
    names[0] = f"embedding + {names[0]}"
    names[-1] += " + loss"
    widths = []
    for chunk in range(layout.v):
        names_of_chunk = names[chunk * layout.pp : (chunk + 1) * layout.pp]
        widths.append(max(map(len, names_of_chunk)))
    lines = []
    for device in range(layout.pp):
        names_of_device = names[device :: layout.pp]
        cells = map(str.ljust, names_of_device, widths)
        line = f"stage {device}  " + " | ".join(cells)
        lines.append(line.rstrip())
    return lines


def _span(stage: Sequence[int]) -> str:
    if not stage:
        return "no layer"
    if len(stage) == 1:
        return f"layer {stage[0]}"
    return f"layers {stage[0]}-{stage[-1]}"
