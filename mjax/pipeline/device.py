"""One device of a pipeline: its weights, its inputs, and how it applies a chunk of layers.

A unit is one micro-batch through one chunk. All devices run the same program; which unit it is
about depends on the pp index and the tick (`schedule.py`). Both training and evaluation
(`run.py`) are made of these parts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import register_dataclass

from mjax.config.languages.pipeline_layout import EMPTY
from mjax.models.base.streams import Activation
from mjax.models.runtime.frozen import WeightParts, Weights, join_frozen, split_frozen
from mjax.models.runtime.layer_outputs import LAYER_OUTPUTS, own_outputs
from mjax.models.runtime.run import LayerInputs
from mjax.models.runtime.vjp import VjpLayout, split_vjp
from mjax.objectives.fields import Batch, Scalars
from mjax.objectives.local_model import LocalModel
from mjax.objectives.objective import OWN_WEIGHTS, LayerReader
from mjax.pipeline.chunk_stacks import stack_groups
from mjax.pipeline.layout import Layout
from mjax.pipeline.schedule import Schedule, UnitTable


@register_dataclass
@dataclass(frozen=True)
class Unit:
    """One micro-batch through one chunk, on this device in this tick; int32 scalars (`UnitTable`).

    An idle tick has `on` 0.
    """

    on: jax.Array
    micro: jax.Array
    chunk: jax.Array
    slot: jax.Array
    new: jax.Array


class UnitInputs(NamedTuple):
    """Inputs of a unit's layers besides weights and activations; computed again for a backward.

    numbers, choices: int32 [slots], see `Layers.run`.
    outputs: int32 [M], which of the outputs that the objective reads are theirs (`own_outputs`).
    micro_batch: for the losses of these outputs; {} if there are none.
    """

    layer_inputs: LayerInputs
    numbers: jax.Array
    choices: jax.Array
    outputs: jax.Array
    micro_batch: Batch


@dataclass(frozen=True)
class Device:
    """All that a device needs to run any unit.

    weights: local, as `load_weights` gives them; stacks are [v * slots, ...].
    micro_batches: fields [m, ...], equal over pp. whole: fields that each micro-batch takes whole.
    key: of dropout, or None. reads_layers: whether stages compute losses of their layers.
    """

    model: LocalModel
    layout: Layout
    schedule: Schedule
    weights: dict
    micro_batches: Batch
    whole: Batch
    key: jax.Array | None = None
    reads_layers: bool = True

    @property
    def layer_reader(self) -> LayerReader | None:
        """The objective, if stages compute losses of their layers for it."""
        return self.model.layer_reader if self.reads_layers else None

    @property
    def read_outputs(self) -> tuple[int, ...]:
        """The numbers of the layers that the losses are of."""
        return () if self.layer_reader is None else self.layer_reader.outputs

    @property
    def layer_losses(self) -> tuple[str, ...]:
        """The names of these losses."""
        return () if self.layer_reader is None else self.layer_reader.layer_names

    @property
    def own_weights(self) -> dict:
        """The weights that losses of layers have; every stage has all."""
        return {} if self.layer_reader is None else self.weights.get(OWN_WEIGHTS, {})

    @property
    def edge_weights(self) -> dict:
        """Weights outside the layers: embedding, final norm, head."""
        stacks = self.layout.stacks
        return {name: w for name, w in self.weights.items() if name not in stacks}

    # ---- a unit's weights and inputs -------------------------------------------------------------

    def split(self, weights: Weights) -> WeightParts:
        """Weights of edges or of a chunk, apart into trained and frozen ones."""
        return split_frozen(weights, self.model.placement)

    def chunk_weights(self, chunk: jax.Array) -> dict:
        """The layers of a chunk, a list for each stack.

        Each weight is an array of its own: of a stack XLA would copy the matmuls' operands.
        """
        weights = {}
        for stack in self.layout.stacks:
            rows = self.rows(stack, chunk)
            weights[stack] = [row_of(self.weights[stack], row) for row in rows]
        return weights

    def rows(self, stack: str, chunk: jax.Array) -> list[jax.Array | int]:
        """The rows of a stack that are a chunk's."""
        any_leaf = jax.tree.leaves(self.weights[stack])[0]
        slots = len(any_leaf) // self.layout.v
        first = 0 if self.layout.v == 1 else chunk * slots
        return [first + slot for slot in range(slots)]

    def held_weights(self, unit: Unit, held: dict | None) -> dict:
        """`chunk_weights` of a unit's chunk, of which `held` are those of the unit before.

        A device runs a chunk for pp micro-batches before it changes to the next, and copies its
        weights out of the stacks only then.
        """

        def change() -> dict:
            return self.chunk_weights(unit.chunk)

        if held is None:
            return change()
        return lax.cond(unit.new == 1, change, lambda: held)

    def micro_batch(self, number: jax.Array | int) -> Batch:
        own = {name: row_of(field, number) for name, field in self.micro_batches.items()}
        return own | self.whole

    def unit_inputs(self, unit: Unit, micro_batch: Batch) -> UnitInputs:
        layers = self.layout.table()  # [pp, v, slots], -1 where a slot is empty
        kinds = np.asarray([*self.layout.kinds, EMPTY])[layers]
        choices = np.empty(layers.shape, np.int32)
        for slot, plan in enumerate(self.model.execution.layers):
            choices[..., slot] = np.searchsorted(plan.kinds, kinds[..., slot])

        def here(table: np.ndarray) -> jax.Array:
            table = jnp.asarray(table, jnp.int32)
            return table[lax.axis_index("pp"), unit.chunk]

        tokens = self.model.tokens(micro_batch, self.key)
        layer_inputs = self.model.layer_inputs(self.weights, tokens)
        outputs = here(own_outputs(layers, self.read_outputs))
        numbers = here(np.maximum(layers, 0)), here(choices), outputs
        return UnitInputs(layer_inputs, *numbers, micro_batch if self.read_outputs else {})

    def layer_weights(self, chunk_weights: dict) -> dict | list[dict]:
        """A chunk's weights as its layers take them: lists, or stacked again for a loop."""
        execution = self.model.execution
        if execution.loops:
            return stack_groups(chunk_weights, execution.layers)
        return chunk_weights

    # ---- the model's parts -----------------------------------------------------------------------

    def is_first(self, unit: Unit) -> jax.Array:
        """Whether a unit is the first of its micro-batch; false for an idle tick."""
        on_first_device = lax.axis_index("pp") == 0
        return on_first_device & (unit.chunk == 0) & (unit.on == 1)

    def is_last(self, unit: Unit) -> jax.Array:
        """Whether a unit is the last of its micro-batch; false for an idle tick."""
        on_last_device = lax.axis_index("pp") == self.layout.pp - 1
        last_chunk = self.layout.v - 1
        return on_last_device & (unit.chunk == last_chunk) & (unit.on == 1)

    def embed(self, edge_weights: dict, micro_batch: Batch) -> Activation:
        tokens = self.model.tokens(micro_batch, self.key)
        return self.model.embed(edge_weights, micro_batch, tokens)

    def enter(self, unit: Unit, micro_batch: Batch, y: Activation) -> Activation:
        """The input of a unit's layers: what came in, or the embedding."""

        def embed() -> Activation:
            x = self.embed(self.edge_weights, micro_batch)
            return jax.tree.map(lambda new, like: new.astype(like.dtype), x, y)

        return lax.cond(self.is_first(unit), embed, lambda: y)

    def apply(
        self,
        layer_weights: dict | list[dict],
        inputs: UnitInputs,
        x: Activation,
        own: dict | None = None,
    ) -> tuple[Activation, Scalars]:
        """x through a chunk; also this device's shares of its statistics, and its layers' losses.

        These are sums as `LayerReader.layer_losses` gives them. `own`: in place of `own_weights`.
        """
        y, statistics, _ = self.model.layers_that_keep(self.read_outputs).run(
            layer_weights,
            x,
            inputs.layer_inputs,
            numbers=inputs.numbers,
            choices=inputs.choices,
        )
        if self.read_outputs:
            kept = jnp.take(statistics.pop(LAYER_OUTPUTS), inputs.outputs, axis=0, mode="clip")
            # A stash then has these outputs and nothing that is made of them.
            losses = jax.checkpoint(self.model.losses_of_stage)
            own = self.own_weights if own is None else own
            statistics |= losses(kept, inputs.outputs, own, inputs.micro_batch)
        return y, statistics

    def linearize(
        self, layer_weights: dict | list[dict], inputs: UnitInputs, x: Activation
    ) -> tuple[tuple[Activation, Scalars], VjpLayout, list[jax.Array]]:
        """((y, statistics and losses), layout of the vjp, kept residuals) of a chunk.

        The vjp gives cotangents of the trained weights of its layers, of `own_weights` and of x.
        """

        trained, frozen = self.split(layer_weights)

        def chunk(
            trained: dict | list[dict], own: dict, x: Activation
        ) -> tuple[Activation, Scalars]:
            return self.apply(join_frozen(trained, frozen), inputs, x, own)

        outputs, vjp = jax.vjp(chunk, trained, self.own_weights, x)
        known = jax.tree.leaves((layer_weights, self.own_weights, inputs))
        return outputs, *split_vjp(vjp, known)

    # ---- hand-overs and ticks --------------------------------------------------------------------

    def hand_over(self, y: Activation, backward: bool = False) -> Activation:
        """Exchange with both neighbors: activations go forward in the ring, cotangents back.

        Returns the array that the neighbor sent.
        """
        devices = self.layout.pp
        ring = [(i, (i + 1) % devices) for i in range(devices)]
        if backward:
            ring = [(receiver, sender) for sender, receiver in ring]
        return lax.ppermute(y, "pp", ring)

    def scan(self, tick: Callable, carry, first: int, last: int):
        """`tick(carry, forward unit, backward unit)` over ticks [first, last)."""
        tables = self.schedule.forward, self.schedule.backward
        units = tuple(units_of(table, first, last) for table in tables)

        def step(carry, units: tuple[Unit, Unit]):
            device = lax.axis_index("pp")
            mine = jax.tree.map(lambda column: column[device], units)
            return tick(carry, *mine), None

        return lax.scan(step, carry, units)[0]


def units_of(table: UnitTable, first: int, last: int) -> Unit:
    """The units of ticks [first, last) on all devices: int32 [ticks, pp] fields."""
    columns = vars(table).values()
    return Unit(*(jnp.asarray(column[first:last]) for column in columns))


def row_of(tree, row: jax.Array | int):
    """One row of every stack in a tree."""

    def take(stack: jax.Array) -> jax.Array:
        if stack.shape[0] == 1:
            return stack[0]
        return lax.dynamic_index_in_dim(stack, row, 0, keepdims=False)

    return jax.tree.map(take, tree)
