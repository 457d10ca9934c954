"""Transformer Engine's kernels are XLA's in other clothes: numbers, state and loss agree."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from mjax.kernels.fp8 import transformer_engine
from mjax.kernels.fp8.quantize import E4M3, E5M2, amax_of, quantize_stack, quantize_to, scale_of
from mjax.kernels.fp8.recipe import RECIPES
from mjax.models.base.weight import Weight, matmul
from mjax.models.feedforward import mlp_fp8
from mjax.plan.xla_options import CUBLAS
from mjax.prove import Cell, make_batch, make_trainer

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "gpu" or importlib.util.find_spec("transformer_engine") is None,
    reason="needs a GPU and Transformer Engine (mjax[te])",
)


def operands(m: int, k: int, n: int) -> tuple[jax.Array, ...]:
    """x, w, gradient in bf16, and scales [3]."""
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (m, k), jnp.bfloat16)
    w = jax.random.normal(keys[1], (k, n), jnp.bfloat16) * 0.02
    g = jax.random.normal(keys[2], (m, n), jnp.bfloat16) * 1e-6
    known = scale_of(amax_of(x), E4M3), scale_of(amax_of(w), E4M3), scale_of(amax_of(g), E5M2)
    return x, w, g, jnp.stack(known)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("factor", [1.0, 64.0, 2.0**-12])  # fits, saturates, underflows
def test_it_rounds_to_the_same_bits_and_finds_the_maximum(dtype, factor):
    x = operands(336, 208, 80)[0]
    scale = scale_of(amax_of(x), dtype) * factor
    made, amax = jax.jit(lambda x, s: transformer_engine.quantize_by_te(x, s, dtype))(x, scale)
    want = jax.jit(lambda x, s: quantize_to(x, s, dtype))(x, scale)

    def as_bytes(a):
        return np.asarray(jax.lax.bitcast_convert_type(a, jnp.uint8))

    np.testing.assert_array_equal(as_bytes(made), as_bytes(want))
    assert amax == amax_of(x)


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("shape", [(2048, 1024, 4096), (336, 208, 80)])
def test_product_and_gradients_are_those_of_xla(shape, delayed, rounded):
    x, w, g, scales = operands(*shape)
    bits = quantize_stack(w[None], scales[None])[0]
    mesh = jax.make_mesh((1,), ("dp",))

    def run(backend: str) -> tuple:
        def all_of_it(x, w, bits, g, scales):
            def product(x, w, scales):
                w8 = bits if rounded else None
                recipe = RECIPES["delayed" if delayed else "current"](backend)
                return matmul(x, Weight(w, w8, scales=scales, recipe=recipe))

            y, vjp = jax.vjp(product, x, w, scales)
            return y, *vjp(g)

        mapped = jax.shard_map(all_of_it, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
        fast = jax.jit(mapped, compiler_options=dict(CUBLAS))
        text = fast.lower(x, w, bits, g, scales).compile().as_text()
        calls = text.count('"te_gemm_v2_ffi"'), text.count('"__cublas$lt$matmul$f8"')
        assert calls == ((3, 0) if backend == "te" else (0, 3))
        return fast(x, w, bits, g, scales)

    *made, seen = run("te")
    *want, want_seen = run("xla")
    np.testing.assert_array_equal(seen, want_seen)
    for a, b in zip(made, want, strict=True):
        a, b = (np.asarray(v, np.float64) for v in (a, b))
        assert np.linalg.norm(a - b) < 3e-3 * np.linalg.norm(b)  # bf16; rounding to FP8 is 3e-2 off


@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_a_step_of_a_model_is_that_of_xla(recipe, monkeypatch):
    """With the same roundings: where `xla` rounds within the gate's kernels, a bf16 rounding less
    puts other elements on other FP8 neighbors, and gradients are as far apart as from bf16's."""
    monkeypatch.setattr(mlp_fp8, "supports", lambda *_: False)

    def run(backend: str):
        keys = f"precision.fp8={recipe}", f"precision.fp8_backend={backend}"
        trainer = make_trainer("dense", Cell(), *keys, "precision.compute=bfloat16")
        metrics = trainer.step(make_batch(24))
        moments = trainer.state["opt"]["mu"]
        return jax.device_get((metrics, moments, trainer.state.get("buffers", {})))

    metrics, moments, state = run("te")
    want_metrics, want, want_state = run("xla")
    assert metrics["finite"] and abs(metrics["loss"] / want_metrics["loss"] - 1) < 1e-3
    pairs = zip(jax.tree.leaves(moments), jax.tree.leaves(want), strict=True)
    off, size = np.sum([[np.sum((a - b) ** 2), np.sum(b**2)] for a, b in pairs], axis=0)
    assert off < 0.03**2 * size  # other sums fall to other bf16 and FP8 neighbors
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0.05), state, want_state)
