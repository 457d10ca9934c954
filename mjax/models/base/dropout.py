"""Random numbers of tokens: dropout, and the jitter of routers.

They are functions of a token's place in the global batch. So they are equal on every mesh and for
every number of micro-batches.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from mjax.models.base.context import Context, Tokens


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

    mask = drawn_for_tokens(keep, tokens, ctx, salt)
    return jnp.where(mask, x / (1 - rate), 0).astype(x.dtype)


def jitter(
    x: jax.Array, most: float, tokens: Tokens, ctx: Context, salt: jax.Array | int
) -> jax.Array:
    """x [B, S/tp, D] times numbers drawn from 1 - most to 1 + most, as `dropout` draws its mask."""
    if most == 0 or not ctx.training.dropout:
        return x

    def factors(key: jax.Array) -> jax.Array:
        return jax.random.uniform(key, x.shape[2:], minval=1 - most, maxval=1 + most)

    return (x * drawn_for_tokens(factors, tokens, ctx, salt)).astype(x.dtype)


def drawn_for_tokens(
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
