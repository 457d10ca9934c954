"""How the tensors of a file are called, where that differs from the names that slots have.

Base classes leave out the prefix of the trunk, models with towers put one before their text, and
files repeat a tensor that is read for two. Invariant: a tensor that stands for another in the model
has its values, or the model has a place for it, or the file is refused.
"""

import json
import math
import os
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from mjax.checkpoint.base.safetensors import Tensor
from mjax.config.schema.model import ModelConfig
from mjax.errors import UserError, or_user_error
from mjax.interop.coded.mxfp4 import PackedTensor
from mjax.interop.huggingface.families.encoders import with_old_names
from mjax.interop.huggingface.families.family import Slot, SlotsByPath, changed, expert_apart

_TRUNKS = ("model.", "transformer.", "backbone.", "bert.", "roberta.")
_HEADS = ("lm_head.weight", "language_model.lm_head.weight")
# Names under which files repeat the embedding, besides those of a tied head.
_EMBEDDINGS = (
    "cls.predictions.decoder.weight",
    "lm_head.decoder.weight",
    "decoder.weight",
    "encoder.embed_tokens.weight",
    "decoder.embed_tokens.weight",
)
_REPEATED_BIASES = {
    "cls.predictions.decoder.bias": "cls.predictions.bias",
    "lm_head.decoder.bias": "lm_head.bias",
}
_LLAVA_TEXT = "language_model.model."
_COMPARED = 2**22  # numbers that are compared at a time

Prefixes = tuple[tuple[str, str], ...]  # what slots say, and the file


@dataclass(frozen=True)
class NamesInFile:
    """The slots of a model in a file.

    repeats: tensors of the file that stand for another, and that one. beside: its tensors of towers
    that the model lacks. prefixes: how names of the text begin beside towers, by ours.
    """

    slots: SlotsByPath
    repeats: Mapping[str, str]
    beside: frozenset[str]
    prefixes: Prefixes = ()


def names_in(cfg: ModelConfig, slots: SlotsByPath, names: Collection[str]) -> NamesInFile:
    """`slots` of a model with the names of a file, whose tensors are `names`."""
    prefixes, tower = _prefixes(slots, _embedding(slots), names)
    slots = changed(slots, lambda slot: replace(slot, tensor=_renamed(slot.tensor, prefixes)))
    slots = with_old_names(_with_head(slots, names), names)
    embedding = _embedding(slots)
    repeats = _repeats_in_file(cfg, slots, names)
    if embedding is not None and embedding not in names and embedding in repeats.values():
        there = next(name for name, of in repeats.items() if of == embedding)
        del repeats[there]
        slots = _with_name(slots, embedding, there)
        repeats = {name: there if of == embedding else of for name, of in repeats.items()}
    beside: Iterable[str] = ()
    if tower is not None:
        read = {slot.tensor for places in slots.values() for slot in places}
        beside = (n for n in names if n not in read and not n.startswith((tower, *_HEADS)))
        if _HEADS[0] not in names:
            prefixes = (*prefixes, (_HEADS[0], _HEADS[1]))
    beside = frozenset(beside)
    return NamesInFile(slots, repeats, beside, prefixes if beside else ())


# ---- the form of a file, for an export -----------------------------------------------------------


def form_of_file(found: NamesInFile, slots: SlotsByPath, exported: SlotsByPath) -> dict[str, str]:
    """How the file differs from what `exported` says, in texts: "prefixes" of a text beside towers,
    and "apart", the tensors of stacked experts of which it has one for each expert."""
    pairs = (pair for path in slots for pair in zip(slots[path], exported[path], strict=True))
    apart = {there.tensor for here, there in pairs if there.lead and not here.lead}
    form = {"prefixes": list(found.prefixes), "apart": sorted(apart)}
    return {name: json.dumps(what) for name, what in form.items() if what}


def in_form(slots: SlotsByPath, form: Mapping[str, str]) -> SlotsByPath:
    """The slots of an export with the names of the imported file, by its `form_of_file`."""
    if not form:
        return slots
    apart = json.loads(form.get("apart", "[]"))
    prefixes = json.loads(form.get("prefixes", "[]"))

    def place(slot: Slot) -> Slot:
        slot = expert_apart(slot) if slot.tensor in apart else slot
        return replace(slot, tensor=_renamed(slot.tensor, prefixes))

    return changed(slots, place)


def _repeats_in_file(
    cfg: ModelConfig, slots: SlotsByPath, names: Collection[str]
) -> dict[str, str]:
    """Tensors of the file that stand for another, and that one."""
    embedding = _embedding(slots)
    read = {slot.tensor for places in slots.values() for slot in places}
    heads = _HEADS if cfg.tie_word_embeddings else ()
    same = dict.fromkeys((*heads, *_EMBEDDINGS), embedding) | _REPEATED_BIASES
    repeats = dict(_repeated_tensors(slots))
    for name, of in same.items():
        if name in names and name not in read and of is not None:
            repeats[name] = of
    return repeats


def turned(slots: SlotsByPath, tensors: Mapping[str, object]) -> SlotsByPath:
    """The slots of a checkpoint in bfloat16, for one whose packed tensors are [..., out, in]."""

    def turn(slot: Slot) -> Slot:
        if isinstance(tensors.get(slot.tensor), PackedTensor):
            return replace(slot, dims=slot.dims[::-1], axis=1 - slot.axis)
        return slot

    return changed(slots, turn)


def heads_apart(found: NamesInFile, tensors: Mapping[str, Tensor], cfg: ModelConfig) -> bool:
    """Whether a file has a head other than the embedding, of a model that calls it tied."""
    heads = [name for name in _HEADS if name in found.repeats]
    # T5 1.0: tied alone
    is_scaled = cfg.architecture.reads_target and cfg.logits_scaling is not None
    if not heads or cfg.bert.mlm_head or is_scaled:
        return False
    head, embedding = tensors[heads[0]], tensors[found.repeats[heads[0]]]
    if equal(head, embedding):
        return False
    print(
        f"mjax: {head.file}: {head.name} differs from {embedding.name}, though config.json calls "
        "them tied: read as tie_word_embeddings=false",
        file=sys.stderr,
    )
    return True


def require_repeats(repeats: Mapping[str, str], tensors: Mapping[str, Tensor]) -> None:
    """Raise `UserError` for a tensor that stands for another and has other values."""
    for name, of in repeats.items():
        if name in tensors and of in tensors and not equal(tensors[name], tensors[of]):
            raise UserError(
                f"{tensors[name].file}: tensors {name} and {of} differ, and the model has one for "
                "both; remove the one that is not meant"
            )


def equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same shape and numbers."""
    if a.shape != b.shape:
        return False
    width = a.shape[-1] if len(a.shape) > 1 else math.prod(a.shape)
    return all(
        np.array_equal(x.astype(np.float32), y.astype(np.float32), equal_nan=True)
        for x, y in zip(_blocks_of_rows(a, width), _blocks_of_rows(b, width), strict=True)
    )


def _blocks_of_rows(tensor: Tensor, width: int) -> Iterator[np.ndarray]:
    count = math.prod(tensor.shape) // max(width, 1)
    step = max(1, _COMPARED // max(width, 1))
    with or_user_error(f"{tensor.file}: cannot read tensor {tensor.name}: {{reason}}"):
        file = os.open(tensor.file, os.O_RDONLY)
        try:
            for first in range(0, count, step):
                rows = slice(first, min(first + step, count))
                yield tensor.read(file, 0, width, rows, slice(0, width))
        finally:
            os.close(file)


def _embedding(slots: SlotsByPath) -> str | None:
    """The name of the table of words."""
    places = [places for path, places in slots.items() if path[0] == "embedding"]
    return places[0][-1].tensor if places else None


def _prefixes(
    slots: SlotsByPath, embedding: str | None, names: Collection[str]
) -> tuple[Prefixes, str | None]:
    """The prefixes of the file under which it has most of the model; that of a text with towers."""
    found: list[tuple[Prefixes, str | None]] = [((), None)]
    trunk = next((t for t in _TRUNKS if embedding and embedding.startswith(t)), None)
    if embedding is not None and embedding.startswith(_LLAVA_TEXT):
        new = ("vision_tower.", "multi_modal_projector.", "image_newline")
        moved = [(_LLAVA_TEXT, "model.language_model."), ("language_model.lm_head.", "lm_head.")]
        found.append(((*moved, *((name, f"model.{name}") for name in new)), None))
    elif trunk is not None:
        found.append((((trunk, ""),), None))
        texts = f"language_model.{trunk}", "model.language_model.", "model.text_model."
        for text in (*texts, "language_model.", "text_model."):
            found.append((((trunk, text),), text))
    tensors = {slot.tensor for places in slots.values() for slot in places}
    return max(found, key=lambda kind: sum(_renamed(n, kind[0]) in names for n in tensors))


def _renamed(name: str, prefixes: Prefixes) -> str:
    for ours, theirs in prefixes:
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    return name


def _with_head(slots: SlotsByPath, names: Collection[str]) -> SlotsByPath:
    """The slots with the name that the file has for a head of its own."""
    plain, of_text = _HEADS
    is_moved = plain not in names and of_text in names
    return _with_name(slots, plain, of_text) if is_moved else slots


def _with_name(slots: SlotsByPath, old: str, new: str) -> SlotsByPath:
    def named(slot: Slot) -> Slot:
        return replace(slot, tensor=new) if slot.tensor == old else slot

    return changed(slots, named)


def _repeated_tensors(slots: SlotsByPath) -> Iterator[tuple[str, str]]:
    """The tensors that slots place a piece in, besides the one that is read, and that one."""
    for places in slots.values():
        read = {slot.piece: slot.tensor for slot in places}
        for slot in places:
            if slot.tensor != read[slot.piece]:
                yield slot.tensor, read[slot.piece]
