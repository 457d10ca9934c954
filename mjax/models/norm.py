"""RMSNorm and LayerNorm over the last axis; statistics and gain in fp32, output in x's dtype."""

import jax
import jax.numpy as jnp
from flax import nnx

from mjax.config.schema import ModelConfig
from mjax.models.params import ParamSpec, constant, declare


class Norm(nnx.Module):
    """`cfg.norm` with gain (and bias for LayerNorm) of `size`; zero-centred gain stores g - 1."""

    def __init__(self, cfg: ModelConfig, size: int, axis: str, rngs: nnx.Rngs):
        self.cfg = cfg
        init = constant(0.0 if cfg.norm_zero_centered else 1.0)
        self.gain = declare(rngs, ParamSpec((size,), (axis,), "norm"), init)
        if cfg.norm == "layernorm":
            self.bias = declare(rngs, ParamSpec((size,), (axis,), "norm"), constant(0.0))

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x.astype(jnp.float32)
        if self.cfg.norm == "layernorm":
            y = y - jnp.mean(y, -1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), -1, keepdims=True) + self.cfg.norm_eps)
        gain = self.gain[...].astype(jnp.float32)
        y = y * (1.0 + gain if self.cfg.norm_zero_centered else gain)
        if self.cfg.norm == "layernorm":
            y = y + self.bias[...].astype(jnp.float32)
        return y.astype(x.dtype)
