"""Samples of sentences with hidden spans, for T5: by Megatron-LM's rules, draw for draw.

The sentences of a sample (`masked.py`) become one text, which loses its end beyond the
target length, and spans of whole words are hidden. Invariant: the draws are those of Megatron's
`t5_dataset.py` and `masked_dataset.py` with the settings of its `pretrain_t5.py`: the lengths of
spans are geometric. As there, the end-of-text id follows the labels alone.
"""

from collections.abc import Sequence

import numpy as np

from mjax.data.corpus.gpt import FieldArrays
from mjax.data.sentences.masked import SentenceDataset, SentenceSource
from mjax.errors import UserError
from mjax.objectives.span_fields import Example, cut_spans, packed_fields

_LAST_WORD_RATE = 0.2  # probability that a word is the last one of its span


class SpanDataset(SentenceDataset):
    """Samples of `seq_length` and `target_length` tokens; see the module for how they are made.

    `[i]` gives the fields of `span_fields.packed_fields`, one example a row. The decoder reads
    `start_token` first. `SentenceDataset` says the rest. Reading raises `UserError` on a sample
    with too many spans or labels.
    """

    frame = 2  # ids of a begin and an end, which Megatron leaves room for

    def __init__(self, *args, start_token: int, **options):
        super().__init__(*args, **options)
        self.start_token = start_token

    def batch(self, indices: Sequence[int] | np.ndarray) -> FieldArrays:
        """Samples `indices`, stacked: the fields of `[i]`, each [B, S] or [B, T]."""
        rows = [[self._example(source)] for source in self.sources(indices)]
        return packed_fields(rows, self.settings, self.start_token)

    def _example(self, source: SentenceSource) -> Example:
        most, rng = self.masked.max_ngram or 10, source.rng
        text = source.text[: source.target]

        def draw_words() -> int:
            return min(rng.geometric(_LAST_WORD_RATE), most)

        spans = list(self.hidden_spans(text, source.target, rng, draw_words))
        spans.sort(key=lambda places: places[0])
        read, written = cut_spans(text, spans, self.settings)
        labels, room = np.append(written, self.settings.eod_token_id), self.settings.target_length
        if len(labels) > room:
            raise UserError(
                f"data.target_length={room}, but sample {source.number} of {self.prefix} has "
                f"{len(labels)} labels: raise it, or lower data.masked.probability"
            )
        return read, labels
