"""Texts with images, for a model that reads both: JSON lines, tokenized into memory.

A line is {"images": ["a.png"], "prompt": "<image>What is it?", "text": "A cat."}; images and prompt
may be left out. The loss is on the text and the end behind it. Where images are compared with texts
(CLIP), a line is {"images": ["a.png"], "text": "a cat"}, and a text that is too long is cut.
Invariant: sample n is a pure function of (file, settings, seed, n), as in `data/labelled.py`. A
sample whose image cannot be decoded, or that does not fit `data.seq_length`, counts in no loss and
is named in the log.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mjax.config.schema import Config
from mjax.data.gpt import Batch
from mjax.data.images import ImageReader
from mjax.data.labelled import part_of_split, shuffled
from mjax.data.tokenizer import IMAGE, Tokenizer, encode_with_images
from mjax.errors import UNREADABLE, UserError, or_user_error
from mjax.json_file import parse_json
from mjax.models.vision import image_fields


@dataclass(frozen=True)
class Line:
    """The ids of a line with those of its images' patches, how many are its prompt's, its files."""

    name: str
    ids: list[int]
    prompt: int
    images: list[Path]


class ImageTextDataset:
    """`size` samples, a line each, padded to `data.seq_length`.

    `batch(indices)` gives `tokens`, `labels`, `segment_ids`, `positions` (int32 [B, S]),
    `loss_mask` (fp32 [B, S]), `patches` (fp32 [B, I, T, C*P*P]) and `row_label` (int32 [B], -1
    where a sample is left out). Raises `UserError` for a line that cannot be used, naming it.
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
        self.reader = ImageReader(cfg, len(self.lines))

    def __len__(self) -> int:
        return self.size

    def batch(self, indices: Sequence[int] | np.ndarray) -> Batch:
        """Samples `indices`, stacked."""
        cfg, vision = self.cfg, self.cfg.model.vision
        chosen = [self.lines[n] for n in shuffled(indices, len(self.lines), cfg.run.seed)]
        shape = len(chosen), cfg.data.seq_length
        ids, mask = np.zeros((shape[0], shape[1] + 1), np.int32), np.zeros(shape, np.float32)
        segments, labels = np.zeros(shape, np.int32), np.full(shape[:1], -1, np.int32)
        sees_padding = cfg.model.is_dual_encoder and cfg.model.contrastive.eos_token_id is None
        if sees_padding:  # as SigLIP's texts do, which are read off there
            ids += cfg.data.masked.pad_token_id or 0
            segments += 1
        images = np.stack([[self.reader.nothing] * vision.max_images] * len(chosen))
        for row, line in enumerate(chosen):
            found = self._images(line)
            if found is None:
                continue
            labels[row] = 0
            end = len(line.ids) - (not cfg.model.is_dual_encoder)  # no next token there
            ids[row, : len(line.ids)] = line.ids
            segments[row, :end] = 1
            mask[row, max(line.prompt - 1, 0) : end] = 1
            images[row, : len(found)] = found or images[row, :0]
        length = vision.row_length(cfg.image_size)
        flat = images.reshape(-1, *images.shape[2:])
        patches = image_fields(flat, vision, length)["patches"]
        columns = np.arange(shape[1], dtype=np.int32)
        return {
            "tokens": ids[:, :-1],
            "labels": ids[:, 1:],
            "loss_mask": mask,
            "segment_ids": segments,
            "positions": np.broadcast_to(columns, shape),
            "patches": patches.reshape(*images.shape[:2], *patches.shape[1:]),
            "row_label": labels,
        }

    def _images(self, line: Line) -> list[np.ndarray] | None:
        """The images of a line, or None if it is left out."""
        room, most = self.cfg.data.seq_length + 1, self.cfg.model.vision.max_images
        if len(line.ids) > room or len(line.images) > most:
            said = (
                f"{len(line.ids)} tokens, {len(line.images)} images: data.seq_length is {room - 1}"
            )
            self.reader.skip(line.name, f"{said}, model.vision.max_images {most}")
            return None
        found = [self.reader.read(str(path), path.read_bytes) for path in line.images]
        return None if any(image is None for image in found) else found


def read_lines(path: Path, tokenizer: Tokenizer, cfg: Config) -> list[Line]:
    """The lines of a file of JSON lines; images are named beside the file or from the root."""
    wrong = f"data.images.path {path}: cannot be read: {{reason}}; give a file of JSON lines"
    with or_user_error(wrong, UNREADABLE):
        raw = path.read_text(encoding="utf-8").splitlines()
    vision, compared, found = cfg.model.vision, cfg.model.is_dual_encoder, []
    end = [] if tokenizer.eod_id is None else [tokenizer.eod_id]
    for number, line in enumerate(raw, 1):
        name = f"{path}:{number}"
        with or_user_error(f"{name}: not a JSON line: {{reason}}", ValueError):
            row = parse_json(line)
        row = row if isinstance(row, dict) else {}
        prompt, text, images = row.get("prompt", ""), row.get("text"), row.get("images", [])
        is_list = isinstance(images, list) and all(isinstance(image, str) for image in images)
        if not (isinstance(prompt, str) and isinstance(text, str) and is_list):
            raise UserError(f'{name}: not {{"images": [".."], "prompt": "..", "text": ".."}}')
        if compared and (prompt or len(images) != 1):
            raise UserError(
                f"{name}: to compare an image with a text, give one image and no prompt"
            )
        if not compared and (prompt.count(IMAGE) != len(images) or IMAGE in text):
            raise UserError(f"{name}: {len(images)} images, and not as many {IMAGE} in its prompt")
        first = [*tokenizer.prefix, *encode_with_images(prompt, tokenizer, vision, cfg.image_size)]
        ids = [*first, *tokenizer.encode(text), *end]
        if compared and len(ids) > cfg.data.seq_length:
            ids = [*ids[: cfg.data.seq_length - len(end)], *end]
        found.append(Line(name, ids, len(first), [path.parent / image for image in images]))
    return found
