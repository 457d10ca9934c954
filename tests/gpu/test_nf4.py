"""The kernel that reads NF4 on a GPU against plain JAX, at sizes of real models; bit-equal."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.kernels.base.chooser import choose
from mjax.kernels.nf4 import values as nf4
from tests.devices import CPU, choose_for

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")

# A weight, its leading axes and whether it is a pair: Llama-3-8B's up and out, experts, and outputs
# that no tile divides.
WEIGHTS = [
    ((4096, 2, 14336), 0, 1, True),
    ((32, 128, 4096), 0, 2, False),
    ((4, 2048, 2, 768), 1, 1, True),
    ((128, 1001), 0, 1, False),
]
quantize = jax.jit(nf4.quantize, static_argnames=("lead", "inputs", "paired"))
dequantize = jax.jit(nf4.dequantize, static_argnames="dtype")
read = jax.jit(nf4.read, static_argnames="dtype")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape, lead, inputs, paired", WEIGHTS)
def test_the_kernel_reads_the_values_of_plain_jax(shape, lead, inputs, paired, dtype):
    dtype = jnp.dtype(dtype)
    drawn = jax.random.normal(jax.random.key(0), shape, jnp.float32)
    w = quantize(drawn, lead=lead, inputs=inputs, paired=paired)
    assert choose("nf4", dtype, w.codes.shape).name == "triton"
    found, expected = read(w, dtype=dtype), dequantize(w, dtype=dtype)
    assert found.shape == shape and found.dtype == dtype
    np.testing.assert_array_equal(found, expected)


def test_a_product_and_its_gradient_are_those_without_the_kernel(monkeypatch):
    keys = jax.random.split(jax.random.key(1), 3)
    w = quantize(jax.random.normal(keys[0], (4096, 1024)), lead=0, inputs=1)
    x, g = (
        jax.random.normal(key, (512, n), jnp.bfloat16)
        for key, n in zip(keys[1:], (4096, 1024), strict=True)
    )

    def product(x: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array]:
        y, pull = jax.vjp(lambda x: nf4.nf4_matmul(x, w), x)
        return y, pull(g)[0]

    found = jax.jit(product)(x, g)
    choose_for(monkeypatch, CPU, "nf4")
    expected = jax.jit(lambda *args: product(*args))(x, g)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
