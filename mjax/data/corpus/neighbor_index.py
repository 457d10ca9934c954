"""The nearest chunks of a database for each chunk of samples, for RETRO.

The database is documents cut into chunks of `model.retro.chunk_length` tokens; the last chunk of a
document may be shorter. An index (faiss) of their vectors gives each chunk of a sample its nearest
chunks. Chunks of a document that the sample has a part of are left out, as in Megatron-LM
(`megatron/core/datasets/retro/query/query.py`). A vector is a hashed bag of tokens and pairs of
tokens, each weighted by its rarity (tf-idf), of length 1; Megatron's are BERT's.
"""

from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np

from mjax.config.schema.run import Config
from mjax.data.corpus.gpt import GPTDataset
from mjax.data.corpus.indexed import IndexedDataset
from mjax.data.corpus.retro import ASKED, BUCKETS, EXACT, MISSING, PROBED, VECTOR, texts_of
from mjax.errors import UserError

CHUNKS_AT_ONCE = 1 << 14  # chunks that are looked up at a time


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
    first, second = ids[:, :-1] + np.uint64(1), ids[:, 1:]
    pairs = first << np.uint64(32) | second
    is_token = tokens >= 0
    is_pair = is_token[:, 1:]
    token_rows, _ = np.nonzero(is_token)
    pair_rows, _ = np.nonzero(is_pair)
    bits = np.concatenate([ids[is_token], pairs[is_pair]])
    for factor in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):  # splitmix64
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(factor)
    mixed = (bits >> np.uint64(8)).astype(np.int64)
    return mixed, np.concatenate([token_rows, pair_rows])


class NeighborIndex:
    """Nearest chunks of a database, by faiss: exact where it is small."""

    def __init__(self, data: IndexedDataset, database: Database, size: int):
        if find_spec("faiss") is None:
            raise UserError("mjax.data.neighbors needs faiss; pip install 'mjax[retro]'")
        import faiss

        places = data, database.starts, size
        self.vectors = Vectors(_blocks_of_chunks(*places))
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
        for tokens in _blocks_of_chunks(*places):
            self.index.add(self.vectors(tokens))

    def nearest(self, tokens: np.ndarray) -> np.ndarray:
        """Numbers of chunks int64 [n, ASKED], the nearest first, for chunks of tokens [n, size]."""
        return self.index.search(self.vectors(tokens), ASKED)[1]


def _blocks_of_chunks(data: IndexedDataset, starts: np.ndarray, size: int) -> Iterator[np.ndarray]:
    """The tokens of chunks at the given places, some at a time."""
    for begin in range(0, len(starts), CHUNKS_AT_ONCE):
        yield texts_of(data, starts[begin : begin + CHUNKS_AT_ONCE], size)


def first_allowed(found: np.ndarray, allowed: np.ndarray, count: int) -> np.ndarray:
    """The first `count` numbers of each row of `found` [n, m] that are allowed, then MISSING."""
    order = np.argsort(~allowed, axis=1, kind="stable")[:, :count]
    kept = np.take_along_axis(allowed, order, 1)
    kept = np.where(kept, np.take_along_axis(found, order, 1), MISSING)
    return np.pad(kept, ((0, 0), (0, count - kept.shape[1])), constant_values=MISSING)


def search(
    dataset: GPTDataset,
    count: int,
    index: NeighborIndex,
    database: Database,
    same: bool,
    cfg: Config,
) -> np.ndarray:
    """int64 [count, C, n]: where neighbors of the chunks of the first samples begin, or MISSING.

    `same`: the samples are from the corpus of the database.
    """
    retro, length = cfg.model.retro, cfg.data.seq_length
    chunks = length // retro.chunk_length
    starts = np.append(database.starts, MISSING)
    documents = np.append(database.documents, MISSING)
    found = np.empty((count, chunks, retro.num_neighbors), np.int64)
    step = max(1, CHUNKS_AT_ONCE // chunks)
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
