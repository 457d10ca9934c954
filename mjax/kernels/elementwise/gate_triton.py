"""The passes of `gate.py` as Triton kernels; that file says what they compute and calls them.

A program takes a tile of ROWS x COLUMNS of arrays [M, F], or of F to each of several parts side by
side. Nothing is masked if no tile goes past the edge. A kernel that transposes takes the even
rows, then the odd ones, so that the two bytes of neighbors make a word.
"""

import triton
import triton.language as tl


@triton.jit
def act_forward(
    h,
    bias,
    out,
    M: tl.constexpr,
    F: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ACT: tl.constexpr,
    BIASED: tl.constexpr,
):
    """out = act(h + bias); `bias` is read if BIASED."""
    rows, columns, mask = _tile_of_program(M, F, ROWS, COLUMNS, 0, 1)
    place = rows * F + columns
    x = _load_wide(h + place, mask)
    if BIASED:
        x += _load_wide(bias + columns, _within(columns, F, COLUMNS))
    share, _ = _share(x, ACT)
    tl.store(out + place, (x * share).to(out.dtype.element_ty), mask=mask)


@triton.jit
def act_backward(
    h,
    d,
    bias,
    dh,
    sums,
    M: tl.constexpr,
    F: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ACT: tl.constexpr,
):
    """dh, the gradient of act(h + bias) being d, and `sums` of it over a tile's rows, [tiles, F].
    Without a bias `sums` is None."""
    i, j = _tile_index(F, COLUMNS)
    columns = j * COLUMNS + tl.arange(0, COLUMNS)
    edge = _within(columns, F, COLUMNS)
    if sums is not None:
        added = _load_wide(bias + columns, edge)
        total = tl.zeros((COLUMNS,), tl.float32)
    # A thread keeps to its columns, so that no sum has to pass from one to another.
    for row in tl.range(i * ROWS, min(i * ROWS + ROWS, M), loop_unroll_factor=4):
        place = row * F + columns
        x = _load_wide(h + place, edge)
        g = _load_wide(d + place, edge)
        if sums is not None:
            x += added
        _, dx, _ = _act_gradients(x, 1.0, g, ACT)
        tl.store(dh + place, dx.to(dh.dtype.element_ty), mask=edge)
        if sums is not None:
            total += dx
    if sums is not None:
        tl.store(sums + i * F + columns, total, mask=edge)


@triton.jit
def gate_backward(
    h,
    d,
    dh,
    M: tl.constexpr,
    F: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ACT: tl.constexpr,
):
    """dh [M, 2 * F], the gradient of act(gate) * up being d; h [M, 2 * F] is gate, up."""
    rows, columns, mask = _tile_of_program(M, F, ROWS, COLUMNS, 0, 1)
    wide = rows * (2 * F) + columns
    gate = _load_wide(h + wide, mask)
    up = _load_wide(h + wide + F, mask)
    g = _load_wide(d + rows * F + columns, mask)
    _, d_gate, d_up = _act_gradients(gate, up, g, ACT)
    tl.store(dh + wide, d_gate.to(dh.dtype.element_ty), mask=mask)
    tl.store(dh + wide + F, d_up.to(dh.dtype.element_ty), mask=mask)


@triton.jit
def gate_tops(
    h,
    d,
    tops,
    M: tl.constexpr,
    F: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ACT: tl.constexpr,
    BACKWARD: tl.constexpr,
):
    """`tops` of act(gate) * up, one a tile, or, if BACKWARD, of its gradients, d being its own."""
    rows, columns, mask = _tile_of_program(M, F, ROWS, COLUMNS, 0, 1)
    wide = rows * (2 * F) + columns
    gate = _load_wide(h + wide, mask)
    up = _load_wide(h + wide + F, mask)
    if BACKWARD:
        g = _load_wide(d + rows * F + columns, mask)
        _, d_gate, d_up = _act_gradients(gate, up, g, ACT)
        top = tl.maximum(_magnitude(d_gate), _magnitude(d_up))
    else:
        share, _ = _share(gate, ACT)
        top = _magnitude(gate * share * up)
    tl.store(tops + tl.program_id(0), tl.max(top))


@triton.jit
def gate_forward8(
    scale,
    h,
    weights,
    tops,
    out,
    M: tl.constexpr,
    F: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ACT: tl.constexpr,
    WEIGHTED: tl.constexpr,
):
    """out = act(gate) * up in 8 bits, by `scale`; `tops` of its magnitude, one a tile. Rows are
    multiplied by `weights` if WEIGHTED."""
    rows, columns, mask = _tile_of_program(M, F, ROWS, COLUMNS, 0, 1)
    wide = rows * (2 * F) + columns
    gate = _load_wide(h + wide, mask)
    up = _load_wide(h + wide + F, mask)
    share, _ = _share(gate, ACT)
    made = gate * share * up
    if WEIGHTED:
        made *= _load_wide(weights + rows, _within(rows, M, ROWS))
    made = _rounded(made, h.dtype.element_ty)
    made8 = (made * tl.load(scale)).to(out.dtype.element_ty)
    tl.store(out + rows * F + columns, made8, mask=mask)
    tl.store(tops + tl.program_id(0), tl.max(_magnitude(made)))


@triton.jit
def gate_backward8(
    scale,
    scale_dh,
    h,
    d,
    weights,
    tops,
    dh,
    out_words,
    dh_words,
    sums,
    M: tl.constexpr,
    F: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ACT: tl.constexpr,
):
    """dh as `gate_backward` has it, in 8 bits by `scale_dh`, as it lies and as words of its
    transpose; words of act(gate) * up in e4m3, by `scale`; `tops` of dh, one a tile. Unless `sums`
    is None, `weights` multiply rows, and `sums` are their gradients, one a tile and row."""
    factor, factor_dh = tl.load(scale), tl.load(scale_dh)
    narrow = h.dtype.element_ty
    for r in tl.static_range(2):
        rows, columns, mask = _tile_of_program(M, F, ROWS, COLUMNS, r, 2)
        wide = rows * (2 * F) + columns
        gate = _load_wide(h + wide, mask)
        up = _load_wide(h + wide + F, mask)
        g = _load_wide(d + rows * F + columns, mask)
        if sums is not None:
            edge = _within(rows, M, ROWS)
            weight = _load_wide(weights + rows, edge)
            made, d_gate, d_up = _act_gradients(gate, up, g * weight, ACT)
            _, j = _tile_index(F, COLUMNS)
            tl.store(sums + j * M + rows, tl.sum(made * g, 1, keep_dims=True), mask=edge)
            made *= weight
        else:
            made, d_gate, d_up = _act_gradients(gate, up, g, ACT)
        made8 = (_rounded(made, narrow) * factor).to(tl.float8e4nv)
        d_gate = _rounded(d_gate, narrow)
        d_up = _rounded(d_up, narrow)
        d_gate8 = (d_gate * factor_dh).to(dh.dtype.element_ty)
        d_up8 = (d_up * factor_dh).to(dh.dtype.element_ty)
        tl.store(dh + wide, d_gate8, mask=mask)
        tl.store(dh + wide + F, d_up8, mask=mask)
        most = tl.maximum(_magnitude(d_gate), _magnitude(d_up))
        if r == 0:
            top, word, word_gate, word_up = most, _byte(made8), _byte(d_gate8), _byte(d_up8)
        else:
            top = tl.maximum(top, most)
            word |= _byte(made8) << 8
            word_gate |= _byte(d_gate8) << 8
            word_up |= _byte(d_up8) << 8
    _store_words(out_words, word, M, F, ROWS, COLUMNS)
    _store_words(dh_words, word_gate, M, F, ROWS, COLUMNS)
    _store_words(dh_words + F * (M // 2), word_up, M, F, ROWS, COLUMNS)
    tl.store(tops + tl.program_id(0), tl.max(top))


@triton.jit
def quantize(
    scale,
    x,
    tops,
    out,
    M: tl.constexpr,
    F: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """out = x in 8 bits, by `scale`; `tops` of x, one a tile."""
    rows, columns, mask = _tile_of_program(M, F, ROWS, COLUMNS, 0, 1)
    value = _load_wide(x + rows * F + columns, mask)
    made8 = (value * tl.load(scale)).to(out.dtype.element_ty)
    tl.store(out + rows * F + columns, made8, mask=mask)
    tl.store(tops + tl.program_id(0), tl.max(_magnitude(value)))


@triton.jit
def quantize_transposed(
    scale,
    x,
    tops,
    words,
    out,
    M: tl.constexpr,
    F: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    OUT: tl.constexpr,
):
    """Words of the transpose of x in OUT, an 8-bit dtype by jax's name; `tops` and, unless None,
    `out` as above."""
    factor = tl.load(scale)
    for r in tl.static_range(2):
        rows, columns, mask = _tile_of_program(M, F, ROWS, COLUMNS, r, 2)
        value = _load_wide(x + rows * F + columns, mask)
        made8 = (value * factor).to(tl.float8e4nv if OUT == "float8_e4m3fn" else tl.float8e5)
        if out is not None:
            tl.store(out + rows * F + columns, made8, mask=mask)
        if r == 0:
            top, word = _magnitude(value), _byte(made8)
        else:
            top = tl.maximum(top, _magnitude(value))
            word |= _byte(made8) << 8
    _store_words(words, word, M, F, ROWS, COLUMNS)
    tl.store(tops + tl.program_id(0), tl.max(top))


# ---- tiles -------------------------------------------------------------------------------------


@triton.jit
def _tile_of_program(
    M: tl.constexpr,
    F: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    first: tl.constexpr,
    step: tl.constexpr,
):
    """(rows [n, 1], columns [1, COLUMNS], which are within [n, COLUMNS]) of this program: of its
    tile's rows every `step`-th, from `first`."""
    i, j = _tile_index(F, COLUMNS)
    rows = (step * (i * (ROWS // step) + tl.arange(0, ROWS // step)) + first)[:, None]
    columns = (j * COLUMNS + tl.arange(0, COLUMNS))[None]
    return rows, columns, _within(rows, M, ROWS) & _within(columns, F, COLUMNS)


@triton.jit
def _tile_index(F: tl.constexpr, COLUMNS: tl.constexpr):
    """(which down, which across) this program's tile is."""
    across: tl.constexpr = (F + COLUMNS - 1) // COLUMNS
    return tl.program_id(0) // across, tl.program_id(0) % across


@triton.jit
def _within(index, SIZE: tl.constexpr, STEP: tl.constexpr):
    """index < SIZE: a constant, and so no mask, where tiles of STEP do not go past the edge."""
    if SIZE % STEP == 0:
        return tl.full(index.shape, True, tl.int1)
    else:
        return index < SIZE


@triton.jit
def _load_wide(place, mask):
    """In fp32, 0 without the mask."""
    return tl.load(place, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store_words(
    words,
    word,
    M: tl.constexpr,
    F: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """`word` of two rows each [ROWS / 2, COLUMNS], turned, into `words` [F, M / 2]."""
    i, j = _tile_index(F, COLUMNS)
    pairs = (i * (ROWS // 2) + tl.arange(0, ROWS // 2))[None]
    columns = (j * COLUMNS + tl.arange(0, COLUMNS))[:, None]
    mask = _within(columns, F, COLUMNS) & _within(2 * pairs, M, ROWS)
    tl.store(words + columns * (M // 2) + pairs, tl.trans(word), mask=mask)


@triton.jit
def _byte(x):
    """Its 8 bits, the lower half of a word."""
    return x.to(tl.uint8, bitcast=True).to(tl.int16)


@triton.jit
def _magnitude(x):
    """As integers, magnitudes are in order, and NaN is the largest."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


# ---- arithmetic --------------------------------------------------------------------------------


@triton.jit
def _share(x, ACT: tl.constexpr):
    """s of act(x) = x * s(x), and its derivative."""
    if ACT == "gelu":
        return _normal_distribution(x)
    elif ACT == "silu":
        s = sigmoid(x)
        return s, s * (1 - s)
    elif ACT == "quick_gelu":
        steep: tl.constexpr = 1.702
        s = sigmoid(steep * x)
        return s, steep * s * (1 - s)
    else:
        tl.static_assert(ACT == "gelu_tanh")
        cube: tl.constexpr = 0.044715
        outer: tl.constexpr = (
            1.5957691216057308  # 2 * sqrt(2 / pi): (1 + tanh(y)) / 2 = sigmoid(2y)
        )
        s = sigmoid(outer * (x + cube * x * x * x))
        return s, outer * (1 + 3 * cube * x * x) * s * (1 - s)


@triton.jit
def _normal_distribution(x):
    """The normal distribution function, to 1e-6 of itself for x > -4, and its density.

    Both are factors of exp(-x^2 / 2), which is computed once. The other factor of the function's
    tail is erfcx(|x| / sqrt(2)) / 2: t times a polynomial in t, to 1.3e-7 of itself for all x (a
    minimax fit of our own).
    """
    bell = power_of_two(-0.7213475204 * x * x)
    t = reciprocal(1.0 + 0.2828427125 * tl.abs(x))
    p = 0.0251362579 * t - 0.0914716535
    p = p * t + 0.0845771695
    p = p * t - 0.00283363848
    p = p * t + 0.0707303285
    p = p * t + 0.084266979
    p = p * t + 0.103921925
    p = p * t + 0.112834763
    p = p * t + 0.112837932
    tail = t * p * bell
    return tl.where(x < 0, tail, 1.0 - tail), 0.3989422804 * bell


@triton.jit
def _act_gradients(gate, up, d, ACT: tl.constexpr):
    """act(gate) * up; by d, the gradients of gate and of up."""
    share, slope = _share(gate, ACT)
    act = gate * share
    return act * up, d * up * (share + gate * slope), d * act


@triton.jit
def sigmoid(x):
    """To 1e-5 of itself, in 4 instructions. Triton's own exp and division take 16 more, for which
    a pass over memory has no time."""
    return tl.inline_asm_elementwise(
        """{
            mul.ftz.f32 $0, $1, 0fBFB8AA3B;
            ex2.approx.ftz.f32 $0, $0;
            add.ftz.f32 $0, $0, 0f3F800000;
            rcp.approx.ftz.f32 $0, $0;
        }""",
        "=f,f",
        [x],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def power_of_two(x):
    """To 2e-7 of itself, without Triton's care for results that are no normal numbers."""
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def reciprocal(x):
    """To 1e-7 of itself. Triton's division takes eight more instructions."""
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _rounded(x, dtype: tl.constexpr):
    """fp32 x with the precision of `dtype`, bfloat16 or float32."""
    if dtype == tl.float32:
        return x
    else:
        return rounded_to_bf16(x)


@triton.jit
def rounded_to_bf16(x):
    """Two at a time: casts of single numbers are slow."""
    return tl.inline_asm_elementwise(
        """{
            .reg .b32 both, low, high;
            cvt.rn.bf16x2.f32 both, $3, $2;
            shl.b32 low, both, 16;
            and.b32 high, both, 0xFFFF0000;
            mov.b32 $0, low;
            mov.b32 $1, high;
        }""",
        "=f,=f,f,f",
        [x],
        dtype=tl.float32,
        is_pure=True,
        pack=2,
    )
