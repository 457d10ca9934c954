"""Capacity: an expert takes no more than its share of the tokens of a sequence, and some.

Each sequence of S tokens gives each expert at most C = ceil(S * k / E * capacity_factor) of them
(GShard, arXiv 2006.16668; Switch Transformer, arXiv 2101.03961). The others lose that expert, and
what is left of their gates stays as it is (Megatron-LM's `moe_expert_capacity_factor`). Megatron-LM
counts over the tokens of a rank and micro-batch, so there the mesh decides who is dropped. Here a
sequence is counted alone. Invariant: what is dropped depends on neither the mesh nor micro-batches.
"""

import math
from fractions import Fraction
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mjax.config.schema.model import MoeConfig
from mjax.models.base.context import Tokens
from mjax.models.moe.router import Routing
from mjax.sharding.collectives import Parallel

SEQUENCE_AXES = ("cp", "tp")  # over which the tokens of a sequence are split, outer to inner


class Choice(NamedTuple):
    """The choices of tokens, [B, S, k] each: experts int32, gates fp32; columns int32 [S]."""

    experts: jax.Array
    gates: jax.Array
    columns: jax.Array


def expert_capacity(moe: MoeConfig, length: int) -> int:
    """The tokens of a sequence of `length` that an expert takes; `length` at most."""
    if moe.capacity_factor is None:
        return length
    factor = Fraction(str(moe.capacity_factor))
    share = factor * length * moe.num_experts_per_tok / moe.num_experts
    return min(math.ceil(share), length)


def within_capacity(
    routing: Routing, tokens: Tokens, moe: MoeConfig, parallel: Parallel
) -> Routing:
    """The routing of [B, S/cp/tp] tokens whose pairs above the capacity go nowhere.

    A pair of a token and an expert goes nowhere if its expert is number E. By `probs` an expert
    keeps the pairs of the largest gates, by `position` the first of the sequence. Equal gates go by
    position.
    """
    experts = routing.experts
    length = experts.shape[1] * parallel.size(*SEQUENCE_AXES)
    capacity = expert_capacity(moe, length)
    if capacity == length:
        return routing
    local = Choice(experts, lax.stop_gradient(routing.gates), tokens.columns)
    whole = Choice(
        parallel.all_gather(local.experts, SEQUENCE_AXES, 1),
        parallel.all_gather(local.gates, SEQUENCE_AXES, 1),
        parallel.all_gather(local.columns, "cp", 0),
    )
    ranks = ranks_of_pairs(whole, moe.num_experts, moe.drop_policy)
    is_above = parallel.shard(ranks >= capacity, SEQUENCE_AXES, 1)
    is_dropped = is_above & (experts < moe.num_experts)
    kept = jnp.where(is_dropped, moe.num_experts, experts)
    return routing._replace(experts=kept, is_dropped=is_dropped)


def ranks_of_pairs(choice: Choice, experts: int, policy: str) -> jax.Array:
    """How many pairs of its sequence an expert takes before each pair: int32 [B, S, k]."""
    shape = choice.experts.shape
    sequences, length, k = shape
    pairs = sequences, length * k
    numbers = choice.experts.reshape(pairs)
    columns = jnp.broadcast_to(choice.columns[:, None], shape)
    columns = columns.reshape(pairs)
    place = jnp.arange(length * k, dtype=jnp.int32)
    place = jnp.broadcast_to(place, pairs)
    keys = [numbers]
    if policy == "probs":
        keys.append(-choice.gates.reshape(pairs))
    keys.append(columns)
    in_order = lax.sort((*keys, place), dimension=1, num_keys=len(keys))
    sorted_numbers, original_place = in_order[0], in_order[-1]
    first = _first_places(sorted_numbers, experts)
    ranks = place - jnp.take_along_axis(first, sorted_numbers, 1)
    _, ranks = lax.sort((original_place, ranks), dimension=1, num_keys=1)
    return ranks.reshape(shape)


def _first_places(sorted_numbers: jax.Array, experts: int) -> jax.Array:
    """The place from which on the pairs of each expert lie, int32 [B, E + 1]."""
    every_expert = jnp.arange(experts + 1, dtype=jnp.int32)
    search = jax.vmap(jnp.searchsorted, in_axes=(0, None))
    return search(sorted_numbers, every_expert).astype(jnp.int32)
