"""The gate's kernel and the block around it, in Triton's interpreter: against fp64, against plain
JAX bit for bit, with numbers that are none, and within a step on a mesh."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.kernels.base import chooser
from mjax.kernels.elementwise import gate
from mjax.kernels.elementwise.activation import activate, activated, gated
from mjax.kernels.elementwise.gate import E4M3, E5M2, GateTile
from mjax.kernels.fp8 import quantize as q
from mjax.kernels.fp8.recipe import Current, Delayed
from mjax.models.base.weight import Weight, matmul
from mjax.models.feedforward import mlp_fp8
from mjax.prove import Cell, deviation, make_trainer, measure
from tests.devices import GPU, choose_for
from tests.marks import exhaustive, quick
from tests.triton_interpreter import interpret

# Sizes that fill no tile, that fill some, that are odd.
CASES = [
    ((6, 40), GateTile(4, 16, 4)),
    ((64, 96), GateTile(16, 32, 4)),
    ((50, 72), GateTile(64, 64, 4)),
    ((34, 17), GateTile(8, 8, 1)),
]
OTHERS = [("relu", 0), ("relu2", 0)]  # activations that the kernel does not know
leaves = jax.tree.leaves
PASSES = {
    "act_forward": lambda h, d, s: [gate.activation_forward(h, 8 * h[0] / s, "gelu_tanh")],
    "act_backward": lambda h, d, s: list(gate.activation_backward(d, d[0], d[::-1], "silu")),
    "backward": lambda h, d, s: [gate.gate_gradient(h.reshape(len(h), 2, -1), d, "gelu_tanh")],
    "act_forward gelu": lambda h, d, s: [gate.activation_forward(h, 8 * h[0] / s, "gelu")],
    "act_backward gelu": lambda h, d, s: list(gate.activation_backward(d, d[0], d[::-1], "gelu")),
    "backward gelu": lambda h, d, s: [gate.gate_gradient(h.reshape(len(h), 2, -1), d, "gelu")],
    "act_forward quick": lambda h, d, s: [gate.activation_forward(h, 8 * h[0] / s, "quick_gelu")],
    "act_backward quick": lambda h, d, s: list(
        gate.activation_backward(d, d[0], d[::-1], "quick_gelu")
    ),
    "forward8": lambda h, d, s: leaves(gate.gate_to_fp8(h, s, "silu")),
    "backward8": lambda h, d, s: leaves(gate.gate_gradients_to_fp8(h, d, s, 8 * s, "silu")),
    "weighted forward8": lambda h, d, s: leaves(gate.gate_to_fp8(h, s, "silu", _weights(d))),
    "weighted backward8": lambda h, d, s: _weighted_backward8(h, d, s),
    "tops": lambda h, d, s: [gate.gate_amax(h, "silu")],
    "tops backward": lambda h, d, s: [gate.gate_amax(h, "gelu_tanh", d)],
    "plain": lambda h, d, s: leaves(gate.to_fp8(h, s, E4M3)),
    "transposed": lambda h, d, s: leaves(gate.to_fp8_transposed(d, s, E5M2)),
    "both": lambda h, d, s: leaves(gate.to_fp8_both(d, s, E5M2)),
}


def _weights(d):
    return d[:, 1].astype(jnp.float32)


def _weighted_backward8(h, d, s):
    """Sums over columns have another order: in bf16 they are equal."""
    *made, sums = leaves(gate.gate_gradients_to_fp8(h, d, s, 8 * s, "silu", _weights(d)))
    return [*made, sums.astype(jnp.bfloat16)]


def draw(m, f, dtype="bfloat16"):
    """h [M, 2 * F], d [M, F]."""
    keys = jax.random.split(jax.random.key(m), 2)
    h, d = (jax.random.normal(k, (m, n * f)) for k, n in zip(keys, (2, 1), strict=True))
    return (3 * h).astype(dtype), d.astype(dtype)


def anew(f):
    """`f` compiled, whatever it was traced to before."""
    return jax.jit(lambda *operands: f(*operands))


def by_kernel(monkeypatch, tile):
    """The kernel for every pass, in the interpreter, by `tile`. Returns what lists its uses."""
    kernel = gate.in_tiles

    def in_tiles(name, own, *operands, **constants):
        return kernel(name, tile, *operands, **constants)

    choose_for(monkeypatch, GPU, "gate", "quantize")
    monkeypatch.setitem(chooser.FEWEST, "gate", 1)
    monkeypatch.setitem(chooser.FEWEST, "quantize", 1)
    monkeypatch.setattr(gate, "in_tiles", in_tiles)
    return interpret(monkeypatch)


def exact(a):
    return np.asarray(a, np.float64)


@pytest.mark.grid
@pytest.mark.parametrize(
    "name, dtype",
    [(name, "bfloat16") for name in PASSES]
    + [(name, "float16") for name in ("act_forward", "act_backward", "backward")],
)
@pytest.mark.parametrize("size, tile", CASES)
def test_kernel_is_plain_jax(monkeypatch, size, tile, name, dtype):
    """To the bit, but for a last bit of fp32 that another order of operations rounds."""
    operands = *draw(*size, dtype), jnp.float32(16)
    want = anew(PASSES[name])(*operands)
    used = by_kernel(monkeypatch, tile)
    got = anew(PASSES[name])(*operands)
    assert used
    for a, e in zip(got, want, strict=True):
        assert (a.shape, a.dtype) == (e.shape, e.dtype)
        a, e = exact(a), exact(e)
        assert np.sum(a != e) <= max(1, 1e-3 * a.size)
        np.testing.assert_allclose(a, e, rtol=0.26 if want[0].dtype.itemsize == 1 else 1e-2)


def test_one_row_is_no_vector_of_all_rows(monkeypatch):
    h, d = draw(1, 40)
    want = (
        *gate.activation_backward(d, d[0], d, "silu"),
        gate.gate_gradient(h.reshape(1, 2, 40), d, "silu"),
    )
    used = by_kernel(monkeypatch, GateTile(4, 16, 4))
    got = (
        *gate.activation_backward(d, d[0], d, "silu"),
        gate.gate_gradient(h.reshape(1, 2, 40), d, "silu"),
    )
    assert used == ["act_backward", "gate_backward"]
    for a, e in zip(got, want, strict=True):
        np.testing.assert_allclose(exact(a), exact(e), rtol=1e-2)


@pytest.mark.parametrize("name", gate.GATES)
def test_gradients_are_those_of_fp64(name):
    h, d = draw(32, 48, "float32")
    got = gate.gate_gradient(h.reshape(32, 2, 48), d, name)
    (got8, got8_transposed, top), (_, a8, _), _ = gate.gate_gradients_to_fp8(
        h, d, jnp.float32(4), jnp.float32(64), name
    )
    with jax.enable_x64(True):

        def of(h):
            return activate(h[:, 0], name) * h[:, 1]

        a, pull = jax.vjp(of, h.astype(float).reshape(32, 2, 48))
        (want,) = pull(d.astype(float))
        a, want = np.asarray(a), np.asarray(want)
    np.testing.assert_allclose(exact(got), want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(float(top), np.abs(want).max(), rtol=1e-6)
    np.testing.assert_array_equal(exact(got8).T, exact(got8_transposed))
    # half a step of 2 or of 3 bits, or of the smallest normal number
    np.testing.assert_allclose(exact(got8) / 64, want.reshape(32, -1), 2**-3 + 1e-5, 2**-17)
    np.testing.assert_allclose(exact(a8).T / 4, a, 2**-4 + 1e-5, 2**-12)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name, kernel", [(a, k) for a in gate.GATES for k in (0, 1)] + OTHERS)
def test_activations_gradients_are_those_of_fp64_and_keep_their_input_alone(
    monkeypatch, name, kernel, biased
):
    h, d = (a.reshape(2, 16, 48) for a in (draw(32, 24, "float32")[0], draw(32, 48, "float32")[1]))
    bias = jax.random.normal(jax.random.key(5), (48,)) if biased else None
    operands = (h, bias) if biased else (h,)
    with jax.enable_x64(True):

        def plain(h, bias=0.0):
            return activate(h + bias, name)

        want, pull = jax.vjp(plain, *(a.astype(float) for a in operands))
        want = [np.asarray(a) for a in (want, *pull(d.astype(float)))]
    used = by_kernel(monkeypatch, GateTile(8, 16, 4)) if kernel else []
    got, pull = jax.vjp(lambda h, bias=None: activated(h, bias, name), *operands)
    kept = [a.size for a in jax.tree.leaves(pull)]
    # XLA's own tanh on CPUs loses digits in programs that compile fast, and wherever it is fused.
    bound = 2e-6 if kernel else 1e-5
    for a, e in zip((got, *pull(d)), want, strict=True):
        np.testing.assert_allclose(exact(a), e, rtol=1e-5, atol=bound * np.abs(e).max())
    assert used == (["act_forward", "act_backward"] if kernel else [])
    assert sorted(kept) == sorted(a.size for a in operands)


@pytest.mark.parametrize("kernel", [False, True])
def test_too_large_saturates_and_what_is_no_number_is_seen(monkeypatch, kernel):
    if kernel:
        by_kernel(monkeypatch, GateTile(4, 4, 4))
    x = jnp.ones((6, 6)).at[0, 1].set(1e9).at[1, 0].set(-1e9)
    for dtype, top in ((E4M3, 448.0), (E5M2, 57344.0)):
        x8, transposed, amax = gate.to_fp8_both(x, jnp.float32(2), dtype)
        assert exact(x8)[[0, 1, 2], [1, 0, 0]].tolist() == [top, -top, 2]
        assert np.array_equal(exact(x8).T, exact(transposed)) and amax == 1e9
        for odd in (jnp.inf, -jnp.inf, jnp.nan):
            with_odd = x.at[5, 3].set(odd)
            x8, transposed, amax = gate.to_fp8_both(with_odd, jnp.float32(2), dtype)
            assert not np.isfinite(amax) and not np.isinf(exact(x8)).any()
            assert np.isnan(odd) == np.isnan(exact(x8)[5, 3]) == np.isnan(exact(transposed)[3, 5])


def test_only_what_pays_and_fits_takes_it(monkeypatch):
    def shaped(*shape, dtype="bfloat16"):
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    assert not gate.supports(shaped(2**14, 2**10)), "there is no GPU here"
    choose_for(monkeypatch, GPU, "gate")
    assert gate.supports(shaped(2**10, 2**10)) and not gate.supports(shaped(2**10, 2**10 - 1))
    assert gate.supports(shaped(2**19, 4095)) and not gate.supports(shaped(2**19, 4096))
    assert not gate.supports(shaped(2**14, 2**10), "relu")
    assert not gate.supports(shaped(2**14, 2**10, dtype="float8_e4m3fn"))
    assert not gate.supports(shaped(2**14 + 1, 2**10), rows=2)


# ---- the block ---------------------------------------------------------------------------------


def block(dtype, act, recipe):
    """Two functions of the same operands, and those: by two matmuls and a gate; in one."""
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (2, 24, 32)).astype(dtype)
    up = (0.1 * jax.random.normal(keys[1], (32, 2, 48))).astype(dtype)
    down = (0.1 * jax.random.normal(keys[2], (48, 32))).astype(dtype)

    def scale(w):
        return jnp.stack([jnp.float32(64), q.scale_of(q.amax_of(w), E4M3), 2.0**18])

    def weight(name, w, scales, sums):
        total = (sums or {}).get(name)
        return Weight(w, scales=scales[name], grad_sum=total, name=name, recipe=recipe)

    def apart(x, up, down, scales):
        h = matmul(x, weight("up", up, scales, None)).astype(jnp.float32)
        a = jax.lax.reduce_precision(gated(h, act), 8, jnp.finfo(dtype).nmant).astype(dtype)
        return matmul(a, weight("down", down, scales, None))

    def whole(x, up, down, scales, sums=None):
        weights = weight("up", up, scales, sums), weight("down", down, scales, sums)
        return mlp_fp8.gated_mlp_fp8(x, *weights, act)

    return apart, whole, (x, up, down, {"up": scale(up), "down": scale(down)})


def relative(a, b):
    return float(np.linalg.norm(exact(a) - exact(b)) / np.linalg.norm(exact(b)))


DELAYED_PASSES = {"quantize": 1, "quantize_transposed": 2}
CURRENT_PASSES = {"quantize_transposed": 2, "gate_tops": 2}


@pytest.mark.parametrize(
    "dtype, act, kernel, recipe",
    quick(
        [
            ("float32", "silu", False, Delayed()),
            ("float32", "gelu_tanh", True, Delayed()),
            ("bfloat16", "gelu_tanh", False, Delayed()),
            ("bfloat16", "silu", True, Delayed()),
            ("float32", "silu", True, Current()),
            ("bfloat16", "silu", False, Current()),
        ],
        1,
        5,
    ),
)
def test_block_is_two_matmuls_and_a_gate(monkeypatch, dtype, act, kernel, recipe):
    """Which computes in fp32 and is rounded once."""
    apart, whole, operands = block(dtype, act, recipe)
    g = (1e-3 * jax.random.normal(jax.random.key(3), operands[0].shape)).astype(dtype)
    y, pull = jax.vjp(apart, *operands)
    want = jax.tree.leaves((y, pull(g)))
    if kernel:
        used = by_kernel(monkeypatch, GateTile(8, 16, 4))
    y, pull = jax.vjp(whole, *operands)
    for a, e in zip(jax.tree.leaves((y, pull(g))), want, strict=True):
        assert (a.shape, a.dtype) == (e.shape, e.dtype) and relative(a, e) < 1e-5
    if kernel:
        passes = {"gate_forward8": 1, "gate_backward8": 1}
        assert Counter(used) == passes | (DELAYED_PASSES if recipe.knows_scales else CURRENT_PASSES)


def test_block_adds_to_sums_of_gradients():
    _, whole, operands = block("bfloat16", "silu", Delayed())
    sums = {"down": jnp.ones(operands[2].shape)}
    y, pull = jax.vjp(whole, *operands, sums)
    _, up, down, _, total = pull(y)
    _, want_up, want, _ = jax.vjp(whole, *operands)[1](y)
    assert not down.any() and total["down"].dtype == jnp.float32
    assert relative(total["down"] - 1, want) < 5e-3 and np.array_equal(exact(up), exact(want_up))


@exhaustive
def test_a_step_is_what_it_was(monkeypatch):
    """In fp32, on a mesh, computing again what is not kept."""

    def step():
        keys = "precision.fp8=delayed", "model.num_hidden_layers=1", "train.remat=dots"
        trainer = make_trainer("dense", Cell({"tp": 2}, 1, 2), *keys)
        return "gated_mlp" in trainer.lower().as_text(debug_info=True), measure(trainer, 1).first

    has, result = step()
    monkeypatch.setattr(mlp_fp8, "supports", lambda *_: False)
    had, before = step()
    assert has and not had and deviation(result, before) < 1e-5
