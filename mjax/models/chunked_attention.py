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

from mjax.config.model_schema import ModelConfig
from mjax.kernels.attention import attention
from mjax.models.attention import attention_arrays
from mjax.models.branch import BranchInputs, Source
from mjax.models.context import Context, Tokens, tokens_of
from mjax.models.context_attention import KEY_EXCHANGES, AllToAllGroup
from mjax.models.cross_attention import CrossAttention


class ChunkedCrossAttention(CrossAttention):
    """[B, S/tp, D] -> [B, S/tp, D]: attention to the neighbors of the last chunk that is whole.

    Tokens before its end, and those whose chunk has no neighbors, get zeros.
    """

    def attend(self, q: jax.Array, k: jax.Array, v: jax.Array, inputs: BranchInputs) -> jax.Array:
        group, size = _whole_sequences(inputs.ctx), self.cfg.retro.chunk_length
        q, k, v = group.split_heads(q, k, v)
        batch, length, *of_token = q.shape
        chunks = batch * (length // size)
        behind = [(0, 0), (0, size - 1), (0, 0), (0, 0)]
        before = [(0, 0), (size - 1, 0), (0, 0), (0, 0)]
        q = jnp.pad(q[:, size - 1 :], behind).reshape(chunks, size, *of_token)
        k, v = (x.reshape(chunks, -1, *x.shape[2:]) for x in (k, v))
        real = jnp.ones(k.shape[:2], jnp.int32)
        if inputs.source.tokens.segments is not None:
            real = group.gather(inputs.source.tokens.segments, 1).reshape(real.shape)
        out = self._of_chunks(q, k, v, inputs, inputs.tokens, real)
        out = jnp.where(real.any(1)[:, None, None, None], out, 0)
        out = jnp.pad(out.reshape(batch, length, *of_token), before)[:, :length]
        return group.to_sequence(out)

    def _of_chunks(self, q, k, v, inputs: BranchInputs, text: Tokens, real=None) -> jax.Array:
        """Attention of q [P, T, N, H] to k, v [P, T', K, H] of the same of all P chunks of a text.

        Keys are seen where `real` int32 [P, T'] is 1. It is plain XLA: fused kernels know no
        padding between the keys of cross-attention, and the scores are few.
        """
        of_row = q.shape[0] // len(text.rows)
        rows = (text.rows[:, None] * of_row + jnp.arange(of_row)).reshape(-1)
        seen = None if real is None else jnp.ones(q.shape[:2], jnp.int32)
        asking = tokens_of(q.shape[:2], segments=seen, rows=rows, key=inputs.tokens.key)
        read = Source(None, tokens_of(k.shape[:2], segments=real))
        arrays = attention_arrays(self.cfg, replace(inputs, tokens=asking, source=read))
        own = _whole_sequences(inputs.ctx).own_dropout(arrays.dropout)
        plain = {"max_documents": 0, "padded": False, "implementation": "xla"}
        call = replace(self.call(inputs), **plain)
        return attention(q, k, v, call, replace(arrays, dropout=own))

    @staticmethod
    def flops(cfg: ModelConfig, letter: str, seq_length: int) -> float:
        keys = cfg.retro.num_neighbors * cfg.retro.retrieved_length
        return CrossAttention.flops(cfg, letter, keys)


class ChunkAttention(ChunkedCrossAttention):
    """[B*C*n, R/tp, D] -> the same: neighbors attend to the chunk that they were retrieved for.

    No token before the chunk's last one reads what they become, so they see all of it.
    """

    source_norm = "decoder_norm"

    def attend(self, q: jax.Array, k: jax.Array, v: jax.Array, inputs: BranchInputs) -> jax.Array:
        group, size = _whole_sequences(inputs.ctx), self.cfg.retro.chunk_length
        q, k, v = group.split_heads(q, k, v)
        shape, chunks = q.shape, k.shape[0] * (k.shape[1] // size)
        q, k, v = (x.reshape(chunks, -1, *x.shape[2:]) for x in (q, k, v))
        out = self._of_chunks(q, k, v, inputs, inputs.source.tokens)
        return group.to_sequence(out.reshape(shape))

    @staticmethod
    def flops(cfg: ModelConfig, letter: str, seq_length: int) -> float:
        return CrossAttention.flops(cfg, letter, cfg.retro.chunk_length)


def _whole_sequences(ctx: Context) -> AllToAllGroup:
    """All devices of cp, which trade heads for sequence."""
    return KEY_EXCHANGES["a2a"].group(ctx)


def neighbor_rows(neighbors: jax.Array) -> jax.Array:
    """int32 [B, C*n, R] with -1 for padding -> ids to embed [B*C*n, R]."""
    return jnp.maximum(neighbors, 0).reshape(-1, neighbors.shape[-1])


def beside_neighbors(
    text: Tokens, neighbors: jax.Array, columns: jax.Array | None = None
) -> Tokens:
    """Facts about the tokens of neighbors, int32 [B, C*n, R], with those about the text's tokens.

    Padding is segment 0. `columns` are those of the neighbors' tokens on this device; None: all.
    """
    flat = neighbors.reshape(-1, neighbors.shape[-1])
    numbers = jnp.arange(neighbors.shape[1], dtype=jnp.int32)
    rows = text.rows[:, None] * neighbors.shape[1] + numbers
    segments = (flat >= 0).astype(jnp.int32)
    place = {"rows": rows.reshape(-1), "columns": columns, "key": text.key}
    return replace(tokens_of(flat.shape, segments=segments, **place), target=text)
