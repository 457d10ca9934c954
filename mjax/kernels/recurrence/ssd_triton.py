"""The scan of Mamba-2 as Triton kernels; `ssd_fused.py` says what they compute and calls them.

A kernel sees heads in slices of P channels, CUT slices a head, and tokens in chunks of Q. `steps`
are dt and `log` their logarithms of decays, summed within a chunk: fp32 [B, H, chunks * Q], where
steps beyond the sequence are 0. `begins` int32 [B, chunks * Q] are the tokens at which documents
begin, -1 for one that began before; they are read if PACKED. A state is [N, P] in registers and
between chunks, [P, N] at both ends. Matrices of a chunk are [s, t] in the backward, [t, s] in the
forward: so the matmul that reads one finds it in registers. No mask lives through a loop: it would
take as many registers as floats.

In the gradients `products` fp32 [B, chunks, GROUPS, Q, Q] are those of b and c, 0 where t does not
see s. `d_b`, `d_c` [B, S, GROUPS * PARTS, N] and `d_products` [B, chunks, GROUPS * PARTS, Q, Q] are
sums over slices. `d_steps` and `d_log` [B, SLICES, chunks * Q] are what goes through x, or through
the state. `d_states` are the gradients of states after each chunk.
"""

import math

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(math.log2(math.e))


@triton.jit
def ssd_forward(
    x,
    steps,
    log,
    begins,
    b,
    c,
    initial,
    y,
    final,
    LENGTH: tl.constexpr,
    SLICES: tl.constexpr,
    CUT: tl.constexpr,
    GROUPS: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    Q: tl.constexpr,
    PACKED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """y and the state after the last token. A program walks a slice's chunks with its state."""
    program = tl.program_id(0).to(tl.int64)
    batch = program // SLICES
    piece = program % SLICES
    group = piece // (SLICES // GROUPS)
    chunks: tl.constexpr = (LENGTH + Q - 1) // Q
    x += batch * LENGTH * SLICES * P + piece * P
    y += batch * LENGTH * SLICES * P + piece * P
    b += batch * LENGTH * GROUPS * N + group * N
    c += batch * LENGTH * GROUPS * N + group * N
    steps += (program // CUT) * chunks * Q
    log += (program // CUT) * chunks * Q
    begins += batch * chunks * Q
    t = tl.arange(0, Q)
    turned = program * P * N + tl.trans(_places_of_matrix(N, P, N))
    state = tl.load(initial + turned)
    for i in tl.range(0, chunks, num_stages=STAGES):
        first = i * Q
        x_s = _load_tile(x, first, SLICES * P, LENGTH, Q, P)
        b_s = _load_tile(b, first, GROUPS * N, LENGTH, Q, N)
        c_t = _load_tile(c, first, GROUPS * N, LENGTH, Q, N)
        logs, left, share, decay = _decays_of_tile(log, begins, first, Q, PACKED)
        step = tl.load(steps + first + t)
        taken = (x_s * (share * step)[:, None]).to(x.dtype.element_ty)
        at = first + t
        seen = at[:, None] >= at[None]
        if PACKED:
            seen &= at[None] >= tl.load(begins + at)[:, None]
        products = tl.dot(c_t, tl.trans(b_s))
        out = tl.dot(c_t, state.to(x.dtype.element_ty)) * left[:, None]
        apart = tl.where(seen, logs[:, None] - logs[None], float("-inf"))
        weights = products * tl.exp2(apart) * step[None]
        out = tl.dot(weights.to(x.dtype.element_ty), x_s, out)
        _store_matrix(y, out, first, SLICES * P, LENGTH, Q, P)
        state = tl.dot(tl.trans(b_s), taken, state * decay)
    tl.store(final + turned, state)


@triton.jit
def ssd_states(
    v,
    steps,
    log,
    begins,
    w,
    initial,
    d_states,
    states,
    final,
    d_decays,
    LENGTH: tl.constexpr,
    SLICES: tl.constexpr,
    CUT: tl.constexpr,
    GROUPS: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    Q: tl.constexpr,
    PACKED: tl.constexpr,
    REVERSE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """From the gradient of y and c, if REVERSE, the gradient of the state after each chunk, and in
    `final` that of the initial one. Else, from x and b, the state before each chunk, and with the
    former `d_states`, the gradients [B, SLICES, chunks] of logarithms of decays of whole chunks."""
    program = tl.program_id(0).to(tl.int64)
    batch = program // SLICES
    piece = program % SLICES
    group = piece // (SLICES // GROUPS)
    chunks: tl.constexpr = (LENGTH + Q - 1) // Q
    v += batch * LENGTH * SLICES * P + piece * P
    w += batch * LENGTH * GROUPS * N + group * N
    steps += (program // CUT) * chunks * Q
    log += (program // CUT) * chunks * Q
    begins += batch * chunks * Q
    t = tl.arange(0, Q)
    turned = program * P * N + tl.trans(_places_of_matrix(N, P, N))
    state = tl.load(initial + turned)
    for j in tl.range(0, chunks, num_stages=STAGES):
        i = chunks - 1 - j if REVERSE else j
        first = i * Q
        v_t = _load_tile(v, first, SLICES * P, LENGTH, Q, P)
        w_t = _load_tile(w, first, GROUPS * N, LENGTH, Q, N)
        _, left, share, decay = _decays_of_tile(log, begins, first, Q, PACKED)
        factor = left if REVERSE else share * tl.load(steps + first + t)
        taken = (v_t * factor[:, None]).to(v.dtype.element_ty)
        at = (program * chunks + i) * P * N + _places_of_matrix(P, N, P)
        tl.store(states + at, state.to(states.dtype.element_ty))
        state *= decay
        if not REVERSE:
            d_decay = tl.sum(tl.sum(state * tl.load(d_states + at), 1), 0)
            tl.store(d_decays + program * chunks + i, d_decay)
        state = tl.dot(tl.trans(w_t), taken, state)
    tl.store(final + turned, state)


@triton.jit
def ssd_gradients(
    x,
    steps,
    log,
    begins,
    b,
    c,
    products,
    d_y,
    d_states,
    d_x,
    d_steps,
    d_log,
    d_b,
    d_products,
    LENGTH: tl.constexpr,
    SLICES: tl.constexpr,
    CUT: tl.constexpr,
    GROUPS: tl.constexpr,
    PARTS: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    Q: tl.constexpr,
    PACKED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The gradients of x and b, and of products of b and c, for a chunk of a group's slices, or of
    one of the PARTS of those; `_of_slice` does a slice."""
    chunks: tl.constexpr = (LENGTH + Q - 1) // Q
    count: tl.constexpr = SLICES // (GROUPS * PARTS)
    program, part, batch, first = _chunk_of_group(LENGTH, GROUPS, PARTS, Q)
    of_group = batch * LENGTH * GROUPS * N + part // PARTS * N
    begins += batch * chunks * Q
    b_s = _load_tile(b + of_group, first, GROUPS * N, LENGTH, Q, N)
    weights = tl.load(products + (program // PARTS) * Q * Q + _places_of_matrix(Q, Q, Q))
    summed = tl.zeros((Q, Q), tl.float32)
    sum_b = tl.zeros((Q, N), tl.float32)
    for i in tl.range(0, count, num_stages=STAGES):
        piece = part * count + i
        row = batch * SLICES + piece
        of_piece = batch * LENGTH * SLICES * P + piece * P
        x_s = _load_tile(x + of_piece, first, SLICES * P, LENGTH, Q, P)
        d_y_t = _load_tile(d_y + of_piece, first, SLICES * P, LENGTH, Q, P)
        after = tl.load(d_states + (row * chunks + first // Q) * P * N + _places_of_matrix(P, N, P))
        of_head = (row // CUT) * chunks * Q
        step = tl.load(steps + of_head + first + tl.arange(0, Q))
        decays = _decays_of_tile(log + of_head, begins, first, Q, PACKED)
        added, d_v, of_steps = _of_slice(x_s, d_y_t, b_s, after, weights, step, decays)
        summed += added
        _store_matrix(d_x + of_piece, d_v, first, SLICES * P, LENGTH, Q, P)
        taken = (x_s * (decays[2] * step)[:, None]).to(x.dtype.element_ty)
        sum_b = tl.dot(taken, tl.trans(after), sum_b)
        d_step, d_logs = _with_share(of_steps, step, Q)
        tl.store(d_steps + row * chunks * Q + first + tl.arange(0, Q), d_step)
        tl.store(d_log + row * chunks * Q + first + tl.arange(0, Q), d_logs)
    summed = _where_seen(summed, begins, first, Q, PACKED).to(x.dtype.element_ty)
    tl.store(d_products + program * Q * Q + _places_of_matrix(Q, Q, Q), summed)
    sum_b = tl.dot(summed, _load_tile(c + of_group, first, GROUPS * N, LENGTH, Q, N), sum_b)
    d_b += batch * LENGTH * GROUPS * PARTS * N + part * N
    _store_matrix(d_b, sum_b, first, GROUPS * PARTS * N, LENGTH, Q, N)


@triton.jit
def _of_slice(x_s, d_y_t, b_s, after, weights, step, decays):
    """(Gradients of products of b and c, of x, (of steps, of logarithms, of shares)) for a slice.

    `weights` are the products; `after` is the gradient of the state after the chunk."""
    logs, _, share, _ = decays
    kept = tl.exp2(tl.minimum(logs[None] - logs[:, None], 0.0))  # masked by weights

    d_weights = tl.dot(x_s, tl.trans(d_y_t)) * kept
    added = d_weights * step[:, None]
    d_weights *= weights
    d_step = tl.sum(d_weights, 1)
    d_logs = tl.sum(d_weights * step[:, None], 0)
    through = (weights * kept).to(x_s.dtype)

    d_taken = tl.dot(b_s, after) * share[:, None]
    d_share = tl.sum(d_taken * x_s, 1)
    d_taken = tl.dot(through, d_y_t) * step[:, None] + d_taken * step[:, None]
    return added, d_taken, (d_step, d_logs, d_share)


@triton.jit
def _with_share(of_steps, step, Q: tl.constexpr):
    """The gradients of steps and of logarithms with what goes through a slice's state."""
    d_step, d_logs, d_share = of_steps
    d_step += d_share
    d_logs -= d_step * step
    d_logs += tl.where(tl.arange(0, Q) == Q - 1, tl.sum(d_share * step, 0), 0.0)
    return d_step, d_logs


@triton.jit
def _where_seen(matrix, begins, first, Q: tl.constexpr, PACKED: tl.constexpr):
    """[s, t], and 0 where t does not see s."""
    t = tl.arange(0, Q)
    seen = t[:, None] <= t[None]
    if PACKED:
        seen &= first + t[:, None] >= tl.load(begins + first + t)[None]
    return tl.where(seen, matrix, 0.0)


@triton.jit
def _chunk_of_group(
    LENGTH: tl.constexpr, GROUPS: tl.constexpr, PARTS: tl.constexpr, Q: tl.constexpr
):
    """(The program, its part of all groups' slices, its row, its chunk's first token)."""
    chunks: tl.constexpr = (LENGTH + Q - 1) // Q
    program = tl.program_id(0).to(tl.int64)
    chunk = program // (GROUPS * PARTS) % chunks
    return program, program % (GROUPS * PARTS), program // (GROUPS * PARTS * chunks), chunk * Q


@triton.jit
def ssd_gradient_c(
    d_y,
    steps,
    log,
    begins,
    b,
    c,
    states,
    d_products,
    d_log,
    d_c,
    LENGTH: tl.constexpr,
    SLICES: tl.constexpr,
    CUT: tl.constexpr,
    GROUPS: tl.constexpr,
    PARTS: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    Q: tl.constexpr,
    PACKED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The gradient of c, and of `log` what goes through the state before each chunk; see
    `ssd_gradients`."""
    chunks: tl.constexpr = (LENGTH + Q - 1) // Q
    count: tl.constexpr = SLICES // (GROUPS * PARTS)
    program, part, batch, first = _chunk_of_group(LENGTH, GROUPS, PARTS, Q)
    d_y += batch * LENGTH * SLICES * P
    b += batch * LENGTH * GROUPS * N + part // PARTS * N
    c += batch * LENGTH * GROUPS * N + part // PARTS * N
    d_c += batch * LENGTH * GROUPS * PARTS * N + part * N
    begins += batch * chunks * Q
    t = tl.arange(0, Q)
    c_t = _load_tile(c, first, GROUPS * N, LENGTH, Q, N)
    sum_c = tl.zeros((Q, N), tl.float32)
    for i in tl.range(0, count, num_stages=STAGES):
        piece = part * count + i
        row = batch * SLICES + piece
        d_y_t = _load_tile(d_y + piece * P, first, SLICES * P, LENGTH, Q, P)
        before = tl.load(states + (row * chunks + first // Q) * P * N + _places_of_matrix(P, N, P))
        _, left, _, _ = _decays_of_tile(log + (row // CUT) * chunks * Q, begins, first, Q, PACKED)
        d_left = tl.sum(tl.dot(c_t, before) * d_y_t, 1)
        given = (d_y_t * left[:, None]).to(d_y.dtype.element_ty)
        sum_c = tl.dot(given, tl.trans(before), sum_c)
        tl.store(d_log + row * chunks * Q + first + t, d_left * left)
    b_s = _load_tile(b, first, GROUPS * N, LENGTH, Q, N)
    summed = tl.load(d_products + program * Q * Q + _places_of_matrix(Q, Q, Q))
    sum_c = tl.dot(tl.trans(summed), b_s, sum_c)
    _store_matrix(d_c, sum_c, first, GROUPS * PARTS * N, LENGTH, Q, N)


@triton.jit
def _decays_of_tile(log, begins, first, Q: tl.constexpr, PACKED: tl.constexpr):
    """(`log` to the base 2 [Q], what is left of the state before a chunk at each token [Q], of each
    token at the end of the chunk [Q], of the state at the end)."""
    t = tl.arange(0, Q)
    logs = tl.load(log + first + t) * _LOG2_E
    last = tl.load(log + first + Q - 1) * _LOG2_E
    left = tl.exp2(logs)
    share = tl.exp2(last - logs)
    decay = tl.exp2(last)
    if PACKED:
        begin = tl.load(begins + first + t)
        at_end = tl.load(begins + first + Q - 1)
        left = tl.where(begin < first, left, 0.0)
        share = tl.where(first + t >= at_end, share, 0.0)
        decay = tl.where(at_end < first, decay, 0.0)
    return logs, left, share, decay


@triton.jit
def _places_of_matrix(ROW: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The places of a matrix whose rows are ROW elements apart."""
    return tl.arange(0, ROWS)[:, None] * ROW + tl.arange(0, COLUMNS)[None]


@triton.jit
def _load_tile(
    source,
    first,
    ROW: tl.constexpr,
    LENGTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Rows from `first`; beyond LENGTH zeros."""
    at = source + first.to(tl.int64) * ROW + _places_of_matrix(ROW, ROWS, COLUMNS)
    if LENGTH % ROWS == 0:
        return tl.load(at)
    else:
        inside = first + tl.arange(0, ROWS)[:, None] < LENGTH
        return tl.load(at, mask=inside, other=0.0)


@triton.jit
def _store_matrix(
    target,
    value,
    first,
    ROW: tl.constexpr,
    LENGTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The rows from `first`, but those beyond LENGTH."""
    at = target + first.to(tl.int64) * ROW + _places_of_matrix(ROW, ROWS, COLUMNS)
    value = value.to(target.dtype.element_ty)
    if LENGTH % ROWS == 0:
        tl.store(at, value)
    else:
        inside = first + tl.arange(0, ROWS)[:, None] < LENGTH
        tl.store(at, value, mask=inside)
