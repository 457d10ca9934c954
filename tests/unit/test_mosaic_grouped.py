"""The Hopper kernels of the grouped matmul in Pallas' interpreter, against the plain version.

Memory that nothing wrote is NaN there, and two threads that meet in it are found.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.errors import UserError
from mjax.kernels import chooser, grouped
from mjax.kernels.chooser import Device, mosaic_grouped_lacks
from mjax.kernels.grouped_tiles import NARROW, WIDE, Tile, tile_of, tiles_of_rows
from tests.devices import CPU, HOPPER
from tests.marks import quick
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


@pytest.mark.parametrize(("m", "k", "n", "tile", "sizes"), quick(CASES, 0))
def test_kernels_equal_the_plain_version(monkeypatch, m, k, n, tile, sizes):
    """Rows by weights and by transposed weights, and gradients of weights, alone and summed."""
    with interpreted(monkeypatch, races=True):
        from mjax.kernels import mosaic_grouped as mosaic

        monkeypatch.setattr(mosaic, "BLOCKS", 2)
        tile = Tile(*tile)
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
    assert tile_of(14336) == tile_of(1408) == WIDE
    assert tile_of(640) == tile_of(64) == NARROW


@pytest.mark.parametrize(
    ("dtype", "shape", "device", "why"),
    [
        ("bfloat16", (64, 2, 64, 128), HOPPER, None),
        ("bfloat16", (64, 2, 64, 128), CPU, "Hopper"),
        ("bfloat16", (64, 2, 64, 128), Device("gpu"), "Hopper"),
        ("float32", (64, 2, 64, 128), HOPPER, "bfloat16, not float32"),
        ("bfloat16", (64, 2, 96, 128), HOPPER, "96 x 128 is no multiple of 64"),
        ("bfloat16", (60, 2, 64, 128), HOPPER, "60 rows"),
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
