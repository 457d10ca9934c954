"""Laws of the loader: a batch is a pure function of (config, seed, step)."""

import json
import subprocess
import sys

import numpy as np
import pytest

from mjax.config.schema.run import Config
from mjax.data import IndexedDatasetWriter
from mjax.data.blend import BlendedDataset
from mjax.data.corpus.gpt import GPTDataset
from mjax.data.loader import build_datasets, make_loader
from mjax.data.mock import MockDataset
from mjax.errors import UserError
from tests.batches import stream_hash
from tests.marks import exhaustive


def ramp(step):
    """Three steps of 4 samples, then of 8: (first sample, count)."""
    return (4 * step, 4) if step < 3 else (12 + 8 * (step - 3), 8)


def corpus(prefix, seed=0, n=200):
    rng = np.random.default_rng(seed)
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for size in rng.integers(1, 60, size=n):
            writer.add_document(rng.integers(0, 256, size=size))
    return str(prefix)


def config(**data):
    return Config.model_validate({"data": {"seq_length": 16, **data}, "model": {"vocab_size": 256}})


def test_restart_rows_and_threads_give_the_same_stream(tmp_path):
    data = GPTDataset(corpus(tmp_path / "c"), "train", (1, 0, 0), 16, 100, 0)
    whole = list(make_loader(data, ramp, 0, 8, workers=2, prefetch=3))
    hashes = [stream_hash(b) for b in whole]
    assert len(set(hashes)) == 8 and [len(b["tokens"]) for b in whole] == [4] * 3 + [8] * 5
    np.testing.assert_array_equal(whole[3]["tokens"], data.batch(range(12, 20))["tokens"])
    for workers, prefetch in ((1, 1), (3, 5)):
        again = make_loader(data, ramp, 5, 3, workers=workers, prefetch=prefetch)
        assert [stream_hash(b) for b in again] == hashes[5:]
    for parts in (2, 4):
        rows = [lambda n, p=p, d=parts: slice(p * n // d, (p + 1) * n // d) for p in range(parts)]
        slices = [make_loader(data, ramp, 0, 8, rows=part) for part in rows]
        for full, *shards in zip(whole, *slices, strict=True):
            joined = {k: np.concatenate([s[k] for s in shards]) for k in full}
            assert stream_hash(joined) == stream_hash(full)


def test_reading_starts_before_the_first_next_and_errors_arrive(tmp_path):
    class Broken(MockDataset):
        def batch(self, indices):
            if indices[0] >= 8:
                raise UserError("broken at 8")
            return super().batch(indices)

    batches = make_loader(Broken(10, 4, 100, 0), lambda s: (4 * s, 4), 0, 5)
    next(batches), next(batches)
    with pytest.raises(UserError, match="broken at 8"):
        next(batches)
    batches.close()
    assert list(make_loader(MockDataset(10, 4, 8, 0), lambda s: (4 * s, 4), 0, 0)) == []
    with pytest.raises(UserError, match="8 samples, but step 3 takes number 12"):
        make_loader(MockDataset(10, 4, 8, 0), lambda s: (4 * s, 4), 0, 3)


def test_mock_is_a_pure_function_of_seed_and_index():
    data = MockDataset(1000, 64, 500, 7)
    batch = data.batch(range(500))
    np.testing.assert_array_equal(data.batch([3, 1])["tokens"], batch["tokens"][[3, 1]])
    np.testing.assert_array_equal(batch["tokens"][:, 1:], batch["labels"][:, :-1])
    other = MockDataset(1000, 64, 500, 8).batch(range(500))["tokens"]
    assert (other == batch["tokens"]).mean() < 0.01
    assert batch["tokens"].min() == 0 and batch["tokens"].max() == 999
    assert abs(batch["tokens"].mean() - 499.5) < 10 and batch["tokens"].dtype == np.int32


def test_build_one_path_splits_and_valid_paths(tmp_path):
    a, b = corpus(tmp_path / "a"), corpus(tmp_path / "b", 1)
    train, valid = build_datasets(config(paths=[a], split=[0.8, 0.2, 0.0]), 150, 10)
    assert isinstance(train, GPTDataset) and len(train) >= 150 and len(valid) >= 10
    assert train.document_index.max() == 159 and valid.document_index.min() == 160
    train, valid = build_datasets(config(paths=[a], valid_paths=[b]), 20, 5)
    assert train.document_index.max() == 199 and valid.prefix == b
    assert valid.document_index.min() == 0 and valid.document_index.max() == 199
    assert build_datasets(config(mock=True), 20, 0)[1] is None
    train, valid = build_datasets(config(mock=True), 20, 5)
    assert len(train) == 20 and len(valid) == 5
    assert train.batch([0])["tokens"].tolist() != valid.batch([0])["tokens"].tolist()


def test_build_blends_by_weight_or_by_size(tmp_path):
    a, b = corpus(tmp_path / "a"), corpus(tmp_path / "b", 1, 100)
    given, _ = build_datasets(config(paths=[a, b], weights=[1.0, 3.0]), 200, 0)
    assert isinstance(given, BlendedDataset) and len(given) == 200
    assert np.bincount(given.dataset_index).tolist() == [50, 150]
    assert [len(d) >= n for d, n in zip(given.datasets, [51, 151], strict=True)] == [True, True]
    epoch, _ = build_datasets(config(paths=[a, b]), 60, 0)
    lengths = [len(d) for d in epoch.datasets]
    share = lengths[0] / sum(lengths)
    assert abs((epoch.dataset_index == 0).mean() - share) < 0.02
    longer, _ = build_datasets(config(paths=[a, b]), 10 * sum(lengths), 0)
    assert len(longer) >= 10 * sum(lengths)
    assert abs((longer.dataset_index == 0).mean() - share) < 0.01


def test_bad_data_configs_are_one_line(tmp_path):
    a = corpus(tmp_path / "a")
    for message, data in [
        ("none is set", {}),
        ("paths and mock are set", {"paths": [a], "mock": True}),
        ("2 weights for 1", {"paths": [a], "weights": [1.0, 2.0]}),
        ("numbers > 0", {"paths": [a], "weights": [0.0]}),
        ("split 'valid'", {"paths": [a], "split": [1.0, 0.0, 0.0]}),
    ]:
        with pytest.raises(UserError, match=message):
            build_datasets(config(**data), 10, 5)


def test_reading_a_corpus_does_not_import_jax():
    code = "import sys, mjax.data, mjax.data.preprocess; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@exhaustive
def test_the_benchmark_prints_json_lines():
    command = [sys.executable, "-m", "mjax.bench", "data", "--tokens", "2e5", "--seq-length", "64"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    index, loader = map(json.loads, done.stdout.splitlines())
    assert index["bench"] == "data_index" and index["ms"] >= 0
    assert loader["bench"] == "data_loader" and loader["tokens_per_second"] > 0
    few = "--images 8 --image-size 48 --batch 4 --workers 1".split()
    done = subprocess.run([*command[:4], *few], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    images = json.loads(done.stdout)
    assert images["bench"] == "data_images" and images["case"]["size"] == 48
    assert images["images_per_second"] > 0 < images["decoder_images_per_second"]
