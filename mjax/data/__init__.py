"""Corpora, sample order and batches; nothing here imports JAX until a loader starts."""

from mjax.data.blend import blend_indices
from mjax.data.corpus.gpt import GPTDataset
from mjax.data.corpus.indexed import IndexedDataset, IndexedDatasetWriter

__all__ = ["GPTDataset", "IndexedDataset", "IndexedDatasetWriter", "blend_indices"]
