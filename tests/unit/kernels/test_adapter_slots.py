"""Products of low rank by slot: against a loop over rows in fp64; rows of slot 0 stay."""

import jax
import jax.numpy as jnp
import numpy as np

from mjax.kernels.matmul.adapter_slots import add_products_by_slot


def test_each_row_takes_the_matrices_of_its_slot():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(7, 12)), rng.normal(size=(7, 2, 5))
    a, b, scales = rng.normal(size=(4, 12, 3)), rng.normal(size=(4, 3, 2, 5)), rng.normal(size=4)
    slots = np.array([3, 0, 1, 1, 2, 0, 3], np.int32)
    y[1, 0, 0] = -0.0
    wanted = y.copy()
    for row, slot in enumerate(slots):
        if slot:
            wanted[row] += scales[slot] * np.tensordot(x[row] @ a[slot], b[slot], 1)
    arrays = [jnp.asarray(array, jnp.float32) for array in (y, x, a, b, scales)]
    found = np.asarray(jax.jit(add_products_by_slot)(*arrays, slots))
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-5)
    is_base = slots == 0
    bits = found.view(np.int32), np.asarray(arrays[0]).view(np.int32)
    np.testing.assert_array_equal(bits[0][is_base], bits[1][is_base])
