"""Mixture of experts: a top-k softmax router and dropless gated experts, sharded over ep and tp.

Each device runs every expert it holds on all tokens of its ep group, weighted by the token's gate,
which is zero where the expert was not chosen: exact and with static shapes, but E/k times the
needed work. It proves the axes; a dispatching kernel replaces the loop, not the interface. Router
after Switch Transformer (arXiv 2101.03961), Mixtral and Qwen3-MoE. The balance loss is per
sequence (DeepSeek-V3, arXiv 2412.19437; Megatron's seq_aux_loss), so that it is a sum over the
global batch and depends neither on the mesh nor on micro-batches. All tokens count in it, masked
ones too: they load the experts alike.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from mjax.config.schema import ModelConfig
from mjax.models.context import Context
from mjax.models.mlp import activated, gated, up_names
from mjax.models.params import declare, normal
from mjax.sharding.collectives import Parallel
from mjax.sharding.spec import ParamSpec


class MoE(nnx.Module):
    """[B, S/tp, D] -> [B, S/tp, D] and this device's share of the balance loss.

    `up` is [E, D, 2, F] (gate, up) when `mlp_gated`, else [E, D, F]; `router` is [D, E].
    """

    def __init__(self, cfg: ModelConfig, out_std: float, rngs: nnx.Rngs):
        self.cfg = cfg
        e, d, f = cfg.num_experts, cfg.hidden_size, cfg.moe_intermediate_size
        lead, axes = ((2, f), ("pair", "mlp")) if cfg.mlp_gated else ((f,), ("mlp",))
        init = normal(cfg.initializer_range)
        router = ParamSpec((d, e), ("embed", "router"), "router", hf=("mlp.gate.weight",))
        self.router = declare(rngs, router, init)
        expert = "mlp.experts.{expert}"
        names = up_names(cfg, expert, "weight")
        up = ParamSpec((e, d, *lead), ("experts", "embed", *axes), "matrix", hf=names)
        names = (f"{expert}.down_proj.weight",)
        down = ParamSpec((e, f, d), ("experts", "mlp", "embed"), "matrix", hf=names)
        self.up, self.down = declare(rngs, up, init), declare(rngs, down, normal(out_std))

    @jax.named_scope("mlp")
    def __call__(self, x: jax.Array, ctx: Context) -> tuple[jax.Array, jax.Array]:
        cfg, par = self.cfg, ctx.parallel
        gates, chosen, probs = route(x, self.router[...], cfg)
        x, gates = to_experts(x, gates, par)

        @jax.checkpoint  # or every expert's activations of all tokens would be kept
        def expert(y, own):
            up, down, gate = own
            h = _hidden(x, up, cfg) * gate[..., None].astype(x.dtype)
            return y + jnp.tensordot(h, down, 1, preferred_element_type=jnp.float32), None

        own = self.up[...], self.down[...], jnp.moveaxis(gates, 2, 0)
        y, _ = jax.lax.scan(expert, jnp.zeros(x.shape, jnp.float32), own)
        return from_experts(y.astype(x.dtype), par), balance_loss(chosen, probs, cfg, par)


def route(
    x: jax.Array, router: jax.Array, cfg: ModelConfig
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """x [B, S, D] -> fp32 [B, S, E]: gates (zero where not chosen), choices (0 or 1), softmax.

    Gates are the softmax over the chosen logits with `norm_topk_prob`, else the chosen entries of
    the softmax over all. Equal logits go to the lower expert.
    """
    precise = dict(precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
    logits = jnp.einsum("bsd,de->bse", x.astype(jnp.float32), router.astype(jnp.float32), **precise)
    probs = jax.nn.softmax(logits, -1)
    _, experts = jax.lax.top_k(jax.lax.stop_gradient(logits), cfg.num_experts_per_tok)
    chosen = jax.nn.one_hot(experts, cfg.num_experts, dtype=jnp.float32).sum(-2)
    if not cfg.norm_topk_prob:
        return probs * chosen, chosen, probs
    return jax.nn.softmax(logits, -1, where=chosen > 0), chosen, probs


def to_experts(x: jax.Array, gates: jax.Array, parallel: Parallel) -> tuple[jax.Array, jax.Array]:
    """x [B, S/tp, D] and gates [B, S/tp, E] -> [B*ep, S, D] and [B*ep, S, E/ep] of own experts."""
    x = parallel.all_gather(parallel.gather_seq(x), "ep", 0)
    gates = parallel.all_gather(parallel.gather_seq(gates), "ep", 0)
    return x, parallel.shard(gates, "ep", 2)


def from_experts(y: jax.Array, parallel: Parallel) -> jax.Array:
    """Partial sums [B*ep, S, D] over own experts and ffn columns -> whole sums [B, S/tp, D]."""
    return parallel.scatter_seq(parallel.reduce_scatter(y, "ep", 0))


def balance_loss(
    chosen: jax.Array, probs: jax.Array, cfg: ModelConfig, parallel: Parallel
) -> jax.Array:
    """This device's share of the sum over its sequences of coef * E * sum_e f_e * P_e, fp32.

    f_e is the fraction of a sequence's choices that went to expert e, P_e the mean probability:
    1 * coef for a balanced sequence. [B, S/cp/tp, E] -> scalar; shares add up over cp and tp.
    """
    if cfg.router_aux_loss_coef == 0:
        return jnp.float32(0)
    size = chosen.shape[1] * parallel.size("cp", "tp")
    counts = parallel.psum(jax.lax.stop_gradient(chosen).sum(1), "cp", "tp")  # of whole sequences
    f = counts / (size * cfg.num_experts_per_tok)
    return cfg.router_aux_loss_coef * cfg.num_experts * jnp.sum(f * probs.sum(1) / size)


def _hidden(x: jax.Array, up: jax.Array, cfg: ModelConfig) -> jax.Array:
    """[..., D] -> [..., F] of one expert."""
    h = jnp.tensordot(x, up, 1)
    if cfg.mlp_gated:
        return gated(h, cfg.hidden_act)
    return activated(h, None, cfg.hidden_act)


def reference(
    x: jax.Array, router: jax.Array, up: jax.Array, down: jax.Array, cfg: ModelConfig
) -> jax.Array:
    """The same block on one device, token by token and choice by choice, for tests: [T, D]."""

    def token(x):
        logits = router.T @ x
        best = jnp.argsort(-logits)[: cfg.num_experts_per_tok]
        whole = jax.nn.softmax(logits)[best]
        gates = jax.nn.softmax(logits[best]) if cfg.norm_topk_prob else whole
        return gates @ jnp.stack([_hidden(x, up[e], cfg) @ down[e] for e in best])

    return jax.lax.map(token, x)
