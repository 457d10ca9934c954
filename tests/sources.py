"""Weights of checkpoints as arrays."""

from pathlib import Path

from mjax.checkpoint.base.source import arrays
from mjax.checkpoint.weights import read_weights


def restore_params(folder: Path, abstract_params: dict) -> dict:
    """The checked parameters of a checkpoint, laid out as `abstract_params` (layer order) says."""
    source = read_weights(folder)
    source.check()
    return arrays(source, abstract_params)
