"""Flax NNX models. `build` gives a module that works under plain `jax.jit`, with no mesh."""

from flax import nnx

from mjax.config.schema.model import ModelConfig
from mjax.models.base.params import Definition as Definition
from mjax.models.base.params import ModelDefinition, define
from mjax.models.base.params import split as split
from mjax.models.decoder import Decoder


def build(cfg: ModelConfig, rngs: nnx.Rngs) -> Decoder:
    """The model of `cfg`, fp32 parameters drawn from `rngs`.

    `jax.jit(build(cfg.model, nnx.Rngs(0)))(tokens)`: int32 [B, S] -> fp32 logits [B, S, V]. The
    dtype of the computation is the dtype of the parameters.
    """
    return Decoder(cfg, rngs)


def definition_of(cfg: ModelConfig) -> ModelDefinition:
    """The model of `cfg` without parameters; nothing is allocated."""
    model = nnx.eval_shape(lambda: build(cfg, nnx.Rngs(0)))
    return define(model, model.stacks, model.statistics)
