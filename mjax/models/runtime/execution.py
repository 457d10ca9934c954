"""The static description of a program's layers; `plan/execution.py` decides it once."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from mjax.config.languages.layer_pattern import stack_index, stack_of
from mjax.kernels.fp8.recipe import Recipe
from mjax.sharding.rules import ParamPlacement, is_partly_read
from mjax.sharding.spec import ParamSpec


@dataclass(frozen=True)
class LayerPlan:
    """The static facts of a layer.

    kinds: its kind; in a pipeline all kinds that its slot has in some chunk, `EMPTY` among them.
    stack, row: where its parameters lie.
    remat: its policy (`models/runtime/remat.py`). fp8: whether its matmuls are of 8 bits.
    """

    kinds: tuple[str, ...]
    stack: str
    row: int
    remat: str = "none"
    fp8: bool = True


def plain_layers(kinds: Sequence[str]) -> tuple[LayerPlan, ...]:
    """Layers of these kinds, which keep all that autodiff asks for."""
    rows = stack_index(tuple(kinds))
    return tuple(
        LayerPlan((kind,), stack_of(kind), row) for kind, row in zip(kinds, rows, strict=True)
    )


@dataclass(frozen=True)
class Execution:
    """How a program holds, gathers, recomputes and reduces; `plan/execution.py` decides it once.

    layers: of the model, or the slots of a pipeline's chunk.
    unroll: 0 if layers run one after the other. Otherwise they run in a loop, with this many groups
        of layers in an iteration.
    pipelined: whether the layers are the slots of a pipeline's chunk.
    apart: whether each layer's weights are arrays of their own instead of rows of a stack.
    micro_batches: of a step.
    gather: when weights that ZeRO stores in shards are made whole: once a step, or by each layer.
    reduce: when gradients are reduce-scattered to those shards: once a step, after every
        micro-batch, or by each layer's backward.
    gradients_apart: whether layers' gradients of matmul weights stay arrays of their own, of which
        the optimizer updates rows of stacks.
    sums_in_matmuls: whether matmuls add their weights' gradients to the running sums.
    overlap: whether a layer's exchanges run under other layers' matmuls. Only matmul weights are
        then gathered and reduced by each layer, all others once a step.
    recipe: of 8-bit matmuls, or None. recipes: those of some weights, by names in the config.
    quantize_stored: whether weights are rounded to 8 bits where they are stored, so that ZeRO
        gathers bytes.
    rounds_dispatch, rounds_attention: those of the program's `Training`.
    weights: `precision.weights`, or None.
    compute, accumulate: dtypes of weights and activations, and of sums of gradients.
    offload: names of kept tensors that wait in host memory.
    """

    layers: tuple[LayerPlan, ...]
    unroll: int = 1
    pipelined: bool = False
    apart: bool = False
    micro_batches: int = 1
    gather: Literal["step", "layer"] = "step"
    reduce: Literal["step", "micro_batch", "layer"] = "step"
    gradients_apart: bool = False
    sums_in_matmuls: bool = False
    overlap: bool = False
    recipe: Recipe | None = None
    recipes: tuple[tuple[str, Recipe], ...] = ()
    quantize_stored: bool = False
    rounds_dispatch: bool = False
    rounds_attention: bool = False
    weights: str | None = None
    compute: str = "bfloat16"
    accumulate: str = "float32"
    offload: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        several, in_step = self.micro_batches > 1, self.gather == self.reduce == "step"
        assert not self.apart or not (self.loops or self.pipelined)
        assert not self.gradients_apart or self.apart
        assert not self.sums_in_matmuls or (self.apart and several and in_step)
        assert not self.overlap or (self.gather == self.reduce == "layer" and not several)
        assert self.reduce != "micro_batch" or (several and not self.pipelined)

    @property
    def loops(self) -> bool:
        """Whether layers run in a loop."""
        return self.unroll > 0

    def recipe_for(self, spec: ParamSpec) -> Recipe | None:
        """The recipe that rounds a parameter, or None."""
        if self.recipe is None or not spec.takes_fp8:
            return None
        return dict(self.recipes).get(spec.recipe, self.recipe)

    def exchanged_in_layer(self, where: ParamPlacement) -> bool:
        """Whether a layer gathers this parameter, and its backward reduces the gradient.

        `where` is the placement of the whole stack.
        """
        if not where.spec.is_stacked:
            return False
        return is_matmul_weight(where) if self.overlap else self.gather == "layer"


class ScanGroup(NamedTuple):
    """Consecutive layers that one scan applies: `repeats` times the layers `period`."""

    first: int
    period: tuple[LayerPlan, ...]
    repeats: int


def scan_groups(layers: Sequence[LayerPlan]) -> Iterator[ScanGroup]:
    """Consecutive layers in few scans: at each point the period that covers most."""
    alike = [replace(plan, row=0) for plan in layers]
    first = 0
    while first < len(alike):
        best = ScanGroup(first, tuple(layers[first : first + 1]), 1)
        for size in range(1, (len(alike) - first) // 2 + 1):
            period, repeats = alike[first : first + size], 1
            while alike[first + repeats * size : first + (repeats + 1) * size] == period:
                repeats += 1
            if repeats > 1 and repeats * size > best.repeats * len(best.period):
                best = ScanGroup(first, tuple(layers[first : first + size]), repeats)
        yield best
        first += best.repeats * len(best.period)


def stack_rows(period: Sequence[LayerPlan]) -> dict[str, tuple[int, int]]:
    """{stack: (its first row in a period of layers, the number of its rows in the period)}."""
    rows_of_stack: dict[str, list[int]] = {}
    for plan in period:
        rows_of_stack.setdefault(plan.stack, []).append(plan.row)
    return {stack: (rows[0], len(rows)) for stack, rows in rows_of_stack.items()}


def is_matmul_weight(where: ParamPlacement) -> bool:
    """Whether matmuls read this parameter as it is, not a part of what the device holds."""
    return where.spec.matmul is not None and not is_partly_read(where.spec, where.parallel)
