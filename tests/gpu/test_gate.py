"""The gate's kernel on a GPU against plain JAX, at sizes of real models; bit-equal twice."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.kernels.elementwise import gate
from mjax.kernels.elementwise.gate import E4M3, E5M2
from mjax.kernels.fp8 import quantize as q
from mjax.kernels.fp8.recipe import Delayed
from mjax.models.base.weight import Weight
from mjax.models.feedforward.mlp_fp8 import gated_mlp_fp8
from mjax.plan.xla_options import CUBLAS
from tests.devices import CPU, choose_for

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")

# tokens, width: Llama-3-8B, Llama-2-7B; what no tile divides, and words do not
SHAPES = [
    *((16384, 14336, "bfloat16"), (4098, 11008, "bfloat16"), (5002, 1001, "bfloat16")),
    (2050, 4864, "float32"),
]
leaves = jax.tree.leaves
PASSES = {
    "act_forward": lambda h, d, s: [gate.activation_forward(h, h[0] / s, "gelu_tanh")],
    "act_backward": lambda h, d, s: list(gate.activation_backward(d, d[0], d[::-1], "gelu_tanh")),
    "backward": lambda h, d, s: [gate.gate_gradient(h.reshape(len(h), 2, -1), d, "silu")],
    "act_forward exact": lambda h, d, s: [gate.activation_forward(h, h[0] / s, "gelu")],
    "act_backward exact": lambda h, d, s: list(gate.activation_backward(d, d[0], d[::-1], "gelu")),
    "backward gelu": lambda h, d, s: [gate.gate_gradient(h.reshape(len(h), 2, -1), d, "gelu_tanh")],
    "act_forward quick": lambda h, d, s: [gate.activation_forward(h, h[0] / s, "quick_gelu")],
    "act_backward quick": lambda h, d, s: list(
        gate.activation_backward(d, d[0], d[::-1], "quick_gelu")
    ),
    "forward8": lambda h, d, s: leaves(gate.gate_to_fp8(h, s, "silu")),
    "backward8": lambda h, d, s: leaves(gate.gate_gradients_to_fp8(h, d, s, 8 * s, "silu")),
    "backward8 gelu": lambda h, d, s: leaves(
        gate.gate_gradients_to_fp8(h, d, s, 8 * s, "gelu_tanh")
    ),
    "plain": lambda h, d, s: leaves(gate.to_fp8(h, s, E4M3)),
    "transposed": lambda h, d, s: leaves(gate.to_fp8_transposed(d, s, E4M3)),
    "both": lambda h, d, s: leaves(gate.to_fp8_both(d, s, E5M2)),
}


# Bytes of an element -> what counts as small, how many may be unlike, by how much of themselves:
# a bit. Gradients that cancel leave the errors of what they are made of.
TOLERANCE = {1: (16, 1e-3, 0.26), 2: (0.1, 1e-2, 0.01), 4: (1, 1, 1e-3)}


@pytest.mark.parametrize("m, f, dtype", SHAPES)
def test_measures_what_it_rounds(m, f, dtype):
    """To a last bit of bf16: compilers fuse products and sums of two kernels in their own ways."""
    keys = jax.random.split(jax.random.key(0), 2)
    h, d = (jax.random.normal(k, (m, n * f), dtype) for k, n in zip(keys, (2, 1), strict=True))
    forward = gate.gate_amax(h, "silu"), gate.gate_to_fp8(h, jnp.float32(1), "silu").amax
    made = gate.gate_gradients_to_fp8(h, d, jnp.float32(1), jnp.float32(1), "silu")
    for got, want in (forward, (gate.gate_amax(h, "silu", d), made.d_input.amax)):
        assert abs(got - want) <= 2**-7 * want


@pytest.mark.parametrize("m, f, dtype", SHAPES)
def test_equals_plain_jax_and_itself(m, f, dtype, monkeypatch):
    """Saturating, infinite and with a number that is none; but for a last bit that rounds over."""
    keys = jax.random.split(jax.random.key(0), 2)
    h, d = (jax.random.normal(k, (m, n * f), dtype) for k, n in zip(keys, (2, 1), strict=True))
    h, s = (3 * h).at[3, 5].set(1e9).at[4, 7].set(jnp.inf).at[5, 9].set(jnp.nan), jnp.float32(16)
    d = d.at[1, 2].set(-1e9)
    assert gate.supports(d, rows=2)

    for name, one in PASSES.items():  # after the other: all results of one size fill 80 GB
        with_kernel = jax.jit(lambda *operands, one=one: one(*operands))
        _poison()
        got = with_kernel(h, d, s)
        _poison()
        assert all(map(_same, got, with_kernel(h, d, s)))
        with monkeypatch.context() as patch:
            choose_for(patch, CPU, "gate", "quantize")
            want = jax.jit(lambda *operands, one=one: one(*operands))(h, d, s)  # anew: without it
        for a, e in zip(got, want, strict=True):
            assert (a.shape, a.dtype) == (e.shape, e.dtype), name
            floor, most, bound = TOLERANCE[a.dtype.itemsize] if "ward" in name else (1, 0, 0)
            unlike, worst = _unlike(a, e, floor)
            assert unlike <= most and worst <= bound, (name, a.shape, unlike, worst)


@jax.jit
def _same(a, b):
    return jnp.all((a == b) | (jnp.isnan(a) & jnp.isnan(b)))


@jax.jit
def _unlike(a, e, floor):
    """(Which share of e a does not equal, by how much of an element or of `floor`). What is not
    finite is alike: a maximum may be either."""
    a, e = a.astype(jnp.float32), e.astype(jnp.float32)
    finite, odd = jnp.isfinite(e), jnp.isfinite(e) != jnp.isfinite(a)
    off = jnp.where(finite & ~odd, jnp.abs(a - e), jnp.where(odd, jnp.inf, 0))
    size = jnp.where(finite, jnp.maximum(jnp.abs(e), floor), 1)
    return jnp.mean(off > 0), jnp.max(off / size)


def _poison():
    """Leave NaN in the memory that the next outputs get: what is not written is seen."""
    jax.block_until_ready([jnp.full((1 << 28,), jnp.nan, jnp.float32) for _ in range(4)])


@pytest.mark.parametrize("summed", [False, True])
def test_block_is_the_cpus(monkeypatch, summed):
    """Six of cuBLASLt's 8-bit products, and what the CPU makes of the same operands."""
    m, d, f = 1024, 1024, 1408
    keys = jax.random.split(jax.random.key(0), 4)
    x, g = (jax.random.normal(k, (m, d), jnp.bfloat16) for k in keys[:2])
    up = 0.02 * jax.random.normal(keys[2], (d, 2, f), jnp.bfloat16)
    down = 0.02 * jax.random.normal(keys[3], (f, d), jnp.bfloat16)

    def scale(w):
        return jnp.stack([64.0, q.scale_of(q.amax_of(w), E4M3), 2.0**10])

    def weight(w):
        total = jnp.zeros(w.shape) if summed else None
        return Weight(w, scales=scale(w), grad_sum=total, recipe=Delayed())

    def everything(x, g, up, down):
        y, pull = jax.vjp(lambda x, up, down: gated_mlp_fp8(x, up, down, "silu"), x, up, down)
        return y, pull(g)

    operands = x, g, weight(up), weight(down)
    made = jax.jit(everything, compiler_options=dict(CUBLAS)).lower(*operands).compile()
    assert made.as_text().count("matmul$f8") == 6
    kernels = set(re.findall(r"\b(gate_\w+|quantize\w*)\)*/triton_kernel_call", made.as_text()))
    assert kernels == {"gate_forward8", "gate_backward8", "quantize", "quantize_transposed"}
    choose_for(monkeypatch, CPU, "gate", "quantize")
    plain = jax.jit(lambda *operands: everything(*operands))  # anew: without the kernel
    want = plain(*jax.device_put(operands, jax.devices("cpu")[0]))
    for a, b in zip(jax.tree.leaves(made(*operands)), jax.tree.leaves(want), strict=True):
        a, b = (np.asarray(v, np.float64) for v in (a, b))
        # sums in another order fall to other neighbors; rounding to FP8 is 0.07 to 0.1 off
        assert np.linalg.norm(a - b) <= 0.03 * np.linalg.norm(b)
