"""Span corruption: the fields of a batch for an encoder and a decoder, in numpy.

T5 (Raffel et al., arXiv 1910.10683) hides spans of a text. The encoder reads the text with a
sentinel in the place of each span. The decoder writes each sentinel and the tokens it stands for.
Both end with the end-of-text id. Each document of a row is an example of its own, as in T5's packed
rows: it is corrupted by itself, so no span crosses its bounds, and its sentinels start anew.
Invariant: putting the spans back into the places of their sentinels gives the document. The rule of
spans is that of T5's `random_spans_noise_mask`.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence

import numpy as np

from mjax.config.schema.run import DataConfig
from mjax.errors import UserError

# A document as the encoder reads it, and as the decoder writes it: int arrays.
Example = tuple[np.ndarray, np.ndarray]


def stream_length(
    seq_length: int,
    target_length: int,
    probability: float,
    mean_span: float,
    most: int | None = None,
) -> int:
    """The tokens of the longest document, `most` at most, that two rooms suffice for; 0: of none.

    Its ends of text and sentinels take their part of `seq_length` and `target_length`.
    """

    def is_too_long(tokens: int) -> bool:
        hidden, spans = span_counts(tokens, probability, mean_span)
        read, written = tokens - hidden + spans + 1, hidden + spans + 1
        return read > seq_length or written > target_length

    most = seq_length + target_length if most is None else most
    return bisect_right(range(1, most + 1), False, key=is_too_long)


def span_counts(length: int, probability: float, mean_span: float) -> tuple[int, int]:
    """(the tokens, the spans) that are hidden of a document of `length` tokens.

    Both are rounded. A document of two tokens or more has at least one of each, and is not hidden
    as a whole. T5 hides nothing of a single token.
    """
    if length < 2:
        return 0, 0
    hidden = min(max(round(length * probability), 1), length - 1)
    spans = max(round(hidden / mean_span), 1)
    return hidden, min(spans, length - hidden)


def span_fields(
    tokens: np.ndarray, segment_ids: np.ndarray, seeds: Sequence, data: DataConfig, start: int
) -> dict[str, np.ndarray]:
    """The fields of `packed_fields`, from rows of a stream, int32 [B, R] each.

    Segment 0 is padding. A row's fields are a function of the row and of its entry of `seeds`, as
    `np.random.default_rng` takes it. A row that does not fit loses its last tokens. A document's
    own end-of-text id is not doubled.
    """
    rows = []
    for line, segments, seed in zip(tokens, segment_ids, seeds, strict=True):
        rows.append(_examples(line, segments, seed, data))
    return packed_fields(rows, data, start)


def _examples(
    tokens: np.ndarray, segment_ids: np.ndarray, seed: object, data: DataConfig
) -> list[Example]:
    """The examples of a row that fit, in the order of its documents."""
    rng = np.random.default_rng(seed)
    sizes = data.masked.probability, data.masked.mean_span
    encoder_room, decoder_room = data.seq_length, data.target_length
    borders = np.flatnonzero(np.diff(segment_ids)) + 1
    documents = np.split(tokens, borders)
    numbers = segment_ids[np.append(0, borders)]
    made = []
    for text, number in zip(documents, numbers, strict=True):
        whole = len(text) - int(text[-1] == data.eod_token_id)
        length = stream_length(encoder_room, decoder_room, *sizes, most=whole)
        if number == 0 or length == 0:
            continue
        spans = _random_spans(length, *sizes, rng)
        parts = cut_spans(text[:length], spans, data)
        read, written = (np.append(part, data.eod_token_id) for part in parts)
        encoder_room -= len(read)
        decoder_room -= len(written)
        made.append((read, written))
        if length < whole:
            break
    return made


def _random_spans(
    length: int, probability: float, mean_span: float, rng: np.random.Generator
) -> list[np.ndarray]:
    """The places of each hidden span: kept and hidden spans take turns, a kept one first."""
    hidden, spans = span_counts(length, probability, mean_span)
    hidden_sizes = _random_parts(hidden, spans, rng)
    kept_sizes = _random_parts(length - hidden, spans, rng)
    ends = np.cumsum(hidden_sizes + kept_sizes)
    begins = ends - hidden_sizes
    return [np.arange(begin, end) for begin, end in zip(begins, ends, strict=True)]


def _random_parts(total: int, parts: int, rng: np.random.Generator) -> np.ndarray:
    """Sizes of `parts` parts of `total`, none of them empty; all such ways are equally likely."""
    if parts == 0:
        return np.zeros(0, np.int64)
    cuts = np.sort(rng.permutation(total - 1)[: parts - 1]) + 1
    return np.diff(cuts, prepend=0, append=total)


def sentinels_of(data: DataConfig, spans: int) -> np.ndarray:
    """The sentinels of as many spans, int [spans]. Raises `UserError` where they are too few."""
    first, last = data.masked.sentinel_ids
    step = 1 if first <= last else -1
    sentinels = np.arange(first, last + step, step)
    if spans > len(sentinels):
        raise UserError(
            f"data.masked.sentinel_ids=[{first}, {last}] are {len(sentinels)} ids, too few for the "
            f"{spans} spans of a sample: give more, or lower data.masked.probability"
        )
    return sentinels[:spans]


def cut_spans(tokens: np.ndarray, spans: Sequence[np.ndarray], data: DataConfig) -> Example:
    """A document without its end-of-text ids.

    `spans` are the places of the tokens of each span, in ascending order. Tokens between the
    places of a span are lost.
    """
    read = []
    written = [tokens[:0]]
    behind = 0
    sentinels = sentinels_of(data, len(spans))
    for places, sentinel in zip(spans, sentinels, strict=True):
        before = tokens[behind : places[0]]
        read += [before, [sentinel]]
        written += [[sentinel], tokens[places]]
        behind = places[-1] + 1
    read.append(tokens[behind:])
    return np.concatenate(read), np.concatenate(written)


def packed_fields(
    rows: Sequence[Iterable[Example]], data: DataConfig, start: int
) -> dict[str, np.ndarray]:
    """The fields of rows with some examples each, behind each other; they must fit.

    int32 [B, S]: `tokens`, `segment_ids` (examples from 1, padding 0) and `positions`.
    int32 [B, T]: `labels`, `decoder_segment_ids`, and `decoder_tokens`, the labels of each example
    shifted right behind the token `start`. fp32 [B, T]: `loss_mask`, 0 for padding.
    """
    encoder, decoder = (len(rows), data.seq_length), (len(rows), data.target_length)
    padding = data.masked.pad_token_id
    columns = np.arange(data.seq_length, dtype=np.int32)
    fields = {
        "tokens": np.full(encoder, padding, np.int32),
        "segment_ids": np.zeros(encoder, np.int32),
        "positions": np.tile(columns, (len(rows), 1)),
        "decoder_tokens": np.full(decoder, padding, np.int32),
        "labels": np.zeros(decoder, np.int32),
        "loss_mask": np.zeros(decoder, np.float32),
        "decoder_segment_ids": np.zeros(decoder, np.int32),
    }
    for row, examples in enumerate(rows):
        encoded = decoded = 0
        for number, (read, written) in enumerate(examples, 1):
            here = row, slice(encoded, encoded + len(read))
            fields["tokens"][here] = read
            fields["segment_ids"][here] = number
            there = row, slice(decoded, decoded + len(written))
            fields["labels"][there] = written
            fields["decoder_tokens"][there] = np.append(start, written[:-1])
            fields["loss_mask"][there] = 1
            fields["decoder_segment_ids"][there] = number
            encoded += len(read)
            decoded += len(written)
    return fields
