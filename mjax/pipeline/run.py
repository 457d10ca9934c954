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
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import register_dataclass

from mjax.models.base.streams import Activation
from mjax.models.base.weight import WeightOrArray, add_gradients, is_weight, map_weights
from mjax.models.runtime.frozen import join_frozen
from mjax.models.runtime.store import zero_sums
from mjax.models.runtime.vjp import VjpLayout, join_vjp
from mjax.objectives.fields import Batch, Scalars
from mjax.objectives.local_model import LocalModel
from mjax.objectives.objective import OWN_WEIGHTS, Denominators
from mjax.pipeline.chunk_stacks import unstack_groups
from mjax.pipeline.device import Device, Unit, row_of
from mjax.pipeline.layout import Layout
from mjax.pipeline.schedule import make_schedule


@register_dataclass
@dataclass(frozen=True)
class Carry:
    """The state of a device between ticks.

    y, dy: the activation and the cotangent that came in.
    stash: kept residuals, each [slots of the stash, ...].
    losses: this device's shares of losses and statistics.
    sums: of gradients, a tree like the weights.
    forward_weights, backward_weights: of the chunk that runs forward, and of that which runs
        backward; None where a device has one chunk.
    """

    y: Activation
    dy: Activation
    stash: list[jax.Array]
    losses: Scalars
    sums: dict
    forward_weights: dict | None
    backward_weights: dict | None


@dataclass(frozen=True)
class TrainingTicks:
    """The work of a device in a tick of training.

    denominators: of losses and statistics, in the global batch.
    """

    device: Device
    denominators: Denominators

    def probe(self) -> tuple[Activation, list[jax.ShapeDtypeStruct], VjpLayout]:
        """Shapes of an activation and of what a chunk keeps; how to find it again."""
        device = self.device
        layouts = []

        def trace(unit: Unit) -> tuple[Activation, list]:
            micro_batch = device.micro_batch(unit.micro)
            inputs = device.unit_inputs(unit, micro_batch)
            x = device.embed(device.edge_weights, micro_batch)
            weights = device.layer_weights(device.chunk_weights(unit.chunk))
            _, layout, kept = device.linearize(weights, inputs, x)
            layouts.append(layout)
            return x, kept

        scalar = jax.ShapeDtypeStruct((), jnp.int32)
        return *jax.eval_shape(trace, Unit(*[scalar] * 5)), layouts[0]

    def start(self, x: Activation, kept: list[jax.ShapeDtypeStruct]) -> Carry:
        """The carry before the first tick, of activations of the shapes in `x`.

        Until its first unit a device holds real weights: zeros as scales of FP8 would make NaN.
        """
        device, chunks = self.device, self.device.layout.v
        placement, execution = device.model.placement, device.model.execution
        slots = device.schedule.slots
        forward_weights = backward_weights = None
        if chunks > 1:
            forward_weights = device.chunk_weights(jnp.int32(0))
            backward_weights = device.chunk_weights(jnp.int32(chunks - 1))
        return Carry(
            y=_zeros_like(x),
            dy=_zeros_like(x),
            stash=[jnp.zeros((slots, *k.shape), k.dtype) for k in kept],
            losses=self.denominators.zeros(),
            sums=zero_sums(device.split(device.weights).trained, placement, execution),
            forward_weights=forward_weights,
            backward_weights=backward_weights,
        )

    def forward(self, layout: VjpLayout, carry: Carry, unit: Unit) -> Carry:
        """One unit forward: its residuals go to the stash, and the last one makes the loss."""
        device = self.device
        held = device.held_weights(unit, carry.forward_weights)
        micro_batch = device.micro_batch(unit.micro)
        inputs = device.unit_inputs(unit, micro_batch)
        x = device.enter(unit, micro_batch, carry.y)
        weights = device.layer_weights(held)
        (y, statistics), traced_layout, kept = device.linearize(weights, inputs, x)
        assert traced_layout.sources == layout.sources, "a chunk was traced differently"
        stash = [
            lax.dynamic_update_index_in_dim(buffer, new, unit.slot, 0)
            for buffer, new in zip(carry.stash, kept, strict=True)
        ]
        shares, dy, edge_sums = self.losses(unit, micro_batch, y, carry)
        shares = _add(shares, self.statistics(unit, statistics))
        return replace(
            carry,
            y=device.hand_over(y),
            dy=dy,
            stash=stash,
            losses=_add(carry.losses, shares),
            sums=carry.sums | edge_sums,
            forward_weights=None if carry.forward_weights is None else held,
        )

    def statistics(self, unit: Unit, sums: Scalars) -> Scalars:
        """This device's shares of a unit's statistics, zeros in an idle tick; zeros for losses."""
        factors = self.denominators.factors()
        shares = self.denominators.zeros()
        for name, total in sums.items():
            shares[name] = jnp.where(unit.on == 1, total, 0) * factors[name]
        return shares

    def losses(
        self, unit: Unit, micro_batch: Batch, y: Activation, carry: Carry
    ) -> tuple[Scalars, Activation, dict]:
        """(shares of what the objective gives, cotangent of y, sums of the edges' gradients).

        They are those of the last unit of a micro-batch, and else zeros, what came in, and as is.
        """
        device = self.device
        factors = self.denominators.factors()
        trained, frozen = device.split(device.edge_weights)

        def share(trained: dict, y: Activation) -> tuple[jax.Array, Scalars]:
            edge_weights = join_frozen(trained, frozen)
            model, key = device.model, device.key
            losses, statistics = model.head_losses(edge_weights, y, micro_batch, key)
            sums = losses | statistics
            shares = {}
            for name, total in sums.items():
                shares[name] = total * factors[name]
            return self.denominators.differentiated(shares), shares

        def differentiate(sums: dict) -> tuple[Scalars, Activation, dict]:
            value_and_cotangents = jax.value_and_grad(share, (0, 1), has_aux=True)
            (_, shares), (d_edges, dy) = value_and_cotangents(trained, y)
            return shares, dy, _add(sums, d_edges)

        def idle(sums: dict) -> tuple[Scalars, Activation, dict]:
            return self.denominators.zeros(), _zeros_like(y), sums

        edge_sums = {name: carry.sums[name] for name in device.edge_weights}
        is_last = device.is_last(unit)
        shares, dy, edge_sums = lax.cond(is_last, differentiate, idle, edge_sums)
        dy = jax.tree.map(lambda new, came: jnp.where(is_last, new, came), dy, carry.dy)
        return shares, dy, edge_sums

    def backward(self, layout: VjpLayout, carry: Carry, unit: Unit) -> Carry:
        """One unit backward: its gradients are added; the first one also has the embedding's."""
        device = self.device
        held = device.held_weights(unit, carry.backward_weights)
        micro_batch = device.micro_batch(unit.micro)
        inputs = device.unit_inputs(unit, micro_batch)
        known = jax.tree.leaves((device.layer_weights(held), device.own_weights, inputs))
        kept = [row_of(buffer, unit.slot) for buffer in carry.stash]
        vjp = join_vjp(layout, known, kept)
        names = (*self.denominators.of_statistics, *device.layer_losses)
        cotangents, of_own, dx = vjp((carry.dy, self.denominators.cotangents(names)))

        def embedding(sums: dict) -> dict:
            trained, frozen = device.split(device.edge_weights)

            def embed(trained: dict) -> Activation:
                return device.embed(join_frozen(trained, frozen), micro_batch)

            _, vjp = jax.vjp(embed, trained)
            (d_edges,) = vjp(dx)
            return _add(sums, d_edges)

        edge_sums = {name: carry.sums[name] for name in device.edge_weights}
        edge_sums = lax.cond(device.is_first(unit), embedding, lambda sums: sums, edge_sums)
        if of_own:
            of_own = jax.tree.map(lambda g: jnp.where(unit.on == 1, g, 0), of_own)
            edge_sums[OWN_WEIGHTS] = _add(edge_sums[OWN_WEIGHTS], of_own)
        return replace(
            carry,
            dy=device.hand_over(dx, backward=True),
            sums=edge_sums | self.add_chunk(carry.sums, cotangents, unit),
            backward_weights=None if carry.backward_weights is None else held,
        )

    def add_chunk(self, sums: dict, cotangents: dict, unit: Unit) -> dict:
        """The sums of the stacks with the cotangents of a chunk's layers, row by row, in place.

        Rows keep an axis of length 1. Without it XLA copies a row of sums before it adds to it.
        """
        device = self.device
        execution = device.model.execution
        cotangents = _gradients(cotangents)
        if execution.loops:
            cotangents = unstack_groups(cotangents, execution.layers)
        added = {}
        for stack in device.layout.stacks:
            total, chunk = sums[stack], cotangents[stack]
            for slot, row in enumerate(device.rows(stack, unit.chunk)):
                layer = jax.tree.map(lambda g: jnp.where(unit.on == 1, g, 0)[None], chunk[slot])
                layer = add_gradients(_row_of_stack(total, row), layer)
                total = _with_row(total, layer, row)
            added[stack] = total
        return added


def pipeline_gradients(
    model: LocalModel,
    layout: Layout,
    weights: dict,
    micro_batches: Batch,
    whole: Batch,
    key: jax.Array,
    denominators: Denominators,
) -> tuple[Scalars, dict]:
    """(this device's shares of losses and statistics, cotangents of their total, summed).

    `weights` are local, in storage order. `micro_batches` [m, ...] are equal over pp, and each
    takes the fields `whole`. A cotangent is as `add_gradients` sums it.
    """
    schedule = make_schedule(layout.pp, layout.v, len(micro_batches["rows"]))
    device = Device(model, layout, schedule, weights, micro_batches, whole, key)
    ticks = TrainingTicks(device, denominators)
    x, kept, vjp_layout = ticks.probe()

    def forward(carry: Carry, unit: Unit, _) -> Carry:
        return ticks.forward(vjp_layout, carry, unit)

    def backward(carry: Carry, _, unit: Unit) -> Carry:
        return ticks.backward(vjp_layout, carry, unit)

    def both(carry: Carry, forward_unit: Unit, backward_unit: Unit) -> Carry:
        """One unit backward and one forward, independent of each other."""
        carry = ticks.backward(vjp_layout, carry, backward_unit)
        return ticks.forward(vjp_layout, carry, forward_unit)

    first_backward, last_forward = schedule.start, schedule.ticks
    carry = ticks.start(x, kept)
    carry = device.scan(forward, carry, 0, first_backward)
    carry = device.scan(both, carry, first_backward, last_forward)
    carry = device.scan(backward, carry, last_forward, first_backward + last_forward)
    return carry.losses, carry.sums


def pipeline_losses(
    model: LocalModel,
    layout: Layout,
    weights: dict,
    micro_batches: Batch,
    whole: Batch,
    zeros: Scalars,
    nothing: Scalars,
) -> tuple[Scalars, Scalars]:
    """This device's parts of the sums of the losses, equal over tp, and of statistics.

    There are no gradients and no dropout. `zeros` has a zero for each loss, `nothing` for each
    statistic that the model makes in evaluation.
    """

    def head(y: Activation, micro_batch: Batch, number: jax.Array) -> Scalars:
        return model.head_losses(weights, y, micro_batch, None)[0]

    given = model, layout, weights, micro_batches, whole
    return _forward_sums(*given, head, zeros, nothing, reads_layers=True)


def pipeline_outputs(
    model: LocalModel,
    layout: Layout,
    weights: dict,
    micro_batches: Batch,
    output: Callable[[Activation, Batch], Any],
) -> Any:
    """The `output` of the last layers' activation for each micro-batch, [m, ...], equal over pp.

    It is a tree of arrays of numbers. There are no gradients and no dropout.
    """
    count = len(micro_batches["rows"])

    def head(y: Activation, micro_batch: Batch, number: jax.Array) -> Any:
        is_own = jnp.arange(count) == number
        found = output(y, micro_batch)
        return jax.tree.map(lambda one: jnp.where(_along(is_own, one), one, 0), found)

    schedule = make_schedule(layout.pp, layout.v, count)
    device = Device(model, layout, schedule, weights, micro_batches, {})
    micro_batch = device.micro_batch(0)
    x = jax.eval_shape(device.embed, device.edge_weights, micro_batch)
    shapes = jax.eval_shape(head, x, micro_batch, 0)
    given = model, layout, weights, micro_batches, {}
    found, _ = _forward_sums(*given, head, _zeros_like(shapes), {})
    return jax.tree.map(lambda each: model.placement.parallel.psum(each, "pp"), found)


def _along(mask: jax.Array, one: jax.Array) -> jax.Array:
    """A mask [m] as [m, 1, ..], for arrays like `one` of each micro-batch."""
    return mask.reshape(-1, *[1] * one.ndim)


def _forward_sums(
    model: LocalModel,
    layout: Layout,
    weights: dict,
    micro_batches: Batch,
    whole: Batch,
    head: Callable[[Activation, Batch, jax.Array], Any],
    zeros: Any,
    nothing: Scalars,
    reads_layers: bool = False,
) -> tuple[Any, Scalars]:
    """(sums of `head` over the micro-batches of a last stage, sums of statistics).

    With `reads_layers` all stages add the losses of their layers.
    """
    schedule = make_schedule(layout.pp, layout.v, len(micro_batches["rows"]))
    given = model, layout, schedule, weights, micro_batches, whole
    device = Device(*given, reads_layers=reads_layers)

    def tick(carry: tuple, unit: Unit, _) -> tuple:
        y, sums, statistics, held = carry
        held = device.held_weights(unit, held)
        micro_batch = device.micro_batch(unit.micro)
        x = device.enter(unit, micro_batch, y)
        inputs = device.unit_inputs(unit, micro_batch)
        y, seen = device.apply(device.layer_weights(held), inputs, x)
        seen = {name: jnp.where(unit.on == 1, value, 0) for name, value in seen.items()}

        def last() -> Any:
            return head(y, micro_batch, unit.micro)

        found = lax.cond(device.is_last(unit), last, lambda: zeros)
        for name in device.layer_losses:
            found[name] += seen.pop(name)
        sums, statistics = _add(sums, found), _add(statistics, seen)
        return device.hand_over(y), sums, statistics, None if layout.v == 1 else held

    x = jax.eval_shape(device.embed, device.edge_weights, device.micro_batch(0))
    held = None if layout.v == 1 else device.chunk_weights(jnp.int32(0))
    start = _zeros_like(x), zeros, nothing, held
    _, sums, statistics, _ = device.scan(tick, start, 0, schedule.ticks)
    return sums, statistics


def _row_of_stack(tree, row: jax.Array | int):
    """One row of every stack in a tree, as a stack [1, ...]."""
    return jax.tree.map(lambda stack: lax.dynamic_slice_in_dim(stack, row, 1), tree)


def _with_row(tree, new, row: jax.Array | int):
    """A tree of stacks, in each of which `new` [1, ...] is the row of that number."""

    def put(stack: jax.Array, new: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(stack, new, row, 0)

    return jax.tree.map(put, tree, new)


def _gradients(cotangents: dict) -> dict:
    """Cotangents without those of integers, which JAX gives as arrays of no dtype."""

    def gradient(cotangent: WeightOrArray) -> WeightOrArray:
        if not is_weight(cotangent):
            return cotangent
        return replace(cotangent, bits=None, transposed=None)

    return map_weights(gradient, cotangents)


def _zeros_like(x: Activation) -> Activation:
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), x)


def _add(total: dict, addend: dict) -> dict:
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, addend)
