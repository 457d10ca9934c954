"""NEFTune: noise on the embeddings of training (arXiv:2310.05914).

As dropout it is a function of a token's place, so it is equal on every mesh.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from mjax.models.base.context import Context, Tokens
from mjax.models.base.dropout import drawn_for_tokens

_SALT = 3 << 24  # tells its draws from those of dropout


@dataclass(frozen=True)
class EmbeddingNoise:
    """NEFTune's noise of strength alpha (`train.neftune_alpha`)."""

    alpha: float

    def __call__(self, x: jax.Array, tokens: Tokens, ctx: Context) -> jax.Array:
        """Embeddings x [B, S/tp, D] with noise, uniform within alpha / sqrt(L * D).

        L is the number of tokens of a token's document, so that packing changes no scale.
        """
        if not ctx.training.dropout:
            return x

        def draw(key: jax.Array) -> jax.Array:
            return jax.random.uniform(key, x.shape[2:], minval=-1, maxval=1)

        lengths = _document_lengths(tokens, ctx)
        lengths = ctx.parallel.shard_seq(lengths)
        most = self.alpha / jnp.sqrt(lengths * jnp.float32(x.shape[-1]))
        noise = drawn_for_tokens(draw, tokens, ctx, _SALT)
        noise = most[..., None] * noise
        return (x + noise).astype(x.dtype)


def _document_lengths(tokens: Tokens, ctx: Context) -> jax.Array:
    """The tokens of each token's document, int32 [B, S]; of its row, where there are none."""
    if tokens.segments is None:
        length = tokens.positions.shape[1] * ctx.parallel.cp
        return jnp.full(tokens.positions.shape, length, jnp.int32)
    whole = jnp.sort(ctx.parallel.all_gather(tokens.segments, "cp", 1), axis=1)
    return jax.vmap(_counts)(whole, tokens.segments)


def _counts(ordered: jax.Array, values: jax.Array) -> jax.Array:
    """How often each of `values` [S] is among sorted ones."""
    first = jnp.searchsorted(ordered, values, side="left")
    end = jnp.searchsorted(ordered, values, side="right")
    return end - first
