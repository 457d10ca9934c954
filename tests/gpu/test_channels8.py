"""Products of few rows with weights in 8 bits on a GPU, against fp32 of what is rounded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.kernels.fp8.channels import Channels8, multiply_few, multiply_rounded, tile_of

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")

SHAPES = [(2048, 4096), (28672, 4096), (4096, 14336), (1000, 384)]


@pytest.mark.parametrize("rows", [1, 5, 64])
@pytest.mark.parametrize("outputs, inputs", SHAPES)
def test_the_kernel_equals_fp32(rows, outputs, inputs):
    keys = jax.random.split(jax.random.key(rows), 3)
    spread = jnp.exp2(jax.random.randint(keys[0], (rows, 1), -20, 20).astype(jnp.float32))
    x = (jax.random.normal(keys[1], (rows, inputs)) * spread).astype(jnp.bfloat16)
    w = jax.random.normal(keys[2], (inputs, outputs), jnp.bfloat16)
    held = jax.jit(lambda w: Channels8.rounded(w, 1))(w)
    tile = tile_of(outputs, inputs)
    with jax.default_matmul_precision("highest"):
        exact = jax.jit(multiply_rounded)(x.astype(jnp.float32), held.values, held.scales)
    most = jnp.max(jnp.abs(exact), -1, keepdims=True)
    y = jax.jit(lambda *a: multiply_few(*a, tile))(x, held.values, held.scales)
    assert jnp.max(jnp.abs(y - exact) / most) < 8e-3  # bf16's rounding, and sums of 14 bits
    again = jax.jit(lambda *a: multiply_few(*a, tile))(x, held.values, held.scales)
    np.testing.assert_array_equal(y, again)
