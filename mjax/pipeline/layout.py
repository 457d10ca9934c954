"""Which layers live on which pipeline device: the single home of the pipeline's layout.

A model is cut into pp * v virtual stages of consecutive layers; virtual stage i is chunk i // pp of
device i % pp (circular, as Megatron-LM's interleaved schedule). Stages may differ in length: every
chunk has as many slots as the longest stage, and unused slots are padding. Invariant: every layer
is in exactly one slot, in order. Layout strings follow Megatron-LM's
`--pipeline-model-parallel-layout`. Where the parameters of a slot are: `storage.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mjax.config.pattern import STACK_OF, expand, stack_index
from mjax.config.pipeline_layout import slot_kinds, stage_sizes, stages_agree
from mjax.config.schema import Config


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
        return tuple(sorted({STACK_OF[kind] for kind in self.kinds}))

    @property
    def slots(self) -> int:
        """Layer slots of a chunk."""
        return max(map(len, self.stages))

    def table(self) -> np.ndarray:
        """int32 [pp, v, slots]: the layer in each slot, -1 where it is padding."""
        return self._by_chunk(self.stages)

    @property
    def uniform(self) -> bool:
        """Whether all devices run layers of the same kinds at the same time."""
        return all(len(kinds) == 1 for kinds in self.slot_kinds())

    def slot_kinds(self) -> tuple[tuple[str, ...], ...]:
        """For each slot, the kinds it has on any device in any chunk, `EMPTY` among them."""
        return slot_kinds(self.kinds, [len(stage) for stage in self.stages])

    @property
    def runs_all_stacks(self) -> bool:
        """A chunk's slots are of one stack, or of the same kind in every chunk."""
        return stages_agree(self.kinds, [len(stage) for stage in self.stages])

    def storage_rows(self, stack: str) -> np.ndarray:
        """int32 [pp * v * slots]: the row of the canonical `stack` stored there, -1: padding.

        A model with two stacks has the same kinds in every chunk, so neither is padded.
        """
        rows = stack_index(self.kinds)
        own = [tuple(rows[i] for i in s if STACK_OF[self.kinds[i]] == stack) for s in self.stages]
        return self._by_chunk(own).reshape(-1)

    def _by_chunk(self, stages: Sequence[Sequence[int]]) -> np.ndarray:
        out = np.full((self.pp, self.v, max(map(len, stages))), -1, np.int32)
        for i, stage in enumerate(stages):
            out[i % self.pp, i // self.pp, : len(stage)] = stage
        return out


def make_layout(
    kinds: Sequence[str],
    pp: int,
    virtual_stages: int = 1,
    layout: str | None = None,
    account_for: Sequence[str] = (),
) -> Layout:
    """Cut the layers of `kinds` into pp * virtual_stages stages.

    `layout`: Megatron's string, which also decides the number of virtual stages; otherwise stages
    are as equal as can be, the first ones longer. `account_for` counts "embedding" and "loss" as
    one layer of the stage that holds them. Raises `UserError` for a malformed `layout`.
    """
    sizes = stage_sizes(len(kinds), pp, virtual_stages, layout, account_for)
    ends = np.cumsum([0, *sizes])
    stages = tuple(tuple(range(a, b)) for a, b in zip(ends, ends[1:], strict=False))
    return Layout(pp, len(sizes) // pp, stages, tuple(kinds))


def layout_of(cfg: Config) -> Layout:
    """The layout a config asks for. Raises `UserError`."""
    mesh = cfg.mesh
    kinds = expand(cfg.model.layer_pattern, cfg.model.num_hidden_layers)
    account_for = mesh.pipeline_account_for
    return make_layout(kinds, mesh.pp, mesh.virtual_stages, mesh.pipeline_layout, account_for)


# ---- for people ------------------------------------------------------------------------------


def stage_lines(layout: Layout) -> list[str]:
    """One line a device: its layers, chunk by chunk."""
    names = [_span(stage) for stage in layout.stages]
    names[0] = f"embedding + {names[0]}"
    names[-1] += " + loss"
    rows = [names[s :: layout.pp] for s in range(layout.pp)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        f"stage {s}  " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
        for s, row in enumerate(rows)
    ]


def _span(stage: Sequence[int]) -> str:
    if not stage:
        return "no layer"
    return f"layer {stage[0]}" if len(stage) == 1 else f"layers {stage[0]}-{stage[-1]}"
