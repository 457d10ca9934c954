"""The gated delta rule's sequential parts as Triton kernels; `gated_delta_fused.py` calls them.

Matrices are row-major. fp32 products have three passes of tf32, whose error is that of fp32.
"""

import triton
import triton.language as tl

SIDE = tl.constexpr(16)  # of a block of a system


@triton.jit
def delta_solve(
    system,
    right,
    solution,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    """Solve (I + A) x = r, or with A's transpose: A [64, 64] strictly lower, r [64, WIDTH], fp32.

    A program takes COLUMNS of a system. It inverts the four blocks on the diagonal and passes from
    block to block by products, from the first, or transposed from the last.
    """
    parts: tl.constexpr = WIDTH // COLUMNS
    one = (tl.program_id(0) // parts).to(tl.int64)
    columns = tl.program_id(0) % parts * COLUMNS + tl.arange(0, COLUMNS)[None]
    system += one * 4 * SIDE * 4 * SIDE
    rows = tl.arange(0, SIDE)[:, None]
    place = one * 4 * SIDE * WIDTH + rows * WIDTH + columns
    step: tl.constexpr = (-SIDE if TRANSPOSED else SIDE) * WIDTH  # to the next block
    if TRANSPOSED:
        place += 3 * SIDE * WIDTH
    x0 = tl.load(right + place)
    x1 = tl.load(right + place + step)
    x2 = tl.load(right + place + 2 * step)
    x3 = tl.load(right + place + 3 * step)
    x0 = _dot(_inverse(system, 0, TRANSPOSED), x0)
    x1 -= _dot(_block(system, 1, 0, TRANSPOSED), x0)
    x2 -= _dot(_block(system, 2, 0, TRANSPOSED), x0)
    x3 -= _dot(_block(system, 3, 0, TRANSPOSED), x0)
    x1 = _dot(_inverse(system, 1, TRANSPOSED), x1)
    x2 -= _dot(_block(system, 2, 1, TRANSPOSED), x1)
    x3 -= _dot(_block(system, 3, 1, TRANSPOSED), x1)
    x2 = _dot(_inverse(system, 2, TRANSPOSED), x2)
    x3 -= _dot(_block(system, 3, 2, TRANSPOSED), x2)
    x3 = _dot(_inverse(system, 3, TRANSPOSED), x3)
    tl.store(solution + place, x0)
    tl.store(solution + place + step, x1)
    tl.store(solution + place + 2 * step, x2)
    tl.store(solution + place + 3 * step, x3)


@triton.jit
def _dot(a, b):
    return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def _block(system, i: tl.constexpr, j: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Block (i, j) of the matrix in the order in which it is solved."""
    rows, columns = tl.arange(0, SIDE)[:, None], tl.arange(0, SIDE)[None]
    if TRANSPOSED:  # block (3 - j, 3 - i), transposed
        at = ((3 - j) * SIDE + columns) * 4 * SIDE + (3 - i) * SIDE + rows
    else:
        at = (i * SIDE + rows) * 4 * SIDE + j * SIDE + columns
    return tl.load(system + at)


@triton.jit
def _inverse(system, i: tl.constexpr, TRANSPOSED: tl.constexpr):
    """The inverse of block i on the diagonal of I + A, in the order in which it is solved.

    With D the two halves of the block on its own diagonal, D^8 = 0, so the inverse of I + D is
    (I - D)(I + D^2)(I + D^4). Halves bound the powers: with equal keys D^4 has 35 at most, the
    15 powers of a whole block would cancel from 6435.
    """
    rows, columns = tl.arange(0, SIDE)[:, None], tl.arange(0, SIDE)[None]
    block: tl.constexpr = 3 - i if TRANSPOSED else i
    at = (block * SIDE + rows) * 4 * SIDE + block * SIDE + columns
    lower = tl.where(rows > columns, tl.load(system + at), 0.0)
    same = rows // (SIDE // 2) == columns // (SIDE // 2)
    halves, across = tl.where(same, lower, 0.0), tl.where(same, 0.0, lower)
    one = tl.where(rows == columns, 1.0, 0.0)
    squared = _dot(halves, halves)
    made = _dot(one - halves, one + squared)
    made = _dot(made, one + _dot(squared, squared))
    made -= _dot(_dot(made, across), made)
    return tl.trans(made) if TRANSPOSED else made


@triton.jit
def delta_states(
    values,
    readers,
    writers,
    left,
    initial,
    states,
    final,
    CHUNKS,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    CHANNELS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write the state before each chunk, [B, C, H, P, N], and the last one.

    A program walks the chunks of CHANNELS of a head, with their state in registers.
    """
    head, row, channels = _head_row_channels(HEADS, P, CHANNELS)
    keys, tokens = tl.arange(0, N), tl.arange(0, TOKENS)
    within = channels[:, None] * N + keys[None]
    state = tl.load(initial + (row * HEADS + head) * P * N + within)
    for c in tl.range(CHUNKS, num_stages=STAGES):
        chunk = row * CHUNKS + c
        at = chunk * HEADS + head
        tl.store(states + at * P * N + within, state)
        token = (chunk * TOKENS + tokens)[:, None] * HEADS + head
        reader = tl.load(readers + token * N + keys[None])
        writer = tl.load(writers + token * N + keys[None])
        value = tl.load(values + token * P + channels[None])
        read = tl.dot(reader, tl.trans(state.to(reader.dtype)))
        written = (value.to(tl.float32) - read).to(writer.dtype)
        state = state * tl.load(left + at) + tl.dot(tl.trans(written), writer)
    tl.store(final + (row * HEADS + head) * P * N + within, state)


@triton.jit
def delta_state_gradients(
    readers,
    writers,
    left,
    d_states,
    d_final,
    d_after,
    d_initial,
    CHUNKS,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    CHANNELS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write the gradient of the state after each chunk, [B, C, H, P, N], and of the first one.

    A program walks back over the chunks of CHANNELS of a head.
    """
    head, row, channels = _head_row_channels(HEADS, P, CHANNELS)
    keys, tokens = tl.arange(0, N), tl.arange(0, TOKENS)
    within = channels[:, None] * N + keys[None]
    gradient = tl.load(d_final + (row * HEADS + head) * P * N + within)
    for i in tl.range(CHUNKS, num_stages=STAGES):
        chunk = row * CHUNKS + CHUNKS - 1 - i
        at = chunk * HEADS + head
        tl.store(d_after + at * P * N + within, gradient)
        token = (chunk * TOKENS + tokens)[:, None] * HEADS + head
        reader = tl.load(readers + token * N + keys[None])
        writer = tl.load(writers + token * N + keys[None])
        d_written = tl.dot(writer, tl.trans(gradient.to(writer.dtype)))
        through = tl.dot(tl.trans(d_written.to(reader.dtype)), reader)
        before = tl.load(d_states + at * P * N + within)
        gradient = gradient * tl.load(left + at) - through + before
    tl.store(d_initial + (row * HEADS + head) * P * N + within, gradient)


@triton.jit
def _head_row_channels(HEADS: tl.constexpr, P: tl.constexpr, CHANNELS: tl.constexpr):
    """The head, the row of the batch and the channels of this program."""
    parts: tl.constexpr = P // CHANNELS
    program = tl.program_id(0)
    head = (program // parts % HEADS).to(tl.int64)
    row = (program // (parts * HEADS)).to(tl.int64)
    return head, row, program % parts * CHANNELS + tl.arange(0, CHANNELS)
