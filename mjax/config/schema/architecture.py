"""The architecture of a model as one value: its inputs, the sequences of its layers, its outputs.

It is derived from `model`, most of it from the branches of the layers. `models/architectures.py`
has the class of each name.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from mjax.config.languages.layer_pattern import (
    BRANCHES,
    DECODER,
    PROJECTORS,
    branches_of_model,
    modalities_of,
    sees_ahead,
    stream_of,
)
from mjax.errors import UserError

if TYPE_CHECKING:
    from mjax.config.schema.model import ModelConfig

TARGET, NEIGHBORS = "target", "neighbors"


class Companions(NamedTuple):
    """The texts that an encoder reads beside each text of a batch.

    field: of the batch that has their tokens, [rows, count, length]; -1 is padding.
    axes: the logical axes of count and length (`sharding/rules.py`).
    count: for each text. length: the tokens of each.
    """

    field: str
    axes: tuple[str, str]
    count: int
    length: int


@dataclass(frozen=True)
class Architecture:
    """The facts about a kind of model that other code asks for.

    name: the row of `models/architectures.py`.
    reads: its inputs: "tokens"; "target", the text of a decoder beside an encoder; "neighbors",
        texts that are retrieved; the modalities of items in or beside a text.
    streams: the sequences that its layers work on (`models/base/streams.py`).
    companions: the group of `model` that says how many texts an encoder reads beside each text, and
        how long they are; None: it reads none.
    predicts: tokens, classes of rows, or which image and text are a pair.
    encodes: whether its only sequence is read in both directions.
    generates: whether it continues a text token by token.
    default_objective: the entry of `train.objective` that it is made for.
    """

    name: str
    reads: tuple[str, ...]
    streams: tuple[str, ...]
    companions: str | None
    predicts: Literal["tokens", "classes", "pairs"]
    encodes: bool
    generates: bool
    default_objective: str

    @property
    def has_streams(self) -> bool:
        """Whether layers work on one of several sequences."""
        return len(self.streams) > 1

    @property
    def reads_tokens(self) -> bool:
        return "tokens" in self.reads

    @property
    def reads_target(self) -> bool:
        return TARGET in self.reads

    @property
    def reads_neighbors(self) -> bool:
        return NEIGHBORS in self.reads

    @property
    def compares(self) -> bool:
        """Whether images and texts are embedded apart, and compared."""
        return self.predicts == "pairs"


_READERS = {
    TARGET: "target is for encoder-decoders, which need it: the tokens that the decoder reads",
    NEIGHBORS: "neighbors are for RETRO (R), which needs them: the texts that were retrieved for "
    "each chunk",
}


def require_inputs(model: "ModelConfig", given: Mapping[str, object]) -> None:
    """Raise `UserError` where a call lacks an input that a model needs, or the reverse."""
    for name, reason in _READERS.items():
        if (name in given) != (name in model.architecture.reads):
            raise UserError(f"model.layer_pattern={model.layer_pattern}: {reason}")


_OBJECTIVES = {
    "encoder": "masked_lm",
    "image_encoder": "classify_images",
    "encoder_decoder": "span_corruption",
    "dual_encoder": "contrastive",
}


def architecture_of(model: "ModelConfig") -> Architecture:
    """The architecture of a model. Raises `UserError` for a malformed layer_pattern."""
    bert = model.bert
    return _architecture(
        model.layer_kinds,
        cuts_images=model.vision.patch_size > 0,
        is_like_bert=bert != _default(type(bert)),
        only_classifies=bool(bert.num_labels) and not bert.mlm_head,
        scores=model.num_labels > 0,
        predicts_ahead=model.num_nextn_predict_layers > 0,
    )


@functools.cache
def _default(group: type) -> object:
    """A group of keys that nobody has set."""
    return group()


@functools.cache  # readers of data ask for every sample
def _architecture(
    kinds: tuple[str, ...],
    *,
    cuts_images: bool,
    is_like_bert: bool,
    only_classifies: bool,
    scores: bool,
    predicts_ahead: bool,
) -> Architecture:
    """The architecture of layers of these kinds, and of what else a config says of a model."""
    words = branches_of_model(kinds)
    modalities = modalities_of(kinds)
    inputs = [*modalities]
    if "retrieval" in words:
        inputs.append(NEIGHBORS)
    if "cross" in words:
        inputs.append(TARGET)
    only_images = cuts_images and not modalities
    reads = ("vision",) if only_images else ("tokens", *inputs)
    streams = {DECODER}
    if inputs:
        streams |= set(map(stream_of, set(kinds)))
    encodes = sees_ahead(kinds) and not inputs
    predicts: Literal["tokens", "classes", "pairs"] = "tokens"
    if only_images or only_classifies or scores:
        predicts = "classes"
    name = "multi_token_decoder" if predicts_ahead else "decoder"
    if only_images:
        name = "image_encoder"
    elif NEIGHBORS in reads:
        name = "retro"
    elif TARGET in reads:
        name = "encoder_decoder"
    elif "vision" in words and not words & PROJECTORS:
        name, predicts = "dual_encoder", "pairs"
    elif modalities:
        name = "text_with_items"
    elif encodes or is_like_bert:
        name = "encoder"
    return Architecture(
        name,
        reads,
        tuple(sorted(streams)),
        BRANCHES["retrieval"].group if NEIGHBORS in reads else None,
        predicts,
        encodes,
        generates=not encodes and not scores and name not in ("retro", "dual_encoder"),
        default_objective="reward" if scores else _OBJECTIVES.get(name, "next_token"),
    )
