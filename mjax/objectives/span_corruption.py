"""Span corruption, the objective of T5 (Raffel et al. 2020, arXiv 1910.10683).

Spans of a text are hidden, each behind a sentinel. The encoder reads the text, and the decoder
gives the hidden spans, each after its sentinel. A data set of sentences (`data/sentences/spans.py`)
has all fields; on a stream of tokens `make_fields` hides spans anew at each step.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from mjax.config.languages.layer_pattern import ENCODER
from mjax.models.architectures import EncoderDecoder
from mjax.models.base.context import Context, Tokens, tokens_of
from mjax.models.base.streams import Streams
from mjax.objectives.fields import FURTHER_COLUMNS, Batch, BatchField, HostBatch
from mjax.objectives.next_token import NextToken
from mjax.objectives.objective import SPANS, OfConfig
from mjax.objectives.span_fields import span_fields

_OF_TARGET = ("batch", "target")


@dataclass(frozen=True)
class CorruptedSpans(OfConfig, NextToken):
    """The cross-entropy of the decoder's next token in nats, a mean over unmasked tokens."""

    fields: ClassVar[Mapping[str, BatchField]] = {
        "tokens": BatchField(np.int32),
        "decoder_tokens": BatchField(np.int32, _OF_TARGET),
        "decoder_segment_ids": BatchField(np.int32, _OF_TARGET),
        "labels": BatchField(np.int32, _OF_TARGET),
        "loss_mask": BatchField(np.float32, _OF_TARGET),
    }
    dataset: ClassVar[str] = SPANS
    pads_rows: ClassVar[bool] = True

    def tokens(self, batch: Batch, base: Tokens, ctx: Context) -> Tokens:
        """Facts about the decoder's tokens, with `base` as those about the encoder's."""
        segments = batch["decoder_segment_ids"]
        target = tokens_of(
            segments.shape,
            segments=None if base.segments is None else segments,
            rows=base.rows,
            columns=batch[FURTHER_COLUMNS["target"]],
            key=base.key,
        )
        return replace(target, others={ENCODER: base})

    def embed(self, edges: EncoderDecoder, batch: Batch, tokens: Tokens, ctx: Context) -> Streams:
        return edges.embed_streams(batch["tokens"], batch["decoder_tokens"], tokens, ctx)

    def make_fields(self, batch: HostBatch, seed: int, step: int, rows: np.ndarray) -> HostBatch:
        """Rows of a stream with spans cut out of them; nothing where the data set has done it."""
        if "decoder_tokens" in batch:
            return {}
        seeds = [(seed, step, row) for row in rows]
        start = self.cfg.model.decoder_start_token_id
        return span_fields(batch["tokens"], batch["segment_ids"], seeds, self.cfg.data, start)
