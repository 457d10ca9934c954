"""Next-token prediction with retrieved neighbors, the objective of RETRO (arXiv 2112.04426).

`data/corpus/neighbor_index.py` looks up the neighbors of each chunk; `data/corpus/retro.py` adds
their tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mjax.models.architectures import NeighborDecoder
from mjax.models.base.context import Context, Tokens
from mjax.models.base.streams import Streams
from mjax.models.retrieval.chunked_attention import beside_neighbors, neighbor_rows
from mjax.objectives.fields import FURTHER_COLUMNS, Batch, BatchField, HostBatch
from mjax.objectives.next_token import NextToken
from mjax.objectives.objective import OfConfig


@dataclass(frozen=True)
class WithNeighbors(OfConfig, NextToken):
    """The cross-entropy of the next token in nats, a mean over unmasked tokens.

    The field "neighbors", int32 [B, C*n, R], has R tokens of each of the n neighbors of a chunk,
    -1 for padding, chunk by chunk.
    """

    fields: ClassVar[Mapping[str, BatchField]] = NextToken.fields | {
        "neighbors": BatchField(np.int32, ("batch", "neighbors", "retrieved"), pad=-1)
    }

    def tokens(self, batch: Batch, base: Tokens, ctx: Context) -> Tokens:
        """Facts about a text's tokens, with those about the tokens of neighbors."""
        columns = batch[FURTHER_COLUMNS["retrieved"]]
        return beside_neighbors(base, batch["neighbors"], columns)

    def embed(self, edges: NeighborDecoder, batch: Batch, tokens: Tokens, ctx: Context) -> Streams:
        ids = neighbor_rows(batch["neighbors"])
        return edges.embed_streams(ids, batch["tokens"], tokens, ctx)

    def make_fields(self, batch: HostBatch, seed: int, step: int, rows: np.ndarray) -> HostBatch:
        """Neighbors made of a row, for speed tests; nothing where the data set has them."""
        if "neighbors" in batch:
            return {}
        neighbors = self.cfg.model.companions(self.cfg.data.seq_length)
        shape = neighbors.count, neighbors.length
        return {"neighbors": np.stack([np.resize(line, shape) for line in batch["tokens"]])}
