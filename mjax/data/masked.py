"""Masked samples of sentences, for encoders: by Megatron-LM's rules, draw for draw.

`sentence_index.py` says which sentences make up a sample. Here they become one text or two, are cut
to the target length, framed by [CLS] and [SEP], and some of their words are hidden. Invariant:
sample n is a pure function of (corpus, settings, seed, n): its draws come from
RandomState(seed + n), in the order of Megatron's `bert_dataset.py` and `masked_dataset.py`.
"""

import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mjax.config.schema import MaskedDataConfig
from mjax.data.cache import cached_arrays
from mjax.data.gpt import Batch, split_range
from mjax.data.indexed import REMEDY, IndexedDataset, Watch
from mjax.data.sentence_index import build_sample_index
from mjax.errors import UserError

_SPECIALS = 3  # [CLS] and two [SEP]


class MaskedSample(NamedTuple):
    """A sample without its padding: int arrays of its length, and the class of its order.

    seen: tokens with some replaced. tokens: the true ones. hidden: 1 where the loss counts.
    types: 0 for the first text, 1 for the second. is_swapped: whether the second came first.
    """

    seen: np.ndarray
    tokens: np.ndarray
    hidden: np.ndarray
    types: np.ndarray
    is_swapped: int


class MaskedDataset:
    """Samples of `seq_length` tokens, padding included; see the module for how they are made.

    `[i]` gives `tokens`, `labels`, `token_types`, `segment_ids` (1, and 0 for padding), `positions`
    (int32 [S]), `loss_mask` (float32 [S]) and `row_label` (int32 []): 1 where the two texts were
    exchanged, 0 where not, -1 without `pairs`. `batch(indices)` gives the same stacked.
    `continues` bool [V] tells which tokens continue a word (`tokenizer.word_continuations`); None:
    each token is a word. Raises `UserError` on a corpus or split that cannot be used.
    """

    max_documents = 2  # the text, and padding

    def __init__(
        self,
        prefix: str | os.PathLike,
        split: str | int,
        split_fractions: Sequence[float],
        seq_length: int,
        num_samples: int | None,
        seed: int,
        settings: MaskedDataConfig,
        vocab_size: int,
        *,
        pairs: bool,
        continues: np.ndarray | None = None,
        cache_dir: str | os.PathLike | None = None,
    ):
        self.prefix, self.seq_length, self.seed = str(prefix), seq_length, seed
        self.settings, self.vocab_size, self.pairs = settings, vocab_size, pairs
        self.continues = np.zeros(vocab_size, bool)
        if continues is not None:
            known = continues[:vocab_size]
            self.continues[: len(known)] = known
        sizes = 1 / np.arange(1, settings.max_ngram + 1)
        below = np.cumsum(sizes / sizes.sum())
        self._ngrams = (below / below[-1]).tolist()
        self.dataset = data = IndexedDataset(prefix)
        bounds = self._documents(split, split_fractions)
        stat = data.idx_path.stat()
        least = 2 if pairs else 1
        key = {
            "index": [os.path.abspath(data.idx_path), stat.st_size, stat.st_mtime_ns],
            "documents": [int(bounds[0]), int(bounds[-1]), len(bounds)],
            "max_length": seq_length - _SPECIALS,
            "num_samples": num_samples,
            "seed": seed,
            "short_probability": settings.short_probability,
            "min_sentences": least,
        }
        order = num_samples, seq_length - _SPECIALS, settings.short_probability, seed, least
        (self.sample_index,), files = cached_arrays(
            cache_dir or f"{prefix}.cache",
            key,
            ["sentences"],
            lambda: [build_sample_index(bounds, data.lengths, *order)],
        )
        self._watch = Watch(files)
        if len(self.sample_index) == 0:
            raise UserError(
                f"{prefix}: no document of split {split!r} has {least} sentences, none of more "
                "than 512 tokens; make the corpus with --split-sentences, or change data.split"
            )

    def _documents(self, split: str | int, fractions: Sequence[float]) -> np.ndarray:
        """The bounds of the split's documents, in sentences."""
        data = self.dataset
        if data.dtype.kind == "f":
            raise UserError(f"{data.idx_path}: holds {data.dtype}, not token ids; {REMEDY}")
        begin, end = split_range(fractions, split, len(data.document_indices) - 1)
        if begin == end:
            raise UserError(
                f"{self.prefix}: split {split!r} {list(fractions)}: no document; change data.split"
            )
        return np.asarray(data.document_indices[begin : end + 1])

    def __len__(self) -> int:
        return len(self.sample_index)

    def __getitem__(self, i: int) -> Batch:
        return {name: array[0] for name, array in self.batch([i]).items()}

    def batch(self, indices: Sequence[int] | np.ndarray) -> Batch:
        """Samples `indices`, stacked: the fields of `[i]`, each [B, S] or [B]."""
        self._watch.check()
        numbers = np.asarray(indices, np.int64)
        first, last, target = self.sample_index[numbers].T.astype(np.int64)
        data = self.dataset
        size = data.offsets[last - 1] + data.lengths[last - 1] - data.offsets[first]
        text = data.gather(data.offsets[first], size).astype(np.int32)
        self._check_ids(text)
        texts = np.split(text, np.cumsum(size)[:-1])

        shape = len(numbers), self.seq_length
        out = {name: np.zeros(shape, np.int32) for name in ("labels", "token_types", "segment_ids")}
        out["tokens"] = np.full(shape, self.settings.pad_token_id, np.int32)
        out["loss_mask"] = np.zeros(shape, np.float32)
        out["positions"] = np.tile(np.arange(self.seq_length, dtype=np.int32), (len(numbers), 1))
        out["row_label"] = np.full(len(numbers), -1, np.int32)
        for row, number in enumerate(numbers.tolist()):
            lengths = data.lengths[first[row] : last[row]]
            rng = np.random.RandomState((self.seed + number) % 2**32)
            sample = self._sample(texts[row], lengths, int(target[row]), rng)
            n = len(sample.tokens)
            out["tokens"][row, :n] = sample.seen
            out["labels"][row, :n] = np.where(sample.hidden, sample.tokens, 0)
            out["loss_mask"][row, :n] = sample.hidden
            out["token_types"][row, :n] = sample.types
            out["segment_ids"][row, :n] = 1
            if self.pairs:
                out["row_label"][row] = sample.is_swapped
        return out

    def _sample(
        self, text: np.ndarray, lengths: np.ndarray, target: int, rng: np.random.RandomState
    ) -> MaskedSample:
        """A sample of these sentences; its draws are made in Megatron's order."""
        pivot, is_swapped = len(lengths), False
        if self.pairs:
            pivot = rng.randint(1, len(lengths)) if len(lengths) >= 3 else 1
            is_swapped = rng.random_sample() < 0.5
        cut = int(lengths[:pivot].sum())
        first, second = text[:cut], text[cut:]
        if is_swapped:
            first, second = second, first
        first, second = _trimmed(first, second, target, rng)
        cls, sep = [self.settings.cls_token_id], [self.settings.sep_token_id]
        parts = [cls, first, sep] + ([second, sep] if len(second) else [])
        tokens = np.concatenate(parts).astype(np.int32)
        types = np.zeros(len(tokens), np.int32)
        types[len(first) + 2 :] = 1
        seen, hidden = self._hide(tokens, target, rng)
        return MaskedSample(seen, tokens, hidden, types, int(is_swapped))

    def _hide(
        self, tokens: np.ndarray, target: int, rng: np.random.RandomState
    ) -> tuple[np.ndarray, np.ndarray]:
        """(tokens with some replaced, 1 where they are to be predicted).

        Words are taken in random order, each with up to `max_ngram` - 1 that follow it, until about
        `probability` of the tokens are hidden.
        """
        settings = self.settings
        special = (tokens == settings.cls_token_id) | (tokens == settings.sep_token_id)
        places = np.flatnonzero(~special)
        begins = (
            ~self.continues[tokens[places]] if settings.whole_words else np.ones(len(places), bool)
        )
        begins[:1] = True
        start = np.flatnonzero(begins)
        stop = np.append(start[1:], len(places)).tolist()
        order = np.arange(len(start))
        rng.shuffle(order)
        start = start.tolist()
        rounded = max(1, int(round(len(tokens) * settings.probability)))
        most = min(settings.probability * target, rounded)

        hidden, count = np.zeros(len(places), bool), 0
        seen = tokens.copy()
        for word in order.tolist():
            if count >= most:
                break
            draw = rng.random_sample()
            longest = 1 + sum(below <= draw for below in self._ngrams)
            begin, end = start[word], None
            for n in range(longest, 0, -1):
                behind = stop[min(word + n, len(stop)) - 1]
                if most >= count + behind - begin:
                    end = behind
                    break
            if end is None or hidden[begin:end].any():
                continue
            hidden[begin:end] = True
            count += end - begin
            for place in places[begin:end].tolist():
                self._replace(seen, place, rng)
        chosen = np.zeros(len(tokens), np.int32)
        chosen[places[hidden]] = 1
        return seen, chosen

    def _replace(self, seen: np.ndarray, place: int, rng: np.random.RandomState) -> None:
        """80 %: by [MASK]; 10 %: by any token; 10 %: it stays."""
        if rng.random_sample() < 0.8:
            seen[place] = self.settings.mask_token_id
        elif rng.random_sample() >= 0.5:
            seen[place] = rng.randint(0, self.vocab_size)

    def _check_ids(self, ids: np.ndarray) -> None:
        if ids.size and (ids.min() < 0 or ids.max() >= self.vocab_size):
            bad = int(ids.min() if ids.min() < 0 else ids.max())
            raise UserError(
                f"{self.dataset.bin_path}: holds token id {bad}, outside the vocabulary of "
                f"{self.vocab_size}: set model.vocab_size to the tokenizer's, or check the data"
            )


def _trimmed(
    first: np.ndarray, second: np.ndarray, target: int, rng: np.random.RandomState
) -> tuple[np.ndarray, np.ndarray]:
    """Both without as many tokens as are too many, each off either end of the longer one."""
    begins, ends = [0, 0], [len(first), len(second)]
    for _ in range(len(first) + len(second) - target):
        longer = 0 if ends[0] - begins[0] > ends[1] - begins[1] else 1
        if rng.random_sample() < 0.5:
            begins[longer] += 1
        else:
            ends[longer] -= 1
    return first[begins[0] : ends[0]], second[begins[1] : ends[1]]
