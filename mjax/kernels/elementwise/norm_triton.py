"""The norm's forward and backward as Triton kernels; `norm.py` says what they compute."""

import triton
import triton.language as tl


@triton.jit
def norm_forward(
    gain,
    bias,
    x,
    y,
    stream,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    TILE: tl.constexpr,
    EPS: tl.constexpr,
):
    """LayerNorm of TILE rows a program. `stream` is x, in its place: nothing is written."""
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)[:, None]
    columns = tl.arange(0, PADDED)[None]
    real = columns < WIDTH
    mask = (rows < ROWS) & real
    place = rows * WIDTH + columns
    z = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    z = tl.where(real, z - tl.sum(z, 1, keep_dims=True) * (1 / WIDTH), 0.0)
    r = tl.rsqrt(tl.sum(z * z, 1, keep_dims=True) * (1 / WIDTH) + EPS)
    out = z * r * tl.load(gain + columns, mask=real, other=0.0)
    out += tl.load(bias + columns, mask=real, other=0.0)
    tl.store(y + place, out.to(y.dtype.element_ty), mask=mask)


@triton.jit
def rmsnorm_forward(
    gain,
    x,
    y,
    stream,
    tops,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    TILE: tl.constexpr,
    EPS: tl.constexpr,
):
    """RMSNorm likewise, and `tops` of its magnitude as integers, one a program."""
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)[:, None]
    columns = tl.arange(0, PADDED)[None]
    real = columns < WIDTH
    mask = (rows < ROWS) & real
    place = rows * WIDTH + columns
    z = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    r = tl.rsqrt(tl.sum(z * z, 1, keep_dims=True) * (1 / WIDTH) + EPS)
    out = z * r * tl.load(gain + columns, mask=real, other=0.0)
    tl.store(y + place, out.to(y.dtype.element_ty), mask=mask)
    tl.store(tops + tl.program_id(0), tl.max(out.to(tl.int32, bitcast=True) & 0x7FFFFFFF))


@triton.jit
def norm_backward(
    gain,
    x,
    dy,
    stream,
    dx,
    parts,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    TILE: tl.constexpr,
    PROGRAMS: tl.constexpr,
    EPS: tl.constexpr,
    FORK: tl.constexpr,
    CENTERED: tl.constexpr,
):
    """Gradients over tiles of TILE rows, PROGRAMS apart.

    `stream` is read with FORK alone. `parts` [PROGRAMS, 1 or 2, WIDTH] are of the gain and, with
    CENTERED, which is LayerNorm, of the bias. PADDED is the power of 2 that holds WIDTH columns.
    """
    program = tl.program_id(0)
    columns = tl.arange(0, PADDED)[None]
    real = columns < WIDTH
    d_gain = tl.zeros((TILE, PADDED), tl.float32)
    d_bias = tl.zeros((TILE, PADDED), tl.float32)
    for i in range((ROWS + TILE * PROGRAMS - 1) // (TILE * PROGRAMS)):
        rows = (program + i * PROGRAMS) * TILE + tl.arange(0, TILE)[:, None]
        mask = (rows < ROWS) & real
        place = rows * WIDTH + columns
        a = tl.load(x + place, mask=mask, other=0.0)
        d = tl.load(dy + place, mask=mask, other=0.0)
        if FORK:
            more = tl.load(stream + place, mask=mask, other=0.0)
        # each time anew, from the cache: registers are what limits the rows in flight
        g = tl.load(gain + columns, mask=real, other=0.0)
        d = d.to(tl.float32)
        out, z, r = _row_gradients(a.to(tl.float32), d, g, real, WIDTH, EPS, CENTERED)
        if FORK:
            out = out + more.to(tl.float32)
        tl.store(dx + place, out.to(dx.dtype.element_ty), mask=mask)
        d_gain += d * (z * r)
        if CENTERED:
            d_bias += d
    column = tl.arange(0, PADDED)
    own = parts + program * (1 + CENTERED) * WIDTH + column
    tl.store(own, tl.sum(d_gain, 0), mask=column < WIDTH)
    if CENTERED:
        tl.store(own + WIDTH, tl.sum(d_bias, 0), mask=column < WIDTH)


@triton.jit
def _row_gradients(a, d, g, real, WIDTH: tl.constexpr, EPS: tl.constexpr, CENTERED: tl.constexpr):
    """(The gradient of rows a, z, r), in fp32: z * r is their norm, d the gradient of that times g.

    To return the product takes 140 registers, more than eight programs of 2 warps find.
    """
    w = d * g
    z = a
    if CENTERED:
        mean, mean_w = _means(a, w, WIDTH)
        z = tl.where(real, a - mean, 0.0)
    variance, slope = _means(z * z, w * z, WIDTH)
    r = tl.rsqrt(variance + EPS)
    out = w - z * (slope * r * r)
    if CENTERED:
        out = out - mean_w
    return out * r, z, r


@triton.jit
def _means(a, b, WIDTH: tl.constexpr):
    """The means of a's and of b's rows, whose padding is 0, for one exchange between warps."""
    sum_a, sum_b = tl.reduce((a, b), 1, _add, keep_dims=True)
    return sum_a * (1 / WIDTH), sum_b * (1 / WIDTH)


@triton.jit
def _add(a, b, c, d):
    return a + c, b + d
