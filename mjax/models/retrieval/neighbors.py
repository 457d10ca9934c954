"""RETRO as a model: a decoder whose layers read neighbors of its chunks (arXiv 2112.04426)."""

import jax

from mjax.models.base.context import Context, Tokens
from mjax.models.heads.encoder_decoder import EncoderDecoderParts
from mjax.models.retrieval.chunked_attention import beside_neighbors, neighbor_rows


class NeighborParts(EncoderDecoderParts):
    """Streams of a text and of the neighbors of its chunks, embedded by one table."""

    def activations(
        self, tokens: jax.Array, info: Tokens, ctx: Context, neighbors: jax.Array
    ) -> jax.Array:
        """The final normed activations [B, S, D] of a text.

        `neighbors` int32 [B, C*n, R] are those of each of the C chunks of a row, -1 for padding.
        """
        info = beside_neighbors(info, neighbors)
        return self.hidden(neighbor_rows(neighbors), info, ctx, target=tokens)[0]
