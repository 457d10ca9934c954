"""The Hopper kernels of the grouped matmul in Pallas' interpreter, against the plain version.

Memory that nothing wrote is NaN there, and two threads that meet in it are found.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.errors import UserError
from mjax.kernels.base import chooser
from mjax.kernels.base.chooser import Device, mosaic_grouped_lacks
from mjax.kernels.elementwise.gate import E4M3, E5M2
from mjax.kernels.matmul import grouped
from mjax.kernels.matmul.grouped_tiles import (
    NARROW,
    PROMOTED8,
    WIDE,
    WIDE8,
    GroupTile,
    group_tile_of,
    tile8_of,
    tiles_of_rows,
)
from tests.devices import CPU, HOPPER
from tests.marks import exhaustive, quick, slow
from tests.mosaic_interpreter import interpreted

# rows, K, N, (lines, columns, slots, band) of a tile, sizes of the groups
CASES = [
    (256, 128, 128, (128, 64, 2, 16), [70, 0, 101, 1, 20]),
    (264, 64, 448, (128, 192, 2, 1), [3, 250]),
    (8, 64, 64, (128, 64, 2, 16), [0, 0]),
    (512, 64, 128, (256, 128, 2, 2), [0, 511, 0, 1]),
    (256, 256, 64, (128, 64, 3, 16), [128, 128]),
    (64, 64, 64, (128, 64, 2, 16), [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
]


def draw(m, groups, k, n):
    keys = jax.random.split(jax.random.key(m), 4)
    shapes = (m, k), (groups, k, n), (m, n), (groups, k, n)
    x, w, g, total = map(jax.random.normal, keys, shapes)
    return *(a.astype(jnp.bfloat16) for a in (x, w, g)), total


def close(got, expected):
    assert got.dtype == expected.dtype
    got, expected = np.asarray(got, np.float32), np.asarray(expected, np.float32)
    np.testing.assert_allclose(got, expected, rtol=2**-7, atol=1e-4 * max(1, abs(expected).max()))


@slow
@pytest.mark.parametrize(("m", "k", "n", "tile", "sizes"), quick(CASES, 0))
def test_kernels_equal_the_plain_version(monkeypatch, m, k, n, tile, sizes):
    """Rows by weights and by transposed weights, and gradients of weights, alone and summed."""
    with interpreted(monkeypatch, races=True):
        from mjax.kernels.matmul import grouped_mosaic as mosaic

        monkeypatch.setattr(mosaic, "BLOCKS", 2)
        tile = GroupTile(*tile)
        x, w, g, total = draw(m, len(sizes), k, n)
        counts = jnp.asarray(sizes, jnp.int32)
        y = mosaic.multiply_rows(x, w, counts, tile, False)
        dx = mosaic.multiply_rows(g, w, counts, tile, True)
        dw = mosaic.weight_gradient(x, g, counts, None, tile)
        summed = mosaic.weight_gradient(x, g, counts, total, tile)
    close(y, grouped.reference_rows(x, w, counts, 1))
    close(dx, grouped.reference_rows(g, w, counts, 2))
    close(dw, grouped.reference_weight_gradient(x, g, counts, None))
    close(summed, grouped.reference_weight_gradient(x, g, counts, total))


# The same of 8 bits: the last number of a tile is after how many steps sums are promoted.
CASES_8 = [
    (256, 128, 256, (128, 192, 2, 16, 1), [70, 0, 101, 1, 20]),
    (384, 384, 128, (256, 128, 2, 2, 2), [0, 383, 0, 1]),
    (128, 128, 256, (128, 256, 2, 16), [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
]


def draw8(m, groups, k, n):
    """x and w in e4m3, g in e5m2, all within [-8, 8]."""
    x, w, g, total = draw(m, groups, k, n)
    return x.astype(E4M3), w.astype(E4M3), g.astype(E5M2), total


@exhaustive
@pytest.mark.parametrize(("m", "k", "n", "tile", "sizes"), quick(CASES_8, 0))
def test_kernels_of_8_bits_equal_the_plain_version(monkeypatch, m, k, n, tile, sizes):
    counts, scale = jnp.asarray(sizes, jnp.int32), jnp.float32(2**-3)
    x, w, g, total = draw8(m, len(sizes), k, n)
    with interpreted(monkeypatch, races=True):
        from mjax.kernels.matmul import grouped_mosaic as mosaic

        monkeypatch.setattr(mosaic, "BLOCKS", 2)
        tile = GroupTile(*tile)
        y = mosaic.multiply_rows(x, w.transpose(0, 2, 1), counts, tile, True, scale)
        dx = mosaic.multiply_rows(g, w, counts, tile, True, scale)
        dw = mosaic.weight_gradient(x.T, g.T, counts, None, tile, scale)
        summed = mosaic.weight_gradient(x.T, g.T, counts, total, tile, scale)
    for got, expected in zip(
        (y, dx, dw, summed), plain8(x, w, g, total, counts, scale), strict=True
    ):
        close(got, expected)


def plain8(x, w, g, total, counts, scale):
    """The four products where no kernel is for Hopper."""
    facts = counts, scale, jnp.bfloat16
    y = grouped.grouped_matmul8(x, w.transpose(0, 2, 1), *facts, "xla")
    dx = grouped.grouped_matmul8(g, w, *facts, "xla")
    dw = grouped.grouped_weight_gradient8(x.T, g.T, *facts, None, "xla")
    return y, dx, dw, grouped.grouped_weight_gradient8(x.T, g.T, *facts, total, "xla")


def test_the_plain_version_of_8_bits_is_the_product_of_what_they_mean():
    m, k, n, sizes = 24, 16, 8, [5, 0, 12]
    x, w, g, total = draw8(m, len(sizes), k, n)
    got = plain8(x, w, g, total, jnp.asarray(sizes, jnp.int32), jnp.float32(0.5))
    x, w, g, total = (np.asarray(a, np.float64) for a in (x, w, g, total))
    y, dx, dw, end = np.zeros((m, n)), np.zeros((m, k)), np.zeros((len(sizes), k, n)), 0
    for i, size in enumerate(sizes):
        rows = slice(end, end := end + size)
        y[rows], dx[rows] = x[rows] @ w[i] / 2, g[rows] @ w[i].T / 2
        dw[i] = x[rows].T @ g[rows] / 2
    for a, e in zip(got, (y, dx, dw, total + dw), strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float64), e, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("lines", [8, 128])
def test_tiles_hold_every_row_once(lines):
    rng = np.random.default_rng(0)
    for groups in (1, 5, 40):
        sizes = rng.integers(0, 300, groups) * (rng.random(groups) < 0.7)
        m = int(sizes.sum() + rng.integers(0, 200)) // 8 * 8 + 8
        tiles, last = tiles_of_rows(jnp.asarray(sizes, jnp.int32), m, lines)
        owner = np.full(m, -1)
        for i, (group, offset, begin, end) in enumerate(np.asarray(tiles)[: int(last[-1])]):
            start = i * lines + offset
            assert start % 8 == 0
            rows = slice(max(start, begin), min(start + lines, end))
            assert rows.start < rows.stop and (owner[rows] == -1).all()
            owner[rows] = group
        np.testing.assert_array_equal(owner[: sizes.sum()], np.repeat(np.arange(groups), sizes))
        assert (owner[sizes.sum() :] == groups).all()


def test_tiles_are_chosen_by_what_lies_beyond_the_edges():
    assert group_tile_of(14336) == group_tile_of(1408) == WIDE
    assert group_tile_of(640) == group_tile_of(64) == NARROW
    assert tile8_of(14336, precise=False) == WIDE8
    assert tile8_of(128, precise=True) == PROMOTED8[1]


@pytest.mark.parametrize(
    ("dtype", "shape", "device", "why"),
    [
        ("bfloat16", (64, 2, 64, 128), HOPPER, None),
        ("bfloat16", (64, 2, 64, 128), CPU, "Hopper"),
        ("bfloat16", (64, 2, 64, 128), Device("gpu"), "Hopper"),
        ("float32", (64, 2, 64, 128), HOPPER, "bfloat16, not float32"),
        ("bfloat16", (64, 2, 96, 128), HOPPER, "96 x 128 is no multiple of 64"),
        ("bfloat16", (60, 2, 64, 128), HOPPER, "60 rows"),
        ("float8_e4m3fn", (128, 2, 256, 128), HOPPER, None),
        ("float8_e5m2", (128, 2, 64, 128), HOPPER, "64 x 128 is no multiple of 128"),
        ("float8_e4m3fn", (64, 2, 128, 128), HOPPER, "64 rows are no multiple of 128"),
    ],
)
def test_what_the_kernels_lack(dtype, shape, device, why):
    said = mosaic_grouped_lacks(jnp.dtype(dtype), shape, device)
    assert said is None if why is None else why in said


def test_a_request_that_cannot_be_met_names_the_reason(monkeypatch):
    monkeypatch.setattr(chooser, "this_device", lambda: HOPPER)
    x, w, *_ = draw(8, 2, 96, 64)
    with pytest.raises(
        UserError, match="96 x 64 is no multiple of 64 both ways; set train.experts"
    ):
        grouped.grouped_matmul(x, w, jnp.zeros(2, jnp.int32), "mosaic")
