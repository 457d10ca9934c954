"""One token of each row as a Triton kernel; `token_step.py` says what it computes.

A program has CHANNELS channels of a row's head, [CHANNELS, N] of its state, in registers. It reads
them once where they lie, and writes them once to the same place.
"""

import triton
import triton.language as tl


@triton.jit
def token_step(
    decay,
    scale,
    v,
    k,
    q,
    numbers,
    begins,
    states,
    y,
    states_again,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    CHANNELS: tl.constexpr,
    CORRECTS: tl.constexpr,
):
    program = tl.program_id(0)
    head = program // (P // CHANNELS)  # along [rows, heads]
    channel = program % (P // CHANNELS) * CHANNELS + tl.arange(0, CHANNELS)
    row = head // HEADS
    n = tl.arange(0, N)
    slot = tl.load(numbers + row).to(tl.int64)  # states of all slots may pass 2**31 elements
    place = states + (slot * HEADS + head % HEADS) * P * N + channel[:, None] * N + n
    group = (row * GROUPS + head % HEADS // (HEADS // GROUPS)) * N + n
    k, q = tl.load(k + group).to(tl.float32), tl.load(q + group).to(tl.float32)
    v = tl.load(v + head * P + channel).to(tl.float32)
    continues = tl.load(begins + row) == 0
    state = tl.load(place, mask=continues, other=0.0) * tl.load(decay + head)
    if CORRECTS:
        v -= tl.sum(state * k, 1)
    state += (tl.load(scale + head) * v)[:, None] * k
    tl.store(place, state)
    tl.store(y + head * P + channel, tl.sum(state * q, 1).to(y.dtype.element_ty))
