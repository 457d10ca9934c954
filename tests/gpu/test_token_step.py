"""A token of each row, whose state changes where it lies, against plain JAX in fp32.

`pytest -q tests/gpu/test_token_step.py` on an NVIDIA GPU.
"""

import jax
import jax.numpy as jnp
import pytest

from mjax.kernels import choose
from tests.unit.kernels.test_token_step import RULES, SIZES, check_slots, close_to

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")

BOUNDS = {"bfloat16": 4e-3, "float32": 1e-6}  # y is rounded to bf16


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("sizes", [*SIZES, (257, 128, 8, 64, 128), (33, 32, 16, 128, 128)])
@pytest.mark.parametrize("rule", RULES)
def test_states_change_where_they_lie(rule, sizes, dtype):
    slots, heads, _, channels, state = sizes
    assert (
        choose("token_step", jnp.dtype("float32"), (slots, heads, channels, state)).name == "triton"
    )
    with jax.default_matmul_precision("highest"):
        check_slots(rule, sizes, jnp.dtype(dtype), close_to(BOUNDS[dtype]))
