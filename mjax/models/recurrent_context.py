"""Context parallelism of recurrences: each device scans its own tokens, and states travel.

Attention wants a sequence in zigzag order: device r of the axis cp holds pieces r and 2*cp-1-r of
2*cp. A recurrence wants the order of the sequence. Here the tokens stay where they are. The two
pieces of a device become two rows, and three things cross: the last tokens of each piece, for a
convolution; what each piece leaves in the state; how much it leaves of a state before it. Every
device gathers them, [2*cp] of each, and finds the states before its own pieces.

So the bytes do not grow with the sequence, heads need not divide cp, and stages of a pipeline may
differ, because nothing goes round in a ring. The price is that what a piece leaves is computed once
more. All-to-all over heads, as in Megatron-LM, moves every token's channels twice and repeats
groups. Invariant: the numbers are those of the sequence in one piece, documents included.
"""

import jax
import jax.numpy as jnp
from jax import lax

from mjax.models.context import Context, Tokens
from mjax.models.context_attention import natural

_AXIS = "cp"


def to_pieces(x: jax.Array, ctx: Context) -> jax.Array:
    """[B, S/cp, ...] -> [B * 2, S/(2 cp), ...]: pieces in the order of the sequence, as rows."""
    if ctx.parallel.cp == 1:
        return x
    return x.reshape(2 * x.shape[0], -1, *x.shape[2:])


def from_pieces(x: jax.Array, ctx: Context) -> jax.Array:
    """The inverse of `to_pieces`."""
    if ctx.parallel.cp == 1:
        return x
    return x.reshape(x.shape[0] // 2, -1, *x.shape[2:])


def document_starts(tokens: Tokens, ctx: Context) -> jax.Array | None:
    """Which tokens start a document, bool, as `to_pieces` has them; None: no borders.

    The first token of a sequence starts none, which changes nothing: there is no state before it.
    """
    if tokens.segments is None or ctx.max_documents == 1:
        return None
    segments = to_pieces(tokens.segments, ctx)
    before = segments[:, :1]
    if ctx.parallel.cp > 1:
        before = tokens_before(segments, 1, ctx)
    return jnp.diff(segments, axis=1, prepend=before) != 0


def history_of(
    x: jax.Array, starts: jax.Array | None, count: int, ctx: Context
) -> jax.Array | None:
    """The `count` tokens before each piece of x [B * 2, S', ...]; None: there are none.

    Those of documents that end before the piece does are zero.
    """
    if ctx.parallel.cp == 1:
        return None
    history = tokens_before(x, count, ctx)
    if starts is None:
        return history
    begun = tokens_before(starts.astype(jnp.int32), count, ctx)
    later = jnp.cumsum(begun[:, ::-1], 1)[:, ::-1] - begun
    same = (later == 0).reshape(*later.shape, *[1] * (x.ndim - 2))
    return jnp.where(same, history, 0)


def tokens_before(x: jax.Array, count: int, ctx: Context) -> jax.Array:
    """[B * 2, count, ...]: the tokens before each piece of x [B * 2, S', ...], zeros before all."""
    kept = min(count, x.shape[1])
    last = x[:, x.shape[1] - kept :]
    rows = last.reshape(-1, 2, *last.shape[1:])
    in_order = _of_all_pieces(rows, ctx)
    line = in_order.reshape(len(rows), -1, *last.shape[2:])
    line = jnp.pad(line, [(0, 0), (count, 0), *[(0, 0)] * (line.ndim - 2)])
    of_pieces = []
    for piece in _own_pieces(ctx):
        found = lax.dynamic_slice_in_dim(line, piece * kept, count, 1)
        of_pieces.append(found)
    return jnp.stack(of_pieces, 1).reshape(-1, count, *last.shape[2:])


def states_before(left_behind: jax.Array, left_over: jax.Array, ctx: Context) -> jax.Array:
    """The state before each piece, [B * 2, H, P, N].

    `left_behind` [B * 2, H, P, N] is what a piece leaves in the state, `left_over` [B * 2, H] the
    part of a state before it that is left.
    """
    made, decays = (v.reshape(-1, 2, *v.shape[1:]) for v in (left_behind, left_over))
    made, decays = (jnp.moveaxis(_of_all_pieces(v, ctx), 1, 0) for v in (made, decays))

    def step(state: jax.Array, piece: tuple) -> tuple[jax.Array, jax.Array]:
        new, decay = piece
        return state * decay[..., None, None] + new, state

    _, states = lax.scan(step, jnp.zeros_like(made[0]), (made, decays))
    own = [lax.dynamic_index_in_dim(states, i, 0, keepdims=False) for i in _own_pieces(ctx)]
    return jnp.stack(own, 1).reshape(left_behind.shape)


def _of_all_pieces(x: jax.Array, ctx: Context) -> jax.Array:
    """A fact about this device's pieces [B, 2, ...] -> about all, in order: [B, 2 cp, ...]."""
    return natural(ctx.parallel.all_gather(x, _AXIS, 1), ctx.parallel.cp)


def _own_pieces(ctx: Context) -> tuple[jax.Array, jax.Array]:
    """The numbers of this device's pieces."""
    device = ctx.parallel.index(_AXIS)
    return device, 2 * ctx.parallel.cp - 1 - device
