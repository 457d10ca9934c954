"""`python -m mjax.data.neighbors --config X [a.b=c ...]`: neighbors of a run's samples, for RETRO.

The database is the training documents, cut into chunks of `model.retro.chunk_length` tokens; the
last chunk of a document may be shorter. An index (faiss) of their vectors gives each chunk of each
sample of the run, held-out ones too, its nearest chunks. Chunks of a document that the sample has a
part of are left out, as in Megatron-LM (`megatron/core/datasets/retro/query/query.py`). What is
read of a neighbor is that chunk and what follows it in its document.

A vector is a hashed bag of tokens and pairs of tokens, each weighted by its rarity (tf-idf), of
length 1; Megatron's are BERT's. Invariant: the neighbors are kept beside the data under a hash of
data, order of samples and settings, so a run finds its own or none, and resumes with the same.
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np

from mjax.config.load import add_config_arguments, config_from_args
from mjax.config.schema import Config
from mjax.data.cache import cached_arrays
from mjax.data.gpt import Batch, GPTDataset
from mjax.data.indexed import IndexedDataset
from mjax.errors import UserError, run_cli

VECTOR = 128  # numbers of a vector
BUCKETS = 1 << 18  # of tokens and pairs, whose rarity is counted
BLOCK = 1 << 14  # chunks that are looked up at a time
ASKED = 100  # nearest chunks, before those of a sample's own documents are left out
EXACT = 1 << 15  # chunks of a database that is searched as a whole
PROBED = 8  # parts that are searched of a larger one
MISSING = -1  # in place of a neighbor, and of tokens behind its end


class Database(NamedTuple):
    """Chunks of documents: their first tokens in `.bin` int64 [N], and their documents [N]."""

    starts: np.ndarray
    documents: np.ndarray


def database_of(data: IndexedDataset, sequences: tuple[int, int], size: int) -> Database:
    """The chunks of `size` tokens of the sequences [begin, end) of a corpus."""
    numbers = np.arange(*sequences)
    counts = -(-data.lengths[numbers] // size)
    documents = np.repeat(numbers, counts)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    place = np.arange(len(documents)) - first
    return Database(data.offsets[documents] + size * place, documents)


def texts_of(data: IndexedDataset, starts: np.ndarray, length: int) -> np.ndarray:
    """int32 [n, length]: the tokens from each place on to the end of its document, then -1.

    A place of -1 is nowhere.
    """
    document = np.searchsorted(data.offsets, starts, side="right") - 1
    ends = data.offsets[document] + data.lengths[document]
    sizes = np.where(starts < 0, 0, np.minimum(ends - starts, length))
    texts = np.full((len(starts), length), MISSING, np.int32)
    texts[np.arange(length) < sizes[:, None]] = data.gather(np.maximum(starts, 0), sizes)
    return texts


class Vectors:
    """Makes vectors of chunks; the rarity of tokens and pairs is that in the chunks of `blocks`."""

    def __init__(self, blocks: Iterable[np.ndarray]):
        holding = np.zeros(BUCKETS)
        chunks = 0
        for tokens in blocks:
            features, rows = _features(tokens)
            once = np.unique(rows * BUCKETS + features % BUCKETS)
            holding += np.bincount(once % BUCKETS, minlength=BUCKETS)
            chunks += len(tokens)
        self.rarity = np.log((1 + chunks) / (1 + holding))

    def __call__(self, tokens: np.ndarray) -> np.ndarray:
        """Tokens int32 [n, size] with -1 for padding -> fp32 [n, VECTOR]."""
        features, rows = _features(tokens)
        weight = self.rarity[features % BUCKETS]
        weight = np.where(features >> 32 & 1, weight, -weight)
        places = rows * VECTOR + (features >> 40) % VECTOR
        sums = np.bincount(places, weight, len(tokens) * VECTOR).reshape(-1, VECTOR)
        norms = np.linalg.norm(sums, axis=1, keepdims=True)
        return (sums / np.maximum(norms, 1e-9)).astype(np.float32)


def _features(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(mixed bits of all tokens and pairs of neighbors in chunks [n, size], their rows), int64."""
    ids = tokens.astype(np.uint64)
    pairs = (ids[:, :-1] + np.uint64(1)) << np.uint64(32) | ids[:, 1:]
    real = tokens >= 0
    found = [ids[real], pairs[real[:, 1:]]]
    rows = [np.nonzero(real)[0], np.nonzero(real[:, 1:])[0]]
    bits = np.concatenate(found)
    for factor in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):  # splitmix64
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(factor)
    return (bits >> np.uint64(8)).astype(np.int64), np.concatenate(rows)


class Index:
    """Nearest chunks of a database, by faiss: exact where it is small."""

    def __init__(self, data: IndexedDataset, database: Database, size: int):
        if find_spec("faiss") is None:
            raise UserError("mjax.data.neighbors needs faiss; pip install 'mjax[retro]'")
        import faiss

        places = data, database.starts, size
        self.vectors = Vectors(_blocks(*places))
        count = len(database.starts)
        self.index = faiss.IndexFlatIP(VECTOR)
        if count > EXACT:
            parts = int(count**0.5)
            kind = f"IVF{parts},Flat"
            self.index = faiss.index_factory(VECTOR, kind, faiss.METRIC_INNER_PRODUCT)
            faiss.extract_index_ivf(self.index).cp.niter = 10
            chosen = np.linspace(0, count - 1, min(count, 40 * parts)).astype(np.int64)
            self.index.train(self.vectors(texts_of(data, database.starts[chosen], size)))
            self.index.nprobe = PROBED
        for tokens in _blocks(*places):
            self.index.add(self.vectors(tokens))

    def nearest(self, tokens: np.ndarray) -> np.ndarray:
        """Numbers of chunks int64 [n, ASKED], the nearest first, for chunks of tokens [n, size]."""
        return self.index.search(self.vectors(tokens), ASKED)[1]


def _blocks(data: IndexedDataset, starts: np.ndarray, size: int) -> Iterator[np.ndarray]:
    """The tokens of chunks at the given places, some at a time."""
    for begin in range(0, len(starts), BLOCK):
        yield texts_of(data, starts[begin : begin + BLOCK], size)


def first_allowed(found: np.ndarray, allowed: np.ndarray, count: int) -> np.ndarray:
    """The first `count` numbers of each row of `found` [n, m] that are allowed, then MISSING."""
    order = np.argsort(~allowed, axis=1, kind="stable")[:, :count]
    kept = np.take_along_axis(allowed, order, 1)
    kept = np.where(kept, np.take_along_axis(found, order, 1), MISSING)
    return np.pad(kept, ((0, 0), (0, count - kept.shape[1])), constant_values=MISSING)


def search(
    dataset: GPTDataset, count: int, index: Index, database: Database, same: bool, cfg: Config
) -> np.ndarray:
    """int64 [count, C, n]: where neighbors of the chunks of the first samples begin, or MISSING.

    `same`: the samples are from the corpus of the database.
    """
    retro, length = cfg.model.retro, cfg.data.seq_length
    chunks = length // retro.chunk_length
    starts = np.append(database.starts, MISSING)
    documents = np.append(database.documents, MISSING)
    found = np.empty((count, chunks, retro.num_neighbors), np.int64)
    step = max(1, BLOCK // chunks)
    for begin in range(0, count, step):
        samples = np.arange(begin, min(begin + step, count))
        tokens = dataset.batch(samples)["tokens"].reshape(-1, retro.chunk_length)
        nearest = index.nearest(tokens)
        allowed = (nearest >= 0).reshape(len(samples), -1)
        theirs = documents[nearest].reshape(len(samples), -1)
        for row, sample in enumerate(samples if same else ()):
            allowed[row] &= ~np.isin(theirs[row], dataset.documents_of(sample))
        kept = first_allowed(nearest, allowed.reshape(nearest.shape), retro.num_neighbors)
        found[samples] = starts[kept].reshape(len(samples), chunks, -1)
    return found


class NeighborDataset:
    """The first `count` samples of a data set with the tokens of their chunks' neighbors.

    The field "neighbors" is int32 [B, C*n, R] (`models/neighbors.py`). `build` looks neighbors up
    where none are kept; None: a run stops in a line that says how to.
    """

    def __init__(
        self,
        dataset: GPTDataset,
        count: int,
        training: GPTDataset,
        cfg: Config,
        build: Callable[[GPTDataset, int], np.ndarray] | None = None,
    ):
        self.dataset, self.corpus, retro = dataset, training.dataset, cfg.model.retro
        self.length = retro.retrieved_length
        key = {
            "samples": dataset.key | {"count": count},
            "database": training.key | {"num_samples": None, "seed": None, "seq_length": None},
            "chunk_length": retro.chunk_length,
            "num_neighbors": retro.num_neighbors,
            "search": [VECTOR, BUCKETS, ASKED, EXACT, PROBED],
        }

        def looked_up() -> list[np.ndarray]:
            if build is None:
                raise UserError(
                    f"{dataset.prefix}: no neighbors are kept for the {count} samples of "
                    "this run (its data, seed, steps and model.retro); run python -m "
                    "mjax.data.neighbors with the same config"
                )
            return [build(dataset, count)]

        folder = cfg.data.cache_dir or f"{dataset.prefix}.cache"
        (self.starts,), _ = cached_arrays(folder, key, ["neighbors"], looked_up)

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def max_documents(self) -> int:
        return self.dataset.max_documents

    @property
    def padded(self) -> bool:
        return self.dataset.padded

    def names(self, indices: Sequence[int] | np.ndarray) -> list[str]:
        """Names of samples `indices`, from the data set."""
        return self.dataset.names(indices)

    def batch(self, indices: Sequence[int] | np.ndarray) -> Batch:
        """Samples `indices` and their neighbors, stacked."""
        starts = np.asarray(self.starts[np.asarray(indices, np.int64)])
        texts = texts_of(self.corpus, starts.reshape(-1), self.length)
        neighbors = texts.reshape(len(starts), -1, self.length)
        return self.dataset.batch(indices) | {"neighbors": neighbors}


def main(argv: list[str] | None = None) -> int:
    """The command line; prints one JSON line on success."""
    about = "Look up the neighbors of the chunks of a run's samples."
    parser = argparse.ArgumentParser(prog="python -m mjax.data.neighbors", description=about)
    add_config_arguments(parser)
    _, cfg = config_from_args(parser, argv)
    if not cfg.model.is_retro or cfg.data.mock:
        raise UserError(
            f"model.layer_pattern={cfg.model.layer_pattern}, data.mock={cfg.data.mock}: neighbors "
            "are for RETRO (R blocks) on text; give its config"
        )
    from mjax.data.loader import run_datasets

    began = time.perf_counter()
    size = cfg.model.retro.chunk_length
    counts, (training, held_out) = run_datasets(cfg)
    corpus = training.dataset
    database = database_of(corpus, training.sequences, size)
    index = Index(corpus, database, size)

    def build(dataset: GPTDataset, count: int) -> np.ndarray:
        same = os.path.abspath(dataset.prefix) == os.path.abspath(training.prefix)
        return search(dataset, count, index, database, same, cfg)

    made = {"database_chunks": len(database.starts)}
    named = ("train", training), ("held_out", held_out)
    for (name, dataset), count in zip(named, counts, strict=True):
        if dataset is not None:
            starts = NeighborDataset(dataset, count, training, cfg, build).starts
            made[f"{name}_chunks"] = int(starts[..., 0].size)
            made[f"{name}_missing"] = round(float((starts < 0).mean()), 4)
    made["seconds"] = round(time.perf_counter() - began, 1)
    print(json.dumps(made))
    return 0


if __name__ == "__main__":
    run_cli(main)
