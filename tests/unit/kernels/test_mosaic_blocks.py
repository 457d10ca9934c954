"""The Hopper kernel of block-scaled products in Pallas' interpreter, against the plain version.

Memory that nothing wrote is NaN there, and two threads that meet in it are found.
"""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.kernels.fp8 import blocks
from mjax.kernels.fp8.block_recipes import Block128
from mjax.kernels.fp8.block_rounding import round_both_ways, round_square
from mjax.kernels.fp8.blocks import FORMATS, multiply_blocks, round_blocks
from mjax.models.base.weight import Weight, matmul
from mjax.models.moe.dispatch import make_dispatch
from mjax.models.moe.expert import Expert
from mjax.models.moe.expert_matmuls import multiply_down, multiply_up
from tests.devices import HOPPER, choose_for
from tests.marks import exhaustive, slow
from tests.mosaic_interpreter import interpreted
from tests.triton_interpreter import interpret

SQUARE, ROW = (128, 128), (1, 128)
SIZES = (77, 256), (256, 128), (77, 128)  # of x, a weight, and the gradient of y


def varied(seed, shape):
    """Random numbers whose blocks, and rows, are of some binades.

    Each is a hundredth above one of 1, 2 and 3 times a power of two, which it is rounded to. A
    product of two then has 12 binades at most, and fp32 holds a sum of 128 exactly: the bits are
    the same in whatever order a CPU adds.
    """
    keys = jax.random.split(jax.random.key(seed), 3)
    grid = [-(-n // 64) for n in shape]
    powers = jnp.kron(jax.random.randint(keys[1], grid, -2, 2), jnp.ones((64, 64), jnp.int32))
    powers = powers[: shape[0], : shape[1]] + jax.random.randint(keys[2], (shape[0], 1), -2, 2)
    digits = jax.random.choice(keys[0], jnp.asarray([-3, -2, -1, 1, 2, 3]), shape)
    return 1.01 * digits * jnp.exp2(powers.astype(jnp.float32))


def rounded(seed, shape, block, rule=blocks.scales_of_powers, to="e4m3"):
    return round_blocks(varied(seed, shape), block, rule, FORMATS[to], exact=False)


# M, K, N, blocks of the right operand, (lines, columns, slots, band, cluster, stages)
CASES = [
    (200, 384, 384, SQUARE, (128, 192, 2, 2, 1, 2)),
    (136, 384, 256, ROW, (128, 128, 2, 16, 1, 2)),
    (520, 256, 128, SQUARE, (256, 128, 2, 1)),
    (264, 256, 384, ROW, (256, 128, 2, 16, 2)),
    (264, 384, 384, SQUARE, (128, 192, 3, 16, 2)),
    (5, 256, 256, SQUARE, (128, 192, 4, 16, 2)),
]
MARKS = slow, exhaustive, exhaustive, slow, exhaustive, ()


@pytest.mark.parametrize(
    ("m", "k", "n", "block", "tile"),
    [pytest.param(*case, marks=marks) for case, marks in zip(CASES, MARKS, strict=True)],
)
def test_kernel_equals_the_plain_version(monkeypatch, m, k, n, block, tile):
    """Added to a sum in fp32, or rounded to bf16 where rows are no multiple of 8.

    Sums are exact, and scales are powers of two: the bits are equal.
    """
    a, b = rounded(0, (m, k), ROW), rounded(1, (n, k), block)
    want = multiply_blocks(a, b, jnp.float32, 128)
    total = varied(2, (m, n)) if m % 8 == 0 else None
    dtype = jnp.bfloat16 if total is None else jnp.float32
    with interpreted(monkeypatch, races=True):
        from mjax.kernels.fp8 import block_mosaic as mosaic
        from mjax.kernels.matmul import grouped_mosaic

        monkeypatch.setattr(grouped_mosaic, "BLOCKS", 2)
        got = mosaic.multiply_on_hopper(a, b, dtype, total, mosaic.BlockTile(*tile))
    want = want.astype(dtype) if total is None else total + want
    assert got.shape == (m, n) and got.dtype == dtype
    np.testing.assert_array_equal(got, want)


# rows, K, N, sizes of the groups, tiles of rows and of sums
CASES_OF_GROUPS = [
    (148, 128, 128, [10, 0, 129, 1], (128, 64, 2, 2, 2), (256, 128, 2, 2, 2, 1)),
    (301, 256, 128, [0, 3, 290], (128, 64, 2, 2), (128, 128, 2, 16)),
    (64, 128, 128, [0, 0], (256, 128, 2, 2, 2), (128, 64, 2, 2, 2)),
    (512, 128, 384, [0, 511, 0, 1], (256, 128, 2, 1), (128, 192, 2, 8)),
    (264, 128, 256, [70, 0, 129, 1, 20], (128, 192, 2, 2, 2), (256, 128, 2, 2, 2, 1)),
]


@exhaustive
@pytest.mark.parametrize(
    ("m", "k", "n", "sizes", "by_rows", "by_sums"),
    CASES_OF_GROUPS,
)
def test_products_of_groups_are_those_of_each_alone(monkeypatch, m, k, n, sizes, by_rows, by_sums):
    """As kernels round them, bit for bit: rows, sums, sums added. Rows of no group are NaN."""
    counts, ends = jnp.asarray(sizes, jnp.int32), np.cumsum(sizes)
    rounds = [(blocks.scales_of_powers, FORMATS[to]) for to in ("e4m3", "e5m2")]
    x, g, w = varied(0, (m, k)), varied(1, (m, n)), varied(2, (len(sizes) * n, k))
    total = varied(3, (len(sizes) * k, n)).reshape(-1, k, n)
    interpret(monkeypatch)
    poisoned = [a.at[ends[-1] :].set(jnp.nan) for a in (x, g)]
    x8, x8_turned = round_both_ways(poisoned[0], rounds[0][1], False, counts)
    _, g8_turned = round_both_ways(poisoned[1], rounds[1][1], False, counts, plain=False)
    w8 = round_square(w.reshape(-1, n, k), rounds[0][1], False, False)
    with interpreted(monkeypatch, races=True):
        from mjax.kernels.fp8 import block_mosaic as mosaic
        from mjax.kernels.matmul import grouped_mosaic

        monkeypatch.setattr(grouped_mosaic, "BLOCKS", 2)
        tiles = mosaic.BlockTile(*by_rows), mosaic.BlockTile(*by_sums)
        y = mosaic.multiply_rows_of_groups(x8, w8, counts, jnp.float32, tiles[0])
        both = x8_turned, g8_turned, counts
        dw = mosaic.weight_gradient_of_groups(*both, jnp.bfloat16, None, tiles[1])
        summed = mosaic.weight_gradient_of_groups(*both, jnp.float32, total, tiles[1])
    x8 = round_blocks(x, ROW, *rounds[0])
    for i, end in enumerate(ends):
        rows = slice(end - sizes[i], end)
        of_group = round_blocks(w[i * n : (i + 1) * n], SQUARE, *rounds[0])
        want = multiply_blocks(x8, of_group, jnp.float32, 128)
        np.testing.assert_array_equal(y[rows], want[rows])
        left, right = (
            round_blocks(a[rows].T, ROW, *facts) for a, facts in zip((x, g), rounds, strict=True)
        )
        want = multiply_blocks(left, right, jnp.float32, 128) if sizes[i] else jnp.zeros((k, n))
        np.testing.assert_array_equal(dw[i], want.astype(jnp.bfloat16))
        np.testing.assert_array_equal(summed[i], total[i] + want)
    assert not np.asarray(y[ends[-1] :]).any()


@slow
def test_free_scales_and_both_formats(monkeypatch):
    a = rounded(0, (64, 256), ROW, blocks.free_scales, "e5m2")
    b = rounded(1, (128, 256), ROW, blocks.free_scales)
    with interpreted(monkeypatch, races=True):
        from mjax.kernels.fp8 import block_mosaic as mosaic

        got = mosaic.multiply_on_hopper(a, b, jnp.float32)
    want = multiply_blocks(a, b, jnp.float32, 128)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6 * np.abs(want).max())


@slow
@pytest.mark.parametrize("gradients", ["e4m3", "e5m2"])
def test_a_matmul_by_kernels_is_the_emulated_one(monkeypatch, gradients):
    """Roundings, the three products and a running sum, with rows that are no whole blocks."""
    keys = jax.random.split(jax.random.key(3), 4)
    x, w, g = (jax.random.normal(key, s) for key, s in zip(keys, SIZES, strict=False))
    total = jax.random.normal(keys[3], w.shape)

    def all_three(recipe):
        w_ = Weight(w, scales=jnp.zeros(3), recipe=recipe, grad_sum=total)
        y, pull = jax.vjp(matmul, x, w_)
        dx, dw = pull(g)
        return y, dx, dw.grad_sum

    want = all_three(Block128(gradients))
    names = interpret(monkeypatch)
    choose_for(monkeypatch, HOPPER, "block_matmul")
    with interpreted(monkeypatch, races=True):
        got = all_three(Block128(gradients))
    assert Counter(names) == {"round_lines_both_ways": 2, "round_squares": 2}
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6 * np.abs(b).max())


def experts_both_ways(recipe, tokens, d, f, dtype=jnp.float32, up_only=False):
    """Both matmuls of three experts, their gradients, and running sums; one has no token."""
    keys = jax.random.split(jax.random.key(4), 8)
    shapes = (tokens, d), (3, d, 2, f), (3, f, d), (tokens, d)
    x, up, down, dy = (
        jax.random.normal(key, s, dtype) for key, s in zip(keys, shapes, strict=False)
    )
    sums = [jax.random.normal(key, w.shape) for key, w in zip(keys[4:6], (up, down), strict=True)]
    gates = jax.random.uniform(keys[6], (tokens, 2))
    chosen = 2 * jax.random.randint(keys[7], (tokens, 2), 0, 3)  # expert 4 is elsewhere
    dispatch, expert = make_dispatch(chosen, 0, 3), Expert("silu", True, kernel="xla")
    weights = [
        Weight(w, scales=jnp.zeros(3), recipe=recipe, grad_sum=s)
        for w, s in zip((up, down), sums, strict=True)
    ]

    def layer(x, gates, up, down):
        h = multiply_up(expert, x, up, dispatch)
        return h if up_only else multiply_down(expert, h, gates, down, dispatch)

    y, pull = jax.vjp(layer, x, gates, *weights)
    dy = jnp.sin(y) if up_only else dy
    dx, d_gates, d_up, d_down = pull(dy)
    return y, dx, d_gates, d_up.grad_sum, d_down.grad_sum


@pytest.mark.parametrize("up_only", [True, pytest.param(False, marks=exhaustive)])
@exhaustive
def test_experts_by_kernels_are_the_emulated_ones(monkeypatch, up_only):
    facts = 24, 128, 128, jnp.float32, up_only
    want = experts_both_ways(Block128(), *facts)
    names = interpret(monkeypatch)
    choose_for(monkeypatch, HOPPER, "block_matmul")
    with interpreted(monkeypatch, races=True):
        from mjax.kernels.fp8 import block_mosaic
        from mjax.kernels.matmul import grouped_mosaic

        monkeypatch.setattr(grouped_mosaic, "BLOCKS", 2)
        monkeypatch.setattr(block_mosaic, "SQUARE_TILE", block_mosaic.BlockTile(128, 64, 2))
        got = experts_both_ways(Block128(), *facts)
    calls = 1 if up_only else 2
    assert Counter(names) == {"round_lines_both_ways": 3 * calls, "round_squares": 2 * calls}
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6 * np.abs(b).max())
