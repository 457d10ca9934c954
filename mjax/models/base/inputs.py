"""The inputs that one architecture needs and others refuse."""

from collections.abc import Mapping

from mjax.config.schema.model import ModelConfig
from mjax.errors import UserError

_READERS = {
    "target": "target is for encoder-decoders, which need it: the tokens that the decoder reads",
    "neighbors": "neighbors are for RETRO (R), which needs them: the texts that were retrieved for "
    "each chunk",
}


def require_inputs(cfg: ModelConfig, given: Mapping[str, object]) -> None:
    """Raise `UserError` where a needed input is not among those given, or the reverse."""
    for name, reason in _READERS.items():
        if (name in given) != (name in cfg.architecture.reads):
            raise UserError(f"model.layer_pattern={cfg.layer_pattern}: {reason}")
