"""FP8 on a GPU: cuBLASLt's products are those of the plain code, which the CPU runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.kernels.fp8.quantize import E4M3, E5M2, amax_of, scale_of
from mjax.kernels.fp8.recipe import RECIPES
from mjax.models.base.weight import Weight, matmul
from mjax.plan.xla_options import CUBLAS
from tests.devices import CPU, choose_for

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("shape", [(2048, 1024, 4096), (336, 208, 80)])
def test_product_and_gradients_are_the_cpus(shape, delayed, monkeypatch):
    m, k, n = shape
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (m, k), jnp.bfloat16)
    w = jax.random.normal(keys[1], (k, n), jnp.bfloat16) * 0.02
    g = jax.random.normal(keys[2], (m, n), jnp.bfloat16) * 1e-6
    known = scale_of(amax_of(x), E4M3), scale_of(amax_of(w), E4M3), scale_of(amax_of(g), E5M2)
    scales = jnp.stack(known)

    def all_three(x, w, g, scales):
        def product(x, w):
            return matmul(
                x, Weight(w, scales=scales, recipe=RECIPES["delayed" if delayed else "current"]())
            )

        y, vjp = jax.vjp(product, x, w)
        return y, *vjp(g)

    fast = jax.jit(all_three, compiler_options=dict(CUBLAS))
    made = fast(x, w, g, scales)
    assert fast.lower(x, w, g, scales).compile().as_text().count("matmul$f8") == 3
    cpu = jax.devices("cpu")[0]
    choose_for(monkeypatch, CPU, "gate", "quantize")  # the CPU has no kernel
    anew = jax.jit(lambda *operands: all_three(*operands))
    plain = anew(*jax.device_put((x, w, g, scales), cpu))
    for a, b in zip(made, plain, strict=True):
        a, b = (np.asarray(v, np.float64) for v in (a, b))
        assert np.linalg.norm(a - b) < 5e-3 * np.linalg.norm(b)  # rounding to FP8 is 3e-2 off
