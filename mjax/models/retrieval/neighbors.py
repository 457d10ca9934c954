"""RETRO as a model: a decoder whose layers read neighbors of its chunks (arXiv 2112.04426)."""

from dataclasses import replace

import jax

from mjax.models.base.context import Context, tokens_of
from mjax.models.base.inputs import require_inputs
from mjax.models.heads.encoder_decoder import EncoderDecoderParts
from mjax.models.retrieval.chunked_attention import beside_neighbors, neighbor_rows


class NeighborParts(EncoderDecoderParts):
    """Streams of a text and of the neighbors of its chunks, embedded by one table."""

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array | None = None,
        segments: jax.Array | None = None,
        types: jax.Array | None = None,
        *,
        neighbors: jax.Array | None = None,
        ctx: Context = Context(),  # noqa: B008 - frozen
        **others: jax.Array | None,
    ) -> jax.Array:
        """tokens int32 [B, S] -> fp32 logits [B, S, vocab_size].

        `neighbors` int32 [B, C*n, R] are those of each of the C chunks of a row, -1 for padding;
        the rest is as for a decoder.
        """
        assert ctx.parallel.tp == 1, "inside a tp mesh use hidden() and head_loss()"
        require_inputs(self.cfg, {"neighbors": neighbors, **others})
        text = replace(tokens_of(tokens.shape, positions, segments), types=types)
        info = beside_neighbors(text, neighbors)
        x, _, _ = self.hidden(neighbor_rows(neighbors), info, ctx, target=tokens)
        return self.logits(x)
