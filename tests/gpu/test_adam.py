"""AdamW of rows of stacks by our kernel on a GPU: equal to XLA's of the stack, and in its place."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.config.schema.run import OptimizerConfig
from mjax.optim.build import Optimizer
from mjax.sharding.spec import ParamSpec

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(3, 1024, 4096), (2, 1000, 37)])
def test_equals_xla_and_takes_no_memory(shape, dtype):
    specs = {"w": ParamSpec(shape, ("layers", "embed", "mlp"), "matrix")}
    optimizer = Optimizer(OptimizerConfig(), specs)
    params = {"w": jax.random.normal(jax.random.key(0), shape)}
    stack = jax.random.normal(jax.random.key(1), shape, dtype)
    state = optimizer.init(params)
    update = functools.partial(
        optimizer.update, lr=jnp.float32(0.1), weight_decay=jnp.float32(0.2), scale=jnp.float32(0.3)
    )

    @functools.partial(jax.jit, donate_argnums=(1, 2))  # arguments as outputs lie, for donation
    def by_rows(rows, params, state):
        return update({"w": rows}, state, params)

    want = update({"w": stack.astype(jnp.float32)}, state, params)
    want = jax.tree.map(np.asarray, want)
    compiled = by_rows.lower(list(stack), params, state).compile()
    assert compiled.as_text().count("update_row/") >= shape[0]
    assert compiled.memory_analysis().temp_size_in_bytes < params["w"].nbytes / 2
    got = compiled(list(stack), params, state)
    for a, e in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, e, rtol=3e-6, atol=1e-7)
