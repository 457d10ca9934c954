"""The pipeline's three scans, inside the train step's one manual region.

Every device runs the same program. In each tick (`schedule.py`) it applies one chunk forward and
one backward, and hands the results to its neighbors. The forward is an explicit `jax.vjp` whose
residuals wait in a stash, a ring buffer, until the backward. Residuals that are the chunk's weights
or inputs of its micro-batch are not kept but put back, so memory does not grow with the number of
micro-batches. The first stage embeds. The last stage makes the loss and its cotangent. Both do so
under `lax.cond`, so that no other stage waits for them. A predicate depends on the pp index and the
tick alone, hence collectives over the other axes may stand in its branches. Embedding, final norm
and head are replicated over pp: the gradient rule sums their parts, tied or not.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import register_dataclass

from mjax.config.pipeline_layout import EMPTY
from mjax.models.layers import LayerInputs, zero_sums
from mjax.models.local import Batch, LocalModel
from mjax.models.residuals import VjpLayout, join_vjp, split_vjp
from mjax.models.weight import Weight, add_gradients, is_weight
from mjax.pipeline.layout import Layout
from mjax.pipeline.schedule import Schedule, UnitTable, make_schedule


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
    """What the layers of a unit read besides weights and activations; made again for a backward.

    numbers, choices: int32 [slots], see `Layers.run`.
    """

    layer_inputs: LayerInputs
    numbers: jax.Array
    choices: jax.Array


@register_dataclass
@dataclass(frozen=True)
class Carry:
    """What a device holds between ticks.

    y, dy: the activation and the cotangent that came in, [B, S/tp, D].
    stash: kept residuals, each [slots of the stash, ...].
    losses: this device's shares of {loss, aux_loss}.
    sums: of gradients, a tree like the weights.
    forward_weights, backward_weights: of the chunk that runs forward, and of that which runs
        backward; None where a device has one chunk.
    """

    y: jax.Array
    dy: jax.Array
    stash: list[jax.Array]
    losses: dict[str, jax.Array]
    sums: dict
    forward_weights: dict | None
    backward_weights: dict | None


@dataclass(frozen=True)
class Device:
    """What a device needs to run any unit.

    weights: local, as `load_weights` gives them; stacks are [v * slots, ...].
    micro_batches: fields [m, ...], equal over pp. key: of dropout, or None.
    loss_scale: factors of the sums {loss, aux_loss} in the loss that is differentiated.
    """

    model: LocalModel
    layout: Layout
    schedule: Schedule
    weights: dict
    micro_batches: Batch
    key: jax.Array | None = None
    loss_scale: dict[str, jax.Array] = field(default_factory=dict)

    @property
    def edge_weights(self) -> dict:
        """Weights outside the layers: embedding, final norm, head."""
        stacks = self.layout.stacks
        return {name: w for name, w in self.weights.items() if name not in stacks}

    # ---- a unit's weights and inputs -------------------------------------------------------------

    def chunk_weights(self, chunk: jax.Array) -> dict:
        """The layers of a chunk, a list for each stack.

        Each weight is an array of its own: of a stack XLA would copy the matmuls' operands.
        """
        weights = {}
        for stack in self.layout.stacks:
            rows = self.rows(stack, chunk)
            weights[stack] = [_row(self.weights[stack], row) for row in rows]
        return weights

    def rows(self, stack: str, chunk: jax.Array) -> list[jax.Array | int]:
        """The rows of a stack that are a chunk's."""
        slots = len(jax.tree.leaves(self.weights[stack])[0]) // self.layout.v
        first = 0 if self.layout.v == 1 else chunk * slots
        return [first + slot for slot in range(slots)]

    def held_weights(self, unit: Unit, held: dict | None) -> dict:
        """`chunk_weights` of a unit's chunk, of which `held` are those of the unit before.

        A device runs a chunk for pp micro-batches before it changes to the next, and copies its
        weights out of the stacks only then.
        """
        if held is None:
            return self.chunk_weights(unit.chunk)
        return lax.cond(unit.new == 1, lambda: self.chunk_weights(unit.chunk), lambda: held)

    def micro_batch(self, number: jax.Array | int) -> Batch:
        return {name: _row(field, number) for name, field in self.micro_batches.items()}

    def unit_inputs(self, unit: Unit, micro_batch: Batch) -> UnitInputs:
        layers, execution = self.layout.table(), self.model.execution
        kinds = np.asarray([*self.layout.kinds, EMPTY])[layers]  # -1 is the last: EMPTY
        choices = np.empty(layers.shape, np.int32)
        for slot, plan in enumerate(execution.layers):
            choices[..., slot] = np.searchsorted(plan.kinds, kinds[..., slot])

        def here(table: np.ndarray) -> jax.Array:
            return jnp.asarray(table, jnp.int32)[lax.axis_index("pp"), unit.chunk]

        tokens = self.model.tokens(micro_batch, self.key)
        layer_inputs = self.model.layer_inputs(self.weights, tokens)
        return UnitInputs(layer_inputs, here(np.maximum(layers, 0)), here(choices))

    def layer_weights(self, chunk_weights: dict) -> dict:
        """A chunk's weights as its layers take them: lists, or stacked again for a loop."""
        if self.model.execution.unroll == 0:
            return chunk_weights
        return {
            stack: jax.tree.map(lambda *rows: jnp.stack(rows), *layers)
            for stack, layers in chunk_weights.items()
        }

    # ---- the model's parts -----------------------------------------------------------------------

    def is_first(self, unit: Unit) -> jax.Array:
        """Whether a unit is the first of its micro-batch; false for an idle tick."""
        return (lax.axis_index("pp") == 0) & (unit.chunk == 0) & (unit.on == 1)

    def is_last(self, unit: Unit) -> jax.Array:
        """Whether a unit is the last of its micro-batch; false for an idle tick."""
        layout = self.layout
        last_device = lax.axis_index("pp") == layout.pp - 1
        return last_device & (unit.chunk == layout.v - 1) & (unit.on == 1)

    def embed(self, edge_weights: dict, micro_batch: Batch) -> jax.Array:
        tokens = self.model.tokens(micro_batch, self.key)
        return self.model.embed(edge_weights, micro_batch, tokens)

    def enter(self, unit: Unit, micro_batch: Batch, y: jax.Array) -> jax.Array:
        """The input of a unit's layers: what came in, or the embedding."""

        def embed() -> jax.Array:
            return self.embed(self.edge_weights, micro_batch).astype(y.dtype)

        return lax.cond(self.is_first(unit), embed, lambda: y)

    def apply(
        self, layer_weights: dict, inputs: UnitInputs, x: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """x [B, S/tp, D] through a chunk; also this device's share of its auxiliary losses."""
        rest = {"numbers": inputs.numbers, "choices": inputs.choices}
        return self.model.layers.run(layer_weights, x, inputs.layer_inputs, **rest)[:2]

    def linearize(
        self, layer_weights: dict, inputs: UnitInputs, x: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array], VjpLayout, list[jax.Array]]:
        """((y, aux), layout of the vjp, kept residuals) of a chunk."""
        out, vjp = jax.vjp(lambda w, x: self.apply(w, inputs, x), layer_weights, x)
        return out, *split_vjp(vjp, jax.tree.leaves((layer_weights, inputs)))

    # ---- hand-overs and ticks --------------------------------------------------------------------

    def hand_over(self, y: jax.Array, backward: bool = False) -> jax.Array:
        """What the neighbor sends: activations go round the ring, cotangents the other way."""
        ring = [(i, (i + 1) % self.layout.pp) for i in range(self.layout.pp)]
        return lax.ppermute(y, "pp", [(b, a) for a, b in ring] if backward else ring)

    def scan(self, tick: Callable, carry, first: int, last: int):
        """`tick(carry, forward unit, backward unit)` over ticks [first, last)."""
        tables = self.schedule.forward, self.schedule.backward
        units = tuple(_units(table, first, last) for table in tables)

        def step(carry, units: tuple[Unit, Unit]):
            mine = jax.tree.map(lambda column: column[lax.axis_index("pp")], units)
            return tick(carry, *mine), None

        return lax.scan(step, carry, units)[0]

    # ---- training --------------------------------------------------------------------------------

    def probe(self) -> tuple[jax.ShapeDtypeStruct, list[jax.ShapeDtypeStruct], VjpLayout]:
        """Shapes of an activation and of what a chunk keeps; how to find it again."""
        layouts = []

        def trace(unit: Unit) -> tuple[jax.Array, list]:
            micro_batch = self.micro_batch(unit.micro)
            inputs = self.unit_inputs(unit, micro_batch)
            x = self.embed(self.edge_weights, micro_batch)
            weights = self.layer_weights(self.chunk_weights(unit.chunk))
            _, layout, kept = self.linearize(weights, inputs, x)
            layouts.append(layout)
            return x, kept

        scalar = jax.ShapeDtypeStruct((), jnp.int32)
        return *jax.eval_shape(trace, Unit(*[scalar] * 5)), layouts[0]

    def start(self, x: jax.ShapeDtypeStruct, kept: list[jax.ShapeDtypeStruct]) -> Carry:
        """The carry before the first tick.

        Until its first unit a device holds real weights: zeros as scales of FP8 would make NaN.
        """
        one_chunk, model = self.layout.v == 1, self.model
        first, last = (jnp.int32(chunk) for chunk in (0, self.layout.v - 1))
        return Carry(
            y=jnp.zeros(x.shape, x.dtype),
            dy=jnp.zeros(x.shape, x.dtype),
            stash=[jnp.zeros((self.schedule.slots, *k.shape), k.dtype) for k in kept],
            losses={"loss": jnp.float32(0), "aux_loss": jnp.float32(0)},
            sums=zero_sums(self.weights, model.placement, model.execution),
            forward_weights=None if one_chunk else self.chunk_weights(first),
            backward_weights=None if one_chunk else self.chunk_weights(last),
        )

    def forward(self, layout: VjpLayout, carry: Carry, unit: Unit) -> Carry:
        """One unit forward: its residuals go to the stash, and the last one makes the loss."""
        held = self.held_weights(unit, carry.forward_weights)
        micro_batch = self.micro_batch(unit.micro)
        inputs, x = self.unit_inputs(unit, micro_batch), self.enter(unit, micro_batch, carry.y)
        (y, aux), own_layout, kept = self.linearize(self.layer_weights(held), inputs, x)
        assert own_layout.sources == layout.sources, "a chunk was traced differently"
        stash = [
            lax.dynamic_update_index_in_dim(buffer, new, unit.slot, 0)
            for buffer, new in zip(carry.stash, kept, strict=True)
        ]
        loss, dy, edge_sums = self.loss(unit, micro_batch, y, carry)
        aux = jnp.where(unit.on == 1, aux, 0) * self.loss_scale["aux_loss"]
        return replace(
            carry,
            y=self.hand_over(y),
            dy=dy,
            stash=stash,
            losses=_add(carry.losses, {"loss": loss, "aux_loss": aux}),
            sums=carry.sums | edge_sums,
            forward_weights=None if carry.forward_weights is None else held,
        )

    def loss(
        self, unit: Unit, micro_batch: Batch, y: jax.Array, carry: Carry
    ) -> tuple[jax.Array, jax.Array, dict]:
        """(share of the loss, cotangent of y, sums of the edges' gradients) of the last unit."""

        def share(edge_weights: dict, y: jax.Array) -> jax.Array:
            return self.model.head_loss(edge_weights, y, micro_batch) * self.loss_scale["loss"]

        def differentiate(sums: dict) -> tuple[jax.Array, jax.Array, dict]:
            value, (d_edges, dy) = jax.value_and_grad(share, (0, 1))(self.edge_weights, y)
            return value, dy, _add(sums, d_edges)

        def idle(sums: dict) -> tuple[jax.Array, jax.Array, dict]:
            return jnp.float32(0), jnp.zeros_like(y), sums

        edge_sums = {name: carry.sums[name] for name in self.edge_weights}
        is_last = self.is_last(unit)
        value, dy, edge_sums = lax.cond(is_last, differentiate, idle, edge_sums)
        return value, jnp.where(is_last, dy, carry.dy), edge_sums

    def backward(self, layout: VjpLayout, carry: Carry, unit: Unit) -> Carry:
        """One unit backward: its gradients are added; the first one also has the embedding's."""
        held = self.held_weights(unit, carry.backward_weights)
        micro_batch = self.micro_batch(unit.micro)
        known = jax.tree.leaves((self.layer_weights(held), self.unit_inputs(unit, micro_batch)))
        kept = [_row(buffer, unit.slot) for buffer in carry.stash]
        vjp = join_vjp(layout, known, kept)
        cotangents, dx = vjp((carry.dy, self.loss_scale["aux_loss"]))

        def embedding(sums: dict) -> dict:
            _, embed_vjp = jax.vjp(lambda w: self.embed(w, micro_batch), self.edge_weights)
            return _add(sums, embed_vjp(dx)[0])

        edge_sums = {name: carry.sums[name] for name in self.edge_weights}
        edge_sums = lax.cond(self.is_first(unit), embedding, lambda sums: sums, edge_sums)
        return replace(
            carry,
            dy=self.hand_over(dx, backward=True),
            sums=edge_sums | self.add_chunk(carry.sums, cotangents, unit),
            backward_weights=None if carry.backward_weights is None else held,
        )

    def add_chunk(self, sums: dict, cotangents: dict, unit: Unit) -> dict:
        """The sums of the stacks with the cotangents of a chunk's layers, row by row, in place.

        Rows keep an axis of length 1. Without it XLA copies a row of sums before it adds to it.
        """
        added = {}
        for stack in self.layout.stacks:
            total, more = sums[stack], cotangents[stack]
            is_list = isinstance(more, list)
            for slot, row in enumerate(self.rows(stack, unit.chunk)):
                layer = _gradients(more[slot]) if is_list else _row(_gradients(more), slot)
                layer = jax.tree.map(lambda g: jnp.where(unit.on == 1, g, 0)[None], layer)
                total = _with_row(total, add_gradients(_row_of_stack(total, row), layer), row)
            added[stack] = total
        return added


def pipeline_gradients(
    model: LocalModel,
    layout: Layout,
    weights: dict,
    micro_batches: Batch,
    key: jax.Array,
    tokens: jax.Array,
    sequences: int,
) -> tuple[dict[str, jax.Array], dict]:
    """(this device's shares of {loss, aux_loss}, cotangents of its share, summed).

    `weights` are local, in storage order. `micro_batches` [m, ...] are equal over pp. `tokens` and
    `sequences` are the denominators of the global batch. A cotangent is as `add_gradients` sums it.
    """
    schedule = make_schedule(layout.pp, layout.v, len(micro_batches["tokens"]))
    tp = model.placement.parallel.tp
    loss_scale = {
        "loss": 1 / jnp.maximum(tokens, 1) / tp,  # the loss is computed on each tp device
        "aux_loss": jnp.float32(1 / sequences),
    }
    device = Device(model, layout, schedule, weights, micro_batches, key, loss_scale)
    x, kept, vjp_layout = device.probe()

    def forward(carry: Carry, unit: Unit, _) -> Carry:
        return device.forward(vjp_layout, carry, unit)

    def backward(carry: Carry, _, unit: Unit) -> Carry:
        return device.backward(vjp_layout, carry, unit)

    def both(carry: Carry, forward_unit: Unit, backward_unit: Unit) -> Carry:
        """One unit backward and one forward, independent of each other."""
        carry = device.backward(vjp_layout, carry, backward_unit)
        return device.forward(vjp_layout, carry, forward_unit)

    carry = device.start(x, kept)
    carry = device.scan(forward, carry, 0, schedule.start)
    carry = device.scan(both, carry, schedule.start, schedule.ticks)
    carry = device.scan(backward, carry, schedule.ticks, schedule.start + schedule.ticks)
    return carry.losses, carry.sums


def pipeline_nll(
    model: LocalModel, layout: Layout, weights: dict, micro_batches: Batch
) -> jax.Array:
    """This device's part of the sum of masked nll, without gradients or dropout; equal over tp."""
    schedule = make_schedule(layout.pp, layout.v, len(micro_batches["tokens"]))
    device = Device(model, layout, schedule, weights, micro_batches)

    def tick(carry: tuple, unit: Unit, _) -> tuple:
        y, nll, held = carry
        held = device.held_weights(unit, held)
        micro_batch = device.micro_batch(unit.micro)
        x = device.enter(unit, micro_batch, y)
        inputs = device.unit_inputs(unit, micro_batch)
        y, _ = device.apply(device.layer_weights(held), inputs, x)

        def head() -> jax.Array:
            return model.head_loss(weights, y, micro_batch)

        nll += lax.cond(device.is_last(unit), head, lambda: jnp.float32(0))
        return device.hand_over(y), nll, None if layout.v == 1 else held

    x = jax.eval_shape(lambda: device.embed(device.edge_weights, device.micro_batch(0)))
    held = None if layout.v == 1 else device.chunk_weights(jnp.int32(0))
    start = jnp.zeros(x.shape, x.dtype), jnp.float32(0), held
    return device.scan(tick, start, 0, schedule.ticks)[1]


def _units(table: UnitTable, first: int, last: int) -> Unit:
    """The units of ticks [first, last) on all devices: int32 [ticks, pp] fields."""
    return Unit(*(jnp.asarray(column[first:last]) for column in vars(table).values()))


def _row(tree, row: jax.Array | int):
    """One row of every stack in a tree."""

    def take(stack: jax.Array) -> jax.Array:
        if stack.shape[0] == 1:
            return stack[0]
        return lax.dynamic_index_in_dim(stack, row, 0, keepdims=False)

    return jax.tree.map(take, tree)


def _row_of_stack(tree, row: jax.Array | int):
    """One row of every stack in a tree, as a stack [1, ...]."""
    return jax.tree.map(lambda stack: lax.dynamic_slice_in_dim(stack, row, 1), tree)


def _with_row(tree, new, row: jax.Array | int):
    """A tree of stacks, in each of which `new` [1, ...] is the row of that number."""
    return jax.tree.map(
        lambda stack, own: lax.dynamic_update_slice_in_dim(stack, own, row, 0), tree, new
    )


def _gradients(cotangents: dict) -> dict:
    """Cotangents without those of integers, which JAX gives as arrays of no dtype."""

    def one(cotangent: Weight | jax.Array) -> Weight | jax.Array:
        return replace(cotangent, bits=None, transposed=None) if is_weight(cotangent) else cotangent

    return jax.tree.map(one, cotangents, is_leaf=is_weight)


def _add(total: dict, more: dict) -> dict:
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, more)
