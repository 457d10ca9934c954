"""Laws of hidden spans: samples equal to Megatron's rules in plain loops; streams that go back."""

from collections import Counter, deque

import numpy as np
import pytest

from mjax.config import load
from mjax.config.schema.run import DataConfig
from mjax.data.base.tokenizer import train_tokenizer, word_continuations
from mjax.data.corpus.indexed import IndexedDatasetWriter
from mjax.data.loader import build_datasets, make_loader
from mjax.data.sentences.spans import SpanDataset
from mjax.errors import UserError
from mjax.objectives.span_fields import span_fields, stream_length
from tests.batches import stream_hash
from tests.marks import slow
from tests.unit.data.test_masked import corpus, megatron_mapping, write

VOCAB = 700
EOD, START, PAD = 280, 281, 282
IDS = {"sentinel_ids": [300, 699], "pad_token_id": PAD}


def settings(seq_length, target_length, **masked):
    sizes = {"seq_length": seq_length, "target_length": target_length}
    return DataConfig(**sizes, eod_token_id=EOD, masked={**IDS, **masked})


# ---- sentences -----------------------------------------------------------------------------------


def megatron_sample(parts, target, data, seed, continues):
    """t5_dataset.py and masked_dataset.py, token by token; the fields by our names."""
    masked, rng = data.masked, np.random.RandomState(seed % 2**32)
    tokens = [token for part in parts for token in part][:target]
    words = []
    for i, token in enumerate(tokens):
        if token in (masked.cls_token_id, masked.sep_token_id):
            continue
        if continues[token] and masked.whole_words and words:
            words[-1].append(i)
        else:
            words.append([i])
    longest = masked.max_ngram or 10
    grams = [[sum(words[i : i + n + 1], []) for n in range(longest)] for i in range(len(words))]
    rng.shuffle(grams)
    most = min(masked.probability * target, max(1, round(len(tokens) * masked.probability)))
    hidden, spans = set(), []
    for gram in grams:
        if len(hidden) >= most:
            break
        n = min(rng.geometric(0.2), longest)
        while n and len(hidden) + len(gram[n - 1]) > most:
            n -= 1
        if n and not hidden & set(gram[n - 1]):
            hidden |= set(gram[n - 1])
            spans.append(gram[n - 1])

    first, last = masked.sentinel_ids
    sentinels = deque(range(first, last + 1) if first < last else range(first, last - 1, -1))
    encoder, decoder, labels, at = [], [START], [], 0
    for span in sorted(spans):
        sentinel = sentinels.popleft()
        encoder += [*tokens[at : span[0]], sentinel]
        decoder += [sentinel, *(tokens[i] for i in span)]
        labels += [sentinel, *(tokens[i] for i in span)]
        at = span[-1] + 1
    encoder += tokens[at:]
    labels += [data.eod_token_id]
    more = data.seq_length - len(encoder), data.target_length - len(decoder)
    assert min(more) >= 0 and len(labels) == len(decoder)
    return {
        "tokens": encoder + [masked.pad_token_id] * more[0],
        "segment_ids": [1] * len(encoder) + [0] * more[0],
        "positions": list(range(data.seq_length)),
        "decoder_tokens": decoder + [masked.pad_token_id] * more[1],
        "labels": labels + [0] * more[1],
        "loss_mask": [1.0] * len(labels) + [0.0] * more[1],
        "decoder_segment_ids": [1] * len(labels) + [0] * more[1],
    }


@pytest.mark.parametrize(
    "sizes, seed, wanted, more",
    [
        ((64, 40), 1234, 500, {}),
        ((128, 64), 7, None, {"whole_words": False, "max_ngram": 3, "short_probability": 0.5}),
        ((24, 30), 2**32 - 40, 1500, {"probability": 0.5, "cls_token_id": 7, "sep_token_id": 220}),
        ((200, 120), 5, 70, {"probability": 0.3, "sentinel_ids": [399, 300]}),
    ],
)
def test_samples_hold_what_megatrons_hold(tmp_path, sizes, seed, wanted, more):
    bounds, lengths = corpus(3)
    sentences = write(tmp_path / "c", bounds, lengths)
    data, continues = settings(*sizes, **more), np.arange(VOCAB) >= 200
    given = tmp_path / "c", "train", (1, 0, 0), wanted, seed, data, VOCAB
    made = SpanDataset(*given, continues=continues, start_token=START)
    short = data.masked.short_probability
    mapping = megatron_mapping(bounds, lengths, wanted, sizes[0] - 2, short, seed, 1)
    np.testing.assert_array_equal(made.sample_index, mapping)
    numbers = np.random.default_rng(0).permutation(len(made))[:120]
    batch, are_spans = made.batch(numbers), 0
    for row, n in enumerate(numbers.tolist()):
        begin, end, target = mapping[n]
        oracle = megatron_sample(sentences[begin:end], target, data, seed + n, continues)
        assert set(oracle) == set(batch)
        for name, value in oracle.items():
            np.testing.assert_array_equal(batch[name][row], value, err_msg=f"{name} of sample {n}")
        are_spans += sum(label >= 300 for label in oracle["labels"])
    assert are_spans > len(numbers)
    for name, value in made[int(numbers[0])].items():
        np.testing.assert_array_equal(value, batch[name][0])


def test_a_sample_that_does_not_fit_is_said(tmp_path):
    write(tmp_path / "c", np.array([0, 3]), np.array([40, 40, 40], np.int32))

    def batch(target_length, **masked):
        data = settings(64, target_length, probability=0.5, **masked)
        given = tmp_path / "c", "train", (1, 0, 0), 5, 1, data, VOCAB
        return SpanDataset(*given, start_token=START).batch(range(5))

    batch(64)
    with pytest.raises(UserError, match=r"data.target_length=20, but sample 0 of .* labels: raise"):
        batch(20)
    with pytest.raises(UserError, match=r"sentinel_ids=\[300, 301\] are 2 ids, too few for the"):
        batch(64, sentinel_ids=[300, 301])


# ---- streams -------------------------------------------------------------------------------------


def t5_counts(length, density, mean_span):
    """(hidden tokens, spans): T5's random_spans_noise_mask, and at most a span a kept token."""
    if length == 1:
        return 0, 0
    hidden = int(np.clip(np.round(length * density), 1, length - 1))
    return hidden, min(max(int(np.round(hidden / mean_span)), 1), length - hidden)


def sizes_of(length, data):
    """The tokens that an encoder reads of a document, and those that a decoder writes."""
    hidden, spans = t5_counts(length, data.masked.probability, data.masked.mean_span)
    return length - hidden + spans + 1, hidden + spans + 1


def put_back(read, written, sentinels):
    """(the document, its hidden spans as (place, length)); the ends of text are checked."""
    assert read[-1] == written[-1] == EOD
    spans, order = {}, []
    for token in written[:-1].tolist():
        if token in sentinels:
            order.append(token)
            spans[token] = []
        else:
            spans[order[-1]].append(token)
    assert order == list(sentinels)[: len(order)]
    document, places = [], []
    for token in read[:-1].tolist():
        if token in sentinels:
            places.append((len(document), len(spans[token])))
            document += spans.pop(token)
        else:
            document.append(token)
    assert not spans
    return document, places


def examples(fields, row, data):
    """(document, spans) of each example of a row; the form of all its fields is checked."""
    first, last = data.masked.sentinel_ids
    sentinels = range(first, last + 1) if first < last else range(first, last - 1, -1)
    line = {name: value[row] for name, value in fields.items()}
    segments, targets = line["segment_ids"], line["decoder_segment_ids"]
    assert segments.shape == line["tokens"].shape == line["positions"].shape == (data.seq_length,)
    assert targets.shape == line["labels"].shape == (data.target_length,)
    for numbers in (segments, targets):  # 1, 1, 2, .., 0, 0
        held = numbers[numbers > 0]
        assert (numbers[len(held) :] == 0).all() and (np.diff(held, prepend=0) >= 0).all()
        assert sorted(set(held.tolist())) == list(range(1, segments.max() + 1))
    assert (line["tokens"][segments == 0] == PAD).all()
    assert (line["decoder_tokens"][targets == 0] == PAD).all()
    np.testing.assert_array_equal(line["loss_mask"], targets > 0)
    np.testing.assert_array_equal(line["positions"], np.arange(data.seq_length))
    found = []
    for number in range(1, segments.max() + 1):
        labels = line["labels"][targets == number]
        np.testing.assert_array_equal(
            line["decoder_tokens"][targets == number], [START, *labels[:-1]]
        )
        found.append(put_back(line["tokens"][segments == number], labels, sentinels))
    return found


def random_row(rng, length, is_padded):
    """(tokens, segments, documents without their end-of-text ids) of a row of a stream."""
    tokens, segments, documents = [], [], []
    while len(tokens) < length:
        size = int(rng.choice([1, 2, 3, rng.integers(1, length + 1)]))
        text = rng.integers(0, 280, size).tolist()
        documents.append(text[: length - len(tokens)])
        ended = text + [EOD] * int(rng.integers(2))
        segments += [len(documents)] * len(ended)
        tokens += ended
        if rng.random() < 0.1:  # nothing but the end of a text
            tokens, segments = [*tokens, EOD], [*segments, len(documents) + 1]
            documents.append([])
    segments = np.array(segments[:length], np.int32)
    if is_padded:
        segments[rng.integers(0, length) :] = 0
    kept = [np.array(tokens[:length])[segments == n + 1].tolist() for n in range(len(documents))]
    kept = [text[:-1] if text and text[-1] == EOD else text for text in kept]
    return np.array(tokens[:length], np.int32), segments, [text for text in kept if text]


@pytest.mark.parametrize("seed", range(60))
def test_spans_put_back_give_the_documents(seed):
    rng = np.random.default_rng(seed)
    density, mean_span = rng.uniform(0.02, 0.9), rng.uniform(1, 8)
    sizes = rng.integers(8, 150, 2).tolist()
    ids = {"sentinel_ids": [699, 300]} if seed % 2 else {}
    data = settings(*sizes, probability=density, mean_span=mean_span, **ids)
    length = stream_length(*sizes, density, mean_span)
    rows = [random_row(rng, length, is_padded=n % 3 == 0) for n in range(8)]
    tokens, segments, documents = zip(*rows, strict=True)
    fields = span_fields(np.stack(tokens), np.stack(segments), range(8), data, START)
    for row, texts in enumerate(documents):
        made = examples(fields, row, data)
        assert len(made) <= len(texts)
        used = np.zeros(2, int)
        for number, (text, (found, spans)) in enumerate(zip(texts, made, strict=False), 1):
            is_last = number == len(made)
            assert found == text or (is_last and found == text[: len(found)])
            assert (len(spans), sum(n for _, n in spans)) == t5_counts(
                len(found), density, mean_span
            )[::-1]
            ends = [0, *(place + n for place, n in spans)]
            assert all(place > end for (place, _), end in zip(spans, ends, strict=False))
            assert len(found) == ends[-1] or not spans  # kept first, hidden last
            if found != text:
                assert (used + sizes_of(len(found) + 1, data) > sizes).any()
            used += sizes_of(len(found), data)
        assert (used <= sizes).all()
        if len(made) < len(texts):
            cut = made and len(made[-1][0]) < len(texts[len(made) - 1])
            assert cut or (used + sizes_of(1, data) > sizes).any()


def test_a_row_of_one_document_fits_as_a_whole():
    """It is T5's compute_input_and_target_lengths, which gives 568 and 114 for 512 tokens."""
    assert stream_length(512, 114, 0.15, 3.0) == stream_length(512, 1000, 0.15, 3.0) == 568
    assert stream_length(512, 113, 0.15, 3.0) < 568
    rng = np.random.default_rng(0)
    for _ in range(200):
        density, mean_span, sizes = (
            rng.uniform(0.01, 0.95),
            rng.uniform(1, 9),
            rng.integers(1, 90, 2),
        )
        data = settings(8, 8, probability=density, mean_span=mean_span)
        fits = [n for n in range(1, 200) if (sizes_of(n, data) <= sizes).all()]
        assert stream_length(*sizes.tolist(), density, mean_span) == max(fits, default=0)


@pytest.mark.parametrize("density, mean_span", [(0.15, 3.0), (0.5, 5.0), (0.3, 1.0)])
def test_as_much_is_hidden_as_asked(density, mean_span):
    data = settings(512, 512, probability=density, mean_span=mean_span)
    tokens = np.random.default_rng(0).integers(0, 280, (20, 300), np.int32)
    fields = span_fields(tokens, np.ones_like(tokens), range(20), data, START)
    lengths = [n for row in range(20) for _, spans in examples(fields, row, data) for _, n in spans]
    assert sum(lengths) / tokens.size == pytest.approx(density, rel=0.01)
    assert np.mean(lengths) == pytest.approx(mean_span, rel=0.05)
    assert mean_span == 1 or len(set(lengths)) > 5


@slow
def test_all_ways_to_hide_are_equally_likely():
    """Four tokens of eight in two spans: each of 3 x 3 ways."""
    data = settings(16, 16, probability=0.5, mean_span=2)
    tokens = np.tile(np.arange(8, dtype=np.int32), (4500, 1))
    fields = span_fields(tokens, np.ones_like(tokens), range(4500), data, START)
    ways = Counter(tuple(examples(fields, row, data)[0][1]) for row in range(4500))
    assert len(ways) == 9
    assert all(abs(count - 500) < 5 * np.sqrt(500) for count in ways.values())


def test_a_row_depends_on_its_seed_and_itself():
    data = settings(64, 40)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 280, (4, 60), np.int32)
    tokens[1] = tokens[0]
    segments = np.ones_like(tokens)
    seeds = [(5, 2, 0), (5, 2, 1), (5, 2, 2), (5, 2, 0)]
    whole = span_fields(tokens, segments, seeds, data, START)
    alone = span_fields(tokens[2:3], segments[2:3], seeds[2:3], data, START)
    assert all(np.array_equal(alone[name][0], whole[name][2]) for name in whole)
    again = span_fields(tokens[1:2], segments[:1], seeds[:1], data, START)
    assert all(np.array_equal(again[name][0], whole[name][0]) for name in whole)
    assert not np.array_equal(whole["tokens"][0], whole["tokens"][1])  # another seed
    kinds = {name: np.float32 if name == "loss_mask" else np.int32 for name in whole}
    assert {name: field.dtype for name, field in whole.items()} == kinds


# ---- config and loader ---------------------------------------------------------------------------

KEYS = [
    "model.vocab_size=700",
    "data.seq_length=32",
    "data.target_length=20",
    "data.split=[0.8, 0.2, 0.0]",
    f"data.eod_token_id={EOD}",
    "train.objective=span_corruption",
    "model.layer_pattern='B*2, [GXD]*2'",
    f"model.decoder_start_token_id={START}",
]


def config(*more, **masked):
    given = ", ".join(f"{name}: {value}" for name, value in {**IDS, **masked}.items())
    return load(None, [*KEYS, f"data.masked={{{given}}}", *more])


@pytest.mark.parametrize(
    "more, masked, said",
    [
        ([], {"sentinel_ids": "[]"}, r"needs data.masked.sentinel_ids=\[\]; set it"),
        (["model.decoder_start_token_id=null"], {}, "needs model.decoder_start_token_id=None"),
        ([], {"pad_token_id": "null"}, "needs data.masked.pad_token_id=None; set it"),
        (["data.eod_token_id=null"], {}, "'span_corruption' needs data.eod_token_id=None; set it"),
        (["data.target_length=null"], {}, "needs data.target_length=None; set it"),
        (["data.target_length=4"], {}, "data.target_length"),
        (["data.seq_length=4"], {}, "data.seq_length=4 leaves no room for a sample"),
        ([], {"sentinel_ids": [300, 700]}, "outside model.vocab_size=700; change either"),
        ([], {"sentinel_ids": [5, -3]}, "outside model.vocab_size=700; change either"),
        (["model.decoder_start_token_id=700"], {}, "outside model.vocab_size=700; change either"),
        ([], {"sentinel_ids": [1, 2, 3]}, "data.masked.sentinel_ids"),
        ([], {"mean_span": 0.5}, "data.masked.mean_span"),
        (["data.document_mask=false"], {}, "keeps padding and other documents out"),
        (["train.objective=next_token"], {}, "next_token' knows no decoder beside an encoder"),
        (
            ["train.objective=next_token", "model.layer_pattern=G"],
            {},
            "target_length=20 has no effect with",
        ),
    ],
)
def test_what_is_missing_is_said(more, masked, said):
    with pytest.raises(UserError, match=said):
        config("data.mock=true", *more, **masked)
    config("data.mock=true")


def loaded(cfg, first_step=0):
    """Four steps of four rows as a run reads them, and the same of held-out data."""

    def make_fields(batch, step, rows):
        if "decoder_tokens" in batch:
            return {}
        seeds = [(cfg.run.seed, step, row) for row in rows]
        return span_fields(batch["tokens"], batch["segment_ids"], seeds, cfg.data, START)

    def batches(data):
        steps = range(first_step, 4)
        given = data, lambda step: (4 * step, 4), first_step, len(steps)
        return list(make_loader(*given, make_fields=make_fields))

    return [batches(data) for data in build_datasets(cfg, 16, 16)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two corpora of sentences, where each is a sequence, and one of whole documents."""
    path = tmp_path_factory.mktemp("corpora")
    for seed, name in enumerate("ab"):
        write(path / name, *corpus(seed), seed)
    rng = np.random.default_rng(0)
    with IndexedDatasetWriter(path / "c", np.uint16) as writer:
        for size in rng.integers(1, 60, 200):
            writer.add_document([*rng.integers(0, 280, size), EOD])
    return path


@pytest.mark.parametrize("kind", ["stream", "mock", "sentences", "blend"])
def test_a_loader_gives_spans(folder, kind):
    keys, masked = {
        "stream": (f"data.paths=[{folder}/c]", {}),
        "mock": ("data.mock=true", {}),
        "sentences": (f"data.paths=[{folder}/a]", {"sentences": "true", "whole_words": "false"}),
        "blend": (
            f"data.paths=[{folder}/a, {folder}/b]",
            {"sentences": "true", "whole_words": "false"},
        ),
    }[kind]
    cfg = config(keys, **masked)
    parts, again = loaded(cfg), loaded(cfg, first_step=2)
    hashes = [[stream_hash(batch) for batch in part] for part in parts]
    assert len({text for part in hashes for text in part}) == 8
    assert [[stream_hash(batch) for batch in part] for part in again] == [p[2:] for p in hashes]
    for batch in (batch for part in parts for batch in part):
        assert batch["tokens"].shape == (4, 32) and batch["labels"].shape == (4, 20)
        assert set(batch) == {"tokens", "segment_ids", "positions", "labels", "loss_mask"} | {
            "decoder_tokens",
            "decoder_segment_ids",
        }
        if kind == "stream":
            assert all(examples(batch, row, cfg.data) for row in range(4))
        assert (batch["loss_mask"].sum(1) > 0).all()


def test_rows_of_a_stream_are_longer_than_what_is_read_of_them(folder):
    for keys in (f"data.paths=[{folder}/c]", "data.mock=true"):
        train, held_out = build_datasets(config(keys), 4, 4)
        length = stream_length(32, 20, 0.15, 3.0)
        assert (
            train.batch([0])["tokens"].shape == held_out.batch([0])["tokens"].shape == (1, length)
        )
        assert length > 32
        with pytest.raises(UserError, match=r"=\[300, 300\] are 1 ids, too few for the 2 spans"):
            build_datasets(config(keys, sentinel_ids=[300, 300]), 4, 0)


def test_words_are_those_of_the_tokenizer(folder, tmp_path):
    path = tmp_path / "tokenizer.json"
    train_tokenizer(["the small house runs under a large tree"] * 9, 290, path)
    keys = f"data.paths=[{folder}/a]", f"data.tokenizer={path}"
    data, _ = build_datasets(config(*keys, sentences="true"), 4, 0)
    continues = word_continuations(path)
    assert isinstance(data, SpanDataset) and 0 < continues.sum() < len(continues) < VOCAB
    np.testing.assert_array_equal(data.continues[: len(continues)], continues)
