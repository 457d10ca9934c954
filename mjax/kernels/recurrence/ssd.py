"""The scan of Mamba-2 (state-space duality, arXiv 2405.21060, section 6), in matmuls over chunks.

A head has a state h [P, N]. With a token it becomes exp(dt * a) * h + dt * outer(x, b), and gives
y = h c. A token that starts a document forgets the state before. `ssd_step` computes just that,
and the tests do so for whole sequences. `ssd` cuts the sequence in chunks. Within a chunk y is a
masked matrix of products of c and b, times x. From chunk to chunk goes the state alone.

Invariant: states, decays and sums are fp32 (fp64 for inputs of fp64). Matmuls read their operands
in x's dtype. The backward keeps the inputs and the states between chunks, [B, chunks, H, P, N], and
computes all else again. The matrices of a chunk, [H, Q, Q], exist for a few chunks at a time
(`chunks.py`). So memory is linear in the length. All heads of a group share b and c, and the
matmuls of states take them together: [heads of a group x P, Q] times [Q, N]. On GPUs our Triton
kernels (`ssd_fused.py`) take the place of all this where the chooser says so.

Letters: B batch, S sequence, Q tokens of a chunk, H heads, G groups, R heads of a group, P channels
of a head, N state.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from mjax.kernels.base.chooser import choose
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
from mjax.kernels.recurrence.ssd_fused import fused_scan
from mjax.kernels.recurrence.token_step import StateSlots, TokenStep, step_in_slots

# Names of what the forward leaves (`config/languages/remat.py`); our kernels leave no states.
OUTPUT, STATES = "ssd_out", "ssd_states"


class SsdInputs(NamedTuple):
    """The inputs of the scan for each token, and `a`.

    x: [B, S, H, P]. dt: fp32 [B, S, H], not negative; 0 leaves the state as it is.
    a: fp32 [H], negative. b, c: [B, S, G, N], of which each group serves H / G consecutive heads.
    """

    x: jax.Array
    dt: jax.Array
    a: jax.Array
    b: jax.Array
    c: jax.Array


def ssd(
    inputs: SsdInputs,
    *,
    chunk: int,
    starts: jax.Array | Forks | None = None,
    initial: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(y [B, S, H, P] in x's dtype, the state after the last token, fp32 [B, H, P, N]).

    `starts` bool [B, S] marks tokens that start a document. `initial` fp32 [B, H, P, N] is the
    state before the first token; a document that starts there does not see it. `chunk` is a number
    of tokens. It changes nothing but rounding. With `Forks` there is no `initial`.
    """
    x, b = inputs.x, inputs.b
    if isinstance(starts, Forks):
        dt = inputs.dt.astype(wide_dtype(x.dtype))
        values = (x * dt[..., None]).astype(x.dtype)
        reads = ForkedReads(inputs.c, b, values, dt * inputs.a, None)
        y, final = forked_scan(reads, starts, chunk)
        return checkpoint_name(y, OUTPUT), final
    batch, length, heads, size = x.shape
    if initial is None:
        initial = jnp.zeros((batch, heads, size, b.shape[-1]), wide_dtype(x.dtype))
    if choose("ssd", x.dtype, x.shape, state=b.shape[-1]).name == "triton":
        y, final = fused_scan(*inputs, starts=starts, initial=initial)
        return checkpoint_name(y, OUTPUT), final
    how = ScanFacts(min(chunk, length), packed=starts is not None)
    if starts is None:
        starts = jnp.zeros((batch, length), bool)
    chunks = SsdInputs(  # zeros at the end leave a state as it is
        *(cut(v, how.chunk) for v in (x, inputs.dt)),
        inputs.a,
        *(cut(v, how.chunk) for v in (b, inputs.c)),
    )
    y, final = _ssd_of_chunks(how, chunks, documents_of(starts, how.chunk), initial)
    return y.reshape(batch, -1, heads, size)[:, :length], final


@dataclass(frozen=True)
class ScanFacts:
    """Static arguments of `_ssd_of_chunks`. chunk: tokens. packed: whether documents may border."""

    chunk: int
    packed: bool


# ---- forward and backward ------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ssd_of_chunks(how: ScanFacts, inputs: SsdInputs, documents: jax.Array, initial: jax.Array):
    """`ssd` of chunks: x [B, C, Q, H, P], dt [B, C, Q, H], b and c [B, C, Q, G, N], documents
    int32 [B, C, Q]: the number of starts so far."""
    return _scan_forward(how, inputs, documents, initial)[0]


def _scan_forward(how: ScanFacts, inputs: SsdInputs, documents: jax.Array, initial: jax.Array):
    made = _states_of_chunks(how, inputs, documents)
    states, final = pass_states(_advance_states, made, initial.astype(made[0].dtype))
    states = checkpoint_name(states, STATES)
    y = checkpoint_name(_outputs(how, inputs, documents, states), OUTPUT)
    return (y, final), (inputs, documents, states)


def _scan_backward(how: ScanFacts, saved: tuple, gradients: tuple):
    # The barrier keeps XLA from taking the matrices of the forward, and so from keeping them.
    (inputs, documents, states), (d_y, d_final) = lax.optimization_barrier((saved, gradients))

    def outputs(inputs: SsdInputs, states: jax.Array) -> jax.Array:
        return _outputs(how, inputs, documents, states)

    def states_of_chunks(inputs: SsdInputs) -> tuple[jax.Array, jax.Array]:
        return _states_of_chunks(how, inputs, documents)

    _, through_outputs = jax.vjp(outputs, inputs, states)
    d_inputs, d_states = through_outputs(d_y)
    made, through_states = jax.vjp(states_of_chunks, inputs)
    gradients = d_states, d_final.astype(states.dtype)
    d_made, d_initial = pass_back(_advance_states, made, states, gradients)
    (more,) = through_states(d_made)
    d_inputs = jax.tree.map(jnp.add, d_inputs, more)
    return d_inputs, None, d_initial


_ssd_of_chunks.defvjp(_scan_forward, _scan_backward)


# ---- the three parts -----------------------------------------------------------------------------


def _decay(inputs: SsdInputs) -> jax.Array:
    """The logarithm of how much of a state is left from a chunk's start to each token.

    [B, C, Q, H], the token's own decay included.
    """
    wide = wide_dtype(inputs.x.dtype)
    return jnp.cumsum(inputs.dt.astype(wide) * inputs.a.astype(wide), 2)


def _states_of_chunks(
    how: ScanFacts, inputs: SsdInputs, documents: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(what the tokens of a chunk leave in the state [B, C, H, P, N], what is left of the state
    before the chunk [B, C, H])."""
    x, dt, b = inputs.x, inputs.dt, inputs.b
    log = _decay(inputs)
    last = log[:, :, -1:]
    share = dt.astype(log.dtype) * jnp.exp(last - log)
    left = jnp.exp(last[:, :, 0])
    if how.packed:
        share = share * (documents == documents[:, :, -1:])[..., None]
        without_start = documents[:, :, -1] == documents_before(documents)
        left = left * without_start[..., None]
    x = by_group(x * share[..., None], b.shape[-2]).astype(inputs.x.dtype)
    wide = {"preferred_element_type": log.dtype}
    states = jnp.einsum("zcqgrp,zcqgn->zcgrpn", x, b, **wide)
    return states.reshape(*states.shape[:2], -1, *states.shape[-2:]), left


def _advance_states(chunk: tuple[jax.Array, jax.Array], state: jax.Array) -> jax.Array:
    """The state [B, H, P, N] after a chunk of each row."""
    new, left = chunk
    return state * left[..., None, None] + new


def _outputs(
    how: ScanFacts, inputs: SsdInputs, documents: jax.Array, states: jax.Array
) -> jax.Array:
    """y [B, C, Q, H, P] from the tokens of each chunk and the state before it."""
    log, before = _decay(inputs), documents_before(documents)
    of_chunk = inputs.x, inputs.dt, log, inputs.b, inputs.c, documents, before, states
    return in_blocks(functools.partial(_scan_output, how), log, of_chunk)


def _scan_output(how: ScanFacts, x, dt, log, b, c, documents, before, state) -> jax.Array:
    """y [Q, H, P] of one chunk; `before` is the document of the token before it."""
    wide = {"preferred_element_type": log.dtype}
    decay = decays_between(log, documents if how.packed else None, b.shape[1])
    products = jnp.einsum("qgn,sgn->gqs", c, b, **wide)
    weights = (products[:, None] * decay).astype(x.dtype)
    taken = by_group(x * dt.astype(log.dtype)[..., None], b.shape[1]).astype(x.dtype)
    y = jnp.einsum("grqs,sgrp->qgrp", weights, taken, **wide)
    left = jnp.exp(log)
    if how.packed:
        left = left * (documents == before)[:, None]
    state = state.reshape(b.shape[1], -1, *state.shape[1:]).astype(x.dtype)
    from_state = jnp.einsum("qgn,grpn->qgrp", c, state, **wide)
    y = y + from_state * left.reshape(*y.shape[:3], 1)
    return y.reshape(x.shape).astype(x.dtype)


# ---- a whole sequence at once, a token at a time -------------------------------------------------


@jax.checkpoint
def ssd_final(inputs: SsdInputs, starts: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """(the state that a sequence leaves where it starts from none [B, H, P, N], what is left of a
    state before it [B, H]): fp32, in one matmul.

    Decays are summed from the end, so that the sums of the tokens that matter are small.
    """
    x, b = inputs.x, inputs.b
    wide = wide_dtype(x.dtype)
    log = inputs.dt.astype(wide) * inputs.a.astype(wide)
    after = jnp.cumsum(log[:, ::-1], 1)[:, ::-1]
    share = inputs.dt.astype(wide) * jnp.exp(after - log)
    left = jnp.exp(after[:, 0])
    if starts is not None:
        documents = jnp.cumsum(starts, 1, dtype=jnp.int32)
        share = share * (documents == documents[:, -1:])[..., None]
        left = left * (documents[:, -1:] == 0)
    x = by_group(x * share[..., None], b.shape[-2]).astype(x.dtype)
    state = jnp.einsum("zqgrp,zqgn->zgrpn", x, b, preferred_element_type=wide)
    return state.reshape(len(x), -1, *state.shape[-2:]), left


def ssd_step(
    state: jax.Array, token: SsdInputs, slots: StateSlots | None = None
) -> tuple[jax.Array, jax.Array]:
    """(the new state, y [B, H, P] in x's dtype) of one token of each row.

    The fields of `token` lack the axis of the sequence. The state is fp32 [B, H, P, N], or with
    `slots` that of all slots, [slots, H, P, N].
    """
    x, dt, a, b, c = token
    if slots is not None:
        step = TokenStep(jnp.exp(dt * a), dt, x, b, c, corrects=False)
        return step_in_slots(state, slots, step, lambda rows: ssd_step(rows, token))
    heads = x.shape[1] // b.shape[1]
    dt = dt.astype(state.dtype)
    b, c = (jnp.repeat(v.astype(state.dtype), heads, 1) for v in (b, c))
    new = (dt[..., None] * x)[..., None] * b[:, :, None]
    state = state * jnp.exp(dt * a)[..., None, None] + new
    return state, jnp.einsum("zhpn,zhn->zhp", state, c).astype(x.dtype)
