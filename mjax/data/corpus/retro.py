"""Samples with the tokens of their chunks' neighbors, for RETRO.

A neighbor is a chunk and the tokens after it in its document. Invariant: the neighbors are kept
beside the data under a hash of data, order of samples and settings, so a run finds its own or none,
and resumes with the same.
"""

from collections.abc import Callable, Sequence

import numpy as np

from mjax.config.schema.run import Config
from mjax.data.base.cache import cached_arrays
from mjax.data.corpus.gpt import FieldArrays, GPTDataset
from mjax.data.corpus.indexed import IndexedDataset
from mjax.errors import UserError

MISSING = -1  # in place of a neighbor, and of tokens behind its end
# How neighbors are searched (`neighbor_index.py`); part of the name under which they are kept.
VECTOR = 128  # numbers of a vector
BUCKETS = 1 << 18  # of tokens and pairs, whose rarity is counted
ASKED = 100  # nearest chunks, before those of a sample's own documents are left out
EXACT = 1 << 15  # chunks of a database that is searched as a whole
PROBED = 8  # parts that are searched of a larger one


def texts_of(data: IndexedDataset, starts: np.ndarray, length: int) -> np.ndarray:
    """int32 [n, length]: the tokens from each place on to the end of its document, then -1.

    A place of -1 is nowhere.
    """
    document = np.searchsorted(data.offsets, starts, side="right") - 1
    ends = data.offsets[document] + data.lengths[document]
    left = np.minimum(ends - starts, length)
    sizes = np.where(starts < 0, 0, left)
    places = np.maximum(starts, 0)
    is_text = np.arange(length) < sizes[:, None]
    texts = np.full(is_text.shape, MISSING, np.int32)
    texts[is_text] = data.gather(places, sizes)
    return texts


class NeighborDataset:
    """The first `count` samples of a data set with the tokens of their chunks' neighbors.

    The field "neighbors" is int32 [B, C*n, R] (`objectives/retrieved.py`). `build` looks neighbors
    up where none are kept; None: a run stops in a line that says how to.
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

    def batch(self, indices: Sequence[int] | np.ndarray) -> FieldArrays:
        """Samples `indices` and their neighbors, stacked."""
        starts = np.asarray(self.starts[np.asarray(indices, np.int64)])
        texts = texts_of(self.corpus, starts.reshape(-1), self.length)
        neighbors = texts.reshape(len(starts), -1, self.length)
        return self.dataset.batch(indices) | {"neighbors": neighbors}
