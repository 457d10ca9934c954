"""Laws of text in: tokenizers round-trip, and the corpus does not depend on how it was read."""

import gzip
import json
import multiprocessing
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from mjax.config import load
from mjax.config.schema.run import DataConfig
from mjax.data import IndexedDataset
from mjax.data.base.tokenizer import load_tokenizer, train_tokenizer
from mjax.data.corpus.bigram import bigram_cross_entropy
from mjax.data.corpus.text import prepare_text, stdlib_files
from mjax.data.corpus.tokenize_files import preprocess, read_texts
from mjax.data.loader import build_datasets
from mjax.data.preprocess import main
from mjax.errors import UserError
from mjax.run.evaluation import HeldOut
from tests.marks import slow

TEXTS = ["def f(x):\n    return x + 1\n", "naïve café — 東京 🚀", "a" * 50, "tail, no newline"]


def write_jsonl(path, texts=TEXTS, key="text"):
    path.write_text("".join(json.dumps({key: t}) + "\n" for t in texts))
    return str(path)


def documents(prefix, tokenizer="byte"):
    decode = load_tokenizer(tokenizer).decode
    return [decode(tokens) for tokens in IndexedDataset(prefix)]


def test_byte_tokenizer_round_trips():
    byte = load_tokenizer("byte")
    assert (byte.vocab_size, byte.eod_id) == (257, 256)
    assert [byte.decode(ids) for ids in byte.encode_batch(TEXTS)] == TEXTS
    assert byte.decode([104, 105, 256]) == "hi" and max(byte.encode("é")) < 256


def test_trained_tokenizer_round_trips_and_is_repeatable(tmp_path):
    made = train_tokenizer(TEXTS * 5, 300, tmp_path / "a" / "tokenizer.json")
    assert made.vocab_size == 300 and made.decode([made.eod_id]) == ""
    for loaded in (
        made,
        load_tokenizer(tmp_path / "a"),
        load_tokenizer(tmp_path / "a/tokenizer.json"),
    ):
        assert [loaded.decode(loaded.encode(t)) for t in TEXTS] == TEXTS
        assert loaded.encode_batch(TEXTS) == [loaded.encode(t) for t in TEXTS]
    assert len(made.encode(TEXTS[0])) < len(TEXTS[0])
    train_tokenizer(TEXTS * 5, 300, tmp_path / "b.json")
    assert (tmp_path / "b.json").read_bytes() == (tmp_path / "a/tokenizer.json").read_bytes()
    assert list(tmp_path.glob("**/*.tmp")) == []
    with pytest.raises(UserError, match="at least 257"):
        train_tokenizer(TEXTS, 256, tmp_path / "c.json")


def test_eod_name_comes_from_the_tokenizer_config(tmp_path):
    made = train_tokenizer(TEXTS, 270, tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "a"}}')
    assert load_tokenizer(tmp_path).eod_id == made.encode("a")[0]


def test_sentencepiece_round_trips(tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece")
    lines = [t.replace("\n", " ") for t in TEXTS] * 20
    out = str(tmp_path / "sp")
    train = sentencepiece.SentencePieceTrainer.train
    options = dict(vocab_size=320, byte_fallback=True, character_coverage=0.99, minloglevel=2)
    train(sentence_iterator=iter(lines), model_prefix=out, hard_vocab_limit=False, **options)
    loaded = load_tokenizer(f"{out}.model")
    assert loaded.decode(loaded.encode("tail, no newline")) == "tail, no newline"
    assert loaded.eod_id == 2 and max(loaded.encode(TEXTS[1])) < loaded.vocab_size
    (tmp_path / "bad.model").write_bytes(b"\xff\xffnot a model")
    with pytest.raises(UserError, match="not a SentencePiece model"):
        load_tokenizer(tmp_path / "bad.model")


def test_missing_and_foreign_tokenizers_are_refused(tmp_path, monkeypatch):
    (tmp_path / "bad.json").write_text("{}")
    (tmp_path / "x.model").write_bytes(b"")
    for spec in ("train:300", tmp_path, tmp_path / "bad.json"):
        with pytest.raises(UserError):
            load_tokenizer(spec)
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(UserError, match="pip install sentencepiece"):
        load_tokenizer(tmp_path / "x.model")


def test_every_container_gives_the_same_corpus(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    raw = open(write_jsonl(tmp_path / "x.jsonl"), "rb").read()
    (tmp_path / "gz.jsonl.gz").write_bytes(gzip.compress(raw))
    frames = [zstandard.compress(raw[:30]), zstandard.compress(raw[30:])]
    (tmp_path / "zst.json.zst").write_bytes(b"".join(frames))
    files = tmp_path / "texts"
    files.mkdir()
    for i, text in enumerate(TEXTS):
        (files / f"{i}.txt").write_text(text)
    (files / ".hidden").write_text("no")
    (files / "sub").mkdir()
    inputs = ["x.jsonl", "gz.jsonl.gz", "zst.json.zst", "texts", "texts/*.txt"]
    for i, name in enumerate(inputs):
        done = preprocess([str(tmp_path / name)], tmp_path / f"out{i}", "byte", append_eod=True)
        assert documents(tmp_path / f"out{i}") == TEXTS, name
        data = IndexedDataset(tmp_path / f"out{i}")
        assert done[:2] == (4, len(data.tokens)) and data.dtype == np.uint16
        assert all(tokens[-1] == 256 for tokens in data)
    assert list(read_texts([str(tmp_path / "texts")])) == TEXTS


@slow
def test_stdin_is_json_lines_or_one_text(tmp_path):
    command = [sys.executable, "-m", "mjax.data.preprocess", "--tokenizer", "byte", "--input", "-"]
    for name, text, expected in [
        ("json", open(write_jsonl(tmp_path / "x.jsonl")).read(), TEXTS),
        ("text", TEXTS[0], TEXTS[:1]),
    ]:
        args = [*command, "--output", str(tmp_path / name), "--workers", "1"]
        done = subprocess.run(args, input=text, text=True, capture_output=True)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["documents"] == len(expected)
        assert documents(tmp_path / name) == expected
    bad = subprocess.run(
        [*command, "--output", str(tmp_path / "bad")],
        input='{"text": "a"}\n{"text"\n',
        text=True,
        capture_output=True,
    )
    assert bad.returncode == 2 and bad.stderr.count("\n") == 1 and "-:2: not a JSON" in bad.stderr
    assert not list(tmp_path.glob("bad*"))


def test_output_does_not_depend_on_workers(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("mjax.data.corpus.tokenize_files.CHUNK_BYTES", 200)
    source = write_jsonl(tmp_path / "x.jsonl", [f"{t} {i}" for i in range(30) for t in TEXTS])
    vocabulary = ["--vocab-size", "300", "--output", str(tmp_path / "tokenizer.json")]
    assert main(["train-tokenizer", "--input", source, *vocabulary]) == 0
    for workers in "12":
        args = [
            "--tokenizer",
            str(tmp_path / "tokenizer.json"),
            "--append-eod",
            "--workers",
            workers,
        ]
        assert main(["--input", source, "--output", str(tmp_path / workers), *args]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["documents"] == 120
    for suffix in (".bin", ".idx"):
        one, two = ((tmp_path / f"{w}{suffix}").read_bytes() for w in "12")
        assert one == two


def test_empty_documents_are_left_out(tmp_path):
    source = write_jsonl(tmp_path / "x.jsonl", ["", "a", ""])
    assert preprocess([source], tmp_path / "c", "byte", append_eod=True).documents == 1


def test_bad_text_is_one_line_and_nothing_is_written(tmp_path):
    def bad(name, raw, message, **options):
        (tmp_path / name).write_bytes(raw)
        with pytest.raises(UserError, match=message):
            preprocess([str(tmp_path / name)], tmp_path / "out", "byte", **options)

    good = b'{"text": "a"}\n'
    bad("a.jsonl", good + b"{oops}\n", r"a.jsonl:2: not a JSON line")
    bad("a.jsonl", good + b"{oops}\n", r"a.jsonl:2: not a JSON line", workers=2)
    bad("b.jsonl", good + b"\n[1]\n", r"b.jsonl:3: no text under 'text'")
    bad("c.jsonl", good, r"c.jsonl:1: no text under 'body'", json_key="body")
    bad("d.jsonl", b'{"text": "\\ud800"}', r"d.jsonl:1: not Unicode")
    bad("e.txt", b"\xff\xfe\x00", r"e.txt: not UTF-8")
    bad("f.txt.gz", gzip.compress(b"x" * 10_000)[:-9], r"f.txt.gz: cannot be read")
    bad("g.txt.gz", b"plain", r"g.txt.gz: cannot be read")
    bad("h.jsonl", b"", "no text found")
    zstandard = pytest.importorskip("zstandard")
    bad("i.txt.zst", zstandard.compress(os.urandom(5000))[:-9], r"ends inside a zstd frame")
    bad("j.txt.zst", b"plain text", r"j.txt.zst: cannot be read")
    with pytest.raises(UserError, match="no such file"):
        preprocess([str(tmp_path / "*.none")], tmp_path / "out", "byte")
    assert not list(tmp_path.glob("out*"))


def prepare(folder, out):
    data = DataConfig(text=str(folder / "*.txt"), tokenizer="train:300")
    out.put(prepare_text(data, folder / "run"))


@slow
def test_prepare_text_builds_once_reuses_and_rebuilds(tmp_path):
    for i in range(20):
        (tmp_path / f"{i:02}.txt").write_text(f"document {i}: {TEXTS[i % 4]}")
    context = multiprocessing.get_context("spawn")
    out = context.Queue()
    workers = [context.Process(target=prepare, args=(tmp_path, out)) for _ in range(2)]
    for worker in workers:
        worker.start()
    corpus, other = (out.get(timeout=60) for _ in workers)
    for worker in workers:
        worker.join()
    assert corpus == other and corpus.vocab_size <= 300
    assert load_tokenizer(corpus.tokenizer_path).eod_id is not None
    texts = documents(corpus.prefix, corpus.tokenizer_path)
    expected = [f"document {i}: {TEXTS[i % 4]}" for i in range(20)]
    assert sorted(texts) == sorted(expected) and texts != expected  # all there, and shuffled
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["data", "data.lock"]

    data = DataConfig(text=str(tmp_path / "*.txt"), tokenizer="train:300")
    stamp = (tmp_path / "run/data/corpus.bin").stat().st_mtime_ns
    assert prepare_text(data, tmp_path / "run") == corpus
    assert (tmp_path / "run/data/corpus.bin").stat().st_mtime_ns == stamp
    byte = prepare_text(data.model_copy(update={"tokenizer": "byte"}), tmp_path / "run")
    assert (byte.vocab_size, byte.tokenizer_path) == (257, "byte")
    assert sorted(documents(byte.prefix)) == sorted(expected)


def test_another_tokenizer_of_the_same_name_is_refused(tmp_path):
    (tmp_path / "x.txt").write_text("some text")
    for kind in ("file", "trained"):
        file, run = tmp_path / "tokenizer.json", tmp_path / kind
        spec = str(file) if kind == "file" else "train:270"
        file = file if kind == "file" else run / "data" / "tokenizer.json"
        made = train_tokenizer(["some text"], 270, tmp_path / "tokenizer.json")
        data = DataConfig(text=str(tmp_path / "x.txt"), tokenizer=spec)
        corpus, first = prepare_text(data, run), file.read_bytes()
        before = {p.name: p.read_bytes() for p in (run / "data").glob("corpus*")}
        train_tokenizer(["others, of other words"], 270, file)
        with pytest.raises(UserError, match="is another tokenizer than .*data was made with"):
            prepare_text(data, run)
        assert before == {p.name: p.read_bytes() for p in (run / "data").glob("corpus*")}
        file.write_bytes(first)  # put back, it is the same; so are settings that move no id
        (file.parent / "tokenizer_config.json").write_text('{"chat_template": "x"}')
        assert prepare_text(data, run) == corpus and corpus.vocab_size == made.vocab_size
        (file.parent / "tokenizer_config.json").unlink()


def test_another_text_is_said_and_read(tmp_path, caplog):
    file, times = tmp_path / "x.txt", (1e9, 1e9)
    file.write_text("first")
    os.utime(file, times)
    data = DataConfig(text=str(tmp_path / "*.txt"), tokenizer="byte")
    prefix = prepare_text(data, tmp_path / "run").prefix
    file.rename(tmp_path / "y.txt")  # the same text
    prepare_text(data, tmp_path / "run")
    assert not caplog.records and documents(prefix) == ["first"]
    (tmp_path / "y.txt").rename(tmp_path / "gone")  # what is made stays usable
    prepare_text(data, tmp_path / "run")
    assert not caplog.records and documents(prefix) == ["first"]
    file.write_text("other")  # of the same size and time
    os.utime(file, times)
    prepare_text(data, tmp_path / "run")
    (record,) = caplog.records
    assert "another text than" in record.getMessage() and documents(prefix) == ["other"]


def test_a_corpus_that_older_versions_made_is_kept(tmp_path):
    (tmp_path / "x.txt").write_text("first")
    data = DataConfig(text=str(tmp_path / "x.txt"), tokenizer="byte")
    prefix = prepare_text(data, tmp_path / "run").prefix
    stamp = tmp_path / "run/data/settings.json"
    stamp.write_text(json.dumps({**json.loads(stamp.read_text()), "digests": {}}))
    (tmp_path / "x.txt").write_text("other")
    prepare_text(data, tmp_path / "run")
    assert documents(prefix) == ["first"]


def test_nothing_changes_where_the_weights_know_another_tokenizer(tmp_path):
    (tmp_path / "x.txt").write_text(" ".join(TEXTS))
    data = DataConfig(text=str(tmp_path / "x.txt"), tokenizer="train:300")
    prepare_text(data, tmp_path / "run")
    folder = tmp_path / "run" / "data"
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    digest = load_tokenizer(folder).digest
    assert prepare_text(data, tmp_path / "run", digest).vocab_size == 300
    for changed in ({"tokenizer": "train:280"}, {"tokenizer": "byte"}):
        other = data.model_copy(update=changed)
        with pytest.raises(UserError, match="than the run's checkpoints were trained with"):
            prepare_text(other, tmp_path / "run", digest)
    (tmp_path / "x.txt").write_text("a text that gives another tokenizer " * 9)
    with pytest.raises(UserError, match="than the run's checkpoints were trained with"):
        prepare_text(data, tmp_path / "run", digest)
    assert before == {p.name: p.read_bytes() for p in folder.iterdir()}
    assert not (tmp_path / "run" / "data.tmp").exists()


def test_bad_text_settings_are_one_line(tmp_path):
    (tmp_path / "file").write_text("x")
    for message, run, data in [
        ("needs data.tokenizer", "run", {"text": str(tmp_path)}),
        ("standard input", "run", {"text": "-", "tokenizer": "byte"}),
        ("train:VOCAB", "run", {"text": str(tmp_path), "tokenizer": "train:many"}),
        ("no such file", "run", {"text": str(tmp_path / "none"), "tokenizer": "byte"}),
        ("set run.dir", "file", {"text": str(tmp_path), "tokenizer": "byte"}),
    ]:
        with pytest.raises(UserError, match=message):
            prepare_text(DataConfig(**data), tmp_path / run)
        assert not (tmp_path / "run" / "data").exists()


def test_stdlib_is_there_without_installed_packages():
    files = stdlib_files()
    assert len(files) > 200 and any(f.endswith("argparse.py") for f in files)
    assert not any("site-packages" in f for f in files)


def test_bigram_is_a_distribution_and_equals_plain_loops():
    rng = np.random.default_rng(0)
    v = 12
    train = rng.integers(0, v - 2, size=300) // rng.integers(1, 4, size=300)  # ids v-2.. unseen
    valid = np.concatenate([rng.integers(0, v, size=80), [v - 1, 0]])
    n, types = len(train), len(set(train.tolist()))

    def p(word, before):
        unigram = ((train == word).sum() + types / v) / (n + types)
        after = train[1:][train[:-1] == before].tolist()
        t = len(set(after))
        return (after.count(word) + t * unigram) / (len(after) + t) if t else unigram

    for before in range(v):
        assert abs(sum(p(word, before) for word in range(v)) - 1) < 1e-12
    pairs = zip(valid[:-1].tolist(), valid[1:].tolist(), strict=True)
    expected = -np.mean([np.log(p(word, before)) for before, word in pairs])
    assert abs(bigram_cross_entropy(train, valid, v) - expected) < 1e-12


def test_bigram_beats_unigram_on_ordered_text_and_not_on_noise():
    rng = np.random.default_rng(1)
    cycle = np.tile(np.arange(50), 200)
    assert bigram_cross_entropy(cycle, cycle[:500], 50) < 0.1
    noise = rng.integers(0, 50, size=20_000)
    assert abs(bigram_cross_entropy(noise, rng.integers(0, 50, size=5000), 50) - np.log(50)) < 0.15


def test_a_text_that_is_edited_while_a_run_trains_leaves_its_data_alone(tmp_path):
    for number in range(20):
        (tmp_path / f"{number}.txt").write_text(f"document {number}: {TEXTS[0]}" * 4)
    keys = ["data.tokenizer=byte", "data.seq_length=16", "data.split=[0.8,0.2,0]"]
    keys += ["train.eval_steps=1", "data.mock=false", "model.vocab_size=300"]
    keys += [f"data.text={tmp_path}/*.txt", f"run.dir={tmp_path}/run"]
    cfg = load(overrides=keys)
    _, held_out = build_datasets(cfg, 4, 4)
    batches = SimpleNamespace(batches=lambda *which: iter([held_out.batch(range(4))]))
    line = HeldOut(SimpleNamespace(cfg=cfg), batches).bigram_line
    before, said = files_of(tmp_path / "run"), line(3.0)
    (tmp_path / "3.txt").write_text("another text")
    assert "bigram cross-entropy" in said and line(3.0) == said
    assert files_of(tmp_path / "run") == before


def files_of(folder):
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.suffix != ".lock"}
