"""The feed-forward block: gated (SwiGLU, GEGLU) or plain, column- then row-parallel over tp."""

import jax
import jax.numpy as jnp
from flax import nnx

from mjax.config.schema import ModelConfig
from mjax.models.context import Context
from mjax.models.params import ParamSpec, constant, declare, normal


def activate(x: jax.Array, name: str) -> jax.Array:
    if name == "silu":
        return jax.nn.silu(x)
    if name == "relu2":
        return jnp.square(jax.nn.relu(x))
    return jax.nn.gelu(x, approximate=name == "gelu_tanh")


class MLP(nnx.Module):
    """[B, S/tp, D] -> [B, S/tp, D] and no auxiliary loss (`models/moe.py` has one). `up` is
    [D, 2, F] (gate, up) when gated, else [D, F]."""

    def __init__(self, cfg: ModelConfig, out_std: float, rngs: nnx.Rngs):
        self.cfg = cfg
        d, f = cfg.hidden_size, cfg.intermediate_size
        lead, axes = ((2, f), ("pair", "mlp")) if cfg.mlp_gated else ((f,), ("mlp",))
        init = normal(cfg.initializer_range)
        self.up = declare(rngs, ParamSpec((d, *lead), ("embed", *axes), "matrix"), init)
        self.down = declare(rngs, ParamSpec((f, d), ("mlp", "embed"), "matrix"), normal(out_std))
        if cfg.mlp_bias:
            self.up_bias = declare(rngs, ParamSpec(lead, axes, "bias"), constant(0.0))
            self.down_bias = declare(rngs, ParamSpec((d,), ("embed",), "bias"), constant(0.0))

    def __call__(self, x: jax.Array, ctx: Context) -> tuple[jax.Array, jax.Array]:
        h = jnp.tensordot(ctx.parallel.gather_seq(x), self.up[...], 1)
        if self.cfg.mlp_bias:
            h = h + self.up_bias[...]
        if self.cfg.mlp_gated:
            h = activate(h[..., 0, :], self.cfg.hidden_act) * h[..., 1, :]
        else:
            h = activate(h, self.cfg.hidden_act)
        y = ctx.parallel.scatter_seq(jnp.tensordot(h, self.down[...], 1))
        return (y + self.down_bias[...] if self.cfg.mlp_bias else y), jnp.float32(0)
