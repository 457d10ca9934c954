"""Laws of retrieved neighbors: the rules of chunks and documents, against plain loops."""

import json

import numpy as np
import pytest

from mjax.config import load
from mjax.data.corpus import neighbor_index
from mjax.data.corpus.gpt import GPTDataset
from mjax.data.corpus.indexed import IndexedDataset, IndexedDatasetWriter
from mjax.data.corpus.neighbor_index import (
    NeighborIndex,
    Vectors,
    database_of,
    first_allowed,
    search,
)
from mjax.data.corpus.retro import texts_of
from mjax.data.loader import build_datasets, make_loader
from mjax.data.neighbors import main
from mjax.errors import UserError
from tests.batches import stream_hash

SIZE, COUNT, LENGTH, VOCAB = 8, 2, 32, 500


def corpus(prefix, seed=0, n=60):
    """Documents in pairs that are near each other: the second has some tokens changed."""
    rng = np.random.default_rng(seed)
    documents = []
    for _ in range(n // 2):
        text = rng.integers(1, VOCAB, rng.integers(0, 70))
        near = np.where(rng.random(len(text)) < 0.05, rng.integers(1, VOCAB, len(text)), text)
        documents += [text, near]
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for document in documents:
            writer.add_document(document)
    return [document.tolist() for document in documents]


def config(tmp_path, *more):
    given = [
        f"run.dir={tmp_path}/run",
        f"data.paths=[{tmp_path}/corpus]",
        "data.split=[0.8,0.2,0.0]",
        f"data.seq_length={LENGTH}",
        f"model.vocab_size={VOCAB}",
        "model.hidden_size=16",
        "model.num_hidden_layers=4",
        "model.layer_pattern='[G],[BCD],[RD],[GRD]'",
        "model.attention.num_attention_heads=2",
        f"model.retro={{chunk_length: {SIZE}, num_neighbors: {COUNT}}}",
        "train.steps=6",
        "train.global_batch_size=8",
        "train.eval_interval=3",
        "train.eval_steps=1",
        *more,
    ]
    return given, load(None, given)


def test_the_database_is_the_chunks_of_documents(tmp_path):
    documents = corpus(tmp_path / "corpus")
    data = IndexedDataset(tmp_path / "corpus")
    made = database_of(data, (10, 50), SIZE)
    starts = np.cumsum([0, *map(len, documents)])
    plain = []
    for number in range(10, 50):
        for place in range(0, len(documents[number]), SIZE):
            plain.append((starts[number] + place, number))
    np.testing.assert_array_equal(np.transpose(made), plain)
    places = np.append(made.starts, -1)
    texts = texts_of(data, places, 2 * SIZE)
    for (start, number), found in zip(plain, texts, strict=False):
        place = start - starts[number]
        text = documents[number][place : place + 2 * SIZE]
        assert found.tolist() == text + [-1] * (2 * SIZE - len(text))
    assert (texts[-1] == -1).all()


def test_vectors_are_near_those_of_a_plain_tf_idf():
    """Without hashing: cosines of bags of tokens and pairs by log((1 + N) / (1 + chunks))."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 40, (300, 12)).astype(np.int32)
    tokens[150:] = np.where(rng.random((150, 12)) < 0.5, tokens[:150], tokens[150:])
    tokens[7, 5:] = -1
    bags = []
    for line in tokens.tolist():
        line = [token for token in line if token >= 0]
        bags.append([*line, *zip(line, line[1:], strict=False)])
    names = sorted({name for bag in bags for name in bag}, key=str)
    column = {name: i for i, name in enumerate(names)}
    counts = np.zeros((300, len(names)))
    for row, bag in enumerate(bags):
        for name in bag:
            counts[row, column[name]] += 1
    plain = counts * np.log(301 / (1 + (counts > 0).sum(0)))
    plain /= np.linalg.norm(plain, axis=1, keepdims=True)
    made = Vectors([tokens[:200], tokens[200:]])(tokens)
    np.testing.assert_allclose(np.linalg.norm(made, axis=1), 1, rtol=1e-5)
    error = made @ made.T - plain @ plain.T
    assert np.abs(error).mean() < 1.5 * neighbor_index.VECTOR**-0.5
    assert (
        np.corrcoef((made[:150] * made[150:]).sum(1), (plain[:150] * plain[150:]).sum(1))[0, 1]
        > 0.9
    )


def test_the_first_that_are_allowed_are_kept_in_order():
    found = np.array([[5, 3, 8, 1], [2, 4, 6, 0], [7, 9, 1, 3]])
    allowed = np.array([[0, 1, 0, 1], [1, 1, 1, 1], [0, 0, 0, 1]], bool)
    assert first_allowed(found, allowed, 2).tolist() == [[3, 1], [2, 4], [3, -1]]
    assert first_allowed(found, allowed, 5)[0].tolist() == [3, 1, -1, -1, -1]


@pytest.mark.parametrize("exact", [True, False])
def test_neighbors_are_the_nearest_of_other_documents(tmp_path, monkeypatch, exact):
    """Against a search of every chunk for every chunk, where Megatron's rule allows it."""
    documents = corpus(tmp_path / "corpus", n=400)
    if not exact:
        monkeypatch.setattr(neighbor_index, "EXACT", 100)
        monkeypatch.setattr(neighbor_index, "PROBED", 10**6)  # all parts, so it is exact again
    cfg = config(tmp_path)[1]
    dataset = GPTDataset(tmp_path / "corpus", "train", (0.8, 0.2, 0), LENGTH, 150, 3)
    data = dataset.dataset
    database = database_of(data, dataset.sequences, SIZE)
    index = NeighborIndex(data, database, SIZE)
    found = search(dataset, 140, index, database, True, cfg)
    assert found.shape == (140, LENGTH // SIZE, COUNT)
    every = index.vectors(texts_of(data, database.starts, SIZE))
    owner = {start: number for start, number in zip(*database, strict=True)}
    from_pair = 0
    for sample in range(140):
        tokens = dataset.batch([sample])["tokens"][0]
        k = dataset.shuffle_index[sample]
        (first, _), (last, _) = dataset.sample_index[k], dataset.sample_index[k + 1]
        own = set(dataset.document_index[first : last + 1].tolist())
        joined = sum((documents[d] for d in dataset.document_index[first : last + 1]), [])
        assert "".join(map(chr, tokens)) in "".join(map(chr, joined))
        likeness = index.vectors(tokens.reshape(-1, SIZE)) @ every.T
        likeness[:, np.isin(database.documents, list(own))] = -2
        for chunk in range(LENGTH // SIZE):
            starts = found[sample, chunk]
            assert (starts >= 0).all() and starts[0] != starts[1]
            assert not own & {owner[start] for start in starts}
            numbers = np.searchsorted(database.starts, starts, side="right") - 1
            best = np.sort(likeness[chunk])[::-1][:COUNT]
            np.testing.assert_allclose(likeness[chunk][numbers], best, atol=1e-5)
            from_pair += owner[starts[0]] // 2 in {number // 2 for number in own}
    assert from_pair > 0.7 * found[..., 0].size  # of the document that is near
    assert (search(dataset, 5, index, database, False, cfg) != found[:5]).any()


def test_a_run_reads_the_neighbors_that_were_looked_up_for_it(tmp_path, capsys):
    documents = corpus(tmp_path / "corpus")
    given, cfg = config(tmp_path)
    with pytest.raises(UserError, match="no neighbors are kept for the 48 samples of this run"):
        build_datasets(cfg, 48, 8)
    assert main(given) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["train_chunks"] == 48 * LENGTH // SIZE and made["held_out_chunks"] == 8 * 4
    train, held_out = build_datasets(cfg, 48, 8)
    assert len(train) == 48 and len(held_out) == 8
    starts = np.cumsum([0, *map(len, documents)])
    in_training = {i for i in range(starts[round(0.8 * len(documents))])}
    for data in (train, held_out):
        batch = data.batch(np.arange(8))
        assert batch["neighbors"].shape == (8, LENGTH // SIZE * COUNT, 2 * SIZE)
        assert set(data.starts[data.starts >= 0].tolist()) <= in_training
        flat = sum(documents, [])
        for texts, places in zip(batch["neighbors"], data.starts[:8], strict=True):
            for found, start in zip(texts, places.reshape(-1), strict=True):
                real = found[found >= 0].tolist()
                assert start < 0 or (real and real == flat[start : start + len(real)])
    again = build_datasets(cfg, 48, 8)[0]

    def stream(data, first, count):
        batches = make_loader(data, lambda step: (step * 8, 8), first, count)
        return [stream_hash(batch) for batch in batches]

    assert stream(again, 3, 3) == stream(train, 0, 6)[3:]
    for other in ("run.seed=7", "train.steps=7", "model.retro.num_neighbors=1"):
        cfg = config(tmp_path, other)[1]
        with pytest.raises(UserError, match="run python -m mjax.data.neighbors with the same"):
            build_datasets(cfg, 8 * cfg.train.steps, 8)


def test_what_cannot_be_looked_up_is_said(tmp_path, monkeypatch):
    corpus(tmp_path / "corpus")
    given, _ = config(tmp_path)
    with pytest.raises(UserError, match="neighbors are for RETRO .R blocks. on text"):
        main([*given, "model.layer_pattern=G"])
    monkeypatch.setattr(neighbor_index, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="needs faiss; pip install 'mjax.retro.'"):
        main(given)
