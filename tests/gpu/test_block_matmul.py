"""128-blocks on a Hopper GPU: roundings bit for bit, products and gradients against plain JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.block_matmul import LINES, SQUARE
from mjax.errors import UserError
from mjax.kernels.base import chooser
from mjax.kernels.fp8.block_recipes import Block128
from mjax.kernels.fp8.block_rounding import round_both_ways, round_square
from mjax.kernels.fp8.blocks import FORMATS, multiply_blocks, round_within_groups, scales_of_powers
from mjax.kernels.matmul.grouped import reference_rows, reference_weight_gradient
from mjax.models.base.weight import Weight, matmul
from tests.gpu.test_grouped_matmul import _close, _poison
from tests.unit.kernels.test_block_rounding import RULES, draw, same
from tests.unit.kernels.test_mosaic_blocks import experts_both_ways, varied

pytestmark = pytest.mark.skipif(not chooser.on_hopper(), reason="needs a Hopper GPU, jax >= 0.11")

# Tensor cores keep 14 bits or more of a sum of 128 terms.
BOUND = {jnp.float32: 1e-3, jnp.bfloat16: 2.5e-3}


def on_cpu(function, x):
    with jax.default_device(jax.devices("cpu")[0]):
        return function(jnp.asarray(np.asarray(x)))


@pytest.mark.parametrize("free", [False, True])
@pytest.mark.parametrize("to", ["e4m3", "e5m2"])
@pytest.mark.parametrize(("shape", "dtype"), [((333, 384), "bfloat16"), ((256, 128), "float32")])
def test_roundings_are_those_of_plain_jax(shape, dtype, to, free):
    from mjax.kernels.fp8.blocks import round_blocks

    x = draw(*shape, dtype, finite=False)
    _poison()
    plain, turned = jax.jit(lambda x: round_both_ways(x, FORMATS[to], free))(x)
    facts = RULES[free], FORMATS[to], not free
    same(plain, on_cpu(lambda x: round_blocks(x, (1, 128), *facts), x))
    same(turned, on_cpu(lambda x: round_blocks(x.T, (1, 128), *facts), x))
    if shape[0] % 128:
        return
    for turn in (False, True):
        got = jax.jit(lambda x, turn=turn: round_square(x, FORMATS[to], free, turn))(x)
        source = (lambda x: x.T) if turn else (lambda x: x)
        same(got, on_cpu(lambda x, s=source: round_blocks(s(x), (128, 128), *facts), x))


@pytest.mark.parametrize(
    ("square", "tile", "dtype"),
    [(True, tile, jnp.bfloat16) for tile in SQUARE]
    + [(False, tile, jnp.float32) for tile in LINES],
)
def test_every_tile_multiplies(square, tile, dtype):
    """Lines and columns that fill no tile; values of many binades; twice the same bits."""
    from mjax.kernels.fp8.block_mosaic import BlockTile, multiply_on_hopper

    m, k, n = 1003, 640, 896
    a, b = varied(0, (m, k)), varied(1, (n, k))
    left = round_both_ways(a, FORMATS["e4m3"], False)[0]
    if square:
        right = round_square(b, FORMATS["e4m3"], False, False)
    else:
        right = round_both_ways(b, FORMATS["e4m3"], False)[0]
    want = multiply_blocks(left, right, jnp.float32, 128)
    run = jax.jit(lambda a, b: multiply_on_hopper(a, b, dtype, tile=BlockTile(*tile)))
    _poison()
    got = run(left, right)
    _close(got, want, BOUND[dtype])
    _poison()
    assert bool((got == run(left, right)).all())


def test_a_product_is_added_to_a_sum_where_it_lies():
    from mjax.kernels.fp8.block_mosaic import multiply_on_hopper

    a, b, total = (
        jax.random.normal(key, s)
        for key, s in zip(
            jax.random.split(jax.random.key(1), 3),
            ((768, 640), (896, 640), (768, 896)),
            strict=True,
        )
    )
    left, right = (round_both_ways(x, FORMATS["e4m3"], False)[0] for x in (a, b))
    want = total + multiply_blocks(left, right, jnp.float32, 128)
    add = jax.jit(
        lambda a, b, total: multiply_on_hopper(a, b, jnp.float32, total), donate_argnums=2
    )
    program = add.lower(left, right, total).compile()
    assert program.memory_analysis().alias_size_in_bytes == 4 * total.size
    _close(program(left, right, jnp.copy(total)), want, BOUND[jnp.float32])


@pytest.mark.parametrize("recipe", [Block128(), Block128("e5m2"), Block128(scales="free")])
@pytest.mark.parametrize("m", [1024, 1003, 5])
def test_product_and_gradients_are_the_emulated_ones(recipe, m):
    """Of a matmul of the model, with rows that are no whole blocks."""
    k, n = 512, 1024
    keys = jax.random.split(jax.random.key(m), 3)
    x, w, g = (
        jax.random.normal(key, s, jnp.bfloat16)
        for key, s in zip(keys, ((m, k), (k, n), (m, n)), strict=True)
    )

    def all_three(recipe):
        def product(x, w):
            return matmul(x, Weight(w, scales=jnp.zeros(3), recipe=recipe))

        y, pull = jax.vjp(product, x, w)
        return y, *pull(g)

    fast = jax.jit(lambda: all_three(recipe))
    assert fast.lower().compile().as_text().count('custom_call_target="mosaic_gpu') == 3
    slow = Block128(recipe.gradients, recipe.scales, emulates=True)
    want = jax.jit(lambda: all_three(slow))()
    _poison()
    for a, b in zip(fast(), want, strict=True):
        _close(a, b, BOUND[jnp.bfloat16])


@pytest.mark.parametrize(
    ("recipe", "bound"),
    [(Block128(), 5e-3), (Block128("e5m2"), 1e-2), (Block128(scales="free"), 2.5e-2)],
)
def test_experts_are_the_emulated_ones(recipe, bound):
    """Both matmuls of experts, rounding included, with running sums; some experts get nothing.

    What the first makes is rounded for the second. Where its last bit differs an element may fall
    to the neighbor in 8 bits, and with free scales a whole block be rounded anew.
    """
    fast = jax.jit(lambda: experts_both_ways(recipe, 600, 512, 384, jnp.bfloat16))
    assert fast.lower().compile().as_text().count('custom_call_target="mosaic_gpu') == 6
    slow = Block128(recipe.gradients, recipe.scales, emulates=True)
    want = jax.jit(lambda: experts_both_ways(slow, 600, 512, 384, jnp.bfloat16))()
    _poison()
    for a, b in zip(fast(), want, strict=True):
        _close(a, b, bound)


SIZES = [300, 0, 129, 1, 128, 7]


@pytest.mark.parametrize("tile", SQUARE)
def test_every_tile_multiplies_rows_of_groups(tile):
    """Rows of no group are NaN, and become zeros; twice the same bits."""
    from mjax.kernels.fp8.block_mosaic import BlockTile, multiply_rows_of_groups

    m, k, n, counts = 603, 640, 896, jnp.asarray(SIZES, jnp.int32)
    x = varied(0, (m, k)).at[sum(SIZES) :].set(jnp.nan)
    w = varied(1, (len(SIZES) * n, k))
    left = round_both_ways(x, FORMATS["e4m3"], False, turned=False)[0]
    right = round_square(w.reshape(-1, n, k), FORMATS["e4m3"], False, False)
    bf16, tile = jnp.bfloat16, BlockTile(*tile)
    run = jax.jit(lambda a, b: multiply_rows_of_groups(a, b, counts, bf16, tile))
    _poison()
    got = run(left, right)
    numbers = round_square(w, FORMATS["e4m3"], False, False).numbers().reshape(-1, n, k)
    rows = jnp.where(jnp.isnan(x), 0, left.numbers())
    _close(got, reference_rows(rows, numbers, counts, 2), BOUND[bf16])
    _poison()
    assert bool((got == run(left, right)).all()) and not got[sum(SIZES) :].any()


@pytest.mark.parametrize("tile", LINES)
def test_every_tile_sums_over_groups(tile):
    """Rows of no group are NaN; added to a sum where it lies."""
    from mjax.kernels.fp8.block_mosaic import BlockTile, weight_gradient_of_groups

    m, k, n, counts = 603, 640, 896, jnp.asarray(SIZES, jnp.int32)
    x, g = (varied(i, (m, size)).at[sum(SIZES) :].set(jnp.nan) for i, size in enumerate((k, n)))
    total = varied(2, (len(SIZES) * k, n)).reshape(-1, k, n)

    def add(x, g, total):
        x8, g8 = (
            round_both_ways(a, FORMATS["e4m3"], False, counts, plain=False)[1] for a in (x, g)
        )
        return weight_gradient_of_groups(x8, g8, counts, jnp.float32, total, BlockTile(*tile))

    run = jax.jit(add)
    _poison()
    got = run(x, g, total)
    facts = counts, 128, scales_of_powers, FORMATS["e4m3"]
    want = reference_weight_gradient(
        round_within_groups(x, *facts), round_within_groups(g, *facts), counts, total
    )
    _close(got - total, want - total, BOUND[jnp.float32])
    _poison()
    assert bool((got == run(x, g, total)).all())


def test_what_is_not_finite_stays_so():
    x = jnp.ones((256, 256), jnp.bfloat16).at[3, 5].set(jnp.nan)
    recipe, scales = Block128(), jnp.zeros(3)
    y = jax.jit(lambda x: matmul(x, Weight(jnp.ones_like(x), scales=scales, recipe=recipe)))(x)
    assert np.isnan(np.asarray(y[3], np.float32)).all() and bool(jnp.isfinite(y[4]).all())


def test_what_has_no_kernel_is_refused():
    device = jax.devices()[0]
    Block128().require(device, rounds_experts=True)
    with pytest.raises(UserError, match="blocks of 128"):
        Block128(block=32).require(device)
