"""Products of MXFP8 and NVFP4 as Blackwell computes them: jax's lowering for CPUs stands in.

It multiplies codes by scales first, so that operands and results can be compared here.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.errors import UserError
from mjax.kernels.elementwise.gate import E4M3
from mjax.kernels.fp8 import blocks
from mjax.kernels.fp8.block_recipes import Block128, MxFp8, NvFp4
from mjax.kernels.fp8.scaled_matmul import codes_and_scales
from mjax.models.base.weight import Weight, matmul
from mjax.plan.absent_devices import StandIn
from mjax.sharding.collectives import LOCAL
from tests.devices import BLACKWELL, MULTIPLIES_SCALED, choose_for
from tests.unit.kernels.test_blocks import hostile, places_of

RECIPES = [MxFp8(), MxFp8("e5m2"), MxFp8(scales="floor"), NvFp4()]
TOKENS, INPUTS, OUTPUTS = 37, 96, 48  # one is a multiple of 32, two are multiples of 16

needs_products = pytest.mark.skipif(not MULTIPLIES_SCALED, reason="needs jax >= 0.11")


def operands(recipe, x, w, g) -> dict:
    """All that the three products read, by name."""
    scales = jnp.stack([jnp.float32(0), jnp.abs(w).max(), jnp.float32(0)])
    x8 = recipe.round_input(x, scales, LOCAL)
    g8 = recipe.round_gradient(g, scales, LOCAL, places_of(*g.shape))
    forward, backward = (recipe.round_weight(w, scales, axis) for axis in (0, 1))
    return {
        "x": x8.plain,
        "x by tokens": x8.turned,
        "g": g8.plain,
        "g by tokens": g8.turned,
        "w over inputs": forward,
        "w over outputs": backward,
    }


@pytest.mark.parametrize("recipe", RECIPES)
def test_codes_times_scales_are_the_numbers(recipe):
    """Bit for bit, in all orientations, in dtypes that tensor cores read; E4M3's NaN stays so."""
    is_four = isinstance(recipe, NvFp4)
    x, w, g = (
        jnp.asarray(hostile(*s)) for s in ((TOKENS, INPUTS), (INPUTS, OUTPUTS), (TOKENS, OUTPUTS))
    )
    if not is_four:
        x = x.at[7, 5].set(jnp.nan)
    dtypes = (jnp.float4_e2m1fn, jnp.float8_e4m3fn) if is_four else (None, jnp.float8_e8m0fnu)
    for name, made in jax.jit(lambda *a: operands(recipe, *a))(x, w, g).items():
        codes, scales = (np.asarray(a) for a in codes_and_scales(made))
        code, scale = dtypes
        gradients = recipe.gradients if name.startswith("g") else "e4m3"
        assert (codes.dtype, scales.dtype) == (code or blocks.FORMATS[gradients].dtype, scale)
        assert codes.shape[1] == scales.shape[1] * recipe.side and len(codes) == len(scales)
        wide = np.repeat(scales.astype(np.float32), recipe.side, 1)
        wide[wide < 2.0**-126] = 0  # as CPUs have it
        columns = made.values.shape[1]
        numbers = (codes.astype(np.float32) * wide)[:, :columns]
        np.testing.assert_array_equal(numbers, np.asarray(made.numbers(), np.float32), name)
        assert not codes[:, columns:].astype(np.float32).any()


def test_every_scale_of_mxfp8_is_its_byte():
    numbers = jnp.arange(256)
    _, factors = blocks.scales_of_bytes(numbers)
    made = blocks.Blocks(jnp.zeros((256, 32), E4M3), factors[:, None], block=(1, 32))
    scales = np.asarray(codes_and_scales(made)[1])
    np.testing.assert_array_equal(scales.view(np.uint8)[:, 0], numbers)


def three_products(recipe, x, w, g, total):
    """y, the gradient of x, and that of w added to a sum, as a layer computes them."""
    amax = jnp.abs(w).max().astype(jnp.float32)
    places = places_of(*g.shape) if recipe.needs_places else None
    scales = jnp.stack([0 * amax, amax, 0 * amax])
    weight = Weight(w, scales=scales, recipe=recipe, grad_sum=total, places=places)
    y, pull = jax.vjp(matmul, x, weight)
    dx, cotangent = pull(g)
    return y, dx, cotangent.grad_sum


def drawn(*shape: int, seed: int) -> jax.Array:
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=shape) * np.exp2(rng.uniform(-6, 6, shape)), jnp.float32)


@needs_products
@pytest.mark.parametrize("recipe", RECIPES)
def test_all_three_products_are_those_of_the_emulation(monkeypatch, recipe):
    """To the order of sums in fp32, rounding at random and the Hadamard transform included."""
    sizes = (TOKENS, INPUTS), (INPUTS, OUTPUTS), (TOKENS, OUTPUTS), (INPUTS, OUTPUTS)
    arrays = [drawn(*s, seed=i) for i, s in enumerate(sizes)]

    emulated = dataclasses.replace(recipe, emulates=True)
    want = jax.jit(functools.partial(three_products, emulated))(*arrays)
    choose_for(monkeypatch, BLACKWELL, "block_matmul")
    traced = jax.jit(functools.partial(three_products, recipe)).trace(*arrays)
    assert str(traced.jaxpr).count(" scaled_matmul_wrapper[") == 3
    for got, exact in zip(traced.lower().compile()(*arrays), want, strict=True):
        error = np.abs(np.asarray(got) - np.asarray(exact)).max()
        assert 0 < np.abs(exact).max() and error < 2e-6 * np.abs(exact).max()


@needs_products
def test_values_that_are_not_finite_stay_so(monkeypatch):
    choose_for(monkeypatch, BLACKWELL, "block_matmul")
    g, w = drawn(TOKENS, OUTPUTS, seed=1), drawn(INPUTS, OUTPUTS, seed=2)
    for recipe in (MxFp8(), NvFp4()):
        run = jax.jit(functools.partial(three_products, recipe))
        # E2M1 has no NaN. It travels in the tensor's maximum, which drops it on some CPUs.
        for bad in (jnp.inf, jnp.nan) if isinstance(recipe, MxFp8) else (jnp.inf,):
            x = drawn(TOKENS, INPUTS, seed=0).at[3, 5].set(bad)
            y, dx, dw = run(x, w, g, jnp.zeros_like(w))
            assert not np.isfinite(y[3]).any() and np.isfinite(dx).all()
            assert not np.isfinite(dw).all()


@needs_products
def test_devices_that_multiply_scaled_blocks():
    """A data center's Blackwell; experts are refused there by name, and all else elsewhere."""
    for capability in ("10.0", "10.3"):
        blackwell = StandIn(0, 0, "NVIDIA B200", capability)
        for recipe in (MxFp8(), NvFp4()):
            recipe.require(blackwell)
        with pytest.raises(UserError, match="fp8_experts: cuDNN has no grouped products of mxfp8"):
            MxFp8().require(blackwell, rounds_experts=True)
        MxFp8(emulates=True).require(blackwell, rounds_experts=True)
        with pytest.raises(UserError, match="block128: NVIDIA B200 has no kernels of it here"):
            Block128(block=32).require(blackwell)
    for capability in ("9.0", "12.0"):
        other = StandIn(0, 0, "NVIDIA", capability)
        with pytest.raises(UserError, match="need Blackwell of compute capability 10.0 or 10.3"):
            NvFp4().require(other)
