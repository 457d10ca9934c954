"""Buffers: the part of a run's state that no gradient moves, each declared with its own update.

They lie in `state["buffers"]`, {name: tree of arrays}. Step, trainer and checkpoints treat all
alike, and the state of a run without buffers has no such entry. The maxima of FP8's delayed scaling
are one. Invariant: a buffer is a function of the steps before, and equal on every mesh.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from mjax.config.schema.run import PrecisionConfig
from mjax.kernels.fp8.recipe import RECIPES, Recipe, recipe_of
from mjax.models.runtime.load import fp8_leaves
from mjax.sharding.collectives import Parallel
from mjax.sharding.rules import Placement

# fp32 [L, E], by the path of a parameter.
ExpertCounts = dict[tuple[str, ...], jax.Array]


class Seen(NamedTuple):
    """The measurements of a step that buffers are updated from.

    maxima: the largest magnitudes in FP8's matmuls on this device, {stack: {matmul: [L, 3]}}.
    losses: of the global batch, by name.
    counts: tokens of the global batch that each expert got, fp32 [L, E] by the path of a parameter
        that counts (`ParamSpec`). L are the layers of this pipeline stage; [E] without a stack.
    """

    maxima: dict
    losses: dict[str, jax.Array]
    counts: ExpertCounts = {}


@dataclass(frozen=True)
class Buffer:
    """The declaration of a buffer.

    initial: parameters as stored -> its arrays before the first step; to be traced.
    axes: the logical axes of its arrays, from the first on (`sharding/rules.py`).
    update: (its arrays, what the step saw, parallel) -> (the next ones, whether the step counts).
        They are local shards. A step that does not count leaves the whole state as it was.
    """

    initial: Callable[[dict], dict]
    axes: tuple[str | None, ...]
    update: Callable[[dict, Seen, Parallel], tuple[dict, jax.Array]]


def buffers_of(precision: PrecisionConfig, specs: dict) -> dict[str, Buffer]:
    """The buffers of a run, by name; `specs` are the parameters' as stored."""
    for name in precision.fp8_recipes:
        recipe = recipe_of(precision, name)
        if recipe.remembers:
            return {"fp8": maxima_buffer(recipe, name, specs, precision.fp8_amax_history)}
    return {}


def buffer_keys(config: dict) -> list[str]:
    """The config keys that a run's buffers follow from; `config` is as `model_dump` gives it.

    A resumed run that changes them starts its buffers anew.
    """
    precision = config["precision"]
    names = [precision.get("fp8"), *(recipe for _, recipe in precision.get("fp8_rules", []))]
    if not any(name in RECIPES and RECIPES[name].remembers for name in names):
        return []
    keys = "fp8", "fp8_amax_history", "fp8_experts", "fp8_rules"
    return [f"precision.{name}" for name in keys]


def maxima_buffer(recipe: Recipe, name: str, specs: dict, steps: int) -> Buffer:
    """The maxima of the last steps that a recipe remembers: {stack: {matmul: fp32 [L, ..]}}.

    They are of the weights whose recipe has that name.
    """

    def initial(params: dict) -> dict:
        return recipe.first_state(fp8_leaves(params, specs, name), steps)

    def update(history: dict, seen: Seen, parallel: Parallel) -> tuple[dict, jax.Array]:
        own = {
            stack: {matmul: seen.maxima[stack][matmul] for matmul in of_stack}
            for stack, of_stack in history.items()
        }
        return recipe.next_state(history, own, parallel)

    return Buffer(initial, ("layers",), update)


def update_buffers(
    buffers: dict[str, Buffer], old: dict, seen: Seen, parallel: Parallel
) -> tuple[dict, jax.Array]:
    """(all buffers after a step, whether the step counts)."""
    new, counts = {}, jnp.bool_(True)
    for name, buffer in buffers.items():
        new[name], one_counts = buffer.update(old[name], seen, parallel)
        counts &= one_counts
    return new, counts


# ---- parameters that count -----------------------------------------------------------------------


def global_counts(cotangents: dict, placement: Placement) -> ExpertCounts:
    """`Seen.counts` from the cotangents of a step on this device; of frozen parameters none."""
    found = {}
    flat = flatten_dict(cotangents)
    for path, spec in flatten_dict(placement.specs).items():
        if spec.counts and not spec.frozen:
            # Layers of a stack are on one stage; only one stage runs those that are in none.
            stages = () if spec.is_stacked else ("pp",)
            found[path] = placement.parallel.psum(flat[path], "dp", "ep", "cp", "tp", *stages)
    return found


def move_biases(params: dict, counts: ExpertCounts, rate: jax.Array | float) -> dict:
    """Parameters as stored, with biases of experts a step nearer to equal loads.

    A bias gains `rate` where its expert got fewer tokens than the mean, and loses it where it got
    more (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).
    """
    flat = flatten_dict(params)
    for path, found in counts.items():
        mean = found.mean(-1, keepdims=True)
        flat[path] = flat[path] + rate * jnp.sign(mean - found)
    return unflatten_dict(flat)


def load_imbalance(counts: ExpertCounts, parallel: Parallel) -> jax.Array:
    """The load of the fullest expert of any layer over the mean of its layer, fp32 []."""
    worst = jnp.float32(0)
    for found in counts.values():
        mean = found.mean(-1)
        of_layers = found.max(-1) / jnp.maximum(mean, 1e-20)
        worst = jnp.maximum(worst, of_layers.max())
    return parallel.pmax(worst, "pp")
