"""The gated delta rule's kernels on a GPU: against plain JAX in fp32, at Qwen3-Next's sizes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.kernels.base.chooser import choose
from mjax.kernels.recurrence import gated_delta_fused as fused
from mjax.kernels.recurrence.gated_delta import DeltaInputs, gated_delta

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")


def draw(batch, length, groups, heads, size, width, seed=0):
    keys = jax.random.split(jax.random.key(seed), 6)
    q, k = (jax.random.normal(key, (batch, length, groups, width)) for key in keys[:2])
    inputs = DeltaInputs(
        (q * width**-0.5).astype(jnp.bfloat16),
        (k / jnp.linalg.norm(k, axis=-1, keepdims=True)).astype(jnp.bfloat16),
        jax.random.normal(keys[2], (batch, length, heads, size), jnp.bfloat16),
        -0.1 * jax.random.uniform(keys[3], (batch, length, heads)),
        jax.random.uniform(keys[4], (batch, length, heads)),
    )
    return inputs, jax.random.uniform(keys[5], (batch, length)) < 0.01


def test_systems_are_solved_to_fp32():
    """Equal keys too, with nothing forgotten among them."""
    rng = np.random.default_rng(0)
    system = np.tril(rng.normal(size=(300, 64, 64), scale=0.3), -1).astype(np.float32)
    system[0] = np.tril(np.ones((64, 64)), -1)
    right = rng.normal(size=(300, 64, 256)).astype(np.float32)
    g = rng.normal(size=right.shape).astype(np.float32)
    found, back = jax.jit(lambda *v: jax.vjp(fused.solve, *v))(system, right)
    d_system, d_right = jax.jit(back)(g)
    lower = system.astype(np.float64) + np.eye(64)
    want, d_want = np.linalg.solve(lower, right), np.linalg.solve(np.swapaxes(lower, 1, 2), g)
    d_lower = np.tril(-d_want @ np.swapaxes(want, 1, 2), -1)
    for a, b in ((found, want), (d_right, d_want), (d_system, d_lower)):
        error = np.linalg.norm(a - b, axis=(1, 2)) / np.linalg.norm(b, axis=(1, 2))
        assert error.max() < 2e-4, (error.max(), error[0])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("sizes", [(2, 1000, 2, 4, 128, 128), (1, 256, 1, 2, 64, 64)])
def test_kernels_are_as_near_fp32_as_plain_jax_in_bf16(sizes, packed):
    inputs, starts = draw(*sizes)
    assert choose("gated_delta", jnp.bfloat16, inputs.v.shape, width=sizes[-1], chunk=64).name == (
        "triton"
    )
    starts = starts if packed else None
    wide = DeltaInputs(*(v.astype(jnp.float32) for v in inputs))

    def both(inputs):
        (y, final), back = jax.vjp(lambda v: gated_delta(v, chunk=64, starts=starts), inputs)
        return y, final, back((jnp.cos(jnp.arange(y.size)).astype(y.dtype).reshape(y.shape), final))

    found = jax.jit(both)(inputs)
    with jax.default_matmul_precision("highest"):
        want = jax.jit(both)(wide)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        a, b = (np.asarray(v, np.float64) for v in (a, b))
        assert np.linalg.norm(a - b) < 2e-2 * np.linalg.norm(b)
