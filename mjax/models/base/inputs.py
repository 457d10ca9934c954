"""The inputs that one architecture needs and others refuse, and the form of a prompt."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

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


class PromptInputs(NamedTuple):
    """The first call of generation, as the layers with caches read it.

    ids: int32 [B, S]. count: int32 [B], the real ones of each row, which come first; None: all are.
    inputs: what else is read with them (`Decoder.extend`).
    source_length: the tokens a row of another stream whose keys caches hold.
    """

    ids: jax.Array
    count: jax.Array | None
    inputs: Mapping[str, Any]
    source_length: int = 0
