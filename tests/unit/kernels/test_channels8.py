"""Weights in 8 bits with a scale for each output: against numpy, the kernel, parts of a weight."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mjax.kernels.base.chooser import believed
from mjax.kernels.fp8 import channels
from mjax.kernels.fp8.channels import Channels8, ChannelTile, multiply_few
from tests.devices import HOPPER
from tests.triton_interpreter import interpret

RNG = np.random.default_rng(0)
SPREAD = 2.0 ** RNG.integers(-12, 12, 64)  # magnitudes of rows and of outputs


def rounded(x, axis):
    """x in e4m3 with a power of two for all entries along an axis, and back in fp64."""
    top = np.max(np.abs(x), axis, keepdims=True).astype(np.float64)
    power = np.floor(np.log2(448 / np.where(top > 0, top, 1)))
    return (x * 2.0**power).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) / 2.0**power


def drawn(rows, width, outputs):
    x = RNG.normal(size=(rows, width)) * SPREAD[:rows, None]
    w = RNG.normal(size=(width, outputs)) * np.resize(SPREAD, outputs)
    return np.float32(x), np.float32(w)


@pytest.mark.parametrize("rows", [1, 20])
def test_a_product_is_that_of_rounded_rows_and_outputs(rows):
    x, w = drawn(rows, 96, 40)
    x[0] = 0
    w[:, 3] = 0
    held = Channels8.rounded(jnp.asarray(w.reshape(8, 12, 4, 10)), 2)
    assert held.shape == (8, 12, 4, 10) and held.values.dtype.itemsize == 1
    expected = rounded(x, 1) @ rounded(w, 0)
    scale = np.abs(rounded(x, 1)) @ np.abs(rounded(w, 0)) + 1e-30
    got = np.asarray(held.product(x))
    assert np.max(np.abs(got - expected) / scale) < 1e-6
    np.testing.assert_array_equal(held.dequantized(jnp.float32).reshape(w.shape), rounded(w, 0))


def test_a_row_does_not_depend_on_others_and_what_is_no_number_stays_in_its_own():
    x, w = drawn(20, 64, 16)
    held = Channels8.rounded(jnp.asarray(w), 1)
    x[3, 5] = np.nan
    y = np.asarray(held.product(x))
    assert np.isnan(y[3]).all() and np.isfinite(np.delete(y, 3, 0)).all()
    np.testing.assert_array_equal(held.product(x[4:5])[0], y[4])


def test_some_outputs_of_a_weight_are_those_of_its_value():
    _, w = drawn(1, 32, 24)
    held = Channels8.rounded(jnp.asarray(w.reshape(32, 2, 3, 4)), 1)
    part = held.of_outputs(lambda a: a[:, :, 1:2])
    assert part.shape == (32, 2, 1, 4)
    whole = held.dequantized(jnp.float32)
    np.testing.assert_array_equal(part.dequantized(jnp.float32), whole[:, :, 1:2])


def test_rows_of_experts_are_rounded_with_their_own_experts_outputs():
    experts, sizes = 3, jnp.asarray([4, 0, 5], jnp.int32)  # the last row is of none
    x, w = drawn(10, 24, experts * 16)
    w = np.float32(np.moveaxis(w.reshape(24, experts, 2, 8), 1, 0))
    held = Channels8.rounded(jnp.asarray(w), 1, lead=1)
    assert held.shape == w.shape and held.scales.shape == (3, 2, 8)
    for expert in range(experts):
        one = Channels8.rounded(jnp.asarray(w[expert]), 1)
        np.testing.assert_array_equal(held.scales[expert], one.scales)
        dequantized = held.dequantized(jnp.float32)[expert]
        np.testing.assert_array_equal(dequantized, one.dequantized(jnp.float32))
    y = np.asarray(held.grouped_product(jnp.asarray(x), sizes, "xla"))
    x8, wide = rounded(x, 1), rounded(w, 1).reshape(experts, 24, -1)
    expected = np.stack([x8[i] @ wide[0 if i < 4 else 2] for i in range(9)] + [np.zeros(16)])
    scale = np.stack([np.abs(x8[i]) @ np.abs(wide[0 if i < 4 else 2]) for i in range(10)])
    assert np.max(np.abs(y - expected) / scale) < 1e-6


@pytest.mark.parametrize(
    "rows, width, outputs, tile",
    [(5, 64, 40, ChannelTile(16, 32, 2)), (16, 96, 32, ChannelTile(32, 32, 1))],
)
def test_the_kernel_equals_plain_jax(monkeypatch, rows, width, outputs, tile):
    x, w = drawn(rows, width, outputs)
    x[2] = 0
    held = Channels8.rounded(jnp.asarray(w), 1)
    x = jnp.asarray(x, jnp.bfloat16).astype(jnp.float32)
    names = interpret(monkeypatch)
    got = multiply_few(x, held.values, held.scales, tile)
    assert names == ["round_rows", "multiply_channels"]
    bound = np.abs(x) @ np.abs(w)
    assert np.max(np.abs(got - held.product(x)) / (bound + 1e-30)) < 1e-6


def test_few_rows_take_the_kernel_on_hopper(monkeypatch):
    names = interpret(monkeypatch)
    x, w = drawn(2, 128, 16)
    held = Channels8.rounded(jnp.asarray(w), 1)
    with believed(HOPPER):
        made = held.product(jnp.asarray(x, jnp.bfloat16))
    assert names == ["round_rows", "multiply_channels"] and made.dtype == jnp.bfloat16
    many = jax.ShapeDtypeStruct((128, 128), jnp.bfloat16)
    with believed(HOPPER):
        jax.eval_shape(held.product, many)
    assert len(names) == 2


def test_tiles_divide_the_inputs():
    for outputs, width in [(28672, 4096), (4096, 14336), (2048, 4096), (64, 128), (1024, 2688)]:
        tile = channels.tile_of(outputs, width)
        assert width % (tile.splits * tile.inputs) == 0
