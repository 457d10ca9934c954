"""One token of each row, which changes the state that the row keeps in a slot: generation's step.

A head's state S [P, N] decays, then gains an outer product: S' = decay S + outer(scale v, k), and
y = S' q. The gated delta rule takes v - decay S k in place of v. In plain JAX the rows' states are
gathered, changed, and put back, so each is read and written twice. Our Triton kernel
(`token_step_triton.py`) changes them where they lie: half the bytes, which bound the step.

Letters: B rows, H heads, G groups, P channels of a head, N state.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mjax.kernels.base.chooser import choose
from mjax.kernels.base.triton_call import triton_call

_STATE_TILE = 8192  # numbers of a state that a program has: 64 a thread


class StateSlots(NamedTuple):
    """The places where rows keep their states among those of all slots.

    numbers: int32 [B], distinct but for rows without work. begins: bool [B], rows whose state
    before this step is zero, whatever lies in the slot.
    """

    numbers: jax.Array
    begins: jax.Array


class TokenStep(NamedTuple):
    """The effect of a token on the state of each head.

    decay, scale: fp32 [B, H]. v: [B, H, P]. k, q: [B, G, N], of which each group serves H / G
    consecutive heads. corrects: whether v loses what the state has for k.
    """

    decay: jax.Array
    scale: jax.Array
    v: jax.Array
    k: jax.Array
    q: jax.Array
    corrects: bool


def states_in(states: jax.Array, slots: StateSlots | None) -> jax.Array:
    """The states [B, ..] of rows from those of all slots [slots, ..]; without slots, of all."""
    if slots is None:
        return states
    begins = jnp.expand_dims(slots.begins, tuple(range(1, states.ndim)))
    return jnp.where(begins, 0, states[slots.numbers])


def with_states(states: jax.Array, rows: jax.Array, slots: StateSlots | None) -> jax.Array:
    """The states of all slots after those of the rows are `rows` [B, ..]."""
    if slots is None:
        return rows
    return states.at[slots.numbers].set(rows.astype(states.dtype))


def step_in_slots(
    states: jax.Array,
    slots: StateSlots,
    token: TokenStep,
    plain: Callable[[jax.Array], tuple[jax.Array, jax.Array]],
) -> tuple[jax.Array, jax.Array]:
    """(states fp32 [slots, H, P, N] after a token of each row, y [B, H, P] in v's dtype).

    `plain` maps the rows' states to (their new states, y), for devices without our kernel.
    """
    if choose("token_step", states.dtype, states.shape).name != "triton":
        rows, y = plain(states_in(states, slots))
        return with_states(states, rows, slots), y
    from mjax.kernels.recurrence import token_step_triton

    batch, heads, size = token.v.shape
    width = states.shape[-1]
    channels = min(size, max(_STATE_TILE // width, 1))
    y, states = triton_call(
        token_step_triton.token_step,
        [*token[:5], slots.numbers, slots.begins.astype(jnp.int32), states],
        [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (token.v, states)],
        programs=batch * heads * (size // channels),
        warps=4,
        aliases={7: 1},
        HEADS=heads,
        GROUPS=token.k.shape[1],
        P=size,
        N=width,
        CHANNELS=channels,
        CORRECTS=token.corrects,
    )
    return states, y
