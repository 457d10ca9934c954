"""Laws of the sample order: equal to Megatron's algorithm written as plain loops."""

import math
import multiprocessing
import os

import numpy as np
import pytest

from mjax.data import GPTDataset, IndexedDatasetWriter
from mjax.data.corpus.gpt import split_range, split_tokens
from mjax.data.corpus.indexed import Watch
from mjax.errors import UserError

ALL = (1, 0, 0)
VOCAB = 1000


def corpus(prefix, seed=0, n=40, top=30, empty=True):
    """Documents of 0..top tokens; the ids count up, so that a token tells where it came from."""
    lengths = np.random.default_rng(seed).integers(0 if empty else 1, top, size=n)
    ends = np.cumsum(lengths)
    documents = [list(range(e - k, e)) for e, k in zip(ends, lengths, strict=True)]
    with IndexedDatasetWriter(prefix, np.int32) as writer:
        for document in documents:
            writer.add_document(document)
    return documents


def megatron_indices(lengths, sequences, s, num_samples, seed):
    """gpt_dataset.py and helpers.cpp, step by step."""
    per_epoch = sum(lengths[d] for d in sequences)
    epochs, tokens = 1, per_epoch
    while num_samples is not None and tokens < num_samples * s + 1:
        epochs, tokens = epochs + 1, tokens + per_epoch
    separate, before_last = False, None
    if epochs > 1:
        before_last = ((epochs - 1) * per_epoch - 1) // s
        from_last = num_samples - before_last
        separate = from_last < int(0.80 * ((per_epoch - 1) // s))
    rng = np.random.RandomState(seed)
    if separate:
        a = np.array(list(sequences) * (epochs - 1), np.int32)
        rng.shuffle(a)
        b = np.array(list(sequences), np.int32)
        rng.shuffle(b)
        document = np.concatenate([a, b])
    else:
        document = np.array(list(sequences) * epochs, np.int32)
        rng.shuffle(document)
    n = (epochs * per_epoch - 1) // s
    sample, at, offset = [[0, 0]], 0, 0
    for _ in range(n):
        remaining = s + 1
        while remaining != 0:
            length = lengths[document[at]] - offset
            remaining -= length
            if remaining <= 0:
                offset += remaining + length - 1
                remaining = 0
            else:
                at, offset = at + 1, 0
        sample.append([at, offset])
    shuffle = np.arange(before_last if separate else n, dtype=np.uint32)
    rng.shuffle(shuffle)
    if separate:
        last = np.arange(before_last, n, dtype=np.uint32)
        rng.shuffle(last)
        shuffle = np.concatenate([shuffle, last])
    return separate, document, np.array(sample), shuffle


@pytest.mark.parametrize("seed, top, s", [(0, 30, 9), (1, 30, 7), (0, 3, 3), (2, 2, 2), (3, 2, 1)])
def test_order_is_megatrons_for_every_number_of_samples(tmp_path, seed, top, s):
    documents = corpus(tmp_path / "c", seed, top=top)  # with a small top many are empty
    lengths = [len(d) for d in documents]
    seen = set()
    for num_samples in [None, 1, 5, *range(30, 190, 7)]:
        begin, end = split_range((8, 2, 0), "train", len(documents))
        separate, *expected = megatron_indices(lengths, range(begin, end), s, num_samples, seed)
        seen.add(separate)
        data = GPTDataset(tmp_path / "c", "train", (8, 2, 0), s, num_samples, seed)
        got = (data.document_index, data.sample_index, data.shuffle_index)
        for ours, theirs in zip(got, expected, strict=True):
            np.testing.assert_array_equal(ours, theirs)
        assert [a.dtype for a in got] == [np.int32, np.int32, np.uint32]
        assert len(data) >= (num_samples or 1)
    assert seen == {True, False}  # both sides of the 80 % rule were met


def test_last_epoch_is_kept_apart_below_80_percent(tmp_path):
    with IndexedDatasetWriter(tmp_path / "c", np.uint16) as writer:
        for i in range(101):
            writer.add_document([i])  # 10 samples of 10 in an epoch

    def first(n):
        return GPTDataset(tmp_path / "c", 0, ALL, 10, n, 0)

    apart, together = first(17), first(18)  # 7 and 8 samples from the second epoch
    assert sorted(apart.document_index[:101]) == list(range(101))
    assert apart.shuffle_index[:10].max() == 9
    assert sorted(together.document_index[:101]) != list(range(101))
    assert together.shuffle_index[:10].max() > 9


def test_the_last_label_needs_a_token_too(tmp_path):
    with IndexedDatasetWriter(tmp_path / "c", np.uint16) as writer:
        writer.add_document(range(20))
    counts = [len(GPTDataset(tmp_path / "c", 0, ALL, 5, n, 0)) for n in (None, 3, 4)]
    assert counts == [3, 3, 7]  # 4 * 5 + 1 tokens take a second epoch


def plain_sample(documents, data, i, s):
    """Sample i out of the indices, token by token: (text, segment of each token)."""
    k = int(data.shuffle_index[i])
    at, offset = map(int, data.sample_index[k])
    text, owner = [], []
    while len(text) <= s:
        document = documents[data.document_index[at]]
        text += document[offset:]
        owner += [at] * len(document[offset:])
        at, offset = at + 1, 0
    rank = {d: n for n, d in enumerate(dict.fromkeys(owner), 1)}
    return text[: s + 1], [rank[d] for d in owner[:s]]


@pytest.mark.parametrize("s", [1, 4, 50])
def test_samples_segments_and_positions_equal_plain_loops(tmp_path, s):
    documents = corpus(tmp_path / "c", top=12)
    options = dict(document_mask=True, reset_position_ids=True, vocab_size=VOCAB)
    data = GPTDataset(tmp_path / "c", "train", ALL, s, None, 3, **options)
    batch = data.batch(np.arange(len(data)))
    most = 0
    for i in range(len(data)):
        text, segments = plain_sample(documents, data, i, s)
        one = data[i]
        assert one["tokens"].tolist() == text[:-1] and one["labels"].tolist() == text[1:]
        assert one["segment_ids"].tolist() == segments
        assert one["positions"].tolist() == [j - segments.index(g) for j, g in enumerate(segments)]
        assert one["loss_mask"].tolist() == [1.0] * s
        most = max(most, segments[-1])
        for name, array in one.items():
            assert array.shape == (s,)
            assert array.dtype == (np.float32 if name == "loss_mask" else np.int32)
            np.testing.assert_array_equal(array, batch[name][i])
    assert data.max_documents == most


def test_an_epoch_shows_every_token_once(tmp_path):
    documents = corpus(tmp_path / "c", seed=5)
    data = GPTDataset(tmp_path / "c", "train", ALL, 6, None, 0)
    tokens = data.batch(range(len(data)))["tokens"].reshape(-1)
    total = sum(map(len, documents))
    assert len(set(tokens.tolist())) == len(tokens) == (total - 1) // 6 * 6


def test_options(tmp_path):
    corpus(tmp_path / "c", empty=False)
    plain = GPTDataset(tmp_path / "c", "train", ALL, 8, None, 0, document_mask=False)
    assert plain.max_documents == 1 and (plain[2]["segment_ids"] == 1).all()
    assert plain[2]["positions"].tolist() == list(range(8))
    eod = int(plain[2]["tokens"][3])
    options = dict(eod_token_id=eod, eod_mask_loss=True)
    masked = GPTDataset(tmp_path / "c", "train", ALL, 8, None, 0, **options)
    assert masked[2]["loss_mask"].tolist() == [1, 1, 1, 0, 1, 1, 1, 1]


def test_splits_partition_as_megatron_rounds(tmp_path):
    documents = corpus(tmp_path / "c", empty=False)
    shares = [0.969, 0.03, 0.001]
    for n in (1, 7, 40, 999, 10**9):
        total = math.fsum(shares)
        a, b = round(shares[0] / total * n), round((shares[0] / total + shares[1] / total) * n)
        assert [split_range(shares, k, n) for k in range(3)] == [(0, a), (a, b), (b, n)]
    parts = [split_tokens(tmp_path / "c", k, (6, 3, 1)) for k in ("train", "valid", "test")]
    assert np.concatenate(parts).tolist() == sum(documents, [])
    valid = GPTDataset(tmp_path / "c", 1, (6, 3, 1), 5, None, 0)
    assert set(valid.batch(range(len(valid)))["tokens"].reshape(-1)) <= set(parts[1].tolist())


def open_it(prefix, out):
    data = GPTDataset(prefix, "train", ALL, 7, 90, 1)
    out.put(data.batch(range(90))["tokens"].tobytes())


def test_processes_that_start_at_once_agree_and_leave_one_entry(tmp_path):
    corpus(tmp_path / "c")
    context = multiprocessing.get_context("spawn")
    out = context.Queue()
    workers = [context.Process(target=open_it, args=(tmp_path / "c", out)) for _ in range(2)]
    for worker in workers:
        worker.start()
    results = [out.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join()
    assert results[0] == results[1]
    entries = list((tmp_path / "c.cache").iterdir())
    assert len(entries) == 1 and len(list(entries[0].iterdir())) == 4


def test_cache_is_read_back_and_follows_the_corpus(tmp_path):
    corpus(tmp_path / "c", seed=1)

    def make():
        return GPTDataset(tmp_path / "c", "train", ALL, 7, None, 1, cache_dir=tmp_path / "k")

    first = make().shuffle_index.tolist()
    assert make().shuffle_index.tolist() == first and len(list((tmp_path / "k").iterdir())) == 1
    corpus(tmp_path / "c", seed=2, n=60)
    assert len(make()) != len(first) and len(list((tmp_path / "k").iterdir())) == 2
    for entry in (tmp_path / "k").iterdir():
        (entry / "sample.npy").write_bytes(b"")
    with pytest.raises(UserError, match="delete this folder"):
        make()


def test_bad_corpora_and_options_are_one_line(tmp_path):
    documents = corpus(tmp_path / "c")
    with IndexedDatasetWriter(tmp_path / "empty", np.uint16):
        pass
    with IndexedDatasetWriter(tmp_path / "float", np.float32) as writer:
        writer.add_document([0.5] * 30)
    (tmp_path / "file").write_text("")
    top = sum(map(len, documents))
    cases = [
        ("no such file", ("missing", "train", ALL, 4, None, 0), {}),
        ("empty", ("empty", "train", ALL, 4, None, 0), {}),
        ("not token ids", ("float", "train", ALL, 4, None, 0), {}),
        ("split 'test' .* 0 documents", ("c", "test", (1, 1, 0), 4, None, 0), {}),
        ("one sample takes 100001", ("c", "train", ALL, 100_000, None, 0), {}),
        ("three shares", ("c", "train", (0, 0, 0), 4, None, 0), {}),
        ("three shares", ("c", "train", (1, -1, 1), 4, None, 0), {}),
        ("one of train", ("c", "dev", ALL, 4, None, 0), {}),
        ("run.seed", ("c", "train", ALL, 4, None, 2**32), {}),
        ("needs data.eod_token_id", ("c", "train", ALL, 4, None, 0), {"eod_mask_loss": True}),
        ("data.cache_dir", ("c", "train", ALL, 4, None, 0), {"cache_dir": tmp_path / "file"}),
        (f"c.bin.* {top - 1}, .*vocab_size", ("c", 0, ALL, 4, None, 0), {"vocab_size": top - 1}),
    ]
    for message, (name, *rest), options in cases:
        with pytest.raises(UserError, match=message) as e:
            GPTDataset(tmp_path / name, *rest, **options)
        assert "\n" not in str(e.value)
    GPTDataset(tmp_path / "c", 0, ALL, 4, None, 0, vocab_size=top)


def test_a_bad_id_past_the_opening_check_is_found_in_its_batch(tmp_path, monkeypatch):
    monkeypatch.setattr("mjax.data.corpus.gpt.OPENING_CHECK", 2)
    with IndexedDatasetWriter(tmp_path / "c", np.int32) as writer:
        writer.add_document([0, 1, 2, 3, -1, 9])
    for vocab_size, bad in ((9, 9), (10, -1)):
        data = GPTDataset(tmp_path / "c", "train", ALL, 5, None, 0, vocab_size=vocab_size)
        with pytest.raises(UserError, match=f"token id {bad},"):
            data.batch([0])


@pytest.mark.parametrize("name", ["corpus.bin", "sample.npy"])
def test_a_file_that_is_cut_while_it_is_read_is_named(tmp_path, name):
    with IndexedDatasetWriter(tmp_path / "corpus", np.uint16) as writer:
        writer.add_document(np.arange(5000))
    data = GPTDataset(tmp_path / "corpus", "train", [1, 0, 0], 16, None, 1)
    assert data.batch([0, 1])["tokens"].shape == (2, 16)
    (file,) = tmp_path.rglob(name)
    os.truncate(file, 20)
    with pytest.raises(
        UserError, match=rf"{name}: changed while it was in use, from \d+ bytes to 20"
    ):
        data.batch([0, 1])


@pytest.mark.parametrize("name", ["corpus.bin", "shuffle.npy"])
def test_a_file_that_changes_after_it_was_checked_is_named(tmp_path, monkeypatch, name):
    with IndexedDatasetWriter(tmp_path / "corpus", np.uint16) as writer:
        writer.add_document(np.arange(5000))
    data = GPTDataset(tmp_path / "corpus", "train", [1, 0, 0], 16, None, 1)
    (file,) = tmp_path.rglob(name)
    check, size = Watch.check, file.stat().st_size

    def check_then_change(self):
        check(self)
        if name == "corpus.bin" and self is data.dataset._watch:
            os.truncate(file, 20)
        elif name == "shuffle.npy":  # numbers of samples that there are not
            with open(file, "r+b") as opened:
                opened.seek(128)
                opened.write(b"\x7f" * (size - 128))
            os.utime(file, (1, 1))

    monkeypatch.setattr(Watch, "check", check_then_change)
    with pytest.raises(UserError, match=rf"{name}: changed while it was in use, from {size} bytes"):
        data.batch([0, 1])


def test_a_read_that_comes_back_short_or_fails_is_named(tmp_path, monkeypatch):
    with IndexedDatasetWriter(tmp_path / "corpus", np.uint16) as writer:
        writer.add_document(np.arange(5000))
    data = GPTDataset(tmp_path / "corpus", "train", [1, 0, 0], 16, None, 1)
    monkeypatch.setattr(os, "preadv", lambda *_: 3)
    with pytest.raises(UserError, match=r"corpus\.bin: ends too early"):
        data.batch([0])

    def broken(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(UserError, match=r"corpus\.bin: cannot be read: Input/output error"):
        data.batch([0])
