"""A layer of a pipeline's chunk that is of one kind or another, as each device chooses."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from mjax.config.languages.pipeline_layout import EMPTY
from mjax.models.runtime.frozen import join_frozen, split_frozen_layer
from mjax.models.runtime.vjp import switch_layers
from mjax.sharding.rules import Placement


def one_of(
    kinds: Sequence[str], layers: Sequence[Callable], placement: Placement | None
) -> Callable:
    """f(carry, call, choice) as `Layers` calls it, of f(carry, call) of each kind; without a cache.

    `placement` is that of the layer's stack.
    """
    apart = []
    for kind, layer in zip(kinds, layers, strict=True):
        apart.append(_with_weights_apart(None if kind == EMPTY else layer))
    switch = switch_layers(apart)

    def choose(carry: Any, call: Any, choice: jax.Array) -> tuple[Any, None]:
        trained, frozen = split_frozen_layer(call.weights, placement)
        constants = call._replace(weights=None), frozen
        return switch(choice, carry, trained, constants), call.cache

    return choose


def _with_weights_apart(layer: Callable | None) -> Callable:
    """A layer as `switch_layers` takes it; None, an empty slot, hands on what it gets."""

    def apply(carry: Any, trained: dict, constants: tuple) -> Any:
        if layer is None:
            return carry
        call, frozen = constants
        call = call._replace(weights=join_frozen(trained, frozen))
        return layer(carry, call)[0]

    return apply
