"""Mixture of experts: a router (`router.py`) and dropless experts (`experts.py`)."""

import jax
from flax import nnx

from mjax.config.model_schema import ModelConfig
from mjax.models.branch import BranchCache, BranchInputs, BranchModule, BranchOutput
from mjax.models.experts import run_experts
from mjax.models.mlp import up_axes, up_names
from mjax.models.params import StatisticCount, declare, normal
from mjax.models.router import balance_loss, route
from mjax.models.weight import weight_of
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
            matmul="expert_up",
            active=active,
            hf=up_names(cfg, prefix, "weight"),
        )
        down = ParamSpec(
            shape=(experts, ffn, width),
            axes=("experts", "mlp", "embed"),
            role="matrix",
            matmul="expert_down",
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
        cfg = self.cfg
        routing = route(x, self.router[...], cfg)
        y = run_experts(x, routing, weight_of(self.up), weight_of(self.down), cfg, inputs.ctx)
        if not self.statistics(cfg):
            return BranchOutput(y)
        return BranchOutput(y, {"aux_loss": balance_loss(routing, cfg, inputs.ctx.parallel)})
