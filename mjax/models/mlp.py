"""The feed-forward block: gated (SwiGLU, GEGLU) or plain, column- then row-parallel over tp."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from mjax.config.schema import ModelConfig
from mjax.kernels import gate
from mjax.models import mlp_fp8
from mjax.models.barriers import compute_again
from mjax.models.context import Context
from mjax.models.linear import column, row
from mjax.models.params import constant, declare, normal
from mjax.models.weight import weight_of
from mjax.sharding.spec import ParamSpec


def activate(x: jax.Array, name: str) -> jax.Array:
    if name == "silu":
        return jax.nn.silu(x)
    if name == "relu2":
        return jnp.square(jax.nn.relu(x))
    return jax.nn.gelu(x, approximate=name == "gelu_tanh")


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def activated(h: jax.Array, bias: jax.Array | None, name: str) -> jax.Array:
    """act(h + bias), [..., F] like h.

    Its backward starts from h, as Megatron-LM's fused bias and GELU does: autodiff would keep what
    it computes on the way, of GELU a tensor as large. Both ways are one pass by our kernel, or XLA.
    """
    return activate(h if bias is None else h + bias, name)


def _activated_forward(h, bias, name):
    by_kernel = gate.supports(h, name)
    return (gate.act_forward if by_kernel else activated)(h, bias, name), (h, bias)


def _activated_backward(name, saved, d):
    h, bias = saved
    if gate.supports(h, name):
        return gate.act_backward(h, bias, d, name)
    h, bias = compute_again(h, bias)
    _, pull = jax.vjp(lambda h, bias: activated.fun(h, bias, name), h, bias)
    return pull(d)


activated.defvjp(_activated_forward, _activated_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def gated(h: jax.Array, name: str) -> jax.Array:
    """[..., 2, F] (gate, up) -> act(gate) * up, [..., F].

    Its own backward stacks the two gradients: one pass by our kernel, or by XLA, which would
    compute both halves everywhere of what autodiff pads and adds.
    """
    return activate(h[..., 0, :], name) * h[..., 1, :]


def _gated_forward(h, name):
    return gated(h, name), h


def _gated_backward(name, h, d):
    if gate.supports(h, name):
        return (gate.gate_backward(h, d, name),)
    _, pull = jax.vjp(lambda gate, up: activate(gate, name) * up, h[..., 0, :], h[..., 1, :])
    return (jnp.stack(pull(d), -2),)


gated.defvjp(_gated_forward, _gated_backward)


def up_names(cfg: ModelConfig, prefix: str, kind: str) -> tuple[str, ...]:
    """Hugging Face names of an `up` projection, with its gate first."""
    names = ("gate_proj", "up_proj") if cfg.mlp_gated else ("up_proj",)
    return tuple(f"{prefix}.{name}.{kind}" for name in names)


class MLP(nnx.Module):
    """[B, S/tp, D] -> [B, S/tp, D] and no auxiliary loss (`models/moe.py` has one). `up` is
    [D, 2, F] (gate, up) when gated, else [D, F]."""

    def __init__(self, cfg: ModelConfig, out_std: float, rngs: nnx.Rngs):
        self.cfg = cfg
        d, f = cfg.hidden_size, cfg.intermediate_size
        lead, axes = ((2, f), ("pair", "mlp")) if cfg.mlp_gated else ((f,), ("mlp",))
        init = normal(cfg.initializer_range)
        names = up_names(cfg, "mlp", "weight")
        up = ParamSpec((d, *lead), ("embed", *axes), "matrix", matmul="up", hf=names)
        down = ParamSpec(
            (f, d), ("mlp", "embed"), "matrix", matmul="down", hf=("mlp.down_proj.weight",)
        )
        self.up = declare(rngs, up, init)
        self.down = declare(rngs, down, normal(out_std))
        if cfg.mlp_bias:
            up = ParamSpec(lead, axes, "bias", hf=up_names(cfg, "mlp", "bias"))
            down = ParamSpec((d,), ("embed",), "bias", hf=("mlp.down_proj.bias",))
            self.up_bias = declare(rngs, up, constant(0.0))
            self.down_bias = declare(rngs, down, constant(0.0))

    @jax.named_scope("mlp")
    def __call__(self, x: jax.Array, ctx: Context) -> tuple[jax.Array, jax.Array]:
        cfg = self.cfg
        plain = cfg.mlp_gated and not cfg.mlp_bias and not ctx.overlaps(x.shape[1])
        up, down = weight_of(self.up), weight_of(self.down)
        if plain and mlp_fp8.takes(up.recipe, cfg.hidden_act):
            x = ctx.parallel.gather_seq(x)
            y = mlp_fp8.gated_mlp_fp8(x, up, down, cfg.hidden_act)
            return checkpoint_name(ctx.parallel.scatter_seq(y), "down"), jnp.float32(0)
        (h,) = column(x, (up,), ctx)
        bias = self.up_bias[...] if cfg.mlp_bias else None
        if cfg.mlp_gated:
            h = gated(h if bias is None else h + bias, cfg.hidden_act)
        else:
            h = activated(h, bias, cfg.hidden_act)
        y = row(h, down, ctx)
        return (y + self.down_bias[...] if cfg.mlp_bias else y), jnp.float32(0)
