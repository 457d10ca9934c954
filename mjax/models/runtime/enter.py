"""The first steps of a layer in training: whole weights, and the order of its exchanges."""

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mjax.models.base.barriers import gradients_before_previous_layer, reduce_under_previous_layer
from mjax.models.base.streams import Activation
from mjax.models.base.weight import WeightOrArray, is_weight, values_of, with_values, without_fp8
from mjax.models.runtime.execution import Execution, LayerPlan
from mjax.models.runtime.frozen import join_frozen, split_frozen_layer
from mjax.sharding.rules import ParamPlacement, Placement


class Entered(NamedTuple):
    """A layer's input, its whole weights, and the token of `reduce_under_previous_layer`."""

    x: Activation
    weights: dict
    ready: jax.Array | None


def enter_layer(
    plan: LayerPlan,
    execution: Execution,
    placement: Placement,
    x: Activation,
    weights: dict,
    ready: jax.Array | None,
) -> Entered:
    """Make a layer's weights whole, and order its exchanges and gradients among others.

    `placement` is that of the layer's stack.
    """
    if not plan.fp8:
        weights = without_fp8(weights)
    if execution.overlap:
        trained, frozen = split_frozen_layer(weights, placement)
        x, values, ready = reduce_under_previous_layer(x, values_of(trained), ready)
        weights = join_frozen(with_values(trained, values), frozen)
    if execution.gather == "layer":
        weights = _gather_layer(execution, placement, weights)
    # A loop waits for gradients anyway, and ZeRO-3 reduces them one by one.
    if execution.unroll != 1 and (execution.overlap or execution.gather == "step"):
        trained, frozen = split_frozen_layer(weights, placement)
        x, values = gradients_before_previous_layer(x, values_of(trained))
        weights = join_frozen(with_values(trained, values), frozen)
    return Entered(x, weights, ready)


@jax.named_scope("gather")
def _gather_layer(execution: Execution, placement: Placement, weights: dict) -> dict:
    """The weights of a layer from their stored shards.

    The value only takes the gradient if matmuls read the bits: its gather is dead code.
    """

    def gather(where: ParamPlacement, w: WeightOrArray) -> WeightOrArray:
        if not execution.exchanged_in_layer(where):
            return w
        where = where.layer
        if not is_weight(w):
            return where.gather(w)
        if execution.overlap:
            value = where.gather_low(w.value, jnp.dtype(execution.compute))
        else:
            value = where.gather(w.value)
        return replace(w, value=value, bits=None if w.bits is None else where.gather(w.bits))

    return placement.map(gather, weights)
