"""The Hopper kernel of block-scaled products in Pallas' interpreter, against the plain version.

Memory that nothing wrote is NaN there, and two threads that meet in it are found.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.kernels.fp8 import blocks
from mjax.kernels.fp8.blocks import FORMATS, multiply_blocks, round_blocks
from tests.marks import quick
from tests.mosaic_interpreter import interpreted

SQUARE, ROW = (128, 128), (1, 128)


def rounded(seed, shape, block, rule=blocks.scales_of_powers, to="e4m3"):
    """Random numbers of many binades in blocks."""
    keys = jax.random.split(jax.random.key(seed), 2)
    x = jax.random.normal(keys[0], shape) * jnp.exp2(jax.random.uniform(keys[1], shape) * 8 - 4)
    return round_blocks(x, block, rule, FORMATS[to], exact=False)


# M, K, N, blocks of the right operand, (lines, columns, slots, band, cluster) of a tile
CASES = [
    (200, 384, 384, SQUARE, (128, 192, 2, 2)),
    (136, 384, 256, ROW, (128, 128, 2, 16)),
    (520, 256, 128, SQUARE, (256, 128, 2, 1)),
    (264, 256, 384, ROW, (256, 128, 2, 16, 2)),
    (264, 384, 384, SQUARE, (128, 192, 3, 16, 2)),
    (5, 128, 128, SQUARE, (128, 192, 4, 16, 2)),
]


@pytest.mark.parametrize(("m", "k", "n", "block", "tile"), quick(CASES, 0, 1))
def test_kernel_equals_the_plain_version(monkeypatch, m, k, n, block, tile):
    a, b = rounded(0, (m, k), ROW), rounded(1, (n, k), block)
    agree(monkeypatch, a, b, tile)


def agree(monkeypatch, a, b, tile, bound=2e-6, dtype=jnp.float32):
    """Sums of 128 terms are XLA's in both, and scales are powers of two: the bits are equal."""
    with interpreted(monkeypatch, races=True):
        from mjax.kernels.fp8 import block_mosaic as mosaic

        monkeypatch.setattr(mosaic, "BLOCKS", 2)
        got = mosaic.multiply_on_hopper(a, b, dtype, mosaic.BlockTile(*tile))
    want = multiply_blocks(a, b, dtype, 128)
    assert got.shape == want.shape and got.dtype == want.dtype
    got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
    np.testing.assert_allclose(got, want, rtol=bound, atol=bound * np.abs(want).max())
