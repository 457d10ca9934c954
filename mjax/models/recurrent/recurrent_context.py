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

from mjax.errors import UserError
from mjax.kernels.recurrence.forks import Forks
from mjax.models.attention.zigzag import natural
from mjax.models.base.context import Context, Tokens

_AXIS = "cp"


def to_pieces(x: jax.Array, ctx: Context) -> jax.Array:
    """[B, S/cp, ...] -> [B * 2, S/(2 cp), ...]: pieces in the order of the sequence, as rows."""
    if ctx.parallel.cp == 1:
        return x
    return _with_rows(x, 2 * len(x))


def from_pieces(x: jax.Array, ctx: Context) -> jax.Array:
    """The inverse of `to_pieces`."""
    if ctx.parallel.cp == 1:
        return x
    return _with_rows(x, len(x) // 2)


def _with_rows(x: jax.Array, rows: int) -> jax.Array:
    """[B, S, ...] with `rows` in the place of B, tokens in order."""
    channels = x.shape[2:]
    return x.reshape(rows, -1, *channels)


def document_starts(tokens: Tokens, ctx: Context) -> jax.Array | Forks | None:
    """Which tokens start a document, bool, as `to_pieces` has them; None: no borders.

    `Forks` where documents may continue a prefix.

    The first token of a sequence starts none, or one, which is the same: no state is before it.
    """
    if tokens.segments is None or ctx.documents.most == 1:
        return None
    if tokens.prefixes is not None:
        if ctx.parallel.cp > 1:
            raise UserError("mesh.cp: states do not start from a prefix over it; set mesh.cp=1")
        return forks_of(tokens.segments, tokens.prefixes)
    segments = to_pieces(tokens.segments, ctx)
    before = segments[:, :1]
    if ctx.parallel.cp > 1:
        before = tokens_before(segments, 1, ctx)
    return jnp.diff(segments, axis=1, prepend=before) != 0


def forks_of(segments: jax.Array, prefixes: jax.Array) -> Forks:
    """The documents of `Tokens.segments` and `Tokens.prefixes`, int32 [B, S]."""
    before = jnp.roll(segments, 1, axis=1)
    before = before.at[:, 0].set(segments[:, 0])
    starts = segments != before
    documents = jnp.cumsum(starts, axis=1, dtype=jnp.int32)
    continues = prefixes > 0
    is_first = continues & (before == prefixes)
    parents = jnp.where(is_first, documents - 1, -1)
    parents = lax.cummax(parents, axis=1)
    return Forks(documents, jnp.where(continues, parents, -1))


def history_of(
    x: jax.Array, starts: jax.Array | None, count: int, ctx: Context
) -> jax.Array | None:
    """The `count` tokens before each piece of x [B * 2, S', ...]; None: there are none.

    Tokens of documents that end before the piece does are zero.
    """
    if ctx.parallel.cp == 1:
        return None
    history = tokens_before(x, count, ctx)
    if starts is None:
        return history
    begun = tokens_before(starts.astype(jnp.int32), count, ctx)
    from_token_on = jax.lax.cumsum(begun, axis=1, reverse=True)
    same = from_token_on == begun
    other_axes = tuple(range(2, x.ndim))
    same = jnp.expand_dims(same, other_axes)
    return jnp.where(same, history, 0)


def tokens_before(x: jax.Array, count: int, ctx: Context) -> jax.Array:
    """[B * 2, count, ...]: the tokens before each piece of x [B * 2, S', ...], zeros before all."""
    length = x.shape[1]
    kept = min(count, length)
    last = x[:, length - kept :]
    of_all = _of_all_pieces(last, ctx)
    line = lax.collapse(of_all, 1, 3)
    nothing = jnp.zeros_like(line, shape=(len(line), count, *x.shape[2:]))
    line = jnp.concatenate([nothing, line], 1)
    found = []
    for piece in _own_pieces(ctx):
        before = lax.dynamic_slice_in_dim(
            line,
            piece * kept,
            count,
            axis=1,
        )
        found.append(before)
    return _as_rows(found)


def states_before(left_behind: jax.Array, left_over: jax.Array, ctx: Context) -> jax.Array:
    """The state before each piece, [B * 2, H, P, N].

    `left_behind` [B * 2, H, P, N] is what a piece leaves in the state. `left_over` is what it
    leaves of a state before it: a factor [B * 2, H], or a matrix [B * 2, H, N, N] behind it.
    """

    def step(state: jax.Array, piece: tuple) -> tuple[jax.Array, jax.Array]:
        new, left = piece
        if left.ndim == state.ndim:
            kept = jnp.matmul(state, left, precision="highest")
        else:
            kept = state * jnp.expand_dims(left, (-2, -1))
        return kept + new, state

    pieces = []
    for of_piece in (left_behind, left_over):
        of_all = _of_all_pieces(of_piece, ctx)
        pieces.append(jnp.moveaxis(of_all, 1, 0))
    nothing = jnp.zeros_like(pieces[0][0])
    _, states = lax.scan(step, nothing, tuple(pieces))
    found = []
    for piece in _own_pieces(ctx):
        before = lax.dynamic_index_in_dim(states, piece, keepdims=False)
        found.append(before)
    return _as_rows(found)


def _of_all_pieces(x: jax.Array, ctx: Context) -> jax.Array:
    """A fact about this device's pieces [B * 2, ...] -> about all, in order: [B, 2 cp, ...]."""
    rows = len(x) // 2
    own = x.reshape(rows, 2, *x.shape[1:])
    gathered = ctx.parallel.all_gather(own, _AXIS, 1)
    return natural(gathered, ctx.parallel.cp)


def _as_rows(pieces: list[jax.Array]) -> jax.Array:
    """[B, ...] of the first piece and of the second -> [B * 2, ...]."""
    both = jnp.stack(pieces, 1)
    return lax.collapse(both, 0, 2)


def _own_pieces(ctx: Context) -> tuple[jax.Array, jax.Array]:
    """The numbers of this device's pieces."""
    device = ctx.parallel.index(_AXIS)
    mirrored = 2 * ctx.parallel.cp - 1 - device
    return device, mirrored
