"""Mixture of experts: a router (`router.py`), its experts (`experts.py`), a shared expert."""

import jax
import jax.numpy as jnp
from flax import nnx

from mjax.config.schema.model import ModelConfig, MoeConfig
from mjax.kernels import choose
from mjax.models.base.branch import (
    BranchCache,
    BranchInputs,
    BranchModule,
    BranchOutput,
    KernelChoices,
    Workload,
)
from mjax.models.base.context import Context
from mjax.models.base.dropout import jitter
from mjax.models.base.params import StatisticCount, declare, declare_bias, matrix, normal
from mjax.models.base.streams import EXPERT_LOADS
from mjax.models.base.tensor_parallel import local_product
from mjax.models.base.weight import weight_of
from mjax.models.feedforward.mlp import MLP, passes_of_activation, up_axes, up_names
from mjax.models.moe.capacity import expert_capacity, within_capacity
from mjax.models.moe.exchange import bytes_of_token, choose_expert_exchange, group_size
from mjax.models.moe.expert_statistics import see_experts
from mjax.models.moe.experts import ExpertSums, ExpertWeights, run_experts
from mjax.models.moe.router import (
    Router,
    Routing,
    balanced,
    counted,
    padding_marked,
    replayed,
    rerouted,
    route,
    without_padding,
)
from mjax.models.moe.router_losses import (
    averages_layers,
    balance_loss,
    balance_of_layers,
    beside_loads,
    dropped_share,
    entropy,
    expert_loads,
    gathered_share,
    z_loss,
)
from mjax.models.moe.sinkhorn import sinkhorn_experts
from mjax.sharding.collectives import Parallel
from mjax.sharding.spec import ParamSpec

_JITTER_SALT = 1 << 25  # tells its draws from those of attention beside it

# [pairs of a token and an expert, D] that pass through memory: gathers and sums of sorted rows.
PASSES_OF_PAIR = 6


def runs_all_experts(kernel: str) -> bool:
    """Whether all of a device's experts run, so that no rows are sorted."""
    return kernel in ("loop", "batched")


def experts_run(moe: MoeConfig, kernel: str, seq_length: int) -> float:
    """The experts of a layer that run on a token: those that it is sent to, or all of them.

    Batched ones run on as many rows as they have capacity.
    """
    if kernel == "loop":
        return moe.num_experts
    if kernel == "batched":
        return moe.num_experts * expert_capacity(moe, seq_length) / seq_length
    return moe.num_experts_per_tok


class MoE(BranchModule):
    """[B, S/tp, D] -> [B, S/tp, D] and its statistics.

    `router` is [D, E]. `up` is [E, D, 2, F] (gate, up) when `mlp_gated`, else [E, D, F]. `down` is
    [E, F, D]; `up_bias` [E, (2,) F] and `down_bias` [E, D] with `mlp_bias`. `shared` is an MLP for
    all tokens, `shared_gate` [D, 1] its weight before a sigmoid. `expert_bias` is
    [E]. With `moe.latent_size` L, experts have L in place of D; `latent_in` [D, L] makes their
    input, `latent_out` [L, D] takes their sums back (NVIDIA's Nemotron 3).
    """

    def __init__(self, cfg: ModelConfig, out_std: float, rngs: nnx.Rngs):
        self.cfg = cfg
        experts, ffn = cfg.moe.num_experts, cfg.moe.moe_intermediate_size
        latent, width = cfg.moe.latent_size, cfg.expert_width
        axis = "latent" if latent else "embed"
        shape, axes = up_axes(cfg, ffn)
        prefix = "mlp.experts.{expert}"
        active = cfg.moe.num_experts_per_tok / experts
        router = ParamSpec(
            shape=(cfg.hidden_size, experts),
            axes=("embed", "router"),
            role="router",
            hf=("mlp.gate.weight",),
        )
        up = ParamSpec(
            shape=(experts, width, *shape),
            axes=("experts", axis, *axes),
            role="matrix",
            matmul="expert_up",
            active=active,
            hf=up_names(cfg, prefix, "weight"),
        )
        name = f"{prefix}.down_proj.weight"
        down_axes = "experts", "mlp", axis
        sizes = experts, ffn, width
        down = matrix(sizes, down_axes, name, matmul="expert_down", active=active)
        init = normal(cfg.initializer_range)
        self.router = declare(rngs, router, init)
        self.up = declare(rngs, up, init)
        self.down = declare(rngs, down, normal(out_std))
        if latent:
            self._declare_latent(latent, out_std, rngs)
        if cfg.mlp_bias:
            self._declare_biases(rngs)
        if cfg.moe.router_bias:
            self.router_bias = declare_bias(rngs, (experts,), ("router",), "mlp.gate.bias")
        if cfg.moe.expert_bias:
            hf = "mlp.gate.e_score_correction_bias"
            self.expert_bias = declare_bias(rngs, (experts,), ("router",), hf, counts=True)
        if cfg.moe.shared_expert_intermediate_size:
            self._declare_shared(out_std, rngs)

    def _declare_latent(self, latent: int, out_std: float, rngs: nnx.Rngs) -> None:
        width = self.cfg.hidden_size
        first, second = "mlp.fc1_latent_proj.weight", "mlp.fc2_latent_proj.weight"
        into = matrix(
            (width, latent),
            ("embed", "latent"),
            first,
            matmul="latent_in",
        )
        back = matrix((latent, width), ("latent", "embed"), second, matmul="latent_out")
        self.latent_in = declare(rngs, into, normal(self.cfg.initializer_range))
        self.latent_out = declare(rngs, back, normal(out_std))

    def _declare_biases(self, rngs: nnx.Rngs) -> None:
        cfg, prefix = self.cfg, "mlp.experts.{expert}"
        experts, ffn = cfg.moe.num_experts, cfg.moe.moe_intermediate_size
        shape, axes = up_axes(cfg, ffn)
        names = up_names(cfg, prefix, "bias")
        self.up_bias = declare_bias(rngs, (experts, *shape), ("experts", *axes), *names)
        shape = experts, cfg.expert_width
        axes = "experts", "latent" if cfg.moe.latent_size else "embed"
        self.down_bias = declare_bias(rngs, shape, axes, f"{prefix}.down_proj.bias")

    def _declare_shared(self, out_std: float, rngs: nnx.Rngs) -> None:
        cfg = self.cfg
        ffn, prefix = cfg.moe.shared_expert_intermediate_size, "mlp.shared_expert"
        self.shared = MLP(cfg, out_std, rngs, ffn, prefix)
        if cfg.moe.shared_expert_gate:
            gate = ParamSpec(
                shape=(cfg.hidden_size, 1),
                axes=("embed", None),
                role="router",
                hf=("mlp.shared_expert_gate.weight",),
            )
            self.shared_gate = declare(rngs, gate, normal(cfg.initializer_range))

    begin = staticmethod(beside_loads)
    finish = staticmethod(balance_of_layers)

    @staticmethod
    def statistics(cfg: ModelConfig) -> dict[str, StatisticCount]:
        """The statistics of the block, and what each is divided by."""
        found: dict[str, StatisticCount] = {
            "router_entropy": "sequences",
            "gathered_share": "sequences",
        }
        if cfg.moe.router_aux_loss_coef > 0:
            found["aux_loss"] = "sequences"
        if cfg.moe.router_z_loss_coef > 0:
            found["router_z_loss"] = "sequences"
        if cfg.moe.capacity_factor is not None:
            found["dropped_share"] = "sequences"
        return found

    @staticmethod
    def kernels(cfg: ModelConfig, work: Workload) -> KernelChoices:
        """The kernel of a device's experts, and the exchange of their tokens."""
        moe, parallel = cfg.moe, work.parallel
        group, cuts = group_size(parallel), parallel.size(*parallel.expert_axes.within)
        held = moe.num_experts // group
        tokens = work.rows * work.length
        pairs = tokens * parallel.ep * min(moe.num_experts_per_tok, held)
        shape = pairs, held, cfg.expert_width, moe.moe_intermediate_size // cuts
        facts = {
            "asked": work.experts,
            "has_capacity": moe.capacity_factor is not None,
            "eight_bits": work.fp8_experts,
        }
        found = {"experts": choose("experts", work.dtype, shape, **facts)}
        if group > 1:
            width = bytes_of_token(cfg.expert_width, work.dtype, work.rounds_dispatch)
            sent = work.expert_exchange, tokens // parallel.tp, width, group
            found["tokens of experts"] = choose_expert_exchange(*sent, moe)
        return found

    @classmethod
    def memory_traffic(cls, cfg: ModelConfig, kernels: KernelChoices, seq_length: int) -> float:
        moe, kernel = cfg.moe, kernels["experts"].name
        width = moe.moe_intermediate_size * experts_run(moe, kernel, seq_length)
        width += moe.shared_expert_intermediate_size
        elements = passes_of_activation(cfg) * width
        if not runs_all_experts(kernel):
            elements += PASSES_OF_PAIR * moe.num_experts_per_tok * cfg.expert_width
        return elements

    @jax.named_scope("mlp")
    def __call__(
        self, x: jax.Array, inputs: BranchInputs, cache: BranchCache = None
    ) -> BranchOutput:
        cfg, ctx, parallel = self.cfg, inputs.ctx, inputs.ctx.parallel
        x = ctx.tap("inputs.latent_in" if cfg.moe.latent_size else "inputs.expert_up", x)
        router = self._router()
        salt = inputs.salt ^ _JITTER_SALT
        seen = jitter(x.astype(jnp.float32), cfg.moe.router_jitter_noise, inputs.tokens, ctx, salt)
        routing = route(seen, router, cfg)
        if cfg.moe.sinkhorn and ctx.training.dropout:
            routing = rerouted(routing, sinkhorn_experts(routing.logits, cfg.moe, parallel), cfg)
        if cfg.moe.force_balanced:
            routing = balanced(routing, inputs.tokens, cfg, parallel)
        routing = replayed(routing, inputs.tokens, inputs.layer, cfg, parallel)
        if cache is not None:
            cache = cache.write(routing.experts, inputs.tokens.new)
        if cfg.moe.skip_padding:
            routing = without_padding(routing, inputs.tokens, parallel)
        if router.expert_bias is not None:
            routing = counted(routing, router.expert_bias)
        if ctx.training.capacity:
            routing = within_capacity(routing, inputs.tokens, cfg.moe, parallel)
        y, gathered = self._experts_output(x, routing, ctx)
        if cfg.moe.shared_expert_intermediate_size:
            y = y + self._shared_output(x, inputs)
        statistics = self._statistics(routing, parallel)
        statistics["gathered_share"] = gathered_share(gathered, routing, self.cfg, parallel)
        if averages_layers(cfg):
            of_text = padding_marked(routing, inputs.tokens, parallel)
            statistics[EXPERT_LOADS] = expert_loads(of_text, cfg)
        figures = inputs.ctx.probe.figures
        if figures is not None:
            statistics |= see_experts(routing, router.expert_bias, inputs.layer, figures.layers)
        return BranchOutput(y, statistics, cache)

    def _experts_output(self, x: jax.Array, routing: Routing, ctx: Context) -> ExpertSums:
        """The weighted sums of what each token's experts make."""
        weights = self._expert_weights()
        if self.cfg.moe.latent_size is None:
            return run_experts(x, routing, weights, self.cfg, ctx)
        latent = local_product(x, weight_of(self.latent_in), ctx)
        sums = run_experts(latent, routing, weights, self.cfg, ctx)
        return sums._replace(y=local_product(sums.y, weight_of(self.latent_out), ctx))

    def _expert_weights(self) -> ExpertWeights:
        weights = weight_of(self.up), weight_of(self.down)
        if not self.cfg.mlp_bias:
            return ExpertWeights(*weights)
        return ExpertWeights(*weights, self.up_bias[...], self.down_bias[...])

    def _router(self) -> Router:
        moe = self.cfg.moe
        return Router(
            self.router[...],
            self.router_bias[...] if moe.router_bias else None,
            self.expert_bias[...] if moe.expert_bias else None,
        )

    def _shared_output(self, x: jax.Array, inputs: BranchInputs) -> jax.Array:
        """Returns the output of the shared expert, [B, S/tp, D]."""
        y = self.shared(x, inputs).y
        if not self.cfg.moe.shared_expert_gate:
            return y
        gate = x.astype(jnp.float32) @ self.shared_gate[...].astype(jnp.float32)
        return y * jax.nn.sigmoid(gate).astype(y.dtype)

    def _statistics(self, routing: Routing, parallel: Parallel) -> dict[str, jax.Array]:
        makers = {
            "aux_loss": balance_loss,
            "router_z_loss": z_loss,
            "router_entropy": entropy,
            "dropped_share": dropped_share,
        }
        names = [name for name in self.statistics(self.cfg) if name in makers]
        if "aux_loss" in names and averages_layers(self.cfg):
            names.remove("aux_loss")
        return {name: makers[name](routing, self.cfg, parallel) for name in names}
