"""The router of a mixture of experts: which experts a token goes to, and with what weight.

The router follows Switch Transformer (arXiv 2101.03961), Mixtral and Qwen3-MoE. The balance loss is
per sequence (DeepSeek-V3, arXiv 2412.19437; Megatron-LM's seq_aux_loss). So it is a sum over the
global batch and depends neither on the mesh nor on micro-batches. Masked tokens count in it too,
because they load the experts alike.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from mjax.config.model_schema import ModelConfig
from mjax.sharding.collectives import Parallel


class Routing(NamedTuple):
    """Where tokens [B, S] go, each to k of E experts.

    experts: int32 [B, S, k], all k different. gates: fp32 [B, S, k], the weights of their outputs.
    probs: fp32 [B, S, E], the scores of all experts; their sum is 1.
    """

    experts: jax.Array
    gates: jax.Array
    probs: jax.Array

    @property
    def chosen(self) -> jax.Array:
        """1 where an expert was chosen, else 0: fp32 [B, S, E]."""
        return jax.nn.one_hot(self.experts, self.probs.shape[-1], dtype=jnp.float32).sum(-2)


def route(x: jax.Array, router: jax.Array, cfg: ModelConfig) -> Routing:
    """The routing of x [B, S, D] by a router [D, E].

    Gates are the softmax over the chosen logits with `norm_topk_prob`, else that over all logits.
    Equal logits go to the expert of the lower number.
    """
    logits = jnp.einsum(
        "bsd,de->bse",
        x.astype(jnp.float32),
        router.astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    probs = jax.nn.softmax(logits, -1)
    constant = jax.lax.stop_gradient(logits)
    _, experts = jax.lax.top_k(constant, cfg.moe.num_experts_per_tok)
    if cfg.moe.norm_topk_prob:
        gates = jax.nn.softmax(jnp.take_along_axis(logits, experts, -1), -1)
    else:
        gates = jnp.take_along_axis(probs, experts, -1)
    return Routing(experts, gates, probs)


def balance_loss(routing: Routing, cfg: ModelConfig, parallel: Parallel) -> jax.Array:
    """This device's share of the balance loss, summed over its sequences: fp32 [].

    The loss of a sequence is coef * E * sum_e f_e * P_e. f_e is the fraction of the sequence's
    choices that went to expert e, P_e the mean probability of e. A balanced sequence has coef.
    The routing is of [B, S/cp/tp] tokens. Shares add up over cp and tp.
    """
    chosen, probs = routing.chosen, routing.probs
    tokens = chosen.shape[1] * parallel.size("cp", "tp")
    counts = jax.lax.stop_gradient(chosen).sum(1)
    counts = parallel.psum(counts, "cp", "tp")  # of all tokens of a sequence
    fractions = counts / (tokens * cfg.moe.num_experts_per_tok)
    weighted = fractions * probs.sum(1)
    return cfg.moe.router_aux_loss_coef * cfg.moe.num_experts * jnp.sum(weighted / tokens)
