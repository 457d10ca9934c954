"""Places of gradients' elements, for recipes that round gradients at random.

Invariant: an element has one number on every mesh. A token's follows from its row and column in the
global batch, an output's from its place in the whole weight.
"""

import zlib
from dataclasses import replace

import jax
import jax.numpy as jnp

from mjax.kernels.base.mixer import mix
from mjax.kernels.fp8.four_bits import GradientPlaces
from mjax.models.base.context import Tokens
from mjax.models.base.weight import Weight, WeightOrArray, is_weight
from mjax.sharding.collectives import Parallel
from mjax.sharding.spec import ParamSpec, is_spec


def with_gradient_places(
    weights: dict, specs: dict, tokens: Tokens | None, number: jax.Array, parallel: Parallel
) -> dict:
    """The weights of layer `number` with places, where their recipes need them.

    `specs` declares them. Without a key of draws, as in evaluation, there is no gradient.
    """
    if tokens is None or tokens.key is None:
        return weights
    leaves = jax.tree.leaves(weights, is_leaf=is_weight)
    if not any(map(_needs_places, leaves)):
        return weights
    of_layer = jax.random.fold_in(tokens.key, number)
    key = jax.random.bits(of_layer, (), jnp.uint32)
    rows = tokens.rows.astype(jnp.uint32)
    columns = tokens.columns.astype(jnp.uint32)
    of_tokens = mix(rows)[:, None] + columns

    def one(spec: ParamSpec, w: WeightOrArray) -> WeightOrArray:
        if not _needs_places(w):
            return w
        name = zlib.crc32(w.name.encode())
        outputs = output_numbers(spec, w, parallel)
        places = GradientPlaces(key ^ jnp.uint32(name), of_tokens, outputs)
        return replace(w, places=places)

    return jax.tree.map(one, specs, weights, is_leaf=is_spec)


def _needs_places(w: WeightOrArray) -> bool:
    return is_weight(w) and w.recipe is not None and w.recipe.needs_places


def output_numbers(spec: ParamSpec, w: Weight, parallel: Parallel) -> jax.Array:
    """The numbers uint32 [1, *outputs] of a device's outputs in the whole weight."""
    local = w.value.shape[w.inputs :]
    inputs = len(spec.shape) - len(local)
    whole = spec.shape[inputs:]
    numbers = jnp.zeros((1,), jnp.uint32)
    for length, size in zip(local, whole, strict=True):
        along = jnp.arange(length)
        if length < size:
            along += length * parallel.index("tp")
        along = along.astype(jnp.uint32)
        numbers = numbers[..., None] * jnp.uint32(size)
        numbers = numbers + along
    return numbers
