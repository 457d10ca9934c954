"""RETRO's attention between a text and the neighbors of its chunks (arXiv 2112.04426).

A row of S tokens is cut into C chunks of m tokens. For each, n neighbors of R tokens were retrieved
by those m tokens. So they may tell of the chunk's last token and of what follows it, and of nothing
before: the last token of chunk c and all but the last of chunk c + 1 attend to the neighbors of
chunk c. The first m - 1 tokens attend to nothing. These are the borders of Megatron-LM's
`RetroDecoderCrossAttention`, too. Neighbors are rows of their own, [B*C*n, R], and attend to the
chunk that they were retrieved for. Over cp both exchange heads for sequence, because a chunk's
tokens lie on several devices.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp

from mjax.config.languages.layer_pattern import ENCODER
from mjax.config.schema.model import ModelConfig
from mjax.kernels.attention.api import attention
from mjax.models.attention.calls import attention_arrays
from mjax.models.attention.cross import CrossAttention
from mjax.models.attention.key_exchange import KEY_EXCHANGES, AllToAllGroup
from mjax.models.base.branch import BranchInputs, Source
from mjax.models.base.context import Context, Tokens, tokens_of


class ChunkedCrossAttention(CrossAttention):
    """[B, S/tp, D] -> [B, S/tp, D]: attention to the neighbors of the last chunk that is whole.

    Tokens before its end, and those whose chunk has no neighbors, get zeros.
    """

    def attend(self, q: jax.Array, k: jax.Array, v: jax.Array, inputs: BranchInputs) -> jax.Array:
        group = _whole_sequences(inputs.ctx)
        q, k, v = group.split_heads(q, k, v)
        size, length = self.cfg.retro.chunk_length, q.shape[1]
        rows = _numbers(inputs.tokens.rows, length // size)
        nothing = jnp.zeros_like(q[:, 1:size])
        shifted = jnp.concatenate([q[:, size - 1 :], nothing], 1)
        real = inputs.source.tokens.segments
        if real is not None:
            real = group.gather(real, 1).reshape(len(rows), -1)
        out = self.within_chunks(shifted, k, v, inputs, rows, real)
        if real is not None:
            has_any = real.any(1)[:, None, None, None]
            out = jnp.where(has_any, out, 0)
        out = jnp.concatenate([nothing, out.reshape(q.shape)], 1)
        return group.to_sequence(out[:, :length])

    def within_chunks(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        inputs: BranchInputs,
        rows: jax.Array,
        real: jax.Array | None = None,
    ) -> jax.Array:
        """Attention of each chunk's part of q to its part of k, v: [C, T, N, H] for C chunks.

        `rows` int32 [C] are the numbers of chunks, which key dropout. Keys are seen where `real`
        int32 [C, T'] is 1. It is plain XLA: fused kernels know no padding between the keys of
        cross-attention, and the scores are few.
        """
        parts = []
        for x in (q, k, v):
            parts.append(x.reshape(len(rows), -1, *x.shape[2:]))
        of_queries, of_keys = parts[0].shape[:2], parts[1].shape[:2]
        seen = None if real is None else jnp.ones(of_queries, jnp.int32)
        asking = tokens_of(
            of_queries,
            segments=seen,
            rows=rows,
            key=inputs.tokens.key,
        )
        read = Source(None, tokens_of(of_keys, segments=real))
        inputs = replace(inputs, tokens=asking, source=read)
        arrays = attention_arrays(self.cfg, inputs)
        group = _whole_sequences(inputs.ctx)
        arrays = replace(
            arrays,
            dropout=group.own_dropout(arrays.dropout),
        )
        call = replace(
            self.call(inputs),
            max_documents=0,
            padded=False,
            implementation="xla",
        )
        return attention(*parts, call, arrays)

    @staticmethod
    def flops(cfg: ModelConfig, word: str, seq_length: int) -> float:
        keys = cfg.retro.num_neighbors * cfg.retro.retrieved_length
        return CrossAttention.flops(cfg, word, keys)


class ChunkAttention(ChunkedCrossAttention):
    """[B*C*n, R/tp, D] -> the same: neighbors attend to the chunk that they were retrieved for.

    No token before the chunk's last one reads what they become, so they see all of it.
    """

    source_norm = "decoder_norm"

    def attend(self, q: jax.Array, k: jax.Array, v: jax.Array, inputs: BranchInputs) -> jax.Array:
        group = _whole_sequences(inputs.ctx)
        q, k, v = group.split_heads(q, k, v)
        length = k.shape[1]
        chunks = length // self.cfg.retro.chunk_length
        rows = _numbers(inputs.source.tokens.rows, chunks)
        out = self.within_chunks(q, k, v, inputs, rows)
        out = out.reshape(q.shape)
        return group.to_sequence(out)

    @staticmethod
    def flops(cfg: ModelConfig, word: str, seq_length: int) -> float:
        return CrossAttention.flops(cfg, word, cfg.retro.chunk_length)


def _whole_sequences(ctx: Context) -> AllToAllGroup:
    """All devices of cp, which trade heads for sequence."""
    return KEY_EXCHANGES["a2a"].group(ctx)


def _numbers(rows: jax.Array, each: int) -> jax.Array:
    """The numbers int32 [B * each] of what rows, by theirs [B], have `each` of."""
    first = each * rows[:, None]
    return (first + jnp.arange(each, dtype=jnp.int32)).reshape(-1)


def neighbor_rows(neighbors: jax.Array) -> jax.Array:
    """int32 [B, C*n, R] with -1 for padding -> ids to embed [B*C*n, R]."""
    rows = neighbors.reshape(-1, neighbors.shape[-1])
    return jnp.maximum(rows, 0)


def beside_neighbors(
    text: Tokens, neighbors: jax.Array, columns: jax.Array | None = None
) -> Tokens:
    """Facts about a text's tokens, with those about the tokens of neighbors, int32 [B, C*n, R].

    Padding is segment 0. `columns` are those of the neighbors' tokens on this device; None: all.
    """
    _, each, length = neighbors.shape
    real = neighbors.reshape(-1, length) >= 0
    tokens = tokens_of(
        real.shape,
        segments=real.astype(jnp.int32),
        rows=_numbers(text.rows, each),
        columns=columns,
        key=text.key,
    )
    return replace(text, others={ENCODER: tokens})
