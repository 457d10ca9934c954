"""The layers of a model that lie in stages over the axis pp, as a step of the engine runs them.

A device has the layers of its stage, and their pages and states. A step's rows, or the tokens of
its prompts, go through the stages in equal parts. In tick t stage s works on part t - s, and hands
it on. Later parts of a prompt find the keys of earlier ones in pages, as chunks do. All devices
embed, and the last stage's output is summed over pp, so heads and draws are as without stages.

Invariant: a token's numbers are those of the layers on one device. A stage without a part, or
without a layer in a slot (`pipeline/layout.py`), writes to no row.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mjax.config.languages.pipeline_layout import EMPTY
from mjax.config.schema.model import ModelConfig
from mjax.errors import UserError
from mjax.kernels.attention.paged import PagedRows
from mjax.models.base.branch import LayerCache, finish_layers
from mjax.models.base.context import Context, PagedTokens, Tokens
from mjax.models.base.params import split
from mjax.models.base.streams import Activation, Streams
from mjax.models.runtime.execution import Execution, LayerPlan
from mjax.models.runtime.run import (
    Caches,
    LayerCall,
    LayerCarry,
    LayerFunction,
    LayerInputs,
    Layers,
    LayersOutput,
)
from mjax.pipeline.layout import Layout, make_layout
from mjax.sharding.collectives import Parallel

# A part has at least so many rows or tokens. Below, the weights that each part reads anew cost more
# than stages gain that work side by side.
LEAST_ROWS, LEAST_TOKENS = 64, 256
_CUT_FIELDS = "positions", "segments", "adapters", "axes"  # fields of `Tokens`, [B, S, ..]


def stages_for(cfg: ModelConfig, pp: int) -> Layout | None:
    """Which layers each of `pp` stages has; None for one. Raises `UserError` for too many."""
    if pp == 1:
        return None
    kinds = cfg.layer_kinds
    if pp > len(kinds):
        raise UserError(
            f"{pp} stages of layers (pp or pipeline_parallel_size): the model has {len(kinds)} "
            "layers, and each stage needs one; take fewer stages"
        )
    return make_layout(kinds, pp)


def kinds_of_slots(layout: Layout) -> list[str]:
    """A kind for each slot of a stage, whose layers' caches are alike."""
    return [next(kind for kind in kinds if kind != EMPTY) for kinds in layout.slot_kinds()]


@dataclass(frozen=True)
class Stages:
    """Runs layers in the place of `Decoder.layers`; `no_row`: the slot of states for no row."""

    layout: Layout
    no_row: int

    def run(
        self, model: Any, x: Activation, info: Tokens, ctx: Context, caches: Caches
    ) -> LayersOutput:
        """`Decoder.layers` of a model that holds the layers of this device's stage."""
        parallel, last = ctx.parallel, self.layout.pp - 1
        stage = parallel.index("pp")
        layers, weights, of_stage = self._layers(model, ctx, stage)
        count = 1 if isinstance(x, Streams) else number_of_parts(info.new, self.layout.pp)

        def tick(carry: tuple[Activation, Caches], time: jax.Array):
            came, caches = carry
            number = time - stage
            is_idle = (number < 0) | (number >= count)
            part = StepPart(jnp.clip(number, 0, count - 1), count)
            tokens = without_rows(part.of(info), is_idle, self.no_row)
            entered = jax.tree.map(
                functools.partial(jnp.where, stage == 0), part.cut(x, info), came
            )
            inputs = LayerInputs(tokens, model.rope(tokens, ctx))
            y, _, caches = layers.run(weights, entered, inputs, caches=caches, **of_stage)
            return (_handed_on(y, parallel), caches), y

        start = jax.tree.map(jnp.zeros_like, StepPart(0, count).cut(x, info))
        ticks = jnp.arange(count + last, dtype=jnp.int32)
        (_, caches), made = lax.scan(tick, (start, caches), ticks)

        def whole(y: jax.Array, like: jax.Array) -> jax.Array:
            """The parts that the last stage has made."""
            y = y[last:].reshape(like.shape)
            return parallel.psum(jnp.where(stage == last, y, 0), "pp")

        x, of_all = finish_layers(jax.tree.map(whole, made, x), model.cfg, parallel)
        return x, of_all, caches

    def _layers(self, model: Any, ctx: Context, stage: jax.Array) -> tuple[Layers, dict, dict]:
        """The layers of a stage with their weights, numbers and choices of kinds."""
        blocks, weights = {}, {}
        for name in self.layout.stacks:
            blocks[name], weights[name] = split(getattr(model, name))
        stacks, table = self.layout.slots.stacks, self.layout.table()[:, 0]
        named = np.asarray([*self.layout.kinds, EMPTY])[table]  # -1: none
        plans, choices = [], []
        for slot, kinds in enumerate(self.layout.slot_kinds()):
            row = stacks[:slot].count(stacks[slot])
            plans.append(LayerPlan(kinds, stacks[slot], row))
            choices.append(np.searchsorted(kinds, named[:, slot]))
        of_stage = {
            "numbers": jnp.asarray(np.maximum(table, 0), jnp.int32)[stage],
            "choices": jnp.asarray(np.stack(choices, 1), jnp.int32)[stage],
        }
        execution = Execution(tuple(plans), unroll=0)
        layers = StageLayers(blocks, execution, ctx, no_row=self.no_row)
        return layers, weights, of_stage


@dataclass(frozen=True, kw_only=True)
class StageLayers(Layers):
    """`Layers` of a stage, whose slots may have several kinds, or no layer on this device."""

    no_row: int

    def one_of(self, plan: LayerPlan, layers: list[Callable]) -> LayerFunction:
        """The layer of the kind that the device chooses.

        A stage without one computes what others do, for no row, and hands on its input: a
        conditional around caches would copy them.
        """
        kinds = zip(plan.kinds, layers, strict=True)
        real = [layer for kind, layer in kinds if kind != EMPTY]
        skipped = len(layers) - len(real)  # `EMPTY` sorts first

        def choose(
            carry: LayerCarry, call: LayerCall, choice: jax.Array
        ) -> tuple[LayerCarry, LayerCache | None]:
            inputs, own = call.inputs, choice - skipped
            tokens = without_rows(inputs.tokens, own < 0, self.no_row)
            call = call._replace(inputs=inputs._replace(tokens=tokens))
            if len(real) == 1:
                found, cache = real[0](carry, call)
            else:
                found, cache = lax.switch(jnp.maximum(own, 0), real, carry, call)
            keep = functools.partial(jnp.where, own < 0)
            return jax.tree.map(keep, carry, found), cache

        return choose


def _handed_on(y: Activation, parallel: Parallel) -> Activation:
    """The output of the stage before; the first stage gets the last one's."""
    ring = [(i, (i + 1) % parallel.pp) for i in range(parallel.pp)]
    return jax.tree.map(lambda leaf: lax.ppermute(leaf, "pp", ring), y)


# ---- parts of a step -----------------------------------------------------------------------------


def number_of_parts(new: PagedTokens, pp: int) -> int:
    """The parts of a step's rows or tokens: at most `pp`, a power of two, of the least size."""
    size, least = len(new.slots), LEAST_ROWS
    if new.each is None:
        size, least = len(new.pages), LEAST_TOKENS
    count = 1
    while 2 * count <= pp and size % (2 * count) == 0 and size // (2 * count) >= least:
        count *= 2
    return count


@dataclass(frozen=True)
class StepPart:
    """Part `number` of `count` equal ones: of the rows of decoding, or of the tokens of prefill."""

    number: jax.Array | int
    count: int

    def cut(self, x: Activation, info: Tokens) -> Activation:
        """The activations [B, S, D] of a part."""
        return x if self.count == 1 else self._take(x, self._axis(info.new))

    def of(self, info: Tokens) -> Tokens:
        """The facts about a part's tokens."""
        if self.count == 1:
            return info
        axis = self._axis(info.new)
        whole = {name: getattr(info, name) for name in _CUT_FIELDS}
        own = {name: None if x is None else self._take(x, axis) for name, x in whole.items()}
        if axis == 0:
            rows, new = self._take(info.rows), self._of_rows(info.new)
            return replace(info, **own, rows=rows, new=new)
        columns, new = self._take(info.columns), self._of_tokens(info.new)
        return replace(info, **own, columns=columns, new=new)

    @staticmethod
    def _axis(new: PagedTokens) -> int:
        return 1 if new.each is None else 0

    def _take(self, x: jax.Array, axis: int = 0) -> jax.Array:
        size = x.shape[axis] // self.count
        return lax.dynamic_slice_in_dim(x, self.number * size, size, axis)

    def _of_rows(self, new: PagedTokens) -> PagedTokens:
        """Rows of decoding, which all have equally many tokens."""
        count = len(new.slots) // self.count
        rows = PagedRows(
            self._take(new.rows.tables),
            self._take(new.rows.lengths),
            new.rows.starts[: count + 1],
        )
        return PagedTokens(
            rows,
            self._take(new.slots),
            self._take(new.pages),
            self._take(new.places),
            None,
            new.each,
        )

    def _of_tokens(self, new: PagedTokens) -> PagedTokens:
        """Tokens of prefill: rows have as many as they have here, and those before."""
        size = len(new.pages) // self.count
        first, rows = self.number * size, new.rows
        begins, ends = rows.starts[:-1], rows.starts[1:]
        done = jnp.clip(first + size - begins, 0, ends - begins)
        lengths = rows.lengths - (ends - begins) + done
        starts = jnp.clip(rows.starts - first, 0, size)
        own = PagedRows(rows.tables, lengths, starts)
        count = jnp.clip(new.count - first, 0, size)
        pages, places = self._take(new.pages), self._take(new.places)
        return PagedTokens(own, new.slots, pages, places, count, None)


def without_rows(tokens: Tokens, where: jax.Array, no_row: int) -> Tokens:
    """The facts about tokens, which `where` says so are of no row and write to none."""
    new = tokens.new
    rows = new.rows

    def nothing(x: jax.Array | None, value: int = 0) -> jax.Array | None:
        return None if x is None else jnp.where(where, value, x)

    starts = nothing(rows.starts) if new.each is None else rows.starts
    rows = PagedRows(rows.tables, nothing(rows.lengths), starts)
    slots = nothing(new.slots, no_row)
    of_tokens = nothing(new.pages), nothing(new.places), nothing(new.count)
    return replace(tokens, new=PagedTokens(rows, slots, *of_tokens, new.each))
