"""Activation functions within matmuls: the Hopper kernels in Pallas' interpreter, and their block.

Memory that nothing wrote is NaN there, and two threads that meet in it are found.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.kernels.base import chooser
from mjax.kernels.elementwise import gate
from mjax.kernels.matmul.grouped_tiles import GroupTile
from mjax.models.base.weight import Weight
from mjax.models.feedforward.mlp_activated import activated_mlp, in_matmuls
from tests.devices import HOPPER
from tests.marks import quick, slow
from tests.mosaic_interpreter import interpreted

BF16 = 2.0**-8
# rows, D, F, act, (lines, columns, slots, band) of a tile: sums with fewer steps than a tile before
# has pieces, with as many and with twice as many; rows and columns that fill no tile.
CASES = [
    (200, 64, 256, "gelu", (128, 128, 2, 16)),
    (264, 512, 192, "gelu_tanh", (128, 128, 2, 2)),
    (136, 256, 128, "quick_gelu", (128, 128, 3, 16)),
    (392, 128, 320, "silu", (128, 64, 2, 1)),
]


def draw(m, depth, width):
    keys = jax.random.split(jax.random.key(m), 5)
    x, g = (jax.random.normal(key, (m, depth), jnp.bfloat16) for key in keys[:2])
    up = jax.random.normal(keys[2], (depth, width)) / depth**0.5
    down = jax.random.normal(keys[3], (width, depth)) / depth**0.5
    bias = jax.random.normal(keys[4], (width,))
    return x, g, up.astype(jnp.bfloat16), down.astype(jnp.bfloat16), bias.astype(jnp.bfloat16)


def wide(x):
    return x.astype(jnp.float32)


def slope_of(name, u):
    share, slope = gate._share_and_slope(name, u)
    return share + u * slope


def close(got, expected, parts):
    """Within so many bf16 roundings of an element, and a tenth of one of the whole."""
    got, expected = wide(got), wide(expected)
    assert got.shape == expected.shape
    scale = jnp.sqrt(jnp.mean(expected**2))
    np.testing.assert_allclose(got, expected, rtol=parts * BF16, atol=parts * BF16 * float(scale))
    assert jnp.linalg.norm(got - expected) <= 0.8 * BF16 * jnp.linalg.norm(expected)


@slow
@pytest.mark.parametrize("m, depth, width, act, tile", quick(CASES, 1))
def test_kernels_equal_the_plain_version(monkeypatch, m, depth, width, act, tile):
    x, g, up, down, bias = draw(m, depth, width)
    with interpreted(monkeypatch, races=True):
        from mjax.kernels.matmul import activated_mosaic as mosaic

        monkeypatch.setattr(mosaic, "BLOCKS", 2)
        out, slope = mosaic.multiply_and_activate(x, up, wide(bias), act, GroupTile(*tile))
        du, sums = mosaic.multiply_by_slope(g, down, slope, GroupTile(*tile))
    u = wide(wide(x) @ wide(up) + wide(bias))
    close(out, u * gate._share_and_slope(act, u)[0], 2)
    close(slope, slope_of(act, u), 2)
    product = (wide(g) @ wide(down).T) * wide(slope)
    close(du, product, 2)
    np.testing.assert_allclose(sums, product.sum(0), rtol=0, atol=m**0.5 * BF16 * 2)


@slow
def test_functions_of_numbers_far_from_zero(monkeypatch):
    """Rows of one element each: u is x itself."""
    far = jnp.array([-1e9, -200.0, -8.0, -5.0, -1e-30, 0.0, 1e-30, 5.0, 9.0, 200.0, 1e9])
    x = jnp.zeros((128, 64), jnp.bfloat16).at[:, 0].set(jnp.resize(far, 128).astype(jnp.bfloat16))
    up = jnp.zeros((64, 64), jnp.bfloat16).at[0].set(1)
    acts, u = ("gelu", "gelu_tanh", "quick_gelu"), wide(x[:, 0])
    with interpreted(monkeypatch, races=True):
        from mjax.kernels.matmul.activated_mosaic import multiply_and_activate

        tile, none = GroupTile(128, 64, 2), jnp.zeros(64)
        made = {act: multiply_and_activate(x, up, none, act, tile) for act in acts}
    for act, (out, slope) in made.items():
        right = u * gate._share_and_slope(act, u)[0]
        np.testing.assert_allclose(wide(out[:, 3]), right, rtol=BF16, atol=2e-6)
        steep = jnp.where(u < -4, 0.0, jnp.where(u > 4, 1.0, 0.5))
        np.testing.assert_allclose(wide(slope[:, 3]), steep, atol=2e-2)


@slow
@pytest.mark.parametrize("summed", quick([False, True], 1), ids=["alone", "added to sums"])
def test_a_block_has_the_gradients_of_its_matmuls(monkeypatch, summed):
    x, r, up, down, bias = draw(264, 128, 256)

    def weight(value, name):
        total = jnp.full(value.shape, 0.5, jnp.float32) if summed else None
        return Weight(value, grad_sum=total, name=name)

    def plain(x, up, bias, down):
        u = x @ up + bias
        return jnp.vdot(wide(r), (u * gate._share_and_slope("gelu", u)[0]) @ down)

    def ours(x, up, bias, down):
        y = activated_mlp(x[None], up, bias, down, "gelu")
        return jnp.vdot(wide(r), wide(y))

    with interpreted(monkeypatch, races=True):
        from mjax.kernels.matmul import activated_mosaic as mosaic

        for name in ("multiply_and_activate", "multiply_by_slope"):
            small = partial(getattr(mosaic, name), tile=GroupTile(128, 128, 2))
            monkeypatch.setattr(mosaic, name, small)
        weights = weight(up, "up"), bias, weight(down, "down")
        got = jax.grad(ours, (0, 1, 2, 3), allow_int=True)(x, *weights)
    expected = jax.grad(plain, (0, 1, 2, 3))(*map(wide, (x, up, bias, down)))
    for mine, right in zip(got, expected, strict=True):
        if isinstance(mine, Weight) and summed:
            mine, right = mine.grad_sum, right + 0.5
        elif isinstance(mine, Weight):
            mine = mine.value
        error = jnp.linalg.norm(wide(mine) - right) / jnp.linalg.norm(right)
        assert error <= 1.5 * BF16, error


def test_blocks_that_the_kernels_do_not_take():
    x, up = jnp.zeros((64, 512, 256), jnp.bfloat16), Weight(jnp.zeros((256, 1024), jnp.bfloat16))
    bias = jnp.zeros(1024, jnp.bfloat16)
    with chooser.believed(HOPPER):
        assert in_matmuls(x, up, bias, "gelu")
        assert not in_matmuls(x, up, None, "gelu")
        assert not in_matmuls(x, up, bias, "relu")
        assert not in_matmuls(x[:1], up, bias, "gelu")
    assert not in_matmuls(x, up, bias, "gelu"), "no GPU"
