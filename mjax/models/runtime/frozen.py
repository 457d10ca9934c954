"""Frozen parameters: how a step takes weights apart into what it trains and what it only reads.

`ParamSpec.frozen` declares them. A tree of trained weights has None in the place of a frozen one.
Autodiff finds no leaf there: no gradient is computed, summed or exchanged, and no moment is kept.
The scales of a frozen matmul in FP8 are in the trained tree, for their cotangents are the maxima
that it saw. Invariant: `join_frozen(*split_frozen(weights, ..))` is `weights`.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import jax

from mjax.models.base.weight import WeightOrArray, is_weight
from mjax.sharding.rules import ParamPlacement, Placement

# The weights of a model: a dict by name as `load_weights` gives it, in which stacks may be lists of
# layers; or of a pipeline's chunk in a loop, a list of such dicts (`stack_groups`).
Weights = dict | list


class WeightParts(NamedTuple):
    """Weights taken apart; `frozen` is None if there are no frozen ones."""

    trained: Weights
    frozen: Weights | None


def split_frozen(weights: Weights, placement: Placement) -> WeightParts:
    """The weights of a model, or of a part of it, taken apart."""
    if not placement.has_frozen:
        return WeightParts(weights, None)
    trained = map_parameters(_trained_part, weights, placement)
    frozen = map_parameters(_frozen_part, weights, placement)
    return WeightParts(trained, frozen)


def split_frozen_layer(weights: dict, placement: Placement) -> WeightParts:
    """The weights of one layer taken apart; `placement` is that of its stack."""
    if not placement.has_frozen:
        return WeightParts(weights, None)
    trained = placement.map(_trained_part, weights)
    frozen = placement.map(_frozen_part, weights)
    return WeightParts(trained, frozen)


def join_frozen(trained: Weights, frozen: Weights | None) -> Weights:
    """The weights that were taken apart."""
    if frozen is None:
        return trained

    def join(trained: WeightOrArray | None, frozen: WeightOrArray | None) -> WeightOrArray:
        if frozen is None:
            return trained
        return replace(frozen, scales=trained.scales) if is_weight(frozen) else frozen

    return jax.tree.map(join, trained, frozen, is_leaf=_is_entry)


def map_parameters(function: Callable, tree: Weights, placement: Placement) -> Weights:
    """function(placement, entry) of every parameter that has an entry in `tree`.

    It is called for each layer of a stack whose layers are apart. In lists of layers the
    placement is that of the stack.
    """
    if isinstance(tree, list):
        return [map_parameters(function, group, placement) for group in tree]

    def one(where: ParamPlacement, entry):
        if entry is None:
            return None
        if isinstance(entry, list):
            return [function(where.layer, layer) for layer in entry]
        return function(where, entry)

    mapped = {}
    for name, entries in tree.items():
        part = placement.part(name)
        if isinstance(entries, list):
            mapped[name] = [part.map(one, layer) for layer in entries]
        else:
            mapped[name] = part.map(one, entries)
    return mapped


def _trained_part(where: ParamPlacement, w: WeightOrArray) -> WeightOrArray | None:
    if not where.spec.frozen:
        return w
    if not is_weight(w):
        return None
    return replace(w, value=None, bits=None, transposed=None, grad_sum=None)


def _frozen_part(where: ParamPlacement, w: WeightOrArray) -> WeightOrArray | None:
    if not where.spec.frozen:
        return None
    return replace(w, scales=None) if is_weight(w) else w


def _is_entry(x: object) -> bool:
    return x is None or is_weight(x)
