"""Rounding to formats of few bits against torch's own dtypes."""

import jax
import numpy as np
import pytest
import torch

from mjax.kernels.fp8.blocks import FORMATS, e8m0_up, round_to_format

DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@pytest.mark.parametrize("name", DTYPES)
def test_formats_are_those_of_torch(name):
    to = FORMATS[name]
    rng = np.random.default_rng(0)
    x = rng.normal(size=100_000) * np.exp2(rng.uniform(-30, 20, 100_000))
    x = np.clip(np.concatenate([x, [0.0, -0.0]]), -to.top, to.top).astype(np.float32)
    want = torch.from_numpy(x).to(DTYPES[name]).float().numpy()
    made = np.asarray(jax.jit(lambda x: round_to_format(x, to))(x))
    np.testing.assert_array_equal(made.view(np.uint32), want.view(np.uint32))


def test_scales_of_mxfp8_are_the_next_power_that_torch_has():
    tops = np.exp2(np.random.default_rng(1).uniform(-60, 60, 10_000)).astype(np.float32)
    byte = np.asarray(e8m0_up(tops, FORMATS["e4m3"])).astype(np.uint8)
    power = torch.from_numpy(byte).view(torch.float8_e8m0fnu).float().numpy()
    ratio = tops.astype(np.float64) / 448
    assert ((power >= ratio * (1 - 2.0**-23)) & (power < 2 * ratio)).all()
