"""The layers of a training step: weights that ZeRO shards, and a pipeline's slots.

Before a layer computes, its weights are made whole, and its exchanges and gradients get their place
among those of other layers.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax

from mjax.config.languages.layer_pattern import stream_of
from mjax.config.languages.pipeline_layout import EMPTY
from mjax.models.base.barriers import gradients_before_previous_layer, reduce_under_previous_layer
from mjax.models.base.weight import WeightOrArray, is_weight, values_of, with_values, without_fp8
from mjax.models.runtime.execution import LayerPlan
from mjax.models.runtime.frozen import WeightParts, join_frozen, split_frozen_layer
from mjax.models.runtime.gradient_places import with_gradient_places
from mjax.models.runtime.run import LayerCall, LayerCarry, LayerFunction, Layers
from mjax.models.runtime.vjp import switch_layers
from mjax.sharding.rules import ParamPlacement, Placement


@dataclass(frozen=True, kw_only=True)
class TrainingLayers(Layers):
    """`Layers` whose weights are as `load_weights` gives them; `placement` is the model's."""

    placement: Placement

    def enter(
        self, plan: LayerPlan, kind: str, carry: LayerCarry, call: LayerCall
    ) -> tuple[LayerCarry, dict]:
        """Make a layer's weights whole, and order its exchanges and gradients among others."""
        execution, x, ready = self.execution, carry.x, carry.ready
        weights = call.weights
        if not plan.fp8:
            weights = without_fp8(weights)
        if execution.overlap:
            trained, frozen = self._split(plan, weights)
            x, values, ready = reduce_under_previous_layer(x, values_of(trained), ready)
            weights = join_frozen(with_values(trained, values), frozen)
        if execution.gather == "layer":
            weights = self._gather(plan, weights)
        # A loop waits for gradients anyway, and ZeRO-3 reduces them one by one.
        if execution.unroll != 1 and (execution.overlap or execution.gather == "step"):
            trained, frozen = self._split(plan, weights)
            x, values = gradients_before_previous_layer(x, values_of(trained))
            weights = join_frozen(with_values(trained, values), frozen)
        stream = stream_of(kind)
        tokens, parallel = call.inputs.tokens.of(stream), self.ctx.of(stream).parallel
        specs = self.blocks[plan.stack].specs
        weights = with_gradient_places(weights, specs, tokens, call.number, parallel)
        return replace(carry, x=x, ready=ready), weights

    def one_of(self, plan: LayerPlan, layers: list[Callable]) -> LayerFunction:
        """One of the kinds of a slot, as its device chooses. It has no cache."""
        apart = []
        for kind, layer in zip(plan.kinds, layers, strict=True):
            apart.append(_with_weights_apart(None if kind == EMPTY else layer))
        switch = switch_layers(apart)

        def choose(carry: LayerCarry, call: LayerCall, choice) -> tuple[LayerCarry, None]:
            trained, frozen = self._split(plan, call.weights)
            constants = call.inputs, call.number, frozen
            return switch(choice, carry, trained, constants), None

        return choose

    def _split(self, plan: LayerPlan, weights: dict) -> WeightParts:
        """The weights of a layer, apart into trained and frozen ones."""
        return split_frozen_layer(weights, self.placement.part(plan.stack))

    @jax.named_scope("gather")
    def _gather(self, plan: LayerPlan, weights: dict) -> dict:
        """The weights of a layer from their stored shards.

        The value only takes the gradient if matmuls read the bits: its gather is dead code.
        """
        execution = self.execution

        def gather(where: ParamPlacement, w: WeightOrArray) -> WeightOrArray:
            if not execution.exchanged_in_layer(where):
                return w
            where = where.layer
            if not is_weight(w):
                return where.gather(w)
            if execution.overlap:
                dtype = where.spec.dtype(execution.compute)
                value = where.gather_low(w.value, dtype)
            else:
                value = where.gather(w.value)
            return replace(w, value=value, bits=None if w.bits is None else where.gather(w.bits))

        return self.placement.part(plan.stack).map(gather, weights)


def _with_weights_apart(layer: Callable | None) -> Callable:
    """A layer as `switch_layers` takes it; None, an empty slot, hands on what it gets."""

    def apply(carry: LayerCarry, trained: dict, constants: tuple) -> LayerCarry:
        if layer is None:
            return carry
        inputs, number, frozen = constants
        call = LayerCall(join_frozen(trained, frozen), inputs, number)
        return layer(carry, call)[0]

    return apply
