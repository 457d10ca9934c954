"""RMSNorm and LayerNorm over the last axis; statistics and gain in fp32, output in x's dtype."""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from mjax.config.schema import ModelConfig
from mjax.kernels import norm as kernel
from mjax.models.params import constant, declare
from mjax.sharding.collectives import LOCAL, Parallel
from mjax.sharding.spec import ParamSpec


class Norm(nnx.Module):
    """`cfg.norm` over the trailing axes `sizes` (one, or heads and head_dim), named `axes`.

    Gain, and bias for LayerNorm, have that shape; a zero-centred gain stores g - 1. Heads may be
    split over tp: `__call__` then sums the statistics over it. `hf`: as in `ParamSpec`.
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
        self.gain = declare(rngs, gain, init)
        if cfg.norm == "layernorm":
            bias = ParamSpec(sizes, axes, "norm", hf=(f"{hf}.bias",))
            self.bias = declare(rngs, bias, constant(0.0))

    @jax.named_scope("norm")
    def __call__(self, x: jax.Array, parallel: Parallel = LOCAL) -> jax.Array:
        if len(self.sizes) == 1:
            return kernel.norm(x, *self._weights(), eps=self.cfg.norm_eps)

        def mean(y: jax.Array) -> jax.Array:
            total = parallel.psum(jnp.sum(y, (-2, -1), keepdims=True), "tp")
            return total / math.prod(self.sizes)

        return kernel.reference(x, *self._weights(), self.cfg.norm_eps, mean)

    @jax.named_scope("norm")
    def fork(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(normed x, x): a residual stream goes on with the second (`kernels/norm.py`)."""
        return kernel.fork(x, *self._weights(), eps=self.cfg.norm_eps)

    def _weights(self) -> tuple[jax.Array, jax.Array | None]:
        """The fp32 factor, and the bias of LayerNorm."""
        gain = self.gain[...].astype(jnp.float32)
        gain = 1.0 + gain if self.cfg.norm_zero_centered else gain
        return gain, self.bias[...].astype(jnp.float32) if self.cfg.norm == "layernorm" else None
