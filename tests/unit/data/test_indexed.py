"""Laws of the .bin/.idx pair: what is written is read, byte for byte as Megatron lays it out."""

import struct

import numpy as np
import pytest

from mjax.data import IndexedDataset, IndexedDatasetWriter
from mjax.data.corpus.indexed import MAGIC, TOKEN_DTYPES
from mjax.errors import UserError

DOCUMENTS = [[5, 6, 7], [], [8], list(range(20))]


def write(prefix, documents=DOCUMENTS, dtype=np.uint16):
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add_document(document)
    return prefix


@pytest.mark.parametrize("dtype", TOKEN_DTYPES.values(), ids=str)
def test_round_trip_in_every_dtype(tmp_path, dtype):
    data = IndexedDataset(write(tmp_path / "c", dtype=dtype))
    assert data.dtype == dtype and len(data) == 4
    assert [list(data[i]) for i in range(4)] == DOCUMENTS
    assert data.lengths.tolist() == [3, 0, 1, 20]
    assert data.document_indices.tolist() == [0, 1, 2, 3, 4]


def test_bytes_are_megatrons(tmp_path):
    write(tmp_path / "c", [[1, 2], [3]])
    index = MAGIC + struct.pack("<QBQQ", 1, 8, 2, 3)
    index += struct.pack("<2i", 2, 1) + struct.pack("<2q", 0, 4) + struct.pack("<3q", 0, 1, 2)
    assert (tmp_path / "c.idx").read_bytes() == index
    assert (tmp_path / "c.bin").read_bytes() == struct.pack("<3H", 1, 2, 3)


def test_bulk_items_equal_one_by_one(tmp_path):
    write(tmp_path / "one")
    flat = np.concatenate([np.array(d, int) for d in DOCUMENTS])
    with IndexedDatasetWriter(tmp_path / "two", np.uint16) as writer:
        writer.add_documents(flat, np.array([3, 0, 1, 20]))
    for suffix in (".bin", ".idx"):
        ours = (tmp_path / f"two{suffix}").read_bytes()
        assert ours == (tmp_path / f"one{suffix}").read_bytes()
    with IndexedDatasetWriter(tmp_path / "three", np.uint16) as writer:
        writer.add_item([1])
        writer.add_item([2, 3])
        writer.end_document()
    several = IndexedDataset(tmp_path / "three")
    assert several.document_indices.tolist() == [0, 2] and len(several) == 2


def test_an_exception_leaves_nothing(tmp_path):
    with pytest.raises(RuntimeError):
        with IndexedDatasetWriter(tmp_path / "c", np.uint16) as writer:
            writer.add_document([1])
            raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(UserError, match="No space left"):
        write(tmp_path / "c")
    assert list(tmp_path.iterdir()) == []


def test_ids_that_do_not_fit_are_refused(tmp_path):
    for bad in ([65536], [-1], [0.5]):
        with pytest.raises(UserError, match="do not fit"):
            write(tmp_path / "c", [bad])
    with pytest.raises(UserError, match="not one of"):
        IndexedDatasetWriter(tmp_path / "c", np.complex64)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        IndexedDatasetWriter(tmp_path / "file" / "c", np.uint16)


def patch(path, at, data):
    raw = bytearray(path.read_bytes())
    raw[at : at + len(data)] = data
    path.write_bytes(raw)


@pytest.mark.parametrize(
    "suffix, damage, message",
    [
        (".bin", lambda p: p.unlink(), "no such file"),
        (".idx", lambda p: p.unlink(), "no such file"),
        (".bin", lambda p: p.write_bytes(p.read_bytes()[:-2]), "truncated"),
        (".bin", lambda p: p.write_bytes(b""), "truncated"),
        (".bin", lambda p: p.write_bytes(p.read_bytes() + b"xx"), "longer"),
        (".idx", lambda p: p.write_bytes(b""), "magic"),
        (".idx", lambda p: patch(p, 0, b"X"), "magic"),
        (".idx", lambda p: patch(p, 9, struct.pack("<Q", 2)), "version 2"),
        (".idx", lambda p: patch(p, 17, b"\x09"), "dtype code 9"),
        (".idx", lambda p: patch(p, 18, struct.pack("<Q", 5)), "header"),
        (".idx", lambda p: p.write_bytes(p.read_bytes()[:-1]), "header"),
        (".idx", lambda p: patch(p, 34, struct.pack("<i", 4)), "disagree"),
        (".idx", lambda p: patch(p, 34, struct.pack("<i", -3)), "disagree"),
        (".idx", lambda p: patch(p, 46, struct.pack("<i", 21)), "truncated"),
        (".idx", lambda p: patch(p, 58, struct.pack("<q", 8)), "disagree"),
        (".idx", lambda p: patch(p, 82, struct.pack("<q", 1)), "bounds"),
    ],
)
def test_damaged_pairs_are_refused_by_name(tmp_path, suffix, damage, message):
    write(tmp_path / "c")
    damage(tmp_path / f"c{suffix}")
    with pytest.raises(UserError, match=message) as e:
        IndexedDataset(tmp_path / "c")
    assert str(tmp_path / "c") in str(e.value) and "\n" not in str(e.value)
