"""Weights of live models as sources, and those of checkpoints as arrays."""

from pathlib import Path

import numpy as np

from mjax.checkpoint.source import Source, arrays, flat
from mjax.checkpoint.weights import read_weights
from mjax.config.model_schema import ModelConfig


def array_source(cfg: ModelConfig, params: dict) -> Source:
    """The parameters of a live model, all of whose shards this process can read."""
    leaves = flat(params)
    return Source(cfg, lambda path, index: np.asarray(leaves[path][index]), lambda: None)


def restore_params(folder: Path, abstract_params: dict) -> dict:
    """The checked parameters of a checkpoint, laid out as `abstract_params` (layer order) says."""
    source = read_weights(folder)
    source.check()
    return arrays(source, abstract_params)
