"""Mixture of experts: a top-k softmax router and dropless experts, sharded over ep and tp.

Each device runs every expert it holds on all tokens of its ep group. It weights the result by the
token's gate, which is zero where the expert was not chosen. That is exact and has static shapes,
but does E/k times the work that is needed. It proves the mesh axes; a dispatching kernel replaces
the loop, not the interface. The router follows Switch Transformer (arXiv 2101.03961), Mixtral and
Qwen3-MoE. The balance loss is per sequence (DeepSeek-V3, arXiv 2412.19437; Megatron-LM's
seq_aux_loss). So it is a sum over the global batch and depends neither on the mesh nor on
micro-batches. Masked tokens count in it too, because they load the experts alike.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from mjax.config.model_schema import ModelConfig
from mjax.models.branch import BranchCache, BranchInputs, BranchModule, BranchOutput
from mjax.models.mlp import activated, gated, up_axes, up_names
from mjax.models.params import StatisticCount, declare, normal
from mjax.sharding.collectives import Parallel
from mjax.sharding.spec import ParamSpec


class MoE(BranchModule):
    """[B, S/tp, D] -> [B, S/tp, D] and its statistics: the balance loss, if it has a weight.

    `router` is [D, E]. `up` is [E, D, 2, F] (gate, up) when `mlp_gated`, else [E, D, F]. `down` is
    [E, F, D].
    """

    def __init__(self, cfg: ModelConfig, out_std: float, rngs: nnx.Rngs):
        self.cfg = cfg
        experts, width, ffn = cfg.moe.num_experts, cfg.hidden_size, cfg.moe.moe_intermediate_size
        shape, axes = up_axes(cfg, ffn)
        prefix = "mlp.experts.{expert}"
        active = cfg.moe.num_experts_per_tok / experts
        router = ParamSpec(
            shape=(width, experts),
            axes=("embed", "router"),
            role="router",
            hf=("mlp.gate.weight",),
        )
        up = ParamSpec(
            shape=(experts, width, *shape),
            axes=("experts", "embed", *axes),
            role="matrix",
            active=active,
            hf=up_names(cfg, prefix, "weight"),
        )
        down = ParamSpec(
            shape=(experts, ffn, width),
            axes=("experts", "mlp", "embed"),
            role="matrix",
            active=active,
            hf=(f"{prefix}.down_proj.weight",),
        )
        init = normal(cfg.initializer_range)
        self.router = declare(rngs, router, init)
        self.up = declare(rngs, up, init)
        self.down = declare(rngs, down, normal(out_std))

    @staticmethod
    def statistics(cfg: ModelConfig) -> dict[str, StatisticCount]:
        """The statistics of the block, and what each is divided by."""
        return {"aux_loss": "sequences"} if cfg.moe.router_aux_loss_coef > 0 else {}

    @jax.named_scope("mlp")
    def __call__(
        self, x: jax.Array, inputs: BranchInputs, cache: BranchCache = None
    ) -> BranchOutput:
        cfg, parallel = self.cfg, inputs.ctx.parallel
        gates, chosen, probs = route(x, self.router[...], cfg)
        x, gates = to_experts(x, gates, parallel)

        @jax.checkpoint  # or every expert's activations of all tokens would be kept
        def add_expert(total: jax.Array, expert: tuple) -> tuple[jax.Array, None]:
            up, down, gate = expert
            gate = gate[..., None].astype(x.dtype)
            h = _hidden(x, up, cfg) * gate
            y = jnp.tensordot(h, down, 1, preferred_element_type=jnp.float32)
            return total + y, None

        zero = jnp.zeros(x.shape, jnp.float32)
        experts = self.up[...], self.down[...], jnp.moveaxis(gates, 2, 0)
        total, _ = jax.lax.scan(add_expert, zero, experts)
        y = from_experts(total.astype(x.dtype), parallel)
        if not self.statistics(cfg):
            return BranchOutput(y)
        return BranchOutput(y, {"aux_loss": balance_loss(chosen, probs, cfg, parallel)})


def route(
    x: jax.Array, router: jax.Array, cfg: ModelConfig
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(gates, choices, softmax), fp32 [B, S, E], of x [B, S, D] and a router [D, E].

    Choices are 0 or 1. Gates are zero where an expert was not chosen. Elsewhere they are the
    softmax over the chosen logits with `norm_topk_prob`, else that over all logits. Equal logits go
    to the expert of the lower number.
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
    one_hot = jax.nn.one_hot(experts, cfg.moe.num_experts, dtype=jnp.float32)
    chosen = one_hot.sum(-2)
    if cfg.moe.norm_topk_prob:
        gates = jax.nn.softmax(logits, -1, where=chosen > 0)
    else:
        gates = probs * chosen
    return gates, chosen, probs


def to_experts(x: jax.Array, gates: jax.Array, parallel: Parallel) -> tuple[jax.Array, jax.Array]:
    """(x [B*ep, S, D] of the ep group, gates [B*ep, S, E/ep] of this device's experts).

    They are gathered from x [B, S/tp, D] and gates [B, S/tp, E].
    """
    x = parallel.gather_seq(x)
    x = parallel.all_gather(x, "ep", 0)
    gates = parallel.gather_seq(gates)
    gates = parallel.all_gather(gates, "ep", 0)
    return x, parallel.shard(gates, "ep", 2)


def from_experts(y: jax.Array, parallel: Parallel) -> jax.Array:
    """The sums over all experts and ffn columns, [B, S/tp, D].

    `y` [B*ep, S, D] are the sums over this device's experts and ffn columns.
    """
    y = parallel.reduce_scatter(y, "ep", 0)
    return parallel.scatter_seq(y)


def balance_loss(
    chosen: jax.Array, probs: jax.Array, cfg: ModelConfig, parallel: Parallel
) -> jax.Array:
    """This device's share of the balance loss, summed over its sequences: fp32 [].

    The loss of a sequence is coef * E * sum_e f_e * P_e. f_e is the fraction of the sequence's
    choices that went to expert e, P_e the mean probability of e. A balanced sequence has coef.
    `chosen` and `probs` are [B, S/cp/tp, E]. Shares add up over cp and tp.
    """
    tokens = chosen.shape[1] * parallel.size("cp", "tp")
    counts = jax.lax.stop_gradient(chosen).sum(1)
    counts = parallel.psum(counts, "cp", "tp")  # of all tokens of a sequence
    fractions = counts / (tokens * cfg.moe.num_experts_per_tok)
    weighted = fractions * probs.sum(1)
    return cfg.moe.router_aux_loss_coef * cfg.moe.num_experts * jnp.sum(weighted / tokens)


def _hidden(x: jax.Array, up: jax.Array, cfg: ModelConfig) -> jax.Array:
    """The activations [..., F] of one expert, from x [..., D]."""
    h = jnp.tensordot(x, up, 1)
    if cfg.mlp_gated:
        return gated(h, cfg.hidden_act)
    return activated(h, None, cfg.hidden_act)


def reference(
    x: jax.Array, router: jax.Array, up: jax.Array, down: jax.Array, cfg: ModelConfig
) -> jax.Array:
    """The output [T, D] of the block for x [T, D] on one device, token by token, for tests."""

    def token(x: jax.Array) -> jax.Array:
        logits = router.T @ x
        best = jnp.argsort(-logits)[: cfg.moe.num_experts_per_tok]
        if cfg.moe.norm_topk_prob:
            gates = jax.nn.softmax(logits[best])
        else:
            gates = jax.nn.softmax(logits)[best]
        outputs = []
        for expert in best:
            h = _hidden(x, up[expert], cfg)
            outputs.append(h @ down[expert])
        return gates @ jnp.stack(outputs)

    return jax.lax.map(token, x)
