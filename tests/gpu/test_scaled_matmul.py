"""MXFP8 and NVFP4 on a Blackwell GPU: cuDNN's products against plain JAX of the same numbers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.kernels.base import chooser
from mjax.kernels.fp8.block_recipes import MxFp8, NvFp4
from mjax.kernels.fp8.scaled_matmul import codes_and_scales
from mjax.sharding.collectives import LOCAL
from tests.unit.kernels.test_blocks import hostile
from tests.unit.kernels.test_scaled_matmul import drawn, operands, three_products

pytestmark = pytest.mark.skipif(
    not chooser.on_blackwell(), reason="needs a Blackwell GPU (10.0 or 10.3), jax >= 0.11"
)

RECIPES = [MxFp8(), MxFp8("e5m2"), NvFp4()]
# Not documented: how many bits of a sum cuDNN keeps. Hopper's tensor cores keep 14.
BOUND = {jnp.float32: 1e-3, jnp.bfloat16: 5e-3}


@pytest.mark.parametrize("recipe", RECIPES)
def test_roundings_are_those_of_plain_jax_on_a_cpu(recipe):
    """Codes and scales, in both orientations: bit for bit but where NVFP4 divides.

    XLA's quotients for GPUs may miss the nearest number by two units in the last place.
    """
    allowed = 1e-3 if isinstance(recipe, NvFp4) else 0
    sizes = (160, 256), (256, 96), (160, 96)
    arrays = [hostile(*s) for s in sizes]

    def run(x, w, g):
        made = operands(recipe, x, w, g).values()
        parts = [part for blocks in made for part in codes_and_scales(blocks)]
        return [part.astype(jnp.float32) for part in parts]

    got = jax.jit(run)(*arrays)
    with jax.default_device(jax.devices("cpu")[0]):
        want = jax.jit(run)(*arrays)
    for of_gpu, of_cpu in zip(got, want, strict=True):
        of_gpu, of_cpu = np.array(of_gpu), np.array(of_cpu)
        of_gpu[np.abs(of_gpu) < 2.0**-126] = 0  # which CPUs take for zero
        assert np.mean(of_gpu != of_cpu) <= allowed


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("shape", [(1024, 2048, 4096), (1000, 480, 368), (37, 96, 48)])
def test_products_are_those_of_the_emulation(recipe, dtype, shape):
    """Forward, both gradients, a weight's gradient added to its sum; whole tiles and others."""
    m, k, n = shape
    sizes = (m, k), (k, n), (m, n)
    x, w, g = (drawn(*s, seed=i).astype(dtype) for i, s in enumerate(sizes))
    total = drawn(k, n, seed=3)
    exact = dataclasses.replace(recipe, emulates=True)
    runs = [jax.jit(functools.partial(three_products, r)) for r in (recipe, exact)]
    assert runs[0].lower(x, w, g, total).compile().as_text().count("__cudnn$blockScaledDot") == 3
    for got, want in zip(*(run(x, w, g, total) for run in runs), strict=True):
        got, want = (np.asarray(a, np.float64) for a in (got, want))
        assert np.linalg.norm(got - want) < BOUND[dtype] * np.linalg.norm(want)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("recipe", RECIPES)
def test_values_that_are_not_finite_stay_so(recipe, bad):
    x, w = drawn(256, 128, seed=0).at[3, 5].set(bad), drawn(128, 128, seed=1)
    scales = jnp.stack([jnp.float32(0), jnp.abs(w).max(), jnp.float32(0)])
    x8, w8 = recipe.round_input(x, scales, LOCAL), recipe.round_weight(w, scales, 0)
    y = recipe.product(x8, w8, 0, scales, jnp.float32)
    assert not np.isfinite(np.asarray(y)[3]).any()
