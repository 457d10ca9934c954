"""Laws of files in stores: what is read there is what is read on a disk, or one line says why not.

`memory://` is a store of fsspec within the process. `tests/unit/data/test_store_servers.py` asks
servers that speak S3's and Google's protocols.
"""

import errno
import json

import fsspec
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import ipc, parquet

from mjax.config import load
from mjax.data import GPTDataset, IndexedDataset, IndexedDatasetWriter
from mjax.data.base import object_store
from mjax.data.base.dataset_files import dataset_files, files_of_split
from mjax.data.base.documents import document_text, expand_paths, read_documents
from mjax.data.corpus.text import prepare_text
from mjax.errors import UserError


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch):
    """An empty store, a cache of its own and no pauses."""
    monkeypatch.setenv("MJAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(object_store, "FIRST_PAUSE", 0.0)
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    return fs


def upload(fs, folder, to):
    for path in folder.rglob("*"):
        if path.is_file():
            fs.pipe_file(f"/{to}/{path.relative_to(folder).as_posix()}", path.read_bytes())
    return f"memory://{to}"


def texts_of(place, key=None):
    found = read_documents(expand_paths([place]), text_key=key)
    return [document_text(document, key) for document in found]


def test_a_corpus_gives_the_samples_that_it_gives_on_a_disk(tmp_path, store):
    rng = np.random.default_rng(0)
    (tmp_path / "data").mkdir()
    with IndexedDatasetWriter(tmp_path / "data" / "a", "uint16") as writer:
        for size in rng.integers(0, 300, 400):
            writer.add_document(rng.integers(0, 500, size))
    place = upload(store, tmp_path / "data", "bucket/corpus")
    how = ("train", (1, 0, 0), 64, 300, 5)
    local = GPTDataset(tmp_path / "data" / "a", *how, vocab_size=500)
    there = GPTDataset(f"{place}/a", *how, vocab_size=500)
    for numbers in ([0], range(40, 72), [299, 3, 3]):
        for name, values in local.batch(numbers).items():
            assert np.array_equal(values, there.batch(numbers)[name])
    with pytest.raises(UserError, match="copy it to a disk"):
        _ = there.dataset.tokens
    with pytest.raises(UserError, match="token id"):
        GPTDataset(f"{place}/a", *how, vocab_size=5).batch([0])
    store.pipe_file("/bucket/corpus/a.bin", b"short")
    with pytest.raises(UserError, match="changed while it was read"):
        there.batch([0])
    with pytest.raises(UserError, match="truncated: 5 bytes"):
        IndexedDataset(f"{place}/a")
    with pytest.raises(UserError, match="no such bucket"):
        IndexedDataset(f"{place}/b")


def test_text_in_a_store_is_tokenized_like_text_on_a_disk(tmp_path, store):
    (tmp_path / "text" / "deeper").mkdir(parents=True)
    rows = [{"body": f"text {i}", "url": "x"} for i in range(9)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "text" / "deeper" / "a.jsonl").write_text(lines)
    table = pa.table({"body": [f"row {i}" for i in range(5)] + [None], "n": list(range(6))})
    parquet.write_table(table, tmp_path / "text" / "b.parquet")
    place = upload(store, tmp_path / "text", "bucket/text")
    made = []
    for text in (place, tmp_path / "text"):
        keys = [f"data.text={text}", "data.text_key=body", "data.tokenizer=byte"]
        cfg = load(None, [*keys, "data.mock=false", "model.vocab_size=300"])
        run = tmp_path / f"run{len(made)}"
        corpus = prepare_text(cfg.data, run)
        made.append(IndexedDataset(corpus.prefix).tokens.tolist())
        stamp = (run / "data" / "settings.json").stat().st_mtime_ns
        assert prepare_text(cfg.data, run) == corpus
        assert (run / "data" / "settings.json").stat().st_mtime_ns == stamp
    assert made[0] == made[1] and len(made[0]) > 80
    assert texts_of(f"{place}/deeper/*.jsonl", "body") == [row["body"] for row in rows]


def test_the_column_of_a_table_is_given_or_found(tmp_path):
    def texts(columns, key=None):
        parquet.write_table(pa.table(columns), tmp_path / "a.parquet")
        return texts_of(str(tmp_path / "a.parquet"), key)

    assert texts({"n": [1, 2], "story": ["a", "b"]}) == ["a", "b"]
    assert texts({"title": ["x"], "text": ["a"]}) == ["a"]
    assert texts({"title": ["x"], "text": ["a"]}, "title") == ["x"]
    with pytest.raises(UserError, match="columns of text: title, body"):
        texts({"title": ["x"], "body": ["a"]})
    with pytest.raises(UserError, match="no column of text 'n' "):
        texts({"n": [1], "text": ["a"]}, "n")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(UserError, match="a.parquet: cannot be read"):
        texts_of(str(tmp_path / "a.parquet"))


def arrow(path, texts, stream=True):
    table = pa.table({"text": texts})
    new = ipc.new_stream if stream else ipc.new_file
    with open(path, "wb") as file, new(file, table.schema) as writer:
        writer.write_table(table, 2)


@pytest.mark.parametrize("is_stored", [False, True])
def test_folders_of_save_to_disk(is_stored, tmp_path, store):
    for split in ("train", "test"):
        folder = tmp_path / "saved" / split
        folder.mkdir(parents=True)
        arrow(folder / "data-00000-of-00002.arrow", [f"{split} a", f"{split} b", f"{split} c"])
        arrow(folder / "data-00001-of-00002.arrow", [f"{split} d"], stream=False)
        files = [{"filename": f"data-0000{i}-of-00002.arrow"} for i in range(2)]
        state = {"_data_files": files, "_indices_files": None}
        (folder / "state.json").write_text(json.dumps(state))
        (folder / "dataset_info.json").write_text("{}")
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    place = str(tmp_path / "saved")
    if is_stored:
        place = upload(store, tmp_path / "saved", "bucket/saved")
    assert texts_of(place) == texts_of(f"{place}/train") == [f"train {c}" for c in "abcd"]
    assert texts_of(f"{place}:test")[0] == "test a"
    with pytest.raises(UserError, match="split 'other'"):
        texts_of(f"{place}:other")


CARD = """---
configs:
- config_name: en
  data_files:
  - split: train
    path: en/train-*
  - split: test
    path: [en/held/*]
- config_name: default
  data_files: other/*.jsonl
---
# A data set
"""


@pytest.mark.parametrize(
    "card, config, split, found",
    [
        (CARD, "en", None, ["en/train-0.parquet", "en/train-1.parquet"]),
        (CARD, "en", "test", ["en/held/a.parquet"]),
        (CARD, None, None, ["other/x.jsonl"]),
        (CARD, None, "test", "no file of text of split 'test'"),
        (CARD, "fr", None, "no config 'fr' there; it has ['en', 'default']"),
        (CARD.replace("default", "de"), None, None, "give one of its configs"),
        ("---\n: [\n---", None, None, "the YAML of README.md"),
        ("", None, "train", ["en/train-0.parquet", "en/train-1.parquet"]),
        ("", None, "held", ["en/held/a.parquet"]),
        ("", None, "validation", "no file of text of split 'validation'"),
    ],
)
def test_the_files_of_a_split(card, config, split, found):
    names = "README.md en/held/a.parquet en/train-0.parquet en/train-1.parquet other/x.jsonl"

    def read(name):
        return card.encode()

    if isinstance(found, list):
        assert files_of_split(names.split(), read, config, split, "here") == found
        return
    with pytest.raises(UserError) as e:
        files_of_split(names.split(), read, config, split, "here")
    assert found in str(e.value) and "\n" not in str(e.value)


def test_files_whose_names_say_no_split_are_all_of_train(tmp_path):
    (tmp_path / "README.md").write_text("---\nconfigs: []\ndataset_info: {}\n---\n")
    (tmp_path / "a.parquet").touch()
    (tmp_path / "constraints-0.jsonl").touch()
    found = [str(tmp_path / name) for name in ("a.parquet", "constraints-0.jsonl")]
    assert dataset_files(str(tmp_path)) == found
    assert dataset_files(f"{tmp_path}:train") == found


class Faulty:
    """Fails so many times with an error, or comes short, then works."""

    def __init__(self, function, errors):
        self.function, self.errors, self.calls = function, list(errors), 0

    def __call__(self, *given, **named):
        self.calls += 1
        fault = self.errors.pop(0) if self.errors else None
        if isinstance(fault, Exception):
            raise fault
        found = self.function(*given, **named)
        return found if fault is None else found[:fault]


class Refusal(Exception):
    """An error as packages of stores raise them, with an HTTP code."""

    def __init__(self, code, words="no"):
        super().__init__(words)
        self.code = code


TIMEOUT = TimeoutError("read timed out")
PASSING = [TIMEOUT], [Refusal(503), Refusal(500)], [Refusal(429)], [0], [3, 3], [TIMEOUT] * 5
FINAL = [
    (PermissionError(errno.EACCES, "AccessDenied"), "refuses it (AccessDenied)"),
    (PermissionError("ExpiredToken: the token has expired"), "refuses it (ExpiredToken"),
    (FileNotFoundError("bucket"), "no such bucket"),
    (Refusal(401), "refuses it"),
    (Refusal(404), "no such bucket"),
]


@pytest.mark.parametrize("errors", PASSING)
def test_what_passes_is_tried_again(errors, store, tmp_path, monkeypatch):
    store.pipe_file("/bucket/a.txt", b"some text")
    faulty = Faulty(store.cat_file, errors)
    monkeypatch.setattr(store, "cat_file", faulty)
    assert texts_of("memory://bucket/a.txt") == ["some text"]
    assert faulty.calls == len(errors) + 1


@pytest.mark.parametrize("error, line", FINAL)
def test_what_does_not_pass_is_one_line_at_once(error, line, store, monkeypatch):
    store.pipe_file("/bucket/a.txt", b"some text")
    faulty = Faulty(store.cat_file, [error] * 9)
    monkeypatch.setattr(store, "cat_file", faulty)
    with pytest.raises(UserError) as e:
        texts_of("memory://bucket/a.txt")
    assert line in str(e.value) and str(e.value).startswith("memory://bucket/a.txt: ")
    assert faulty.calls == 1


def test_what_never_passes_is_one_line_after_six_tries(store, monkeypatch):
    store.pipe_file("/bucket/a.txt", b"some text")
    faulty = Faulty(store.cat_file, [Refusal(503, "Slow Down.")] * 9)
    monkeypatch.setattr(store, "cat_file", faulty)
    with pytest.raises(UserError, match="Slow Down, 6 times in a row"):
        texts_of("memory://bucket/a.txt")
    assert faulty.calls == 6


def test_an_object_that_changes_while_it_is_copied_is_one_line(store, tmp_path):
    store.pipe_file("/bucket/a.txt", b"some text")
    found = object_store.stored_object("memory://bucket/a.txt")
    store.pipe_file("/bucket/a.txt", b"Some text")
    with pytest.raises(UserError, match="changed while it was read"):
        object_store.fetch(found, tmp_path / "copy")
    assert not list(tmp_path.glob("*copy*"))


def test_another_protocol_is_one_line():
    with pytest.raises(UserError, match="give s3://, gs:// or hf://"):
        expand_paths(["abfs://x/y"])
