"""The feed-forward block: gated (SwiGLU, GEGLU) or plain, column- then row-parallel over tp."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from mjax.config.schema.model import ModelConfig
from mjax.kernels import choose
from mjax.kernels.elementwise.activation import activated, gated
from mjax.models.base.branch import (
    BranchCache,
    BranchInputs,
    BranchModule,
    BranchOutput,
    KernelChoices,
    Workload,
)
from mjax.models.base.context import Context
from mjax.models.base.params import declare, declare_bias, matrix, normal
from mjax.models.base.tensor_parallel import column, row
from mjax.models.base.weight import weight_of
from mjax.models.feedforward import mlp_fp8
from mjax.models.feedforward.mlp_activated import activated_mlp, in_matmuls
from mjax.sharding.spec import ParamSpec

# [tokens, F] that pass through memory for the activation function: where matmuls compute it, by
# itself, and with a gate.
PASSES_IN_MATMULS, _PASSES_ALONE, _PASSES_WITH_GATE = 1, 5, 9


def passes_of_activation(cfg: ModelConfig) -> int:
    """Tensors [tokens, F] that pass through memory for an activation function between matmuls."""
    return _PASSES_WITH_GATE if cfg.mlp_gated else _PASSES_ALONE


class UpAxes(NamedTuple):
    """The axes of an `up` projection behind its input: (gate, up) and F when gated, else F."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]


def up_axes(cfg: ModelConfig, ffn: int) -> UpAxes:
    """The output axes of an `up` projection to `ffn` columns."""
    if cfg.mlp_gated:
        return UpAxes((2, ffn), ("pair", "mlp"))
    return UpAxes((ffn,), ("mlp",))


def up_names(cfg: ModelConfig, prefix: str, kind: str) -> tuple[str, ...]:
    """Hugging Face names of an `up` projection, with its gate first."""
    names = ("gate_proj", "up_proj") if cfg.mlp_gated else ("up_proj",)
    return tuple(f"{prefix}.{name}.{kind}" for name in names)


class MLP(BranchModule):
    """[B, S/tp, D] -> [B, S/tp, D].

    `up` is [D, 2, F] (gate, up) when `mlp_gated`, else [D, F]. `down` is [F, D]. F is `ffn`, or 0:
    the model's. `prefix` begins the names in Hugging Face's words.
    """

    def __init__(
        self, cfg: ModelConfig, out_std: float, rngs: nnx.Rngs, ffn: int = 0, prefix: str = "mlp"
    ):
        self.cfg = cfg
        width, ffn = cfg.hidden_size, ffn or cfg.intermediate_size
        shape, axes = up_axes(cfg, ffn)
        up = ParamSpec(
            shape=(width, *shape),
            axes=("embed", *axes),
            role="matrix",
            matmul="up",
            hf=up_names(cfg, prefix, "weight"),
        )
        down = matrix((ffn, width), ("mlp", "embed"), f"{prefix}.down_proj.weight", matmul="down")
        self.up = declare(rngs, up, normal(cfg.initializer_range))
        self.down = declare(rngs, down, normal(out_std))
        if cfg.mlp_bias:
            self.up_bias = declare_bias(rngs, shape, axes, *up_names(cfg, prefix, "bias"))
            name = f"{prefix}.down_proj.bias"
            self.down_bias = declare_bias(rngs, (width,), ("embed",), name)

    @staticmethod
    def kernels(cfg: ModelConfig, work: Workload) -> KernelChoices:
        """Whether its matmuls compute the activation function."""
        shape = work.rows * work.length, cfg.hidden_size, cfg.intermediate_size // work.parallel.tp
        is_plain = cfg.mlp_bias and not cfg.mlp_gated and not work.fp8
        facts = {"act": cfg.hidden_act, "plain": is_plain}
        return {"activated matmul": choose("activated_matmul", work.dtype, shape, **facts)}

    @classmethod
    def memory_traffic(cls, cfg: ModelConfig, kernels: KernelChoices, seq_length: int) -> float:
        in_matmuls = kernels["activated matmul"].name == "mosaic"
        passes = PASSES_IN_MATMULS if in_matmuls else passes_of_activation(cfg)
        return passes * cfg.intermediate_size

    @jax.named_scope("mlp")
    def __call__(
        self, x: jax.Array, inputs: BranchInputs, cache: BranchCache = None
    ) -> BranchOutput:
        y = self._product(x, inputs)
        if self.cfg.mlp_bias:
            y = y + self.down_bias[...]
        if self.cfg.mlp_multipliers is not None:
            y = y * self.cfg.mlp_multipliers[1]
        return BranchOutput(y)

    def _product(self, x: jax.Array, inputs: BranchInputs) -> jax.Array:
        """The second matmul's output."""
        act, ctx = self.cfg.hidden_act, inputs.ctx
        (up,) = inputs.reading(x, weight_of(self.up))
        down = weight_of(self.down)
        bias = self.up_bias[...] if self.cfg.mlp_bias else None
        is_plain = up.adapter is None and down.adapter is None and not up.is_coded
        is_plain &= up.recipe == down.recipe
        if self._in_one_function(x, ctx) and is_plain:
            if self.cfg.mlp_gated and bias is None and mlp_fp8.supports(up.recipe, act):
                block = functools.partial(
                    mlp_fp8.gated_mlp_fp8, up=up, down=down, act=act, parallel=ctx.parallel
                )
                return _exchanged(x, ctx, block)
            if not self.cfg.mlp_gated and ctx.training.keeps_all and in_matmuls(x, up, bias, act):
                return _exchanged(x, ctx, lambda x: activated_mlp(x, up, bias, down, act))
        (h,) = column(x, (up,), ctx)
        if self.cfg.mlp_gated:
            h = h if bias is None else h + bias
            if self.cfg.mlp_multipliers is not None:
                of_gate = jnp.asarray([self.cfg.mlp_multipliers[0], 1.0], h.dtype)
                h = h * of_gate[:, None]
            h = gated(h, act)
        else:
            h = activated(h, bias, act)
        return row(h, down, ctx)

    def _in_one_function(self, x: jax.Array, ctx: Context) -> bool:
        """Whether nothing but biases and the activation stands between the two matmuls."""
        return self.cfg.mlp_multipliers is None and not ctx.overlaps(x.shape[1])


def _exchanged(x: jax.Array, ctx: Context, block: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """`block` of the sequence that tp devices share, its sums scattered over it again."""
    y = block(ctx.parallel.gather_seq(x))
    return checkpoint_name(ctx.parallel.scatter_seq(y), "down")
