"""Fixed-length training samples out of an indexed corpus, in Megatron-LM's exact order.

The sequences of a split, repeated per epoch and shuffled, form one stream of tokens; sample k is
its tokens [k*S, (k+1)*S], one more than S so that every position has a label, and the last token
of a sample is the first of the next. A second shuffle orders the samples. Both shuffles draw from
one `RandomState(seed)`. Invariant: the order is a pure function of (lengths, split, S, number of
samples, seed), the same array for array as Megatron's `document_index`, `sample_index` and
`shuffle_index`. Source: Megatron-LM `gpt_dataset.py` and `helpers.cpp`.
"""

import os
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from mjax.data.base.cache import cached_arrays
from mjax.data.corpus.fim import FillInTheMiddle
from mjax.data.corpus.indexed import REBUILD, IndexedDataset, Watch
from mjax.errors import UserError

SPLITS = ("train", "valid", "test")
OPENING_CHECK = 1 << 25  # tokens checked against the vocabulary before the first batch
FieldArrays = dict[str, np.ndarray]


class Indices(NamedTuple):
    """`document` int32 [D]: sequence numbers in stream order. `sample` int32 or int64 [n + 1, 2]:
    position in `document` and offset in that sequence where each sample starts. `shuffle` uint32
    or int64 [n]: which sample comes i-th."""

    document: np.ndarray
    sample: np.ndarray
    shuffle: np.ndarray


def split_range(fractions: Sequence[float], split: str | int, n: int) -> tuple[int, int]:
    """Sequences [begin, end) of a split out of n: Megatron normalizes, accumulates and rounds."""
    shares = np.asarray(fractions, np.float64)
    if len(shares) != 3 or not (shares >= 0).all() or not 0 < shares.sum() < np.inf:
        raise UserError(f"data.split {list(fractions)}: give three shares >= 0, not all zero")
    if split not in (*SPLITS, 0, 1, 2):
        raise UserError(f"split {split!r}: one of {', '.join(SPLITS)}")
    k = SPLITS.index(split) if isinstance(split, str) else split
    bounds = [0.0]
    for share in (shares / shares.sum()).tolist():
        bounds.append(bounds[-1] + share)
    return round(bounds[k] * n), round(bounds[k + 1] * n)


def build_indices(
    lengths: np.ndarray,
    sequences: np.ndarray,
    seq_length: int,
    num_samples: int | None,
    seed: int,
) -> Indices:
    """The three indices over `sequences` (numbers into `lengths`); `num_samples` None: one epoch.

    Epochs are the fewest that hold `num_samples`. If the last one gives under 80 % of an epoch's
    samples, it is shuffled apart, so that no sample of it comes early.
    """
    tokens = int(lengths[sequences].sum(dtype=np.int64))
    epochs = 1 if num_samples is None else max(1, -(-(num_samples * seq_length + 1) // tokens))
    full = ((epochs - 1) * tokens - 1) // seq_length  # samples that the last epoch has no part in
    apart = False
    if epochs > 1:
        apart = num_samples - full < int(0.80 * ((tokens - 1) // seq_length))

    rng = np.random.RandomState(seed)
    parts = [epochs - 1, 1] if apart else [epochs]
    document = np.concatenate(
        [_shuffled(np.tile(sequences.astype(np.int32), n), rng) for n in parts]
    )
    sample = _sample_index(lengths, document, seq_length, (epochs * tokens - 1) // seq_length)
    n = len(sample) - 1
    kind = np.uint32 if n < np.iinfo(np.uint32).max - 1 else np.int64
    bounds = [0, full, n] if apart else [0, n]
    shuffle = [_shuffled(np.arange(a, b, dtype=kind), rng) for a, b in pairwise(bounds)]
    return Indices(document, sample, np.concatenate(shuffle))


def _shuffled(array: np.ndarray, rng: np.random.RandomState) -> np.ndarray:
    rng.shuffle(array)
    return array


def _sample_index(lengths: np.ndarray, document: np.ndarray, s: int, n: int) -> np.ndarray:
    """Sample k starts at token k*s of the stream: find the sequence that holds that token."""
    ends = np.cumsum(lengths[document], dtype=np.int64)
    at = np.arange(n + 1, dtype=np.int64) * s
    row = np.searchsorted(ends, at, side="right")
    row[0] = 0  # Megatron starts at the first sequence even if that one is empty
    starts = ends[row] - lengths[document[row]]
    offset = at - starts
    offset[0] = 0
    largest = max(len(document), int(lengths.max()))
    dtype = np.int64 if largest > np.iinfo(np.int32).max else np.int32
    index = np.stack([row, offset], axis=1)
    return index.astype(dtype)


class GPTDataset:
    """Samples of `seq_length` tokens; see the module for their order.

    `[i]` gives `tokens`, `labels`, `segment_ids`, `positions` (int32) and `loss_mask` (float32),
    each [S]; `batch(indices)` the same stacked to [B, S]. Segments count the index's sequences
    within a sample from 1 (all 1 without `document_mask`); 0 is kept for padding. `positions`
    restart at each of them with `reset_position_ids`. `eod_mask_loss` drops the loss where the
    input is `eod_token_id`. `fim` permutes documents (`fim.py`); only then there may be padding, at
    the end and without loss. Indices are cached under `cache_dir`, by default `PREFIX.cache`.
    Raises `UserError` on a corpus, split or token id that cannot be used.
    """

    def __init__(
        self,
        prefix: str | os.PathLike,
        split: str | int,
        split_fractions: Sequence[float],
        seq_length: int,
        num_samples: int | None,
        seed: int,
        *,
        cache_dir: str | os.PathLike | None = None,
        document_mask: bool = True,
        reset_position_ids: bool = False,
        eod_token_id: int | None = None,
        eod_mask_loss: bool = False,
        vocab_size: int | None = None,
        fim: FillInTheMiddle | None = None,
    ):
        self.prefix, self.seq_length, self.vocab_size = str(prefix), seq_length, vocab_size
        self.document_mask, self.reset_position_ids = document_mask, reset_position_ids
        self.eod_mask_loss, self.eod_token_id, self.fim = eod_mask_loss, eod_token_id, fim
        if eod_mask_loss and eod_token_id is None:
            raise UserError("data.eod_mask_loss needs data.eod_token_id: set it")
        if not 0 <= seed < 2**32:
            raise UserError(f"run.seed {seed}: the data order takes a seed from 0 to 2**32 - 1")
        self.dataset = data = IndexedDataset(prefix)
        self.sequences = begin, end = self._sequences(split, split_fractions)
        if vocab_size is not None and data.stored is None:
            data.require_ids(data.tokens[:OPENING_CHECK], vocab_size)
        stat = data.idx_path.stat()
        self.key = key = {
            "index": [os.path.abspath(data.idx_path), stat.st_size, stat.st_mtime_ns],
            "tokens": data.num_tokens,
            "sequences": [begin, end],
            "seq_length": seq_length,
            "num_samples": num_samples,
            "seed": seed,
        }
        sequences = np.arange(begin, end, dtype=np.int32)
        indices, files = cached_arrays(
            cache_dir or (data.idx_path.with_suffix("") if data.stored else f"{prefix}.cache"),
            key,
            Indices._fields,
            lambda: build_indices(data.lengths, sequences, seq_length, num_samples, seed),
        )
        self.document_index, self.sample_index, self.shuffle_index = indices
        self._watch = Watch(files)

    def _sequences(self, split: str | int, fractions: Sequence[float]) -> tuple[int, int]:
        """The split's range, once it is known to hold a sample."""
        data = self.dataset
        if data.dtype.kind == "f":
            raise UserError(f"{data.idx_path}: holds {data.dtype}, not token ids; {REBUILD}")
        if data.num_tokens == 0:
            raise UserError(f"{data.bin_path}: the corpus is empty; preprocess some text into it")
        begin, end = split_range(fractions, split, len(data))
        name = split if isinstance(split, str) else SPLITS[split]
        held = int(data.lengths[begin:end].sum(dtype=np.int64))
        if held < self.seq_length + 1:
            raise UserError(
                f"{self.prefix}: split '{name}' {list(fractions)} has {end - begin} documents, "
                f"{held} tokens, but one sample takes {self.seq_length + 1}: "
                "change data.split, shorten data.seq_length or add text"
            )
        return begin, end

    def __len__(self) -> int:
        return len(self.shuffle_index)

    def __getitem__(self, i: int) -> FieldArrays:
        return {name: array[0] for name, array in self.batch([i]).items()}

    def batch(self, indices: Sequence[int] | np.ndarray) -> FieldArrays:
        """Samples `indices`, stacked: the fields of `[i]`, each [B, S].

        A sample is a few pieces, one per sequence it touches. One call fetches all pieces.
        """
        b, s = len(indices), self.seq_length
        with self._watch.holds():
            k = self.shuffle_index[np.asarray(indices, np.int64)].astype(np.int64)
            first, offset = self.sample_index[k].T.astype(np.int64)
            last, end = self.sample_index[k + 1].T.astype(np.int64)
            n = last - first + 1  # pieces per sample
            tail = np.cumsum(n) - 1  # the number of each sample's last piece
            head = tail - n + 1
            sequence = self.document_index[np.arange(n.sum()) + np.repeat(first - head, n)]
            begin = np.zeros(len(sequence), np.int64)
            begin[head] = offset
            stop = self.dataset.lengths[sequence].astype(np.int64)
            stop[tail] = end + 1
            size = stop - begin
            start = np.cumsum(size) - size  # where each piece lands in the flat batch
            text = self.dataset.gather(self.dataset.offsets[sequence] + begin, size)
            text = text.reshape(b, s + 1)
            if self.vocab_size is not None:
                self.dataset.require_ids(text, self.vocab_size)
        if self.fim is not None:
            text, size, n = self._filled(indices, text, size, n)
            head = np.cumsum(n) - n
            start = np.cumsum(size) - size

        tokens = text[:, :-1].astype(np.int32)
        segments, positions = np.ones((b, s), np.int32), np.empty((b, s), np.int32)
        if self.document_mask:
            number = np.cumsum(size > 0, dtype=np.int32)  # empty sequences are not counted
            number -= np.repeat(number[head] - (size[head] > 0), n)
            segments[:] = np.repeat(number, size).reshape(b, s + 1)[:, :-1]
        positions[:] = np.arange(s, dtype=np.int32)
        if self.reset_position_ids:
            start_in_row = (start - np.repeat(start[head], n)).astype(np.int32)
            positions -= np.repeat(start_in_row, size).reshape(b, s + 1)[:, :-1]
        loss_mask = np.ones((b, s), np.float32)
        if self.eod_mask_loss:
            loss_mask[tokens == self.eod_token_id] = 0.0
        if self.fim is not None:
            column = np.arange(s + 1)
            is_padding = column >= s + 1 - size[np.cumsum(n) - 1][:, None]
            segments[is_padding[:, :-1]] = 0
            loss_mask[is_padding[:, 1:]] = 0.0
        return {
            "tokens": tokens,
            "labels": text[:, 1:].astype(np.int32),
            "loss_mask": loss_mask,
            "segment_ids": segments,
            "positions": positions,
        }

    def documents_of(self, i: int) -> np.ndarray:
        """The numbers in the index of the sequences that sample i has tokens of."""
        k = int(self.shuffle_index[i])
        (first, _), (last, _) = self.sample_index[k : k + 2]
        return self.document_index[first : last + 1]

    def names(self, indices: Sequence[int] | np.ndarray) -> list[str]:
        """The corpus and the sequences in its index that samples `indices` have tokens of."""
        numbers = [", ".join(map(str, self.documents_of(i))) for i in indices]
        return [f"{self.prefix} ({found})" for found in numbers]

    def _filled(
        self, indices: Sequence[int] | np.ndarray, text: np.ndarray, size: np.ndarray, n: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(text, sizes of pieces, pieces a sample) after fill-in-the-middle.

        Each sample has a further piece, its last one, which is padding and mostly empty.
        """
        rows, sizes = [], []
        ends = np.cumsum(n)
        for i, row, end, count in zip(indices, text, ends, n, strict=True):
            borders = np.cumsum(size[end - count : end])[:-1]
            pieces = np.split(row.astype(np.int64), borders)
            filled = self.fim.fill(int(i), pieces)
            padding = len(row) - sum(filled.sizes)
            rows.append(filled.tokens)
            sizes += [*filled.sizes, padding]
        return np.stack(rows), np.array(sizes, np.int64), n + 1

    padded = False

    @cached_property
    def max_documents(self) -> int:
        """The most segments that any sample has: a static bound for attention kernels."""
        if not self.document_mask:
            return 1
        held = self.dataset.lengths[self.document_index] > 0
        rank = np.cumsum(held)
        first, (last, offset) = self.sample_index[:-1, 0], self.sample_index[1:].T
        # A sample whose successor starts a sequence has only its last label from that one.
        most = int((rank[last] - (offset == 0) - rank[first] + held[first]).max())
        # Padding is a segment, and text that got shorter may bring in one that was a label alone.
        return most if self.fim is None else most + 2


def split_tokens(
    prefix: str | os.PathLike, split: str | int, split_fractions: Sequence[float]
) -> np.ndarray:
    """All tokens of a split in file order: a flat read-only view of `.bin`."""
    data = IndexedDataset(prefix)
    begin, end = split_range(split_fractions, split, len(data))
    if begin == end:
        return data.tokens[:0]
    return data.tokens[data.offsets[begin] : data.offsets[end - 1] + data.lengths[end - 1]]
