"""Flax NNX models. `build` gives a module that works under plain `jax.jit`, with no mesh."""

from flax import nnx

from mjax.config.schema.model import ModelConfig
from mjax.models.architectures import build as build
from mjax.models.base.params import Definition as Definition
from mjax.models.base.params import ModelDefinition, define
from mjax.models.base.params import split as split


def definition_of(cfg: ModelConfig) -> ModelDefinition:
    """The model of `cfg` without parameters; nothing is allocated."""
    model = nnx.eval_shape(lambda: build(cfg, nnx.Rngs(0)))
    return define(model, model.stacks, model.statistics)
