"""The inputs that one architecture needs and others refuse."""

from collections.abc import Mapping

from mjax.config.schema.model import ModelConfig
from mjax.errors import UserError

_NEEDED = {
    "target": "target is for encoder-decoders, which need it: the tokens that the decoder reads",
    "neighbors": "neighbors are for RETRO (R), which needs them: the texts that were retrieved for "
    "each chunk",
}


def require_inputs(cfg: ModelConfig, given: Mapping[str, object]) -> None:
    """Raise `UserError` unless a model is given the inputs that it needs, and no others."""
    for name, reason in _NEEDED.items():
        if (given.get(name) is not None) != (name in cfg.architecture.reads):
            raise UserError(f"model.layer_pattern={cfg.layer_pattern}: {reason}")
    for name, value in given.items():
        if value is not None and name not in _NEEDED:
            raise UserError(f"model.layer_pattern={cfg.layer_pattern}: this model reads no {name}")
