"""Texts with images and sounds, for a model that reads them: JSON lines, tokenized into memory.

A line is {"images": ["a.png"], "audio": ["b.wav"], "prompt": "<image><audio>What is it?", "text":
"A cat."}; all but the text may be left out. The loss is on the text and the end behind it. Where
images are compared with texts (CLIP), a line is {"images": ["a.png"], "text": "a cat"}, and a text
that is too long is cut. Invariant: sample n is a pure function of (file, settings, seed, n), as in
`data/labelled.py`. A sample whose image or sound cannot be decoded, or that does not fit
`data.seq_length`, counts in no loss and is named in the log.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from mjax.config.schema import Config
from mjax.data.audio import SoundReader
from mjax.data.gpt import Batch
from mjax.data.images import ImageReader
from mjax.data.labelled import part_of_split, shuffled
from mjax.data.tiles import PictureReader, cut, expanded
from mjax.data.tokenizer import Tokenizer, encode_with_items
from mjax.errors import UNREADABLE, UserError, or_user_error
from mjax.json_file import parse_json
from mjax.models.modalities import MODALITIES, features_of_tiles
from mjax.models.multimodal import items_of
from mjax.models.tiles import Features, padded_features

# A modality's key in a line, and what decodes its files.
KEYS = {"vision": "images", "audio": "audio"}
READERS = {"vision": ImageReader, "audio": SoundReader}


@dataclass(frozen=True)
class Line:
    """The ids of a line with those of its items, how many are its prompt's, files by modality.

    features: what stands in it for its images in tiles, once they are read. Before that an image is
    one id.
    """

    name: str
    ids: list[int]
    prompt: int
    files: dict[str, list[Path]]
    features: Sequence[Features] = ()


class ImageTextDataset:
    """`size` samples, a line each, padded to `data.seq_length`.

    `batch(indices)` gives `tokens`, `labels`, `segment_ids`, `positions` (int32 [B, S]),
    `loss_mask` (fp32 [B, S]), `patches` and `frames` (fp32 [B, I, T, N]) of a model that reads
    them, and `row_label` (int32 [B], -1 where a sample is left out). Raises `UserError` for a line
    that cannot be used, naming it.
    """

    max_documents = 2  # the text, and padding

    def __init__(
        self,
        path: str | os.PathLike,
        split: str,
        split_fractions: Sequence[float],
        size: int,
        cfg: Config,
        tokenizer: Tokenizer,
    ):
        self.cfg, self.size = cfg, size
        eos = cfg.model.contrastive.eos_token_id
        if eos not in (None, 2, tokenizer.eod_id):
            raise UserError(
                f"model.contrastive.eos_token_id={eos} is not the end that data.tokenizer puts "
                f"behind a text, {tokenizer.eod_id}; set it to that"
            )
        lines = read_lines(Path(path), tokenizer, cfg)
        order = shuffled(np.arange(len(lines)), len(lines), 0)
        lines = [lines[number] for number in order]
        self.lines = part_of_split(lines, split_fractions, split, f"{path}", "lines")
        bad: set[str] = set()
        readers = READERS | ({"vision": PictureReader} if cfg.model.vision.is_tiled else {})
        self.readers = {name: readers[name](cfg, len(self.lines), bad) for name in KEYS}

    def __len__(self) -> int:
        return self.size

    def batch(self, indices: Sequence[int] | np.ndarray) -> Batch:
        """Samples `indices`, stacked."""
        cfg = self.cfg
        chosen = [self.lines[n] for n in shuffled(indices, len(self.lines), cfg.run.seed)]
        shape = len(chosen), cfg.data.seq_length
        ids, mask = np.zeros((shape[0], shape[1] + 1), np.int32), np.zeros(shape, np.float32)
        segments, labels = np.zeros(shape, np.int32), np.full(shape[:1], -1, np.int32)
        compared = cfg.model.is_dual_encoder
        if compared and cfg.model.contrastive.eos_token_id is None:
            ids += cfg.data.masked.pad_token_id or 0  # SigLIP's texts see padding, and end there
            segments += 1
        items = {}
        for name in cfg.model.modalities:
            shape_of_items = len(chosen), cfg.model.tower(name).max_items
            items[name] = np.zeros((*shape_of_items, *self.readers[name].shape), np.float32)
        texts: list[Sequence[Features]] = [()] * len(chosen)
        for row, unread in enumerate(chosen):
            read = self._read(unread)
            if read is None:
                continue
            line, found = read
            labels[row], texts[row] = 0, line.features
            end = len(line.ids) - (not compared)  # there is no next token
            ids[row, : len(line.ids)] = line.ids
            segments[row, :end] = 1
            mask[row, max(line.prompt - 1, 0) : end] = 1
            for name, arrays in found.items():
                for place, array in enumerate(arrays):
                    items[name][row, place] = array
        columns = np.arange(shape[1], dtype=np.int32)
        fields = {MODALITIES[name].field: self._rows(name, array) for name, array in items.items()}
        if cfg.model.vision.is_tiled:
            of_row = items_of(cfg, "vision"), *padded_features(texts)
            names = "vision_features", "vision_weights"
            of_tokens = features_of_tiles(ids[:, :-1], cfg.model.vision, *of_row)
            fields |= dict(zip(names, of_tokens, strict=True))
        return fields | {
            "tokens": ids[:, :-1],
            "labels": ids[:, 1:],
            "loss_mask": mask,
            "segment_ids": segments,
            "positions": np.broadcast_to(columns, shape),
            "row_label": labels,
        }

    def _rows(self, name: str, items: np.ndarray) -> np.ndarray:
        """[B, I, T, N] of items [B, I, ...]."""
        tower = self.cfg.model.tower(name)
        length = tower.row_length(self.cfg.item_size(name))
        rows = MODALITIES[name].rows(items.reshape(-1, *items.shape[2:]), tower, length)
        return rows.reshape(*items.shape[:2], *rows.shape[1:])

    def _read(self, line: Line) -> tuple[Line, dict[str, Sequence[np.ndarray]]] | None:
        """A line and its items by modality, or None if it is left out."""
        found: dict[str, list] = {}
        if not self._fits(line):
            return None
        for name, files in line.files.items():
            reader, tower = self.readers[name], self.cfg.model.tower(name)
            most = getattr(tower, f"max_{tower.item}s")
            if len(files) > most:
                why = f"{len(files)} {KEYS[name]}: model.{name}.max_{tower.item}s is {most}"
                reader.skip(line.name, why)
                return None
            found[name] = [reader.read(str(path), path.read_bytes) for path in files]
        if any(item is None for items in found.values() for item in items):
            return None
        if self.cfg.model.vision.is_tiled and found["vision"]:
            return self._in_tiles(line, found)
        return line, found

    def _in_tiles(self, line: Line, found: dict[str, list]) -> tuple[Line, dict] | None:
        """A line and its items, its pictures cut into tiles and their tokens among its ids."""
        vision, scale = self.cfg.model.vision, self.cfg.data.images
        tiles, features = cut(found["vision"], vision, scale.mean, scale.std)
        counts = [len(of_image.corners) for of_image in features]
        ids = expanded(line.ids, vision.image_token_id, counts)
        prompt = line.prompt + len(ids) - len(line.ids)  # where all pictures stand
        line = replace(line, ids=ids, prompt=prompt, features=features)
        return (line, found | {"vision": tiles}) if self._fits(line) else None

    def _fits(self, line: Line) -> bool:
        """Whether `data.seq_length` holds a line; the log names one that it does not."""
        room = self.cfg.data.seq_length
        if len(line.ids) > room + 1:
            why = f"{len(line.ids)} tokens: data.seq_length is {room}"
            self.readers["vision"].skip(line.name, why)
        return len(line.ids) <= room + 1


def read_lines(path: Path, tokenizer: Tokenizer, cfg: Config) -> list[Line]:
    """The lines of a file of JSON lines; items are named beside the file or from the root."""
    wrong = f"data.images.path {path}: cannot be read: {{reason}}; give a file of JSON lines"
    with or_user_error(wrong, UNREADABLE):
        raw = path.read_text(encoding="utf-8").splitlines()
    model, found = cfg.model, []
    sizes = {name: cfg.item_size(name) for name in model.modalities}
    end = [] if tokenizer.eod_id is None else [tokenizer.eod_id]
    for number, line in enumerate(raw, 1):
        name = f"{path}:{number}"
        with or_user_error(f"{name}: not a JSON line: {{reason}}", ValueError):
            row = parse_json(line)
        row = row if isinstance(row, dict) else {}
        prompt, text = row.get("prompt", ""), row.get("text")
        given = {modality: row.get(key, []) for modality, key in KEYS.items()}
        are_lists = all(isinstance(files, list) for files in given.values())
        are_lists = are_lists and all(isinstance(f, str) for files in given.values() for f in files)
        if not (isinstance(prompt, str) and isinstance(text, str) and are_lists):
            keys = ", ".join(f'"{key}": [".."]' for key in KEYS.values())
            raise UserError(f'{name}: not {{{keys}, "prompt": "..", "text": ".."}}')
        for modality, files in given.items():
            if modality not in model.modalities:
                if files:
                    raise UserError(f"{name}: {KEYS[modality]}, but model.layer_pattern reads none")
                continue
            mark = model.tower(modality).mark
            if model.is_dual_encoder:
                if prompt or len(files) != 1:
                    said = "to compare an image with a text, give one image and no prompt"
                    raise UserError(f"{name}: {said}")
                continue
            if (prompt + text).count(mark) != len(files) or mark in text:
                said = f"{len(files)} {KEYS[modality]}, and not as many {mark} in its prompt"
                raise UserError(f"{name}: {said}")
        first = [*tokenizer.prefix, *encode_with_items(prompt, tokenizer, model, sizes)]
        ids = [*first, *tokenizer.encode(text), *end]
        if model.is_dual_encoder and len(ids) > cfg.data.seq_length:
            ids = [*ids[: cfg.data.seq_length - len(end)], *end]
        paths = {m: [path.parent / file for file in files] for m, files in given.items()}
        found.append(Line(name, ids, len(first), paths))
    return found
