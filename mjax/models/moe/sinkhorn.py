"""Sinkhorn's routing: experts of equal loads, chosen for all tokens of a sequence at once.

exp(logits) is scaled by a factor for each token and one for each expert, in turn, until tokens and
experts have equal sums; a token goes to its k largest. Megatron-LM (`moe_router_load_balancing_type
sinkhorn`) balances the tokens of a rank, and stops where the factors of experts move by less than
1e-4. Here each sequence is balanced alone, in a fixed number of turns, so that neither the mesh nor
micro-batches matter. Only the choice depends on it: gates are the router's, and no gradient flows.
"""

import jax
import jax.numpy as jnp
from jax import lax

from mjax.config.schema.model import MoeConfig
from mjax.models.moe.capacity import SEQUENCE_AXES
from mjax.sharding.collectives import Parallel

TURNS = 16
_SMALL = 1e-8


def sinkhorn_experts(logits: jax.Array, moe: MoeConfig, parallel: Parallel) -> jax.Array:
    """The experts int32 [B, S/cp/tp, k] of tokens, from the router's logits fp32 [B, .., E]."""
    whole = parallel.all_gather(lax.stop_gradient(logits), SEQUENCE_AXES, 1)
    scores = jax.vmap(sinkhorn)(whole)
    _, experts = lax.top_k(scores, moe.num_experts_per_tok)
    return parallel.shard(experts, SEQUENCE_AXES, 1)


def sinkhorn(logits: jax.Array) -> jax.Array:
    """exp(logits) [S, E], scaled so that all rows and all columns have nearly equal sums."""
    costs = jnp.exp(logits - logits.max())
    tokens, experts = costs.shape

    def turn(_, factors: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        _, of_experts = factors
        sums = jnp.sum(costs * of_experts, 1)
        of_tokens = 1 / tokens / (sums + _SMALL)
        loads = jnp.sum(costs * of_tokens[:, None], 0)
        of_experts = 1 / experts / (loads + _SMALL)
        return of_tokens, of_experts

    start = jnp.ones(tokens), jnp.ones(experts)
    of_tokens, of_experts = lax.fori_loop(0, TURNS, turn, start)
    return of_experts * costs * of_tokens[:, None]
