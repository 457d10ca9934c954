"""The matmul of routers: bf16 operands, products and sums of fp32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.kernels.matmul.exact import _bf16_parts, multiply_exactly


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_outputs_and_gradients_are_those_of_fp64_rounded_once(dtype):
    keys = jax.random.split(jax.random.key(0), 3)
    x, w = (
        jax.random.normal(k, s, dtype) for k, s in zip(keys, [(2, 9, 64), (64, 8)], strict=False)
    )
    dy = jax.random.normal(keys[2], (2, 9, 8))
    y, pull = jax.vjp(multiply_exactly, x, w)
    dx, dw = pull(dy)
    x64, w64, dy64 = (np.asarray(a, np.float64) for a in (x, w, dy))
    expected = x64 @ w64, dy64 @ w64.T, np.einsum("bsd,bse->de", x64, dy64)
    assert (y.dtype, dx.dtype, dw.dtype) == (jnp.float32, dtype, dtype)
    for got, exact in zip((y, dx, dw), expected, strict=True):
        exact = np.asarray(jnp.asarray(exact, jnp.float32).astype(got.dtype), np.float64)
        # An ulp of bf16 where the sum lies between two of its values, else rounding of fp32 sums.
        step = 2**-8 if got.dtype == jnp.bfloat16 else 0
        error = np.abs(np.asarray(got, np.float64) - exact)
        assert np.all(error <= step * np.abs(exact) + 4e-6 * np.abs(exact).max())
        assert np.mean(error > 4e-6 * np.abs(exact).max()) < 0.02


def test_three_parts_hold_all_bits():
    x = jax.random.normal(jax.random.key(0), (1000,)) * 2.0 ** jnp.arange(-50, 50).repeat(10)
    parts = [np.asarray(part, np.float64) for part in _bf16_parts(x)]
    np.testing.assert_array_equal(sum(parts), np.asarray(x, np.float64))
