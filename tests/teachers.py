"""A model in a folder that teaches: drawn weights, twice as large, so that its words differ."""

from pathlib import Path

import jax
from flax import nnx

from mjax.checkpoint.base.source import array_source
from mjax.checkpoint.weights import write_weights
from mjax.config.schema.model import ModelConfig
from mjax.models import build, split


def write_teacher_folder(folder: Path, cfg: ModelConfig) -> Path:
    """Write a teacher, and return its folder."""
    definition, params = split(build(cfg, nnx.Rngs(3)))
    params = jax.tree.map(lambda a: 2.0 * a, params)
    write_weights(folder, array_source(cfg, params), definition.specs)
    return folder
