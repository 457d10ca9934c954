"""Flax NNX models. `build` gives a module that works under plain `jax.jit`, with no mesh."""

from flax import nnx

from mjax.config.schema import ModelConfig
from mjax.models.decoder import Decoder
from mjax.models.params import Definition, split
from mjax.sharding.spec import ParamSpec

__all__ = ["Definition", "ParamSpec", "build", "definition_of", "split"]


def build(cfg: ModelConfig, rngs: nnx.Rngs) -> Decoder:
    """The model of `cfg`, fp32 parameters drawn from `rngs`.

    `jax.jit(build(cfg.model, nnx.Rngs(0)))(tokens)`: int32 [B, S] -> fp32 logits [B, S, V]. The
    dtype of the computation is the dtype of the parameters.
    """
    return Decoder(cfg, rngs)


def definition_of(cfg: ModelConfig) -> Definition:
    """The model of `cfg` without weights; nothing is allocated."""
    return split(nnx.eval_shape(lambda: build(cfg, nnx.Rngs(0))))[0]
