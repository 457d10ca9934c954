"""Our Hopper grouped matmul against a loop in fp32: forward, gradients, sums; bit-equal twice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.bench.grouped import skewed_sizes
from mjax.kernels.base import chooser
from mjax.kernels.elementwise.gate import E4M3, E5M2
from mjax.kernels.matmul.grouped import grouped_matmul, grouped_matmul8, grouped_weight_gradient8
from mjax.kernels.matmul.grouped_tiles import NARROW, WIDE, GroupTile
from mjax.models.base.weight import Weight
from mjax.models.moe.grouped_linear import weight_cotangent

pytestmark = pytest.mark.skipif(not chooser.on_hopper(), reason="needs a Hopper GPU, jax >= 0.11")

# rows, K, N, sizes of the groups
CASES = {
    "ragged": (1024, 512, 768, [70, 0, 301, 1, 20, 500]),
    "no_row": (256, 128, 128, [0, 0]),
    "all_in_one": (2048, 256, 256, [0, 0, 2048, 0]),
    "each_alone": (64, 64, 64, [1] * 64),
    "many_tiny": (1024, 128, 192, [7, 9, 1, 8, 15, 17, 0, 3] * 16),
    "last_tile_of_columns": (512, 192, 1408, [255, 257]),
    "rows_of_no_group": (4096, 128, 128, [5, 1000]),
    "skewed": (16384, 2048, 768, list(skewed_sizes(16384, 128))),
    "long_sums": (1024, 8192, 256, [512, 500]),
}


def _inputs(m, groups, k, n):
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = (m, k), (groups, k, n), (m, n), (groups, k, n)
    x, w, g, total = map(jax.random.normal, keys, shapes)
    return *(a.astype(jnp.bfloat16) for a in (x, w, g)), total


def _expected(sizes, x, w, g, total):
    """(y, dx, dw, total + dw) by a loop over groups, fp32, on the host."""
    x, w, g, total = (np.asarray(a, np.float32) for a in (x, w, g, total))
    y, dx = np.zeros((len(x), w.shape[2]), np.float32), np.zeros_like(x)
    dw = np.zeros_like(w)
    end = 0
    for i, size in enumerate(sizes):
        part = slice(end, end := end + size)
        y[part], dx[part], dw[i] = x[part] @ w[i], g[part] @ w[i].T, x[part].T @ g[part]
    return y, dx, dw, total + dw


def _close(mine, theirs, bound=0.004):
    mine, theirs = np.asarray(mine, np.float32), np.asarray(theirs, np.float32)
    assert mine.shape == theirs.shape and np.isfinite(mine).all()
    error = np.linalg.norm(mine - theirs) / max(np.linalg.norm(theirs), 1.0)
    assert error < bound, error


def _poison():
    """Leave NaN in the memory that the next outputs get: a tile not written is seen."""
    jax.block_until_ready([jnp.full((1 << 24,), jnp.nan, jnp.float32) for _ in range(4)])


@pytest.mark.parametrize("name", CASES)
def test_kernels_equal_the_loop(name):
    m, k, n, sizes = CASES[name]
    x, w, g, total = _inputs(m, len(sizes), k, n)
    counts = jnp.asarray(sizes, jnp.int32)

    @jax.jit
    def mine(x, w, g, total):
        y = grouped_matmul(x, w, counts, "mosaic")
        dx = grouped_matmul(g, w, counts, "mosaic", transposed=True)
        dw = weight_cotangent(Weight(w), x, g, counts, "mosaic")
        summed = weight_cotangent(Weight(w, grad_sum=total), x, g, counts, "mosaic")
        return y, dx, dw.value, summed.grad_sum

    expected = _expected(sizes, x, w, g, total)
    _poison()
    got = mine(x, w, g, total)
    for a, e in zip(got, expected, strict=True):
        _close(a, e)
    assert not got[0][sum(sizes) :].any() and not got[1][sum(sizes) :].any()
    _poison()
    for a, again in zip(got, mine(x, w, g, total), strict=True):
        assert bool((a == again).all())


@pytest.mark.parametrize("tile", [WIDE, NARROW, GroupTile(256, 192, 3), GroupTile(256, 128, 4, 8)])
def test_every_tile_equals_the_loop(tile):
    from mjax.kernels.matmul.grouped_mosaic import multiply_rows, weight_gradient

    m, k, n, sizes = CASES["ragged"]
    x, w, g, total = _inputs(m, len(sizes), k, n)
    counts = jnp.asarray(sizes, jnp.int32)
    y, dx, dw, summed = _expected(sizes, x, w, g, total)
    _poison()
    _close(jax.jit(lambda: multiply_rows(x, w, counts, tile, False))(), y)
    _poison()
    _close(jax.jit(lambda: multiply_rows(g, w, counts, tile, True))(), dx)
    _poison()
    _close(jax.jit(lambda: weight_gradient(x, g, counts, None, tile))(), dw)
    add = jax.jit(lambda t: weight_gradient(x, g, counts, t, tile), donate_argnums=0)
    _close(add(jnp.copy(total)), summed)


CASES_8 = {
    "ragged": (1024, 512, 768, [70, 0, 301, 1, 20, 500]),
    "no_row": (256, 128, 128, [0, 0]),
    "all_in_one": (2048, 256, 256, [0, 0, 2048, 0]),
    "each_alone": (128, 128, 128, [1] * 64),
    "rows_of_no_group": (4096, 128, 1408, [5, 1000]),
    "long_sums": (1024, 8192, 256, [512, 500]),
}


@pytest.mark.parametrize("name", CASES_8)
def test_kernels_of_8_bits_equal_the_loop(name):
    """Forward sums stay in the tensor cores, with 14 bits; the others leave them every 512."""
    m, k, n, sizes = CASES_8[name]
    x, w, g, total = _inputs(m, len(sizes), k, n)
    x, w, g = x.astype(E4M3), w.astype(E4M3), g.astype(E5M2)
    counts, scale = jnp.asarray(sizes, jnp.int32), jnp.float32(2**-3)
    facts = counts, scale, jnp.bfloat16

    @jax.jit
    def mine(x, w, g, total):
        y = grouped_matmul8(x, w.transpose(0, 2, 1), *facts, "mosaic")
        dx = grouped_matmul8(g, w, *facts, "mosaic", precise=True)
        dw = grouped_weight_gradient8(x.T, g.T, *facts, None, "mosaic")
        return y, dx, dw, grouped_weight_gradient8(x.T, g.T, *facts, total, "mosaic")

    expected = _expected(sizes, x, w, g, np.zeros_like(total))[:3]
    y, dx, dw = (a * 2**-3 for a in expected)
    _poison()
    got = mine(x, w, g, total)
    for a, e in zip(got, (y, dx, dw, total + dw), strict=True):
        _close(a, e)
    assert not got[0][sum(sizes) :].any() and not got[1][sum(sizes) :].any()
    _poison()
    for a, again in zip(got, mine(x, w, g, total), strict=True):
        assert bool((a == again).all())


def test_a_sum_that_others_read_is_not_overwritten():
    m, k, n, sizes = CASES["ragged"]
    x, w, g, total = _inputs(m, len(sizes), k, n)
    before = np.asarray(total)
    from mjax.kernels.matmul.grouped import grouped_weight_gradient

    counts = jnp.asarray(sizes, jnp.int32)
    add = jax.jit(lambda t: (grouped_weight_gradient(x, g, counts, t, "mosaic"), t + 1))
    _, more = add(total)
    np.testing.assert_array_equal(more, before + 1)
    np.testing.assert_array_equal(total, before)
