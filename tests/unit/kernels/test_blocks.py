"""Rounding in blocks against numpy and ml_dtypes, bit for bit, and products of rounded matrices."""

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mjax.errors import UserError
from mjax.kernels.base.chooser import Device, believed
from mjax.kernels.base.device_facts import has_triton
from mjax.kernels.fp8 import blocks
from mjax.kernels.fp8.block_recipes import Block128, MxFp8, NvFp4
from mjax.kernels.fp8.blocks import FORMATS, multiply_blocks, round_blocks, round_to_format
from mjax.kernels.fp8.four_bits import GradientPlaces, hadamard_matrix, mix_tokens, round_four_bits
from mjax.plan.absent_devices import StandIn
from mjax.sharding.collectives import LOCAL
from tests.marks import quick, slow

DTYPES = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m1": ml_dtypes.float4_e2m1fn,
}
LEAST = np.float32(2.0**-126)  # CPUs take what is smaller for zero


def hostile(rows: int, columns: int, dtype=np.float32) -> np.ndarray:
    """Values of many binades: blocks of zeros and negative zeros, tiny, huge, with one outlier."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, columns)) * np.exp2(rng.uniform(-20, 20, (rows, columns)))
    x[0], x[1] = 0, -0.0
    x[2] *= 2.0**-100
    x[3] *= 2.0**100
    x[4, ::7] = 1e30
    x[5] = np.where(np.arange(columns) % 2, 448, -447.9)
    return x.astype(dtype)


@pytest.mark.parametrize("name", DTYPES)
def test_formats_are_those_of_ml_dtypes(name):
    """All borders between neighbors, the values about them, and what saturates."""
    to, dtype = FORMATS[name], DTYPES[name]
    codes = np.arange(16 if name == "e2m1" else 256, dtype=np.uint8).view(dtype)
    numbers = np.sort(codes.astype(np.float32))
    numbers = numbers[np.isfinite(numbers)]
    borders = (numbers[1:] + numbers[:-1]) / 2
    near = [np.nextafter(borders, np.float32(s * np.inf), dtype=np.float32) for s in (-1, 1)]
    x = np.concatenate([numbers, borders, *near, [-0.0, to.top, 2 * to.top, -3e38, np.inf]])
    x = x.astype(np.float32)
    want = np.clip(x, -to.top, to.top).astype(dtype).astype(np.float32)
    got = np.asarray(jax.jit(lambda x: round_to_format(x, to))(x))
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(np.signbit(got), np.signbit(want))
    assert np.isnan(round_to_format(jnp.float32(jnp.nan), to))


def scale_of_te(top: np.ndarray, most: float, power_of_two: bool) -> np.ndarray:
    with np.errstate(divide="ignore", over="ignore"):
        scale = np.float32(most) / top
    scale = np.minimum(scale, np.finfo(np.float32).max)
    if power_of_two:
        scale = np.exp2(np.floor(np.log2(scale.astype(np.float64)))).astype(np.float32)
    return np.where((top == 0) | ~np.isfinite(top), np.float32(1), scale)


def maxima_of(x: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    rows, columns = block
    made = np.abs(x).reshape(len(x) // rows, rows, -1, columns)
    return made.max((1, 3))


def places_of(tokens: int, outputs: int) -> GradientPlaces:
    numbers = (jnp.arange(n, dtype=jnp.uint32)[None] for n in (tokens, outputs))
    return GradientPlaces(jnp.uint32(1), *numbers)


def spread_out(factors: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    return np.repeat(np.repeat(factors, block[0], 0), block[1], 1)


HALF = ml_dtypes.bfloat16
KINDS = itertools.product(
    ["e4m3", "e5m2"], [HALF, np.float32], [False, True], [(1, 128), (128, 128)]
)


@pytest.mark.parametrize("name, dtype, free, block", quick(list(KINDS), 2))
def test_blocks_of_128_are_those_of_transformer_engine(name, dtype, free, block):
    x = hostile(256, 256, dtype)
    rule = blocks.free_scales if free else blocks.scales_of_powers
    made = jax.jit(lambda x: round_blocks(x, block, rule, FORMATS[name], not free))(x)
    wide = x.astype(np.float32)
    scale = scale_of_te(maxima_of(wide, block), FORMATS[name].top, not free)
    scaled = np.clip(wide * spread_out(scale, block), -FORMATS[name].top, FORMATS[name].top)
    np.testing.assert_array_equal(np.asarray(made.values), scaled.astype(DTYPES[name]))
    factors = 1 / scale
    factors[factors < LEAST] = 0
    np.testing.assert_array_equal(np.asarray(made.factors), factors)
    assert made.wide == (np.float32 if free else dtype)


def bytes_up(top: np.ndarray, most: float) -> np.ndarray:
    """E8M0 in exact arithmetic: the smallest power of two that is no less."""
    ratio = (top * np.float32(1 / most)).astype(np.float64)
    with np.errstate(divide="ignore"):
        power = np.ceil(np.log2(ratio))
    return np.clip(np.where(ratio > 0, power, -127) + 127, 0, 254).astype(int)


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_mxfp8_rounds_its_scales_up(name):
    to, x = FORMATS[name], hostile(64, 128)
    made = jax.jit(lambda x: round_blocks(x, (1, 32), blocks.rounded_up, to))(x)
    byte = bytes_up(maxima_of(x, (1, 32)), to.top)
    scale = np.exp2(127.0 - byte).astype(np.float32)
    scaled = np.clip(x * spread_out(scale, (1, 32)), -to.top, to.top)
    np.testing.assert_array_equal(np.asarray(made.values), scaled.astype(DTYPES[name]))
    want = np.exp2(byte - 127.0).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(made.factors)[byte > 0], want[byte > 0])
    e8m0 = want.astype(ml_dtypes.float8_e8m0fnu).view(np.uint8)
    np.testing.assert_array_equal(np.asarray(blocks.e8m0_up(maxima_of(x, (1, 32)), to)), e8m0)


def test_scales_of_mxfp8_at_their_borders():
    e4m3 = FORMATS["e4m3"]
    of = {0.0: 0, 448.0: 127, 448.5: 128, 447.0: 127, 224.0: 126, np.inf: 254, np.nan: 255}
    of[float(np.finfo(np.float32).max)] = 247
    tops = np.array(list(of), np.float32)
    np.testing.assert_array_equal(
        np.asarray(jax.jit(lambda a: blocks.e8m0_up(a, e4m3))(tops)), list(of.values())
    )
    down = {448.0: 127, 511.9: 127, 512.0: 128, 255.9: 126, 0.0: 0, np.inf: 254, np.nan: 255}
    tops = np.array(list(down), np.float32)
    np.testing.assert_array_equal(
        np.asarray(jax.jit(lambda a: blocks.e8m0_down(a, e4m3))(tops)), list(down.values())
    )


@pytest.mark.parametrize("block", [(1, 16), (16, 16)])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_nvfp4_is_that_of_transformer_engine(block, dtype):
    x = hostile(32, 64, dtype)
    x[3:5] = 1
    wide, one = x.astype(np.float32), np.float32(1)
    amax = np.abs(wide).max()
    whole = np.float32(448 * 6) / amax
    factors = maxima_of(wide, block) * (whole * np.float32(1 / 6))
    factors = np.clip(factors, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    with np.errstate(divide="ignore"):
        scale = one / (factors.astype(np.float32) * (one / whole))
    scale = np.minimum(scale, np.finfo(np.float32).max)
    scaled = np.clip(wide * spread_out(scale, block), -6, 6)
    made = jax.jit(lambda x: round_four_bits(x, block, jnp.float32(amax)))(x)
    want = scaled.astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(made.values).astype(np.float32), want)
    np.testing.assert_array_equal(np.asarray(made.factors), factors.astype(np.float32))


@slow
def test_nothing_but_zeros_is_nothing_but_zeros():
    zero = jnp.zeros((16, 128))
    for recipe in (Block128(), MxFp8(), NvFp4()):
        x8 = recipe.round_input(zero, None, LOCAL)
        w8 = recipe.round_weight(jnp.ones((128, 128)), jnp.ones(3), 0)
        y = recipe.product(x8, w8, 0, None, jnp.float32)
        assert not np.asarray(y).any(), recipe


@slow
@pytest.mark.parametrize("recipe", [Block128(), Block128(scales="free"), MxFp8(), NvFp4()])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_stays_so(recipe, bad):
    """In each of the three products."""
    x = jnp.ones((128, 128)).at[3, 5].set(bad)
    scales = jnp.ones(3)
    places = places_of(128, 128)
    x8, one = (recipe.round_input(a, scales, LOCAL) for a in (x, jnp.ones((128, 128))))
    g8 = recipe.round_gradient(x, scales, LOCAL, places)
    w8 = recipe.round_weight(jnp.ones((128, 128)), scales, 0)
    for y in (
        recipe.product(x8, w8, 0, scales, jnp.float32),
        recipe.input_gradient(g8, w8, scales, jnp.float32),
        recipe.weight_gradient(one, g8, jnp.float32, None),
    ):
        assert not np.isfinite(np.asarray(y)).all()


@slow
@pytest.mark.parametrize(
    "recipe", [Block128(), Block128("e5m2"), MxFp8(), MxFp8(scales="floor"), NvFp4()]
)
def test_orientations_and_the_order_of_sums(recipe):
    """Both copies are roundings of the unrounded tensor, and products are those of the numbers."""
    rng = np.random.default_rng(1)
    x, w = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((160, 256), (256, 128)))
    scales = jnp.stack([jnp.float32(0), jnp.abs(w).max(), jnp.float32(0)])
    x8 = recipe.round_input(x, scales, LOCAL)
    turned = mix_tokens(x.T) if isinstance(recipe, NvFp4) else x.T
    direct = recipe.round_input(turned, scales, LOCAL).plain
    jax.tree.map(np.testing.assert_array_equal, x8.turned, direct)
    forward, backward = (recipe.round_weight(w, scales, axis) for axis in (0, 1))
    assert recipe.square == bool(
        (np.asarray(forward.numbers()).T == np.asarray(backward.numbers())).all()
    )
    y = recipe.product(x8, forward, 0, scales, jnp.float32)
    exact = np.asarray(x8.plain.numbers(), np.float64) @ np.asarray(forward.numbers(), np.float64).T
    if isinstance(recipe, NvFp4):
        exact *= float(x8.plain.amax) * float(forward.amax) / (6 * 448) ** 2
    np.testing.assert_allclose(np.asarray(y), exact, rtol=1e-5, atol=1e-4)
    true = np.asarray(x @ w)
    assert np.linalg.norm(y - true) / np.linalg.norm(true) < (
        0.2 if isinstance(recipe, NvFp4) else 0.06
    )


def test_sums_by_128_terms_are_the_sum():
    rng = np.random.default_rng(2)
    a, b = (rng.normal(size=(8, 300)).astype(np.float32) for _ in range(2))
    a8, b8 = (round_blocks(m, (1, 128), blocks.scales_of_powers, FORMATS["e4m3"]) for m in (a, b))
    want = multiply_blocks(a8, b8, jnp.float32)
    np.testing.assert_allclose(
        multiply_blocks(a8, b8, jnp.float32, 128), want, rtol=1e-5, atol=1e-5
    )


def test_the_hadamard_transform_cancels():
    matrix = hadamard_matrix()
    np.testing.assert_array_equal(matrix @ matrix.T, np.eye(16))
    rng = np.random.default_rng(3)
    x, g = (jnp.asarray(rng.normal(size=(5, 40)), jnp.float32) for _ in range(2))
    mixed = mix_tokens(x), mix_tokens(g)
    assert mixed[0].shape == (5, 48)
    np.testing.assert_allclose(mixed[0] @ mixed[1].T, x @ g.T, rtol=1e-4, atol=1e-5)


@slow
def test_rounding_at_random_has_no_bias():
    """The mean of many steps is the gradient; no step rounds to other than the two neighbors."""
    rng = np.random.default_rng(4)
    g = jnp.asarray(rng.normal(size=(16, 32)), jnp.float32)
    places = places_of(16, 32)

    @jax.jit
    @jax.vmap
    def numbers(key):
        of_step = places._replace(key=key)
        g8 = NvFp4().round_gradient(g, None, LOCAL, of_step)
        both = g8.plain, g8.turned
        return [b.numbers() * b.amax / (6 * 448) for b in both]

    plain, turned = numbers(jnp.arange(4096, dtype=jnp.uint32))
    for made, exact in ((plain, g), (turned, mix_tokens(g.T))):
        steps = np.asarray(made).std(0)
        exact = np.asarray(exact)
        error = np.where(np.abs(exact) < np.abs(made).max(0), np.asarray(made).mean(0) - exact, 0)
        assert np.abs(error / np.maximum(steps / 64, 1e-3)).max() < 5
        once = np.abs(np.asarray(made)[0] - exact)
        assert np.abs(error).mean() < 0.05 * once.mean() and (error != 0).mean() > 0.8


@slow
def test_rows_of_groups_start_blocks_of_their_own():
    """Poisoned rows of no group change nothing."""
    rng = np.random.default_rng(5)
    x = rng.normal(size=(40, 6)).astype(np.float32)
    sizes = np.array([5, 0, 17, 9], np.int32)
    poisoned = x.copy()
    poisoned[31:] = np.nan
    rule, to = blocks.scales_of_powers, FORMATS["e4m3"]
    made = np.asarray(blocks.round_within_groups(poisoned, sizes, 8, rule, to))
    start = 0
    for size in sizes:
        for first in range(start, start + size, 8):
            rows = x[first : min(first + 8, start + size)]
            want = round_blocks(rows.T, (1, 8), rule, to).numbers().T
            np.testing.assert_array_equal(made[first : first + len(rows)], want)
        start += size
    assert not made[31:].any()


def test_mxfp4_fits_blocks_of_128_without_loss():
    """6 * 2**6 is less than 448; so groups of 32 whose scales are within six binades stay exact."""
    rng = np.random.default_rng(6)
    values = rng.choice([0, 0.5, 1, 1.5, 2, 3, 4, 6], (128, 256)) * rng.choice([-1, 1], (128, 256))
    scales = np.exp2(rng.integers(-5, 2, (128, 8)))
    w = (values * np.repeat(scales, 32, 1)).astype(np.float32)
    made = round_blocks(jnp.asarray(w), (128, 128), blocks.scales_of_powers, FORMATS["e4m3"])
    np.testing.assert_array_equal(np.asarray(made.numbers()), w)


def test_gpus_without_kernels_are_refused():
    """Hopper has them for blocks of 128, others for none."""
    hopper, blackwell = (StandIn(0, 0, "NVIDIA", c) for c in ("9.0", "10.0"))
    refused = [(Block128(), blackwell), (MxFp8(), hopper), (Block128(block=32), hopper)]
    for recipe, device in refused:
        with pytest.raises(UserError, match=f"{recipe.name}: NVIDIA has no kernels of it here"):
            recipe.require(device)
    for recipe in (Block128(emulates=True), MxFp8(emulates=True)):
        recipe.require(blackwell)


@pytest.mark.skipif(
    jax.__version_info__ < (0, 11) or not has_triton(), reason="needs jax >= 0.11 and jax-triton"
)
def test_hopper_multiplies_blocks_of_experts_too():
    hopper = StandIn(0, 0, "NVIDIA", "9.0")
    for rounds_experts in (False, True):
        Block128().require(hopper, rounds_experts)


def test_a_recipe_says_whether_it_is_emulated():
    """As `--dry-run` prints it."""
    with believed(Device("gpu", hopper=True)):
        assert str(Block128()) == "block128 by our kernels"
        assert [str(r) for r in (Block128(block=32), Block128(emulates=True), MxFp8())] == [
            "block128, emulated",
            "block128, emulated",
            "mxfp8, emulated",
        ]
    with believed(Device("cpu")):
        assert str(Block128()) == "block128, emulated"
