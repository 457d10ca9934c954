"""RMSNorm and LayerNorm over the last axis; statistics and gain in fp32, output in x's dtype."""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from mjax.config.schema.model import ModelConfig
from mjax.kernels.elementwise import norm as kernel
from mjax.models.base.params import constant, declare
from mjax.sharding.collectives import LOCAL, Parallel
from mjax.sharding.spec import ParamSpec


class Norm(nnx.Module):
    """`cfg.norm` over the trailing axes `sizes` (one, or heads and head_dim), named `axes`.

    Gain and LayerNorm's bias have that shape, where the model has them. A zero-centered gain g is
    stored as g - 1. Heads may be split over tp: `__call__` then sums the statistics over it.
    `hf` is the name of the module in Hugging Face's checkpoints.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        sizes: tuple[int, ...],
        axes: tuple[str, ...],
        hf: str,
        rngs: nnx.Rngs,
    ):
        self.cfg, self.sizes = cfg, sizes
        init = constant(0.0 if cfg.norm_zero_centered else 1.0)
        gain = ParamSpec(sizes, axes, "norm", hf=(f"{hf}.weight",))
        if cfg.norm_gain:
            self.gain = declare(rngs, gain, init)
        if cfg.norm == "layernorm" and cfg.norm_bias:
            bias = ParamSpec(sizes, axes, "norm", hf=(f"{hf}.bias",))
            self.bias = declare(rngs, bias, constant(0.0))

    @jax.named_scope("norm")
    def __call__(self, x: jax.Array, parallel: Parallel = LOCAL) -> jax.Array:
        """Return normed x, of x's shape and dtype."""
        gain, bias = self.weights()
        if len(self.sizes) == 1:
            return kernel.norm(x, gain, bias, eps=self.cfg.norm_eps)

        def mean(y: jax.Array) -> jax.Array:
            total = jnp.sum(y, (-2, -1), keepdims=True)
            total = parallel.psum(total, "tp")
            return total / math.prod(self.sizes)

        return kernel.norm_reference(x, gain, bias, self.cfg.norm_eps, mean)

    @jax.named_scope("norm")
    def fork(self, x: jax.Array, measured: bool = False) -> kernel.NormFork:
        """Normed x, and x for a residual stream (`kernels/elementwise/norm.py`)."""
        gain, bias = self.weights()
        return kernel.fork(x, gain, bias, eps=self.cfg.norm_eps, measured=measured)

    def weights(self) -> tuple[jax.Array, jax.Array | None]:
        """(the factor on x, the bias of LayerNorm, zeros if it has none), fp32."""
        has_gain = self.cfg.norm_gain
        gain = self.gain[...].astype(jnp.float32) if has_gain else jnp.ones(self.sizes[-1:])
        if self.cfg.norm_zero_centered:
            gain = 1.0 + gain
        if self.cfg.norm != "layernorm":
            return gain, None
        if not self.cfg.norm_bias:
            return gain, jnp.zeros_like(gain)
        return gain, self.bias[...].astype(jnp.float32)
