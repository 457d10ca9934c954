"""FP8: rounding, scales, the matmul and its gradients, and what passes from step to step."""

import sys
from types import ModuleType, SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.errors import UserError
from mjax.kernels.elementwise.gate import E4M3, E5M2
from mjax.kernels.fp8 import quantize as q
from mjax.kernels.fp8 import transformer_engine
from mjax.kernels.fp8.recipe import Current, Delayed
from mjax.models.base.weight import Weight, add_gradients, matmul
from mjax.sharding.collectives import LOCAL

TOP = {E4M3: 448.0, E5M2: 57344.0}
BITS = {E4M3: 3, E5M2: 2}


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("amax", [1e-12, 0.875, 0.8750001, 1.0, 447.0, 448.0, 449.0, 3e7])
def test_scale_is_the_largest_power_of_two_that_fits(dtype, amax):
    scale = float(q.scale_of(jnp.float32(amax), dtype))
    assert np.log2(scale) == round(np.log2(scale))
    assert np.float32(amax) * scale <= TOP[dtype] < 2 * np.float32(amax) * scale


def test_scale_of_nothing_is_finite_and_of_no_number_is_none():
    extremes = jnp.float32([0.0, 1e-38, 3e38])
    for dtype in (E4M3, E5M2):
        scales = np.asarray(q.scale_of(extremes, dtype), np.float64)
        assert np.all(np.isfinite(scales)) and np.all(scales > 0)
        assert np.all(np.isfinite(np.float32(1 / scales[:, None] / scales)))
    assert np.isnan(q.scale_of(jnp.float32([np.inf, np.nan]), E4M3)).all()


@pytest.mark.parametrize("source", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_rounding_error_is_half_a_step(dtype, source):
    x = jax.random.normal(jax.random.key(0), (64, 64)).astype(source)
    scale = q.scale_of(q.amax_of(x), dtype)
    back = np.asarray(q.quantize_to(x, scale, dtype), np.float64) / float(scale)
    x = np.asarray(x, np.float64)
    least = float(jnp.finfo(dtype).smallest_normal) / float(scale)
    bound = 2.0 ** -(BITS[dtype] + 1) * np.maximum(np.abs(x), least)
    assert np.all(np.abs(back - x) <= bound)
    assert np.abs(back - x).max() > 0.5 * bound.max()


def test_overflow_saturates_and_nan_stays():
    x = jnp.float32([1e9, -1e9, np.nan])
    for dtype in (E4M3, E5M2):
        made = np.asarray(q.quantize_to(x, jnp.float32(1), dtype), np.float64)
        assert made[:2].tolist() == [TOP[dtype], -TOP[dtype]] and np.isnan(made[2])


def test_another_scale_rounds_alike():
    x = jax.random.uniform(jax.random.key(0), (64, 64), minval=0.01)
    back = [q.quantize_to(x, jnp.float32(s), E4M3).astype(jnp.float32) / s for s in (256.0, 32.0)]
    np.testing.assert_array_equal(*back)


def scales(w, x=0.0, g=0.0):
    return jnp.stack([jnp.float32(x), q.scale_of(q.amax_of(w), E4M3), jnp.float32(g)])


def weight(w, scales, delayed=False, inputs=1, backend="xla"):
    recipe = Delayed(backend) if delayed else Current(backend)
    return Weight(w, scales=scales, inputs=inputs, recipe=recipe)


def operands(dtype, shape=((2, 24, 32), (32, 2, 40))):
    keys = jax.random.split(jax.random.key(1), 3)
    x = 3 * jax.random.normal(keys[0], shape[0])
    w = 0.1 * jax.random.normal(keys[1], shape[1])
    g = 1e-6 * jax.random.normal(keys[2], (*shape[0][:2], *shape[1][1:]))
    return (a.astype(dtype) for a in (x, w, g))


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_product_and_gradients_are_near_fp64(dtype, delayed):
    x, w, g = operands(dtype)
    given = scales(w, *(32.0, 2.0**30) if delayed else ())

    y, vjp = jax.vjp(matmul, x, weight(w, given, delayed))
    dx, cotangent = vjp(g)
    dw, seen = cotangent.value, cotangent.scales
    assert y.dtype == dx.dtype == dw.dtype == dtype
    x, w, g = (np.asarray(a, np.float64) for a in (x, w, g))
    exact = (
        np.einsum("bsd,def->bsef", x, w),
        np.einsum("bsef,def->bsd", g, w),
        np.einsum("bsd,bsef->def", x, g),
    )
    for made, want, bound in zip((y, dx, dw), exact, (0.04, 0.08, 0.08), strict=True):
        error = np.linalg.norm(np.asarray(made, np.float64) - want) / np.linalg.norm(want)
        assert 1e-3 < error < bound  # not zero: it was rounded
    np.testing.assert_array_equal(np.float32(seen), np.float32([abs(x).max(), 0, abs(g).max()]))


def test_it_is_the_product_of_what_was_rounded():
    """Exactly: with few bits in every factor nothing else may round."""
    x, w, g = operands(jnp.float32)
    given = scales(w)
    y, vjp = jax.vjp(lambda x, w: matmul(x, weight(w, given)), x, w)
    dx, dw = vjp(g)

    def rounded(a, dtype):
        scale = q.scale_of(q.amax_of(a), dtype)
        return np.asarray(q.quantize_to(a, scale, dtype), np.float64) / float(scale)

    x, w, g = rounded(x, E4M3), rounded(w, E4M3), rounded(g, E5M2)
    np.testing.assert_allclose(y, np.einsum("bsd,def->bsef", x, w), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dx, np.einsum("bsef,def->bsd", g, w), rtol=1e-5, atol=1e-11)
    np.testing.assert_allclose(dw, np.einsum("bsd,bsef->def", x, g), rtol=1e-5, atol=1e-10)


def test_zeros_give_zeros_and_infinity_is_not_hidden():
    w = jnp.ones((16, 16))
    for delayed in (False, True):
        rounded = weight(w, scales(w, 1.0, 1.0), delayed)
        y, dx = jax.value_and_grad(lambda x, w: matmul(x, w).sum())(jnp.zeros((4, 16)), rounded)
        assert y == 0 and np.all(np.isfinite(dx))
    rounded = weight(w, scales(w, 1.0, 1.0))
    assert np.isnan(matmul(jnp.full((4, 16), np.inf), rounded)).all()


def test_row_parallel_weights_contract_two_axes():
    x = jax.random.normal(jax.random.key(0), (2, 8, 4, 16))
    w = jax.random.normal(jax.random.key(1), (4, 16, 32))
    y = matmul(x, weight(w, scales(w), inputs=2))
    want = jnp.tensordot(x, w, 2)
    assert jnp.linalg.norm(y - want) < 0.05 * jnp.linalg.norm(want)


def test_history_follows_a_plain_model():
    """Six steps of two layers against the rule written out in numpy."""
    length, tokens, rng = 3, 100.0, np.random.default_rng(0)
    weights = {"dense": {"up": jnp.float32([0.3, 7.0])}}
    history = Delayed().first_state({"dense": {"up": jnp.zeros((2, 5, 5))}}, length)
    past = [[], []]
    for _ in range(6):
        made = Delayed()._scales_of(weights, history, tokens)["dense"]["up"]
        for layer in (0, 1):
            top = np.max(past[layer][-length:], axis=0) if past[layer] else None
            x, g = top if top is not None else (64.0, 1024.0 / tokens)
            want = [2.0 ** np.floor(np.log2(448 / x)), 2.0 ** np.floor(np.log2(57344 / g))]
            assert [float(made[layer, 0]), float(made[layer, 2])] == want
            assert made[layer, 1] == q.scale_of(weights["dense"]["up"][layer], E4M3)
        first, second = (rng.lognormal(0, 3, (2, 3)).astype(np.float32) for _ in range(2))
        saw = [{"dense": {"up": Weight(scales=jnp.asarray(s))}} for s in (first, second)]
        seen = add_gradients(*saw)["dense"]["up"].scales  # of two micro-batches
        history, finite = q.remember(history, {"dense": {"up": seen}}, LOCAL)
        assert finite
        for layer in (0, 1):
            past[layer].append(np.maximum(first, second)[layer, ::2])
    _, finite = q.remember(
        history, {"dense": {"up": jnp.float32([[1, 0, 1], [np.inf, 0, 1]])}}, LOCAL
    )
    assert not finite


def test_a_gpu_without_fp8_is_refused():
    class Device:
        platform, device_kind, compute_capability = "gpu", "NVIDIA A100", "8.0"

    with pytest.raises(UserError, match="A100 has compute capability 8.0.*set precision.fp8=none"):
        Current().require(Device())
    Device.compute_capability = "9.0"
    Current().require(Device())
    Current().require(jax.devices("cpu")[0])


# ---- Transformer Engine, which runs on GPUs only (tests/gpu/test_te.py) -------------------------


class Gpu:
    platform, device_kind, compute_capability = "gpu", "NVIDIA H200", "9.0"


@pytest.fixture
def fresh():
    transformer_engine._te.cache_clear()
    yield
    transformer_engine._te.cache_clear()


def test_transformer_engine_is_refused_on_cpus():
    with pytest.raises(UserError, match="no kernels for CPUs; set precision.fp8_backend=xla"):
        Current("te").require(jax.devices("cpu")[0])


def test_transformer_engine_that_is_missing_is_refused(monkeypatch, fresh):
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    with pytest.raises(UserError, match=r"does not load .*install mjax\[te\] or set precision.fp8"):
        Current("te").require(Gpu())


def test_transformer_engine_of_another_make_is_refused(monkeypatch, fresh):
    for name in ("transformer_engine", "transformer_engine.jax"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    with pytest.raises(UserError, match="2.20 for JAX does not load .ImportError: cannot import"):
        Current("te").require(Gpu())


def plain_te() -> SimpleNamespace:
    """What `mjax.kernels.fp8.transformer_engine` asks of TE, in plain JAX."""

    def gemm(a, b, contracting_dims, use_split_accumulator):
        assert contracting_dims == ((1,), (1,))
        y = jnp.einsum("mk,nk->mn", *(t.data.astype(jnp.float32) * t.scale_inv for t in (a, b)))
        return y.astype(a.dq_dtype)

    def quantize(x, quantizer, flatten_axis):
        data = q.quantize_to(x, quantizer.scale[0], quantizer.q_dtype)
        return SimpleNamespace(data=data, amax=q.amax_of(x)[None])

    def tensor(data, scale_inv, **more):
        return SimpleNamespace(data=data, scale_inv=scale_inv, **more)

    def make(**values):
        return SimpleNamespace(**values)

    return make(quantize=quantize, gemm=gemm, Quantizer=make, tensor=tensor, mode=0, rows=0)


@pytest.mark.parametrize("delayed", [False, True])
def test_both_backends_are_one_function(monkeypatch, delayed):
    monkeypatch.setattr(transformer_engine, "_te", plain_te)
    x, w, g = operands(jnp.float32, ((2, 24, 32), (32, 2, 40)))
    given = scales(w, *(32.0, 2.0**30) if delayed else ())

    def run(backend):
        y, vjp = jax.vjp(matmul, x, weight(w, given, delayed, backend=backend))
        dx, cotangent = vjp(g)
        return y, dx, cotangent.value, cotangent.scales

    for made, want in zip(run("te"), run("xla"), strict=True):
        np.testing.assert_allclose(made, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


def test_transformer_engine_refuses_sizes_that_cublaslt_does_not_take(monkeypatch):
    monkeypatch.setattr(transformer_engine, "_te", plain_te)
    w = weight(jnp.ones((32, 24)), jnp.ones(3), backend="te")
    with pytest.raises(UserError, match="no multiple of 16 .*set precision.fp8_backend=xla"):
        matmul(jnp.ones((16, 32)), w)
