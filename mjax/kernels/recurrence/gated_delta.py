"""The gated delta rule (Gated DeltaNet, arXiv 2412.06464), in matmuls over chunks.

A head has a state S [P, N], which maps keys to values. A token lets it decay by a, then moves what
the key k reads of it towards the value v by the share beta, and reads it with the query q:

    S[t] = a[t] S[t-1] (I - beta[t] k[t] k[t]^T) + beta[t] v[t] k[t]^T        y[t] = S[t] q[t]

A token that starts a document forgets the state before. `gated_delta_step` computes just that.
`gated_delta` cuts the sequence in chunks. With l[t] the product of a from the start of t's chunk,
S[t] = l[t] S + sum over s <= t of l[t] / l[s] u[s] k[s]^T, where S is the state before the chunk
and u = beta (v - what k reads of the state that has decayed). The u of a chunk solve

    (I + A) u = beta v - beta l (S k)        A[t, s] = beta[t] l[t] / l[s] (k[t] . k[s]) for s < t

a unit lower triangular system: the UT transform of the WY form (section 3.3 of the paper). `values`
and `readers` are its solutions for both right sides, so that u = values - S readers. From chunk to
chunk goes the state alone.

Invariant: states, decays, sums and the system are fp32 (fp64 for inputs of fp64). Other matmuls
read their operands in v's dtype. The backward keeps the inputs and the states between chunks, [B,
C, H, P, N], and computes all else again, matrices of few chunks at a time (`chunks.py`). So memory
is linear in the length. On GPUs our Triton kernels (`gated_delta_fused.py`) solve the systems and
walk from chunk to chunk where the chooser says so.

Letters: B batch, S sequence, C chunks, Q tokens of a chunk, G heads of keys, R heads of values of
each, H = G R, N channels of a key, P channels of a value.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from mjax.kernels.base.chooser import choose
from mjax.kernels.recurrence import gated_delta_fused as fused
from mjax.kernels.recurrence.chunks import (
    by_group,
    cut,
    decays_between,
    documents_before,
    documents_of,
    in_blocks,
    pass_back,
    pass_states,
    wide_dtype,
)
from mjax.kernels.recurrence.forks import ForkedReads, Forks, forked_scan
from mjax.kernels.recurrence.token_step import StateSlots, TokenStep, step_in_slots

# Names of what the forward leaves (`config/languages/remat.py`).
OUTPUT, STATES = "delta_out", "delta_states"

_keep_states = functools.partial(
    jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(STATES)
)


class DeltaInputs(NamedTuple):
    """The inputs of the rule for each token.

    q, k: [B, S, G, N]; k of length 1 at most. v: [B, S, H, P].
    log_decay: fp32 [B, S, H], not positive. beta: fp32 [B, S, H], from 0 to 1.
    A token with log_decay and beta 0 leaves the state as it is.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    log_decay: jax.Array
    beta: jax.Array


class ChunkEffect(NamedTuple):
    """The effect of a chunk on the state S before it: left S + (values - S readers)^T writers.

    values [Q, H, P] and readers [Q, H, N] solve its system, writers [Q, H, N] are its keys as they
    have decayed at its end, all in v's dtype. left, fp32 [H], is left of S.
    """

    values: jax.Array
    readers: jax.Array
    writers: jax.Array
    left: jax.Array


class Decays(NamedTuple):
    """Decays at the tokens of a chunk.

    log: fp32 [Q, H], the sums of log_decay from the chunk's start on.
    seen: fp32 [Q, H], the share of the state before the chunk that each token sees.
    documents: the tokens' documents [Q], or None.
    """

    log: jax.Array
    seen: jax.Array
    documents: jax.Array | None


def gated_delta(
    inputs: DeltaInputs,
    *,
    chunk: int,
    starts: jax.Array | Forks | None = None,
    initial: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(y [B, S, H, P] in v's dtype, the state after the last token, fp32 [B, H, P, N]).

    `starts` bool [B, S] marks tokens that start a document. `initial` fp32 [B, H, P, N] is the
    state before the first token; a document that starts there does not see it. `chunk` is a number
    of tokens. It changes nothing but rounding. With `Forks` there is no `initial`.
    """
    if isinstance(starts, Forks):
        y, final = forked_scan(ForkedReads(*inputs), starts, chunk)
        return checkpoint_name(y, OUTPUT), final
    batch, length, heads, size = inputs.v.shape
    if initial is None:
        shape = batch, heads, size, inputs.k.shape[-1]
        initial = jnp.zeros(shape, wide_dtype(inputs.v.dtype))
    y, final = _gated_delta_of_chunks(*_in_chunks(inputs, chunk, starts), initial)
    y = y.reshape(batch, -1, heads, size)[:, :length]
    return checkpoint_name(y, OUTPUT), final


@_keep_states
def _gated_delta_of_chunks(inputs: DeltaInputs, documents: jax.Array | None, initial: jax.Array):
    """`gated_delta` of chunks: inputs [B, C, Q, ...], documents int32 [B, C, Q]."""
    decays, left = _decays_of_chunks(inputs, documents)
    chunks = _effects_of_chunks(inputs, decays, left)
    states, final = _pass_states(chunks, initial)
    of_chunk = inputs, decays, chunks, states
    return in_blocks(_delta_output, decays.log, of_chunk), final


@functools.partial(_keep_states, static_argnums=1)
def gated_delta_final(
    inputs: DeltaInputs, chunk: int, starts: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """(the state E that a sequence leaves where it starts from none [B, H, P, N], its transition M
    [B, H, N, N]), fp32: a state S before it becomes S M + E.

    M goes through the chunks as N more channels of values, which begin as the identity and of which
    tokens write none.
    """
    cut_inputs, documents = _in_chunks(inputs, chunk, starts)
    chunks = _effects_of_chunks(cut_inputs, *_decays_of_chunks(cut_inputs, documents))
    batch, _, heads, size = inputs.v.shape
    width = inputs.k.shape[-1]
    more = [(0, 0)] * 4 + [(0, width)]
    chunks = chunks._replace(values=jnp.pad(chunks.values, more))
    initial = jnp.eye(size + width, width, -size, dtype=wide_dtype(inputs.v.dtype))
    initial = jnp.broadcast_to(initial, (batch, heads, *initial.shape))
    _, final = _pass_states(chunks, initial)
    return final[:, :, :size], final[:, :, size:]


def gated_delta_step(
    state: jax.Array, token: DeltaInputs, slots: StateSlots | None = None
) -> tuple[jax.Array, jax.Array]:
    """(the new state, y [B, H, P] in v's dtype) of one token of each row.

    The fields of `token` lack the axis of the sequence. The state is fp32 [B, H, P, N], or with
    `slots` that of all slots, [slots, H, P, N].
    """
    wide = state.dtype
    if slots is not None:
        decay, beta = jnp.exp(token.log_decay.astype(wide)), token.beta.astype(wide)
        step = TokenStep(decay, beta, token.v, token.k, token.q, corrects=True)
        return step_in_slots(state, slots, step, lambda rows: gated_delta_step(rows, token))
    heads = token.v.shape[1] // token.k.shape[1]
    q, k = (jnp.repeat(v.astype(wide), heads, 1) for v in (token.q, token.k))
    state = state * jnp.exp(token.log_decay.astype(wide))[..., None, None]
    exactly = functools.partial(jnp.einsum, precision="highest")
    error = token.v.astype(wide) - exactly("zhpn,zhn->zhp", state, k)
    written = token.beta.astype(wide)[..., None] * error
    state = state + written[..., None] * k[:, :, None]
    return state, exactly("zhpn,zhn->zhp", state, q).astype(token.v.dtype)


# ---- chunks --------------------------------------------------------------------------------------


def _in_chunks(
    inputs: DeltaInputs, chunk: int, starts: jax.Array | None
) -> tuple[DeltaInputs, jax.Array | None]:
    """(inputs [B, C, Q, ...], documents [B, C, Q]); zeros at the end leave a state as it is."""
    chunk = min(chunk, inputs.v.shape[1])
    documents = None if starts is None else documents_of(starts, chunk)
    return DeltaInputs(*(cut(v, chunk) for v in inputs)), documents


def _decays_of_chunks(inputs: DeltaInputs, documents: jax.Array | None) -> tuple[Decays, jax.Array]:
    """(decays of the tokens of all chunks [B, C, Q, ...], what is left of a state after each
    [B, C, H])."""
    log = jnp.cumsum(inputs.log_decay.astype(wide_dtype(inputs.v.dtype)), 2)
    seen = jnp.exp(log)
    if documents is not None:
        before = documents_before(documents)[..., None]
        seen = seen * (documents == before)[..., None]
    return Decays(log, seen, documents), seen[:, :, -1]


def _effects_of_chunks(inputs: DeltaInputs, decays: Decays, left: jax.Array) -> ChunkEffect:
    """The effect of each chunk on a state, [B, C, ...]."""
    values, readers = in_blocks(_solve, decays.log, (inputs, decays))
    rest = jnp.exp(decays.log[:, :, -1:] - decays.log)
    if decays.documents is not None:
        rest = rest * (decays.documents == decays.documents[:, :, -1:])[..., None]
    k = jnp.repeat(inputs.k, rest.shape[-1] // inputs.k.shape[-2], 3)
    writers = (k * rest[..., None]).astype(k.dtype)
    return ChunkEffect(values, readers, writers, left)


def _solve(inputs: DeltaInputs, decays: Decays) -> tuple[jax.Array, jax.Array]:
    """The `values` and `readers` of a chunk."""
    _, k, v, _, beta = inputs
    groups, wide = k.shape[1], decays.log.dtype
    beta = beta.astype(wide)
    products = jnp.einsum("qgn,sgn->gqs", k, k, preferred_element_type=wide)
    system = products[:, None] * decays_between(*decays[::2], groups)
    by_heads = beta.T.reshape(groups, -1, len(v), 1)
    seen = by_group((beta * decays.seen)[..., None], groups)
    right = by_group(v * beta[..., None], groups), k[:, :, None] * seen
    right = jnp.concatenate([side.astype(wide) for side in right], -1)
    solve = fused.solve if _has_kernel(v, k) else _solve_triangular
    made = solve(system * by_heads, jnp.moveaxis(right, 0, 2))
    made = jnp.moveaxis(made, 2, 0).reshape(*v.shape[:2], -1).astype(v.dtype)
    return made[..., : v.shape[-1]], made[..., v.shape[-1] :]


def _has_kernel(v: jax.Array, k: jax.Array) -> bool:
    """Whether our kernels take chunks of values [..., Q, H, P] and keys [..., Q, G, N]."""
    tokens, width = k.shape[-3], k.shape[-1]
    return choose("gated_delta", v.dtype, v.shape, width=width, chunk=tokens).name == "triton"


def _solve_triangular(system: jax.Array, right: jax.Array) -> jax.Array:
    """x [..., Q, W] of (I + system) x = right, of what is below the diagonal of system."""
    sides = {"left_side": True, "lower": True, "unit_diagonal": True}
    return lax.linalg.triangular_solve(system, right, **sides)


def _delta_output(
    inputs: DeltaInputs, decays: Decays, chunk: ChunkEffect, state: jax.Array
) -> jax.Array:
    """y [Q, H, P] of one chunk, from the state before it."""
    q, k, v, _, _ = inputs
    groups, wide = k.shape[1], {"preferred_element_type": decays.log.dtype}
    products = jnp.einsum("qgn,sgn->gqs", q, k, **wide)
    weights = products[:, None] * decays_between(*decays[::2], groups)
    written = _written(chunk, state)
    within = jnp.einsum(
        "grqs,sgrp->qgrp", weights.astype(v.dtype), by_group(written, groups), **wide
    )
    grouped = state.astype(v.dtype).reshape(groups, -1, *state.shape[1:])
    from_state = jnp.einsum("qgn,grpn->qgrp", q, grouped, **wide)
    y = within + from_state * by_group(decays.seen[..., None], groups)
    return y.reshape(v.shape).astype(v.dtype)


def _written(chunk: ChunkEffect, state: jax.Array) -> jax.Array:
    """u [..., Q, H, P], in v's dtype: what the tokens of a chunk write."""
    values, readers = chunk.values, chunk.readers
    wide = {"preferred_element_type": state.dtype}
    read = jnp.einsum("...hpn,...qhn->...qhp", state.astype(values.dtype), readers, **wide)
    return (values - read).astype(values.dtype)


# ---- from chunk to chunk -------------------------------------------------------------------------


def _advance(chunk: ChunkEffect, state: jax.Array) -> jax.Array:
    """The state [B, H, P, N] after a chunk of each row."""
    wide = {"preferred_element_type": state.dtype}
    new = jnp.einsum("zqhp,zqhn->zhpn", _written(chunk, state), chunk.writers, **wide)
    return state * chunk.left[..., None, None] + new


@jax.custom_vjp
def _pass_states(chunks: ChunkEffect, initial: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(the state before each chunk [B, C, H, P, N], the last one [B, H, P, N])."""
    return _pass_forward(chunks, initial)[0]


def _pass_forward(chunks: ChunkEffect, initial: jax.Array):
    if _has_kernel(chunks.values, chunks.readers):
        states, final = fused.states_of(chunks, initial)
    else:
        states, final = pass_states(_advance, chunks, initial)
    states = checkpoint_name(states, STATES)
    return (states, final), (chunks, states)


def _pass_back(saved: tuple, gradients: tuple):
    chunks, _ = saved
    if _has_kernel(chunks.values, chunks.readers):
        return fused.gradients_of(*saved, *gradients)
    return pass_back(_advance, *saved, gradients)


_pass_states.defvjp(_pass_forward, _pass_back)
