"""Laws of streamed text: all of it, once an epoch, whatever was read before."""

import gc
import json
import threading
import time
import weakref
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from mjax.config import load
from mjax.data.base import object_store
from mjax.data.corpus import stream as stream_module
from mjax.data.corpus.stream import StreamedText
from mjax.errors import UserError
from tests.marks import quick

S = 8
SOURCES = "jsonl", "parquet", "memory"


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    monkeypatch.setattr(stream_module, "WINDOW_BYTES", 60)
    monkeypatch.setattr(object_store, "FIRST_PAUSE", 0.0)


def texts(file):
    return [f"{file}-{i}:" + chr(97 + i) * (3 * i % 17) for i in range(11)]


def write(folder, kind="jsonl"):
    """Three files of eleven documents; returns data.text."""
    for file in range(3):
        if kind == "parquet":
            rows = {"id": list(range(11)), "text": texts(file)}
            parquet.write_table(pa.table(rows), folder / f"{file}.parquet", row_group_size=4)
        else:
            lines = "".join(json.dumps({"text": text}) + "\n" for text in texts(file))
            (folder / f"{file}.jsonl").write_text(lines)
    if kind != "memory":
        return str(folder)
    fs = fsspec.filesystem("memory")
    for path in folder.glob("*.jsonl"):
        fs.pipe_file(f"/{folder.name}/{path.name}", path.read_bytes())
    return f"memory://{folder.name}"


def stream(tmp_path, text, *keys, split="train", **more):
    given = [f"data.text={text}", f"run.dir={tmp_path}", f"data.seq_length={S}"]
    given += ["data.stream=true", "data.tokenizer=byte", "model.vocab_size=300"]
    given += ["data.mock=false", "data.split=[1,0,0]"]
    cfg = load(None, [*given, *keys])
    return StreamedText(cfg.data, split, cfg.run.seed, **more)


def documents(rows):
    """The texts of a stream's rows, the last of which may be cut."""
    tokens = np.concatenate([rows["tokens"][:, 0:S]]).reshape(-1)
    return bytes(np.where(tokens == 256, 0, tokens).astype(np.uint8)).decode().split("\0")


@pytest.mark.parametrize("kind", SOURCES)
def test_an_epoch_has_every_document_once_in_another_order_each_time(kind, tmp_path):
    (tmp_path / "text").mkdir()
    text = write(tmp_path / "text", kind)
    data = stream(tmp_path, text)
    found = documents(data.batch(range(130)))
    every = sorted(text for file in range(3) for text in texts(file))
    assert sorted(found[:33]) == every and sorted(found[33:66]) == every
    assert found[:33] != found[33:66] and found[:33] != every
    assert len(list(Path(data._folder.name).iterdir())) <= (2 if kind == "memory" else 0)


@pytest.mark.parametrize("kind", SOURCES)
def test_a_row_is_the_same_whatever_was_read_before(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(stream_module, "ROWS_APART", 4)
    monkeypatch.setattr(stream_module, "POSITIONS_HELD", 5)
    (tmp_path / "text").mkdir()
    text = write(tmp_path / "text", kind)
    first = stream(tmp_path, text, rows_held=3)
    whole, records = first.batch(range(120)), {}
    for row in (0, 9, 57, 119):
        one = stream(tmp_path, text, rows_held=3)
        one.batch(range(row + 1))
        records[row] = json.loads(json.dumps(one.record_of(row)))
        assert row - 4 <= records[row]["row"] <= row
    for row, record in records.items():
        resumed = stream(tmp_path, text, rows_held=3)
        resumed.go_on(record)
        part = resumed.batch(range(row, 120)) if row < 119 else resumed.batch([119])
        for name, values in part.items():
            assert np.array_equal(values, whole[name][row:])
    rng = np.random.default_rng(0)
    for _ in range(6):  # back and forth, as threads and roll-backs ask
        some = rng.integers(0, 120, 5)
        assert np.array_equal(first.batch(some)["labels"], whole["labels"][some])


def test_labels_segments_and_positions(tmp_path):
    (tmp_path / "text").mkdir()
    text = write(tmp_path / "text")
    keys = ["data.reset_position_ids=true", "data.eod_mask_loss=true", "data.eod_token_id=256"]
    rows = stream(tmp_path, text, *keys).batch(range(60))
    flat = rows["tokens"].reshape(-1)
    assert np.array_equal(rows["labels"].reshape(-1)[:-1], flat[1:])
    ends = rows["tokens"] == 256
    assert np.array_equal(rows["segment_ids"], 1 + np.cumsum(ends, 1) - ends)
    assert np.array_equal(rows["loss_mask"], 1.0 - ends)
    for row, positions in zip(ends, rows["positions"], strict=True):
        wanted, at = [], 0
        for end in row:
            wanted.append(at)
            at = 0 if end else at + 1
        assert positions.tolist() == wanted


def test_what_is_held_out_is_never_trained_on(tmp_path):
    (tmp_path / "text").mkdir()
    text = write(tmp_path / "text")
    found = {}
    for split in ("train", "valid", "test"):
        rows = stream(tmp_path, text, "data.split=[2,1,1]", split=split).batch(range(200))
        found[split] = set(documents(rows)[:-1])
    assert not found["train"] & found["valid"] and not found["test"] & found["valid"]
    assert len(set.union(*found.values())) == 33
    with pytest.raises(UserError, match="no text in the split"):
        stream(tmp_path, text, split="valid").batch([0])


def test_other_files_than_the_run_has_read_are_one_line(tmp_path):
    (tmp_path / "text").mkdir()
    text = write(tmp_path / "text")
    record = stream(tmp_path, text).record_of(0)
    (tmp_path / "text" / "3.jsonl").write_text('{"text": "more"}\n')
    with pytest.raises(UserError, match="not those that the run has read"):
        stream(tmp_path, text).go_on(record)


def test_an_error_in_a_file_names_it_and_can_be_mended(tmp_path):
    (tmp_path / "text").mkdir()
    text = write(tmp_path / "text")
    broken = tmp_path / "text" / "1.jsonl"
    good = broken.read_text()
    broken.write_text(good[:-20] + "{")
    data = stream(tmp_path, text)
    for _ in range(2):
        with pytest.raises(UserError, match=r"1.jsonl:11: not a JSON line"):
            data.batch(range(100))
    broken.write_text(good)
    assert len(documents(data.batch(range(130)))) > 66


@pytest.mark.parametrize("kind", quick(["jsonl", "memory"], 0))
def test_a_stream_that_is_dropped_waits_for_no_thread(kind, tmp_path, monkeypatch):
    """The garbage collector may end it while `threading` holds its lock: to wait hung."""
    (tmp_path / "text").mkdir()
    data = stream(tmp_path, write(tmp_path / "text", kind))
    data.batch(range(9))
    gc.collect()
    waits, gone = [], weakref.ref(data)
    monkeypatch.setattr(
        threading.Thread, "join", lambda *_: waits.append(threading.current_thread())
    )
    del data
    deadline = time.monotonic() + 30
    while gone() and time.monotonic() < deadline:  # a thread may still read
        time.sleep(0.01)
        gc.collect()
    assert not gone() and threading.main_thread() not in waits
