"""Rows of conversations: packed by best fit, or one a row; the order of epochs.

A conversation of n + 1 tokens takes n places of a row, a document of its own whose positions begin
at 0. Invariants: row n is a pure function of (files, settings, seed, n); each conversation is in
one row of an epoch.
"""

import logging
import os
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from mjax.config.schema.run import Config
from mjax.data.base.best_fit import packed
from mjax.data.base.tokenizer import Tokenizer, require_vocabulary
from mjax.data.conversations.tokenized import TokenizedSource, tokenize_source
from mjax.data.corpus.gpt import FieldArrays
from mjax.data.sentences.labelled import drawn_part
from mjax.errors import UserError

log = logging.getLogger(__name__)

_KINDS = {"tokens": np.int32, "labels": np.int32, "loss_mask": np.float32}


class LengthCounts(NamedTuple):
    """Conversations that are too long for a row, and the tokens that they lose.

    lost_trained: the lost tokens that are answers'.
    """

    cut: int
    dropped: int
    lost: int
    lost_trained: int


def document_fields(ids: np.ndarray, is_trained: np.ndarray) -> FieldArrays:
    """The fields of n + 1 tokens, [n] each; the loss is on tokens that `is_trained` flags."""
    count = len(ids) - 1
    return {
        "tokens": ids[:count],
        "labels": ids[1:],
        "loss_mask": np.asarray(is_trained[1 : count + 1], np.float32),
    }


def rows_of_documents(rows: Sequence[Sequence[FieldArrays]], width: int) -> FieldArrays:
    """Documents side by side in rows, each field [B, width]; segments and positions are added."""
    shape = len(rows), width
    segments, positions = np.zeros((2, *shape), np.int32)
    found = {name: np.zeros(shape, kind) for name, kind in _KINDS.items()}
    for row, documents in enumerate(rows):
        begin = 0
        for number, document in enumerate(documents, 1):
            count = len(document["tokens"])
            place = row, slice(begin, begin + count)
            for name, values in document.items():
                if name not in found:
                    found[name] = np.zeros(shape, np.float32)
                found[name][place] = values
            segments[place] = number
            positions[place] = np.arange(count)
            begin += count
    return found | {"segment_ids": segments, "positions": positions}


class ConversationDataset:
    """`size` rows (None: an epoch) of the conversations of a source.

    `batch(indices)` gives the fields of `GPTDataset`, each [B, S]; `segment_ids` number the
    conversations of a row from 1 on, and padding is 0. Raises `UserError`.
    """

    documents = 1  # of a member

    def __init__(
        self,
        path: str | os.PathLike,
        split: str,
        split_fractions: Sequence[float],
        size: int | None,
        cfg: Config,
        tokenizer: Tokenizer,
    ):
        require_vocabulary(tokenizer.vocab_size, cfg.model)
        self.path, self.seq_length, self.seed = f"{path}", cfg.data.seq_length, cfg.run.seed
        self.settings = cfg.data.conversations
        self.source = self._read(cfg, tokenizer)
        count = len(self.source.names)
        numbers = drawn_part(count, split_fractions, split, self.path, "conversations")
        self.numbers, self.lengths, self.counts = self._fitting(np.array(numbers))
        self.ranks = [[rank] for rank in range(len(self.numbers))]
        if self.settings.rows == "packed":
            longest_first = sorted(self.lengths.tolist(), reverse=True)
            self.ranks = packed([(n,) for n in longest_first], (self.seq_length,))
        self.size = len(self.ranks) if size is None else size
        self.max_documents = 1 + self.documents * max(map(len, self.ranks))  # and padding
        self.padded = self.settings.rows != "packed"
        self._epoch = lru_cache(maxsize=4)(self._epoch_order)

    def _read(self, cfg: Config, tokenizer: Tokenizer) -> TokenizedSource:
        return tokenize_source(self.path, cfg, tokenizer)

    def _fitting(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray, LengthCounts]:
        """(the conversations that are used, their places in a row, what was lost)."""
        room, too_long = self.seq_length, self.settings.too_long
        lengths = self.source.lengths[numbers] - 1
        is_used, cut, lost_trained = np.ones(len(numbers), bool), 0, 0
        for at in np.flatnonzero(lengths > room):
            _, is_answer = self.source[numbers[at]]
            is_used[at] = too_long == "cut" and is_answer[1 : room + 1].any()
            cut += int(is_used[at])
            lost_trained += int(is_answer[room + 1 if is_used[at] else 1 :].sum())
        places = np.minimum(lengths, room)
        counts = LengthCounts(
            cut=cut,
            dropped=int((~is_used).sum()),
            lost=int(lengths.sum() - places[is_used].sum()),
            lost_trained=lost_trained,
        )
        if counts.cut + counts.dropped:
            name = self.source.names[numbers[np.argmax(lengths)]]
            said = (
                f"{self.path}: {counts.cut + counts.dropped} of {len(numbers)} conversations are "
                f"longer than data.seq_length={room} (the longest, {name}: {lengths.max()})"
            )
            if too_long == "refuse" or not is_used.any():
                raise UserError(f"data.conversations: {said}; raise it, or see too_long")
            say = "data.conversations: %s; %d are cut, %d left out, with %d tokens of answers"
            log.warning(say, said, counts.cut, counts.dropped, counts.lost_trained)
        return numbers[is_used], places[is_used], counts

    def __len__(self) -> int:
        return self.size

    def _epoch_order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """(the conversations by length, equal ones shuffled; which row comes i-th).

        All epochs have the same rows by length, for best fit sees nothing but lengths.
        """
        rng = np.random.RandomState((self.seed + epoch) % 2**32)
        order = rng.permutation(len(self.numbers))
        by_length = order[np.argsort(-self.lengths[order], kind="stable")]
        return by_length, rng.permutation(len(self.ranks))

    def members(self, index: int) -> np.ndarray:
        """The conversations of a row, as numbers into `numbers` and `lengths`."""
        epoch, place = divmod(int(index), len(self.ranks))
        by_length, rows = self._epoch(epoch)
        return by_length[self.ranks[rows[place]]]

    def batch(self, indices: Sequence[int] | np.ndarray) -> FieldArrays:
        """Rows `indices`, stacked."""
        rows = [[self._document(member) for member in self.members(index)] for index in indices]
        return rows_of_documents(rows, self.seq_length)

    def _document(self, member: int) -> FieldArrays:
        ids, is_answer = self.source[self.numbers[member]]
        return document_fields(ids[: self.lengths[member] + 1], is_answer)

    def trained_tokens(self) -> int:
        """The tokens with a loss in an epoch."""
        pairs = zip(self.numbers, self.lengths, strict=True)
        return sum(int(self.source[n][1][1 : length + 1].sum()) for n, length in pairs)

    def sizes(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """int64 [n, 2]: tokens of each row; attention's cost, the sum of squared lengths."""
        rows = [self.lengths[self.members(index)] for index in indices]
        return np.array([(row.sum(), (row**2).sum()) for row in rows], np.int64).reshape(-1, 2)

    def names(self, indices: Sequence[int] | np.ndarray) -> list[str]:
        """The files and lines of rows `indices`."""
        chosen = [self.numbers[self.members(index)] for index in indices]
        return [", ".join(self.source.names[n] for n in row) for row in chosen]
