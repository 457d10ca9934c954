"""`python -m mjax.bench kernel NAME|all`: one kernel at a time, or all.

Forward and backward of each on random inputs, in milliseconds and in TFLOP/s or GB/s, as a share of
the rate that this device reaches in the same run: of its fastest large matmul, or of a copy that is
read and written once. FLOPs are those the mathematics needs (half of the square under a causal
mask), bytes are each input read and each output written once. A reference path is timed, too, if
there is one.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from mjax.bench.grouped import grouped_matmuls, grouped_matmuls8
from mjax.bench.report import add_arguments, launch_ms, report, rounded
from mjax.bench.ssd import scans
from mjax.bench.work import Work, draw, pulled
from mjax.config.schema.model import ModelConfig
from mjax.errors import CommandParser, UserError, at_least, read_numbers
from mjax.kernels.attention.api import attention, resolve
from mjax.kernels.attention.mosaic import supports_mosaic as supports_mosaic
from mjax.kernels.base.attention_call import AttentionArrays, AttentionCall
from mjax.kernels.elementwise.activation import activate, activated, gated
from mjax.kernels.elementwise.norm import fork, norm
from mjax.kernels.elementwise.norm import norm_reference as normed
from mjax.kernels.loss.cross_entropy import Terms, cross_entropy, loss_reference
from mjax.models.attention import positions
from mjax.sharding.collectives import LOCAL

# What --shape gives, and the shapes measured without it.
SHAPES = {
    "attention": (
        "batch,seq,heads,kv_heads,head_dim,documents",
        ((2, 8192, 32, 8, 128, 1), (2, 8192, 32, 8, 128, 8), (8, 2048, 16, 16, 128, 1))
        + ((32, 1024, 12, 12, 64, 1),),
    ),
    "loss": ("tokens,vocab,width", ((16384, 151936, 4096), (32768, 50257, 768))),
    "norm": ("tokens,width,heads", ((65536, 4096, 32),)),
    "matmul": (
        "tokens,inputs,outputs",
        ((16384, 4096, 28672), (16384, 14336, 4096), (16384, 4096, 4096), (32768, 768, 3072)),
    ),
    "grouped": (
        "rows,groups,inputs,outputs",
        ((16384, 8, 4096, 14336), (16384, 8, 14336, 4096), (65536, 64, 2048, 1408))
        + ((65536, 64, 1408, 2048), (65536, 128, 2048, 768), (65536, 128, 768, 2048)),
    ),
    "grouped8": (
        "rows,groups,inputs,outputs",
        ((16384, 8, 4096, 14336), (16384, 8, 14336, 4096), (65536, 64, 2048, 1408)),
    ),
    "ssd": ("batch,seq,heads,groups,head_dim,state", ((8, 4096, 80, 8, 64, 128),)),
}


def main(argv: list[str]) -> int:
    parser = CommandParser("bench kernel", description=__doc__)
    parser.add_argument("kernel", choices=[*SHAPES, "all"], help="what to time")
    shapes = "; ".join(f"{name}: {words}" for name, (words, _) in SHAPES.items())
    parser.add_argument("--shape", action="append", help=f"numbers with commas ({shapes})")
    parser.add_argument("--samples", type=at_least(1), default=20, help="the median counts")
    add_arguments(parser)
    args = parser.parse_args(argv)
    if args.shape and args.kernel == "all":
        raise UserError("--shape: shapes differ among kernels; name one kernel instead of 'all'")
    names = list(SHAPES) if args.kernel == "all" else [args.kernel]
    works = {name: shapes_of(name, args.shape) for name in names}
    return report(args, measure_kernels(works, args.samples))


def shapes_of(kernel: str, given: list[str] | None) -> list[tuple[int, ...]]:
    words, default = SHAPES[kernel]
    option = f"--shape ({kernel}: {words})"
    out = [tuple(read_numbers(option, text)) for text in given or ()]
    if any(len(shape) != words.count(",") + 1 or min(shape) < 1 for shape in out):
        raise UserError(f"--shape: {kernel} takes {words}, all positive")
    return out or list(default)


def measure_kernels(shapes: dict[str, list[tuple[int, ...]]], samples: int) -> Iterator[dict]:
    """A record for every piece of work, after those of the two ceilings."""
    roof: dict[str, float] = {}
    for kind, work in ceilings().items():
        record = timed("ceiling", (), work, samples, {})
        roof[kind] = getattr(work, kind) / record["ms"]
        yield record
    make = {"attention": attentions, "loss": losses, "norm": norms, "matmul": matmuls}
    make |= {"grouped": grouped_matmuls, "grouped8": grouped_matmuls8, "ssd": scans}
    for kernel, all_shapes in shapes.items():
        for shape in all_shapes:
            done = {}
            for work in make[kernel](*shape):
                done[work.name] = timed(kernel, shape, work, samples, roof)
                yield done[work.name] | beside(done, work.name)


def beside(done: dict[str, dict], name: str) -> dict:
    """How a time compares with those measured before it."""
    ms = {key: record["ms"] for key, record in done.items()}
    if name == "three matmuls alone" and "forward with gradients" in ms:
        ratio = ms["forward with gradients"] / ms[name]
        return {"loss_overhead": round(ratio - 1, 4)}
    ours = name.removeprefix("reference ")
    if ours == name:
        return {}
    ratio = ms[name] / ms[ours]
    return {"ours_is_faster": round(ratio, 2)}


def timed(kernel: str, shape: tuple[int, ...], work: Work, samples: int, roof: dict) -> dict:
    compiled = jax.jit(work.run).lower(*work.inputs).compile()
    ms = launch_ms(launcher(work, compiled), samples)
    record = {"bench": "kernel", "case": {"kernel": kernel, "work": work.name, "shape": shape}}
    record |= {"ms": rounded(ms)}
    if work.flops:
        record["tflops"] = rounded(work.flops / ms / 1e9)
    if work.bytes:
        record["gb_per_s"] = rounded(work.bytes / ms / 1e6)
    if roof:
        shares = (getattr(work, kind) / ms / best for kind, best in roof.items())
        record["of_ceiling"] = rounded(max(shares))
    if work.expected is not None:
        record["error"] = rounded(error_of(work, compiled))
    memory = compiled.memory_analysis()
    return record | {"temp_gb": memory and rounded(memory.temp_size_in_bytes / 1e9)}


def launcher(work: Work, compiled: Callable) -> Callable[[], object]:
    """A function that launches the work once."""
    if not work.kept:
        return functools.partial(compiled, *work.inputs)
    in_place = jax.jit(work.run, donate_argnums=len(work.inputs) - 1)
    *inputs, last = work.inputs
    state = [jnp.copy(last)]

    def launch() -> object:
        state[0] = in_place(*inputs, state[0])
        return state[0]

    return launch


def error_of(work: Work, compiled: Callable) -> float:
    """How far the output is from the expected one, as a share of that one's norm."""

    @jax.jit
    def compare(got, expected):
        got, expected = got.astype(jnp.float32), expected.astype(jnp.float32)
        return jnp.linalg.norm(got - expected) / jnp.linalg.norm(expected)

    expected = jax.jit(work.expected)(*work.inputs)
    return float(compare(compiled(*work.inputs), expected))


def ceilings() -> dict[str, Work]:
    is_cpu = jax.default_backend() == "cpu"
    n = 256 if is_cpu else 8192
    m = 2**20 if is_cpu else 2**29
    x = draw((n, n))
    w = draw((n, n), 1)
    a = draw((m,), 2)
    matmul = Work("matmul", jnp.matmul, (x, w), flops=2.0 * n**3)
    copy = Work("copy", jnp.copy, (a,), bytes=4.0 * m)
    return {"flops": matmul, "bytes": copy}


def attentions(b: int, s: int, n: int, k: int, h: int, documents: int) -> Iterator[Work]:
    if s % documents:
        raise UserError(f"--shape: {documents} documents do not divide {s} tokens")
    qkv = draw((b, s, n, h)), draw((b, s, k, h), 1), draw((b, s, k, h), 2)
    columns = jnp.arange(s, dtype=jnp.int32)
    ids = jnp.broadcast_to(columns * documents // s, (b, s))
    flops = 2.0 * b * n * s * s // documents * h  # two matmuls over half of each square

    arrays = AttentionArrays((columns, columns), (ids, ids) if documents > 1 else None)
    call = AttentionCall(h**-0.5, max_documents=documents)

    def fn(implementation, q, k, v):
        return attention(q, k, v, replace(call, implementation=implementation), arrays)

    paths = {"": "auto", "mosaic ": "mosaic", "reference ": "xla"}
    if not supports_mosaic(qkv[0], qkv[2], call):
        paths.pop("mosaic ")
    for prefix, implementation in paths.items():
        run = functools.partial(fn, implementation)
        yield Work(f"{prefix}forward", run, qkv, flops)
        yield pulled(run, qkv, f"{prefix}backward", 2.5 * flops)
    in_8_bits = replace(call, eight_bits=True)
    try:
        resolve(in_8_bits, qkv[0], qkv[2], arrays)
    except UserError:  # cuDNN has no such call in 8 bits
        return
    run = functools.partial(attention, call=in_8_bits, arrays=arrays)
    yield Work("8-bit forward", run, qkv, flops, expected=functools.partial(fn, "xla"))
    yield pulled(run, qkv, "8-bit backward", 2.5 * flops)


def losses(t: int, v: int, d: int) -> Iterator[Work]:
    padded = -(-v // 128) * 128
    x = draw((t, d))
    w = draw((padded, d), 1) * d**-0.5
    rng = np.random.default_rng(0)
    labels = jnp.asarray(rng.integers(0, v, t, dtype=np.int32))
    mask = jnp.ones(t, jnp.float32)
    terms = Terms(v)
    flops = 6.0 * t * padded * d
    inputs = x, w, labels, mask
    ours = functools.partial(cross_entropy, terms=terms, parallel=LOCAL)
    whole = functools.partial(loss_reference, terms=terms)
    for name, loss in (("", ours), ("reference ", whole)):
        both = jax.value_and_grad(loss, (0, 1))
        yield Work(f"{name}forward with gradients", both, inputs, flops)

    def three(x, w, d_z):
        z = jnp.einsum("td,vd->tv", x, w)
        d_x = jnp.einsum("tv,vd->td", d_z, w)
        d_w = jnp.einsum("tv,td->vd", d_z, x)
        return z, d_x, d_w

    d_z = draw((t, padded), 2)
    yield Work("three matmuls alone", three, (x, w, d_z), flops)


def norms(t: int, d: int, heads: int) -> Iterator[Work]:
    """Norms, RoPE (heads * 128 wide), SwiGLU, GELU; backwards read what they keep."""
    size = 2.0 * t * d
    yield from _norms_of_rows(t, d, size)
    yield from _rope(t, heads)
    yield from _gates(t, d, size)


def _norms_of_rows(t: int, d: int, size: float) -> Iterator[Work]:
    x = draw((t, d))
    gain = draw((d,), 1, "float32")
    bias = draw((d,), 2, "float32")
    for kind, inputs in (("rmsnorm", (x, gain, None)), ("layernorm", (x, gain, bias))):
        ours = functools.partial(norm, eps=1e-5)
        stream = functools.partial(fork, eps=1e-5)
        plain = functools.partial(normed, eps=1e-5)
        yield Work(f"{kind} forward", ours, inputs, bytes=2 * size)
        yield pulled(ours, inputs, f"{kind} backward", moved=3 * size)
        yield pulled(plain, inputs, f"reference {kind} backward", moved=3 * size)
        yield pulled(stream, inputs, f"{kind} backward, with a stream", moved=4 * size)


def _rope(t: int, heads: int) -> Iterator[Work]:
    seq = min(t, 8192)
    wide = 2.0 * t * heads * 128
    q = draw((t // seq, seq, heads, 128))
    cfg = ModelConfig(hidden_size=heads * 128, attention={"num_attention_heads": heads})
    places = jnp.broadcast_to(jnp.arange(seq), (t // seq, seq))
    tables = positions.rope_tables(cfg, places, "full")
    rope = functools.partial(positions.apply_rope, tables=tables)
    yield Work("rope forward", rope, (q,), bytes=2 * wide)
    yield pulled(rope, (q,), "rope backward", moved=2 * wide)


def _gates(t: int, d: int, size: float) -> Iterator[Work]:
    pair = (draw((t, 2, d)),)
    swiglu = functools.partial(gated, name="silu")

    def plain_swiglu(h):
        gate, up = h[:, 0], h[:, 1]
        return activate(gate, "silu") * up

    yield Work("swiglu forward", swiglu, pair, bytes=3 * size)
    yield pulled(swiglu, pair, "swiglu backward", moved=5 * size)
    yield pulled(plain_swiglu, pair, "reference swiglu backward", moved=5 * size)

    biased = draw((t, d)), draw((d,), 1)
    gelu = functools.partial(activated, name="gelu_tanh")

    def gelu_forward(*inputs):
        return jax.vjp(gelu, *inputs)[0]

    def plain_gelu(h, bias):
        return activate(h + bias, "gelu_tanh")

    yield Work("bias and gelu forward", gelu_forward, biased, bytes=2 * size)
    yield Work("reference bias and gelu forward", plain_gelu, biased, bytes=2 * size)
    yield pulled(gelu, biased, "bias and gelu backward", moved=3 * size)
    yield pulled(plain_gelu, biased, "reference bias and gelu backward", moved=3 * size)


def matmuls(t: int, d: int, f: int) -> Iterator[Work]:
    x = draw((t, d))
    w = draw((d, f), 1)
    d_y = draw((t, f), 2)
    flops = 2.0 * t * d * f
    forward = functools.partial(jnp.tensordot, axes=1)
    d_input = functools.partial(jnp.einsum, "tf,df->td")
    d_weight = functools.partial(jnp.einsum, "td,tf->df")
    yield Work("forward", forward, (x, w), flops)
    yield Work("d_input", d_input, (d_y, w), flops)
    yield Work("d_weight", d_weight, (x, d_y), flops)
