"""Random numbers of tokens: dropout, the jitter of routers, and noise on embeddings.

They are functions of a token's place in the global batch. So they are equal on every mesh and for
every number of micro-batches.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from mjax.models.base.context import Context, Tokens

_NOISE_SALT = 3 << 24  # tells its draws from those of dropout


def dropout(
    x: jax.Array, rate: float, tokens: Tokens, ctx: Context, salt: jax.Array | int
) -> jax.Array:
    """Inverted dropout on [B, S/tp, D]; the mask is a function of the token's global place alone.

    `salt` distinguishes the call sites of a model. One threefry key per token makes the mask equal
    on every mesh and for every number of micro-batches.
    """
    if rate == 0 or not ctx.training.dropout:
        return x

    def keep(key: jax.Array) -> jax.Array:
        return jax.random.bernoulli(key, 1 - rate, x.shape[2:])

    mask = _of_each_token(keep, tokens, ctx, salt)
    return jnp.where(mask, x / (1 - rate), 0).astype(x.dtype)


def jitter(
    x: jax.Array, most: float, tokens: Tokens, ctx: Context, salt: jax.Array | int
) -> jax.Array:
    """x [B, S/tp, D] times numbers drawn from 1 - most to 1 + most, as `dropout` draws its mask."""
    if most == 0 or not ctx.training.dropout:
        return x

    def factors(key: jax.Array) -> jax.Array:
        return jax.random.uniform(key, x.shape[2:], minval=1 - most, maxval=1 + most)

    return (x * _of_each_token(factors, tokens, ctx, salt)).astype(x.dtype)


def noisy(x: jax.Array, tokens: Tokens, ctx: Context) -> jax.Array:
    """Embeddings [B, S/tp, D] with NEFTune's noise, uniform within alpha / sqrt(L * D).

    L is the number of tokens of a token's document, so that packing changes no scale.
    """
    alpha = ctx.training.neftune_alpha
    if alpha == 0 or not ctx.training.dropout:
        return x

    def draw(key: jax.Array) -> jax.Array:
        return jax.random.uniform(key, x.shape[2:], minval=-1, maxval=1)

    lengths = ctx.parallel.shard_seq(_document_lengths(tokens, ctx))
    most = alpha / jnp.sqrt(lengths * jnp.float32(x.shape[-1]))
    noise = most[..., None] * _of_each_token(draw, tokens, ctx, _NOISE_SALT)
    return (x + noise).astype(x.dtype)


def _document_lengths(tokens: Tokens, ctx: Context) -> jax.Array:
    """The tokens of each token's document, int32 [B, S]; of its row, where there are none."""
    if tokens.segments is None:
        length = tokens.positions.shape[1] * ctx.parallel.cp
        return jnp.full(tokens.positions.shape, length, jnp.int32)
    whole = jnp.sort(ctx.parallel.all_gather(tokens.segments, "cp", 1), axis=1)
    first, end = (
        jax.vmap(functools.partial(jnp.searchsorted, side=side))(whole, tokens.segments)
        for side in ("left", "right")
    )
    return end - first


def _of_each_token(
    draw: Callable[[jax.Array], jax.Array],
    tokens: Tokens,
    ctx: Context,
    salt: jax.Array | int,
) -> jax.Array:
    """[B, S/tp, ...]: what `draw` makes of the key of each token."""
    assert tokens.key is not None, "dropout is on but Tokens.key is None"
    key = jax.random.fold_in(tokens.key, salt)
    columns = ctx.parallel.shard(tokens.columns, "tp", 0)

    def of_token(row: jax.Array, column: jax.Array) -> jax.Array:
        return draw(jax.random.fold_in(jax.random.fold_in(key, row), column))

    return jax.vmap(lambda row: jax.vmap(lambda column: of_token(row, column))(columns))(
        tokens.rows
    )
