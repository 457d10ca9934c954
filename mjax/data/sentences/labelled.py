"""Texts with a class each, for `train.objective=classify`: JSON lines, tokenized into memory.

A line is {"text": .., "label": 0} and may have a second text, "text_pair". Invariant: sample n is a
pure function of (file, settings, seed, n): epoch e is a shuffle of the split's lines by
RandomState(seed + e), and lines are dealt to splits in an order of their content.
"""

import functools
import hashlib
import os
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from mjax.config.schema.run import Config
from mjax.data.base.documents import expand_paths, json_rows
from mjax.data.base.tokenizer import Tokenizer, require_vocabulary
from mjax.data.corpus.gpt import FieldArrays, split_range
from mjax.data.sentences.masked import fill_row, frame_of_pairs, padded_rows
from mjax.errors import UserError

LabelledText = TypeVar("LabelledText")
# A line's texts as ids, and its class.
LabelledLine = tuple[list[list[int]], int]


class LabelledDataset:
    """`size` samples: [CLS] text [SEP], and text_pair [SEP], then padding to `data.seq_length`.

    Pairs are framed as the tokenizer frames them (`masked.frame_of_pairs`).

    `batch(indices)` gives `tokens`, `token_types`, `segment_ids`, `positions` (int32 [B, S]) and
    `row_label` (int32 [B]). A sample that is too long loses tokens at the end of its longer text.
    Raises `UserError` for a line that cannot be used, naming it.
    """

    max_documents, padded = 2, True  # the texts, and padding

    def __init__(
        self,
        path: str | os.PathLike,
        split: str,
        split_fractions: Sequence[float],
        size: int,
        cfg: Config,
        tokenizer: Tokenizer,
    ):
        model, data = cfg.model, cfg.data
        require_vocabulary(tokenizer.vocab_size, model)
        self.settings, self.seq_length = data.masked, data.seq_length
        self.frame = frame_of_pairs(tokenizer, model.bert)
        self.path, self.size, self.seed = f"{path}", size, cfg.run.seed
        lines = read_labelled_lines(path, tokenizer, model.bert.num_labels)
        order = sorted(range(len(lines)), key=lambda number: _digest_of_line(lines[number]))
        self.numbers = part_of_split(order, split_fractions, split, self.path, "lines")
        self.lines = [lines[number] for number in self.numbers]
        most = max(len(texts) for texts, _ in self.lines)
        least = 2 + most + (self.frame.separators - 1 if most > 1 else 0)
        if self.seq_length < least:
            raise UserError(
                f"data.seq_length={self.seq_length}: [CLS], a token, and [SEP] behind each text of "
                f"{path} need {least}; raise it"
            )

    def __len__(self) -> int:
        return self.size

    def batch(self, indices: Sequence[int] | np.ndarray) -> FieldArrays:
        """Samples `indices`, stacked."""
        out = padded_rows(len(indices), self.seq_length, self.settings.pad_token_id)
        for row, line in enumerate(shuffled(indices, len(self.lines), self.seed)):
            texts, out["row_label"][row] = self.lines[line]
            tokens, types = self._framed(texts)
            ones = [1] * len(tokens)
            fill_row(out, row, {"tokens": tokens, "token_types": types, "segment_ids": ones})
        return out

    def names(self, indices: Sequence[int] | np.ndarray) -> list[str]:
        """The file, and which of its lines samples `indices` are, blank ones not counted."""
        lines = shuffled(indices, len(self.lines), self.seed)
        return [f"{self.path} (line {self.numbers[line] + 1})" for line in lines]

    def _framed(self, texts: list[list[int]]) -> tuple[list[int], list[int]]:
        """(tokens, their types) of a sample without its padding."""
        ends = [[self.settings.sep_token_id]] * len(texts)
        if len(texts) > 1:
            ends[0] = ends[0] * self.frame.separators
        room = self.seq_length - 1 - sum(map(len, ends))
        tokens, types = [self.settings.cls_token_id], [0]
        behind = sum(map(len, texts[1:]))
        most = max(room - behind, room // len(texts))  # tokens of the text that is next
        for text, end, kind in zip(texts, ends, (0, self.frame.second_type), strict=False):
            kept = text[:most]
            most = room - len(kept)
            tokens += [*kept, *end]
            types += [kind] * (len(kept) + len(end))
        return tokens, types


def part_of_split(
    examples: list[LabelledText], fractions: Sequence[float], split: str, source: str, kind: str
) -> list[LabelledText]:
    """The examples of a split; `kind` is what they are called. Raises `UserError` where it has
    none."""
    begin, end = split_range(fractions, split, len(examples))
    part = examples[begin:end]
    if not part:
        raise UserError(
            f"{source}: split {split!r} of {len(examples)} {kind} has none; change data.split"
        )
    return part


def drawn_part(
    count: int, fractions: Sequence[float], split: str, source: str, kind: str
) -> list[int]:
    """The numbers of the examples of a split that is drawn at random, the same in every run.

    `count` examples there are; `kind` and errors as in `part_of_split`.
    """
    order = shuffled(np.arange(count), count, 0)
    return part_of_split(order, fractions, split, source, kind)


def shuffled(indices: Sequence[int] | np.ndarray, length: int, seed: int) -> list[int]:
    """Which of `length` examples each sample is: epoch e goes through them in an order of its own,
    by RandomState(seed + e)."""
    epochs, places = np.divmod(np.asarray(indices, np.int64), length)
    pairs = zip(epochs.tolist(), places.tolist(), strict=True)
    return [int(_order(length, (seed + epoch) % 2**32)[place]) for epoch, place in pairs]


@functools.lru_cache(maxsize=4)  # a batch lies in an epoch or two, of training and held-out data
def _order(length: int, seed: int) -> np.ndarray:
    return np.random.RandomState(seed).permutation(length)


def read_labelled_lines(
    path: str | os.PathLike, tokenizer: Tokenizer, num_labels: int
) -> list[LabelledLine]:
    """The lines of a file, a folder or a glob of JSON lines.

    Raises `UserError` naming the first that is no sample.
    """
    texts, sizes, labels = [], [], []
    for where, row in json_rows(expand_paths([os.fspath(path)])):
        found, label = _parsed_line(where, row, num_labels)
        texts += found
        sizes.append(len(found))
        labels.append(label)
    ids = iter(tokenizer.encode_batch(texts))
    return [([next(ids) for _ in range(n)], k) for n, k in zip(sizes, labels, strict=True)]


def _parsed_line(where: str, row: dict, num_labels: int) -> tuple[list[str], int]:
    """(the texts, the class) of a line."""
    texts = [row.get("text"), row.get("text_pair")]
    texts = texts if texts[1] is not None else texts[:1]
    label = row.get("label")
    if not all(isinstance(text, str) for text in texts) or type(label) is not int:
        raise UserError(f'{where}: not {{"text": "..", "label": 0}}, with "text_pair" or without')
    if not 0 <= label < num_labels:
        raise UserError(f"{where}: label {label} is none of model.bert.num_labels={num_labels}")
    return texts, label


def _digest_of_line(line: LabelledLine) -> bytes:
    return hashlib.blake2b(repr(line).encode(), digest_size=16).digest()
