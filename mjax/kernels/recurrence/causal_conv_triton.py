"""The causal convolution of 4 taps as Triton kernels; `causal_conv.py` says what they compute.

A program walks TOKENS tokens of a row and WIDTH channels, with the 3 tokens before in registers, so
it loads each token once. Its backward walks 4 tokens more, for the gradients of its last ones. A
turn takes 4 tokens and loads them all first, since loads do not pass stores. `weight` fp32 [5,
CHANNELS] are taps and bias. `begins` int32 [B, LENGTH] are the tokens at which documents begin, -3
for one that began before all; they are read if PACKED, `history` [B, 3, CHANNELS] if HISTORY.
"""

import triton
import triton.language as tl

from mjax.kernels.elementwise.gate_triton import sigmoid


@triton.jit
def conv_forward(
    x,
    weight,
    begins,
    history,
    y,
    LENGTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    PACKED: tl.constexpr,
    HISTORY: tl.constexpr,
):
    batch, first, channel, _ = _place_of_program(LENGTH, CHANNELS, TOKENS, WIDTH)
    real = channel < CHANNELS
    x += batch * LENGTH * CHANNELS + channel
    y += batch * LENGTH * CHANNELS + channel
    history += batch * 3 * CHANNELS + channel
    begins += batch * LENGTH
    w = _rows_from(weight + channel, 0, real, 5, 5, CHANNELS)
    before = _before(x, history, first, real, LENGTH, CHANNELS, HISTORY)
    for i in range(TOKENS // 4):
        new = _rows_from(x, first + 4 * i, real, 4, LENGTH, CHANNELS)
        for j in tl.static_range(4):
            t = first + 4 * i + j
            seen = _tokens_before(t, before, begins, LENGTH, PACKED)
            total = _total(w, seen, new[j])
            out = (total * sigmoid(total)).to(y.dtype.element_ty)
            tl.store(y + t * CHANNELS, out, mask=real & (t < LENGTH))
            before = (before[1], before[2], new[j])


@triton.jit
def conv_backward(
    x,
    weight,
    begins,
    history,
    d_y,
    d_x,
    parts,
    d_history,
    LENGTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    PACKED: tl.constexpr,
    HISTORY: tl.constexpr,
):
    """`parts` fp32 [B * tiles of tokens, 5, CHANNELS] are a program's part of `weight`'s gradient.
    `d_before` are the gradients of the 3 tokens before, as far as they are known."""
    batch, first, channel, part = _place_of_program(LENGTH, CHANNELS, TOKENS, WIDTH)
    real = channel < CHANNELS
    x += batch * LENGTH * CHANNELS + channel
    d_y += batch * LENGTH * CHANNELS + channel
    d_x += batch * LENGTH * CHANNELS + channel
    history += batch * 3 * CHANNELS + channel
    begins += batch * LENGTH
    w = _rows_from(weight + channel, 0, real, 5, 5, CHANNELS)
    before = _before(x, history, first, real, LENGTH, CHANNELS, HISTORY)
    zero = tl.zeros((WIDTH,), tl.float32)
    d_before = (zero, zero, zero)
    sums = (zero, zero, zero, zero, zero)
    for i in range(TOKENS // 4 + 1):
        new = _rows_from(x, first + 4 * i, real, 4, LENGTH, CHANNELS)
        d_new = _rows_from(d_y, first + 4 * i, real, 4, LENGTH, CHANNELS)
        for j in tl.static_range(4):
            t = first + 4 * i + j
            seen = _tokens_before(t, before, begins, LENGTH, PACKED)
            total = _total(w, seen, new[j])
            s = sigmoid(total)
            d = d_new[j] * (s + total * s * (1 - s))
            more = _tokens_before(t, (d * w[0], d * w[1], d * w[2]), begins, LENGTH, PACKED)
            done = (d_before[0] + more[0]).to(d_x.dtype.element_ty)
            of_own = (t - 3 >= first) & (t - 3 < first + TOKENS) & (t - 3 < LENGTH)
            tl.store(d_x + (t - 3) * CHANNELS, done, mask=real & of_own)
            if HISTORY:
                of_history = d_history + (batch * 3 + t) * CHANNELS + channel
                tl.store(of_history, done, mask=real & (t < 3))
            d_before = (d_before[1] + more[1], d_before[2] + more[2], d * w[3])
            d = tl.where(t < first + TOKENS, d, 0.0)
            to_taps = (d * seen[0], d * seen[1], d * seen[2], d * new[j], d)
            added = ()
            for k in tl.static_range(5):
                added = added + (sums[k] + to_taps[k],)
            sums = added
            before = (before[1], before[2], new[j])
    for k in tl.static_range(5):
        tl.store(parts + (part * 5 + k) * CHANNELS + channel, sums[k], mask=real)


@triton.jit
def _place_of_program(
    LENGTH: tl.constexpr, CHANNELS: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr
):
    """(The row, the first token, the channels, the number of the tile of tokens)."""
    across: tl.constexpr = (CHANNELS + WIDTH - 1) // WIDTH
    along: tl.constexpr = (LENGTH + TOKENS - 1) // TOKENS
    program = tl.program_id(0).to(tl.int64)
    part = program // across
    channel = (program % across) * WIDTH + tl.arange(0, WIDTH)
    return part // along, (part % along) * TOKENS, channel, part


@triton.jit
def _rows_from(x, t, real, COUNT: tl.constexpr, LENGTH: tl.constexpr, CHANNELS: tl.constexpr):
    """COUNT rows from t, in fp32; zeros outside of LENGTH."""
    rows = ()
    for j in tl.static_range(COUNT):
        mask = real & (t + j >= 0) & (t + j < LENGTH)
        row = tl.load(x + (t + j) * CHANNELS, mask=mask, other=0.0)
        rows = rows + (row.to(tl.float32),)
    return rows


@triton.jit
def _before(
    x, history, first, real, LENGTH: tl.constexpr, CHANNELS: tl.constexpr, HISTORY: tl.constexpr
):
    """The 3 tokens before a tile."""
    rows = _rows_from(x, first - 3, real, 3, LENGTH, CHANNELS)
    if HISTORY:
        old = _rows_from(history, 0, real & (first == 0), 3, 3, CHANNELS)
        rows = (rows[0] + old[0], rows[1] + old[1], rows[2] + old[2])
    return rows


@triton.jit
def _tokens_before(t, before, begins, LENGTH: tl.constexpr, PACKED: tl.constexpr):
    """The values of the 3 tokens before t; 0 for tokens of another document."""
    if PACKED:
        begin = tl.load(begins + t, mask=t < LENGTH, other=0)
        return (
            tl.where(t - 3 >= begin, before[0], 0.0),
            tl.where(t - 2 >= begin, before[1], 0.0),
            tl.where(t - 1 >= begin, before[2], 0.0),
        )
    else:
        return before


@triton.jit
def _total(w, seen, now):
    """The convolution at a token with its bias, the input of SiLU."""
    return w[4] + w[3] * now + w[2] * seen[2] + w[1] * seen[1] + w[0] * seen[0]
