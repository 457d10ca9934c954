"""Masked samples of sentences, for encoders: by Megatron-LM's rules, draw for draw.

`sentence_index.py` says which sentences make up a sample. Here they become one text or two, are cut
to the target length, framed by [CLS] and [SEP], and some of their words are hidden. `spans.py` has
T5's samples, of the same sources. Invariant: sample n is a pure function of (corpus, settings,
seed, n): its draws come from RandomState(seed + n), in the order of Megatron's `bert_dataset.py`
and `masked_dataset.py`.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from mjax.config.schema.model import BertConfig
from mjax.config.schema.run import DataConfig
from mjax.data.base.cache import cached_arrays
from mjax.data.base.tokenizer import BERT_PAIR, ROBERTA_PAIR, PairFrame, Tokenizer
from mjax.data.corpus.gpt import FieldArrays, split_range
from mjax.data.corpus.indexed import REBUILD, IndexedDataset, Watch
from mjax.data.sentences.sentence_index import build_sample_index
from mjax.errors import UserError


class SentenceSource(NamedTuple):
    """A sample's sentences before anything is hidden, and where its draws come from.

    number: of the sample. text: int32, the tokens of its sentences. lengths: of each sentence.
    target: tokens that the sample is cut to.
    """

    number: int
    text: np.ndarray
    lengths: np.ndarray
    target: int
    rng: np.random.RandomState


class SentenceDataset:
    """Samples of up to `data.seq_length` tokens, from documents of a sentence, with `pairs` of two.

    A subclass gives `batch(indices)`; `[i]` is one sample of it. `continues` bool [V] tells which
    tokens continue a word (`tokenizer.word_continuations`); None: each token is a word. Raises
    `UserError` on a corpus or split that cannot be used.
    """

    max_documents, padded = 2, True  # the text, and padding
    frame: int  # tokens that a sample has room for beside its text

    def __init__(
        self,
        prefix: str | os.PathLike,
        split: str | int,
        split_fractions: Sequence[float],
        num_samples: int | None,
        seed: int,
        settings: DataConfig,
        vocab_size: int,
        *,
        pairs: bool = False,
        continues: np.ndarray | None = None,
    ):
        self.prefix, self.seed, self.vocab_size = str(prefix), seed, vocab_size
        self.settings, self.masked, self.pairs = settings, settings.masked, pairs
        self.continues = np.zeros(vocab_size, bool)
        if continues is not None:
            known = continues[:vocab_size]
            self.continues[: len(known)] = known
        self.dataset = data = IndexedDataset(prefix)
        bounds = self._documents(split, split_fractions)
        stat = data.idx_path.stat()
        least, longest = 2 if pairs else 1, settings.seq_length - self.frame
        key = {
            "index": [os.path.abspath(data.idx_path), stat.st_size, stat.st_mtime_ns],
            "documents": [int(bounds[0]), int(bounds[-1]), len(bounds)],
            "max_length": longest,
            "num_samples": num_samples,
            "seed": seed,
            "short_probability": self.masked.short_probability,
            "min_sentences": least,
        }
        order = num_samples, longest, self.masked.short_probability, seed, least
        (self.sample_index,), files = cached_arrays(
            settings.cache_dir or f"{prefix}.cache",
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
            raise UserError(f"{data.idx_path}: holds {data.dtype}, not token ids; {REBUILD}")
        begin, end = split_range(fractions, split, len(data.document_indices) - 1)
        if begin == end:
            raise UserError(
                f"{self.prefix}: split {split!r} {list(fractions)}: no document; change data.split"
            )
        return np.asarray(data.document_indices[begin : end + 1])

    def __len__(self) -> int:
        return len(self.sample_index)

    def __getitem__(self, i: int) -> FieldArrays:
        return {name: array[0] for name, array in self.batch([i]).items()}

    def names(self, indices: Sequence[int] | np.ndarray) -> list[str]:
        """The corpus and the sequences in its index that samples `indices` are made of."""
        bounds = self.sample_index[np.asarray(indices, np.int64), :2].tolist()
        return [f"{self.prefix} ({first} to {last - 1})" for first, last in bounds]

    def sources(self, indices: Sequence[int] | np.ndarray) -> Iterator[SentenceSource]:
        """Yield the sentences and draws of samples `indices`; one call reads all their text."""
        data = self.dataset
        with self._watch.holds():
            numbers = np.asarray(indices, np.int64)
            first, last, target = self.sample_index[numbers].T.astype(np.int64)
            begin = data.offsets[first]
            end = data.offsets[last - 1] + data.lengths[last - 1]
            sizes = end - begin
            text = data.gather(begin, sizes).astype(np.int32)
            data.require_ids(text, self.vocab_size)
        borders = np.cumsum(sizes)[:-1]
        texts = np.split(text, borders)
        for row, number in enumerate(numbers.tolist()):
            lengths = data.lengths[first[row] : last[row]]
            rng = np.random.RandomState((self.seed + number) % 2**32)
            yield SentenceSource(number, texts[row], lengths, int(target[row]), rng)

    def hidden_spans(
        self, tokens: np.ndarray, target: int, rng: np.random.RandomState, draw: Callable[[], int]
    ) -> Iterator[np.ndarray]:
        """Yield the places in `tokens` of words to be hidden at once, in the order of the draws.

        Words are taken in random order, each with up to `draw()` - 1 that follow it, until about
        `probability` of the tokens are hidden.
        """
        # An id that is not given is None, which no token equals.
        special = (tokens == self.masked.cls_token_id) | (tokens == self.masked.sep_token_id)
        places = np.flatnonzero(~special)
        words = self.masked.whole_words
        begins = ~self.continues[tokens[places]] if words else np.ones(len(places), bool)
        begins[:1] = True
        start = np.flatnonzero(begins)
        stop = np.append(start[1:], len(places)).tolist()
        order = np.arange(len(start))
        rng.shuffle(order)
        start = start.tolist()
        rounded = max(1, int(round(len(tokens) * self.masked.probability)))
        most = min(self.masked.probability * target, rounded)

        hidden, count = np.zeros(len(places), bool), 0
        for word in order.tolist():
            if count >= most:
                break
            begin, end = start[word], None
            for n in range(draw(), 0, -1):
                behind = stop[min(word + n, len(stop)) - 1]
                if most >= count + behind - begin:
                    end = behind
                    break
            if end is None or hidden[begin:end].any():
                continue
            hidden[begin:end] = True
            count += end - begin
            yield places[begin:end]


def padded_rows(count: int, length: int, pad: int) -> FieldArrays:
    """The fields of rows that hold no token yet: [count, length], and `row_label` [count]."""
    fields = {name: np.zeros((count, length), np.int32) for name in ("token_types", "segment_ids")}
    fields["tokens"] = np.full((count, length), pad, np.int32)
    fields["positions"] = np.tile(np.arange(length, dtype=np.int32), (count, 1))
    return fields | {"row_label": np.full(count, -1, np.int32)}


def fill_row(
    fields: FieldArrays, row: int, values: Mapping[str, Sequence[int] | np.ndarray]
) -> None:
    """Write what a row holds before its padding, [n] a field, into fields of `padded_rows`."""
    for name, array in values.items():
        fields[name][row, : len(array)] = array


def frame_of_pairs(tokenizer: Tokenizer | None, bert: BertConfig) -> PairFrame:
    """The frame of pairs of texts for a model: its tokenizer's.

    If the tokenizer has none, positions that begin after padding tell that it is RoBERTa's. A
    table without a second type has one type for all.
    """
    frame = None if tokenizer is None else tokenizer.pair
    if frame is None:
        frame = ROBERTA_PAIR if bert.position_offset else BERT_PAIR
    return frame._replace(second_type=0) if bert.type_vocab_size == 1 else frame


class MaskedDataset(SentenceDataset):
    """Samples of `seq_length` tokens, padding included; see the module for how they are made.

    `[i]` gives `tokens`, `labels`, `token_types`, `segment_ids` (1, and 0 for padding), `positions`
    (int32 [S]), `loss_mask` (float32 [S]) and `row_label` (int32 []): 1 where the two texts were
    exchanged, 0 where not, -1 without `pairs`. `batch(indices)` gives the same stacked.
    `SentenceDataset` says the rest.
    """

    def __init__(self, *given, pairs: bool = False, framed: PairFrame = BERT_PAIR, **more):
        self.framed = framed
        self.frame = 2 + (framed.separators if pairs else 1)  # [CLS] and [SEP]
        super().__init__(*given, pairs=pairs, **more)

    def batch(self, indices: Sequence[int] | np.ndarray) -> FieldArrays:
        """Samples `indices`, stacked: the fields of `[i]`, each [B, S] or [B]."""
        shape = len(indices), self.settings.seq_length
        out = padded_rows(*shape, self.masked.pad_token_id)
        out["labels"], out["loss_mask"] = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
        for row, source in enumerate(self.sources(indices)):
            fields, is_swapped = self._sample(source)
            fill_row(out, row, fields)
            if self.pairs:
                out["row_label"][row] = is_swapped
        return out

    def _sample(self, source: SentenceSource) -> tuple[FieldArrays, bool]:
        """(the fields of a sample without its padding, whether its second text came first).

        Its draws are made in Megatron's order.
        """
        _, text, lengths, target, rng = source
        pivot, is_swapped = len(lengths), False
        if self.pairs:
            pivot = rng.randint(1, len(lengths)) if len(lengths) >= 3 else 1
            is_swapped = rng.random_sample() < 0.5
        cut = int(lengths[:pivot].sum())
        first, second = text[:cut], text[cut:]
        if is_swapped:
            first, second = second, first
        first, second = _trimmed(first, second, target, rng)
        cls, sep = [self.masked.cls_token_id], [self.masked.sep_token_id]
        parts = [cls, first, sep]
        if len(second):
            parts = [cls, first, sep * self.framed.separators, second, sep]
        tokens = np.concatenate(parts).astype(np.int32)
        is_second = np.arange(len(tokens)) > len(first) + self.framed.separators
        types = is_second * self.framed.second_type
        seen, hidden = self._hide(tokens, target, rng)
        fields = {
            "tokens": seen,
            "labels": np.where(hidden, tokens, 0),
            "loss_mask": hidden,
            "token_types": types,
            "segment_ids": np.ones_like(tokens),
        }
        return fields, is_swapped

    def _hide(
        self, tokens: np.ndarray, target: int, rng: np.random.RandomState
    ) -> tuple[np.ndarray, np.ndarray]:
        """(tokens with some replaced, 1 where they are to be predicted)."""

        def draw_words() -> int:
            draw = rng.random_sample()
            return 1 + sum(below <= draw for below in self._ngrams)

        seen, chosen = tokens.copy(), np.zeros(len(tokens), np.int32)
        for places in self.hidden_spans(tokens, target, rng, draw_words):
            chosen[places] = 1
            for place in places.tolist():
                self._replace(seen, place, rng)
        return seen, chosen

    @cached_property
    def _ngrams(self) -> list[float]:
        """The probability of at most 1, 2, .. words at once."""
        chances = 1 / np.arange(1, (self.masked.max_ngram or 3) + 1)
        below = np.cumsum(chances / chances.sum())
        return (below / below[-1]).tolist()

    def _replace(self, seen: np.ndarray, place: int, rng: np.random.RandomState) -> None:
        """80 %: by [MASK]; 10 %: by any token; 10 %: it stays."""
        if rng.random_sample() < 0.8:
            seen[place] = self.masked.mask_token_id
        elif rng.random_sample() >= 0.5:
            seen[place] = rng.randint(0, self.vocab_size)


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
