"""Activation functions, gates and rounding to 8 bits, each in one pass over its tensors on GPUs.

XLA reads a tensor anew for its maximum, for what it rounds it to, and for the transpose that the
weight's gradient needs; its GELU takes more time for arithmetic than for memory. Our kernel, in
Pallas' Triton dialect, reads each tensor once: a program takes a tile, computes in fp32, writes
what leaves, as it lies and transposed, and the largest magnitude within or sums over rows; they are
joined afterwards, without atomics, equal bit for bit each time. Turned tiles of 8 bits move as
words of two rows, which the hardware turns. Where the kernel does not pay or fit (`supports`) the
same functions are plain JAX. Invariant: results are rounded from fp32 to the inputs' dtype, and
then, where wanted, to 8 bits: saturating, while NaN stays NaN.

jax 0.11 calls Pallas' Triton deprecated; 0.12 has it. Mosaic or jax-triton are where to go.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from mjax.kernels.chooser import GATES, choose

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
_ROWS = 2  # of a transposed tile that make a word


@dataclass(frozen=True)
class Tile:
    """Rows and columns that a program takes, and its warps; powers of 2."""

    rows: int
    columns: int
    warps: int


@dataclass(frozen=True)
class Output:
    """A result: `parts` [M, F] side by side. One with a place among the scales is rounded to an
    8-bit dtype, and if it was `computed`, to the inputs' dtype before. `plain` [M, parts * F] and
    `transposed` [parts * F, M]: how it is wanted. `measured`: the maximum is of it. `summed`: its
    sums over rows, fp32 [F], leave last, of one part."""

    dtype: jnp.dtype
    parts: int = 1
    scale: int | None = None
    computed: bool = False
    plain: bool = True
    transposed: bool = False
    measured: bool = False
    summed: bool = False

    def of(self, x: jax.Array, scales, saturate: bool = True) -> jax.Array:
        """fp32 x as it leaves. A GPU's conversion to 8 bits saturates by itself."""
        if self.scale is None:
            return x.astype(self.dtype)
        x = x * scales[self.scale]
        if saturate:
            top = float(jnp.finfo(self.dtype).max)
            x = jnp.where(x > top, top, jnp.where(x < -top, -top, x))
        return x.astype(self.dtype)


@dataclass(frozen=True)
class Pass:
    """One pass over inputs [M, parts * F], `parts` of them in order, or [1, F]. `make` takes a
    sigmoid and the parts of all inputs, fp32, and returns those of each of `outs`."""

    name: str
    make: Callable[..., list[tuple[jax.Array, ...]]]
    parts: tuple[int, ...]
    outs: tuple[Output, ...]

    @property
    def rows(self) -> int:
        """That make a word."""
        return _ROWS if any(out.transposed for out in self.outs) else 1

    @property
    def tile(self) -> Tile:
        """Fastest on an H200: long rows, if transposed long columns too, few values to a thread."""
        if any(out.summed for out in self.outs):
            return Tile(32, 256, 8)
        if self.rows == 1:
            return Tile(8, 128, 4)
        return Tile(64, 128, 16 if sum(self.parts) > 1 else 8)

    def __call__(self, inputs: list[jax.Array], scales: list[jax.Array]) -> list[jax.Array]:
        """Plain outputs, transposed outputs, the fp32 maximum if one is measured, and sums."""
        if supports(inputs[0], rows=self.rows):
            return in_tiles(self, self.tile, inputs, scales)
        return at_once(self, inputs, scales)


def supports(x: jax.Array, name: str = GATES[0], rows: int = 1) -> bool:
    """Whether the kernel takes x, the widest input (of gate `name`), by so many rows."""
    return choose("gate", x.dtype, x.shape, act=name, rows=rows).name == "triton"


# ---- what it is for ----------------------------------------------------------------------------


def act_forward(h: jax.Array, bias: jax.Array | None, name: str) -> jax.Array:
    """h [..., F], bias [F] -> act(h + bias)."""

    def make(sigmoid, *parts):
        return [(_product(name, sigmoid, sum(parts), 1.0),)]

    inputs = _rows(h, bias)
    one = Pass("act_forward", make, (1,) * len(inputs), (Output(h.dtype),))
    return one(inputs, [])[0].reshape(h.shape)


def act_backward(
    h: jax.Array, bias: jax.Array | None, d: jax.Array, name: str
) -> tuple[jax.Array, jax.Array | None]:
    """h, d [..., F], bias [F]; d is the gradient of act(h + bias) -> those of h and of bias."""

    def make(sigmoid, h, d, *bias):
        return [(_gradients(name, sigmoid, sum(bias, h), 1.0, d)[1],)]

    inputs, out = _rows(h, d, bias), Output(h.dtype, summed=bias is not None)
    one = Pass("act_backward", make, (1,) * len(inputs), (out,))
    dh, *sums = one(inputs, [])
    return dh.reshape(h.shape), sums[0].astype(bias.dtype) if sums else None


def gate_backward(h: jax.Array, d: jax.Array, name: str) -> jax.Array:
    """h [..., 2, F] (gate, up) and the gradient d [..., F] of act(gate) * up -> that of h."""
    f = d.shape[-1]

    def make(sigmoid, *parts):
        return [_gradients(name, sigmoid, *parts)[1:]]

    one = Pass("gate_backward", make, (2, 1), (Output(h.dtype, 2),))
    return one([h.reshape(-1, 2 * f), d.reshape(-1, f)], [])[0].reshape(h.shape)


def gate_forward8(h: jax.Array, scale: jax.Array, name: str) -> list[jax.Array]:
    """h [M, 2 * F] -> [act(gate) * up in e4m3 [M, F], its maximum]."""

    def make(sigmoid, *parts):
        return [(_product(name, sigmoid, *parts),)]

    out = Output(E4M3, scale=0, computed=True, measured=True)
    return Pass("gate_forward8", make, (2,), (out,))([h], [scale])


def gate_backward8(
    h: jax.Array, d: jax.Array, scale: jax.Array, scale_dh: jax.Array, name: str
) -> list[jax.Array]:
    """h [M, 2 * F], d [M, F] -> [dh in e5m2 [M, 2 * F], act(gate) * up again, in e4m3, transposed
    [F, M], dh transposed [2 * F, M], the maximum of dh]."""

    def make(sigmoid, *parts):
        a, *dh = _gradients(name, sigmoid, *parts)
        return [(a,), dh]

    a = Output(E4M3, scale=0, computed=True, plain=False, transposed=True)
    dh = Output(E5M2, 2, scale=1, computed=True, transposed=True, measured=True)
    return Pass("gate_backward8", make, (2, 1), (a, dh))([h, d], [scale, scale_dh])


def quantize_rows(
    x: jax.Array, scale: jax.Array, dtype: jnp.dtype, plain: bool = True, transposed: bool = False
) -> list[jax.Array]:
    """x [M, K] in 8 bits -> [[M, K] if `plain`, [K, M] if `transposed`, the maximum]."""
    out = Output(dtype, scale=0, plain=plain, transposed=transposed, measured=True)
    return Pass("quantize", lambda sigmoid, x: [(x,)], (1,), (out,))([x], [scale])


def _rows(*arrays: jax.Array | None) -> list[jax.Array]:
    """[..., F] each -> [M, F], those that there are."""
    return [a.reshape(-1, a.shape[-1]) for a in arrays if a is not None]


def _inner(name, x):
    """p of act(x) = x * sigmoid(p(x)), and its derivative."""
    if name == "silu":
        return x, 1.0
    outer, cube = 2 * math.sqrt(2 / math.pi), 0.044715  # (1 + tanh(y)) / 2 = sigmoid(2 * y)
    return outer * (x + cube * x * x * x), outer * (1 + 3 * cube * x * x)


def _product(name, sigmoid, gate, up):
    return gate * sigmoid(_inner(name, gate)[0]) * up


def _gradients(name, sigmoid, gate, up, d):
    """act(gate) * up; by d, the gradients of gate and of up."""
    inner, slope = _inner(name, gate)
    s = sigmoid(inner)
    act = gate * s
    return act * up, d * up * (s + act * slope * (1 - s)), d * act


# ---- plain JAX, and the kernel ------------------------------------------------------------------


def at_once(one: Pass, inputs: list[jax.Array], scales: list[jax.Array]) -> list[jax.Array]:
    """`one` in plain JAX."""

    def cut(x, n):
        return jnp.split(x.astype(jnp.float32), n, axis=1)

    parts = [part for x, n in zip(inputs, one.parts, strict=True) for part in cut(x, n)]
    narrow = functools.partial(_as, inputs[0].dtype)
    made = zip(one.outs, one.make(lax.logistic, *parts), strict=True)
    pairs = [(out, [narrow(x) if out.computed else x for x in values]) for out, values in made]
    whole = [out.of(jnp.concatenate(made, 1), scales) for out, made in pairs]
    plain = [x for out, x in zip(one.outs, whole, strict=True) if out.plain]
    transposed = [x.T for out, x in zip(one.outs, whole, strict=True) if out.transposed]
    tops = [jnp.max(jnp.abs(x)) for out, made in pairs for x in made if out.measured]
    sums = [jnp.sum(x, 0) for out, made in pairs for x in made if out.summed]
    return [*plain, *transposed, *([functools.reduce(jnp.maximum, tops)] if tops else []), *sums]


def in_tiles(
    one: Pass,
    tile: Tile,
    inputs: list[jax.Array],
    scales: list[jax.Array],
    interpret: bool = False,
) -> list[jax.Array]:
    """`one` by the kernel; `interpret` runs it on a CPU, for tests."""
    import jax.experimental.pallas as pl
    import jax.experimental.pallas.triton as plt

    m, f = inputs[0].shape[0], inputs[0].shape[1] // one.parts[0]
    down, across = pl.cdiv(m, tile.rows), pl.cdiv(f, tile.columns)
    shape = jax.ShapeDtypeStruct
    shapes = [shape((m, out.parts * f), out.dtype) for out in one.outs if out.plain]
    transposed = [out for out in one.outs if out.transposed]
    shapes += [shape((out.parts * f, m // _ROWS), jnp.int16) for out in transposed]
    measured = any(out.measured for out in one.outs)
    shapes += [shape((down * across,), jnp.int32)] * measured
    shapes += [shape((down, f), jnp.float32) for out in one.outs if out.summed]
    made = pl.pallas_call(
        functools.partial(_kernel, one, tile, m, f, inputs[0].dtype, interpret),
        out_shape=shapes,
        grid=(down * across,),
        compiler_params=plt.CompilerParams(num_warps=tile.warps),
        interpret=interpret,
        name=one.name,
    )(jnp.stack([*scales, jnp.float32(1)]), *inputs)
    left = iter(made)
    plain = [next(left) for out in one.outs if out.plain]
    words = [(out, next(left)) for out in transposed]
    bytes_ = [lax.bitcast_convert_type(x, out.dtype).reshape(-1, m) for out, x in words]
    tops = [lax.bitcast_convert_type(jnp.max(next(left)), jnp.float32)] if measured else []
    return [*plain, *bytes_, *tops, *(jnp.sum(parts, 0) for parts in left)]


def _kernel(one: Pass, tile: Tile, m: int, f: int, dtype, interpret: bool, scale_ref, *refs):
    """A program's tile, of which it takes every `one.rows`-th row at a time."""
    import jax.experimental.pallas as pl
    import jax.experimental.pallas.triton as plt

    left = iter(refs)
    in_refs = [next(left) for _ in one.parts]
    plain_refs = [next(left) if out.plain else None for out in one.outs]
    turned_refs = [next(left) if out.transposed else None for out in one.outs]
    top_ref = next(left) if any(out.measured for out in one.outs) else None
    sums_ref = next(left, None)
    used = {out.scale for out in one.outs if out.scale is not None}
    scales = {k: scale_ref[k] for k in used}
    across = pl.cdiv(f, tile.columns)
    i, j = pl.program_id(0) // across, pl.program_id(0) % across
    column = j * tile.columns + jnp.arange(tile.columns, dtype=jnp.int32)
    row = i * (tile.rows // one.rows) + jnp.arange(tile.rows // one.rows, dtype=jnp.int32)
    ragged = m % tile.rows or f % tile.columns
    edge, other = (column < f, 0.0) if ragged else (None, None)
    sigmoid, narrow = (lax.logistic, _as) if interpret else (_fast_sigmoid, _fast_as)
    words, top, total = {}, 0, 0
    for r in range(one.rows):
        own = one.rows * row + r
        mask = (own < m)[:, None] & edge[None] if ragged else None

        def at(part):
            return (own[:, None], part * f + column[None])  # noqa: B023

        read = []
        for ref, parts in zip(in_refs, one.parts, strict=True):
            vector = ref.shape[0] < m
            places = [(0, column)] if vector else [at(part) for part in range(parts)]
            real = edge if vector else mask
            values = [plt.load(ref.at[place], mask=real, other=other) for place in places]
            read += [value[None] for value in values] if vector else values
        made = one.make(sigmoid, *(x.astype(jnp.float32) for x in read))
        for k, (out, values) in enumerate(zip(one.outs, made, strict=True)):
            for part, value in enumerate(values):
                value = narrow(dtype, value) if out.computed else value
                if out.measured:  # as integers, magnitudes are in order, and NaN is the largest
                    bits = lax.bitcast_convert_type(value, jnp.int32) & 0x7FFFFFFF
                    top = jnp.maximum(top, bits)
                if out.summed:
                    total += jnp.sum(jnp.where(mask, value, 0.0) if ragged else value, 0)
                value = out.of(value, scales, saturate=interpret)
                if out.plain:
                    plt.store(plain_refs[k].at[at(part)], value, mask=mask)
                if out.transposed:
                    byte = lax.bitcast_convert_type(value, jnp.uint8).astype(jnp.int16)
                    words[k, part] = words.get((k, part), 0) | byte << 8 * r
    mask = edge[:, None] & (one.rows * row < m)[None] if ragged else None
    for (k, part), word in words.items():
        place = (part * f + column)[:, None], row[None]
        plt.store(turned_refs[k].at[place], word.T, mask=mask)
    if top_ref is not None:
        plt.store(top_ref.at[pl.program_id(0)], jnp.max(top))
    if sums_ref is not None:
        plt.store(sums_ref.at[i, column], total, mask=edge)


def _as(dtype, x: jax.Array) -> jax.Array:
    """fp32 x with the precision of `dtype`. A cast there and back XLA would drop."""
    return lax.reduce_precision(x, 8, jnp.finfo(dtype).nmant)


def _fast_as(dtype, x: jax.Array) -> jax.Array:
    """`_as` in Triton, whose casts of single numbers are slow: two at a time."""
    asm = """{
        .reg .b32 both, low, high;
        cvt.rn.bf16x2.f32 both, $3, $2;
        shl.b32 low, both, 16;
        and.b32 high, both, 0xFFFF0000;
        mov.b32 $0, low;
        mov.b32 $1, high;
    }"""
    return x if dtype == jnp.float32 else _in_asm(asm, x, "=f,=f,f,f", 2)


def _fast_sigmoid(x: jax.Array) -> jax.Array:
    """In Triton: to 1e-5 of itself, in 4 instructions. Its own exp and division take 16 more, for
    which a pass over memory has no time."""
    asm = """{
        mul.ftz.f32 $0, $1, 0fBFB8AA3B;
        ex2.approx.ftz.f32 $0, $0;
        add.ftz.f32 $0, $0, 0f3F800000;
        rcp.approx.ftz.f32 $0, $0;
    }"""
    return _in_asm(asm, x, "=f,f", 1)


def _in_asm(asm: str, x: jax.Array, constraints: str, pack: int) -> jax.Array:
    """PTX that maps `pack` fp32 numbers to as many."""
    import jax.experimental.pallas.triton as plt

    shape = [jax.ShapeDtypeStruct(x.shape, jnp.float32)]
    return plt.elementwise_inline_asm(
        asm, args=[x], constraints=constraints, pack=pack, result_shape_dtypes=shape
    )[0]
