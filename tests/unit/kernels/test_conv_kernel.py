"""The causal convolution's kernels against fp64, in Triton's interpreter; when they are called."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.kernels.base import chooser
from mjax.kernels.recurrence import causal_conv as kernels
from mjax.kernels.recurrence.causal_conv import ConvTile, causal_conv, fused_conv, plain_conv
from tests.devices import GPU, choose_for
from tests.marks import exhaustive
from tests.triton_interpreter import interpret

TAPS = 4


def draw(length, channels, dtype, packed, history):
    """(x, weight, bias, history), where documents start, and a gradient of y."""
    rng = np.random.default_rng(length)

    def normal(*shape, dtype="float32"):
        return jnp.asarray(rng.normal(size=shape), dtype)

    x, d_y = (normal(2, length, *channels, dtype=dtype) for _ in range(2))
    before = normal(2, TAPS - 1, *channels, dtype=dtype) if history else None
    starts = jnp.asarray(rng.random((2, length)) < 0.3) if packed else None
    return (x, normal(*channels, TAPS), normal(*channels), before), starts, d_y


def by_fp64(inputs, starts, d_y):
    """y and the gradients of the inputs, from plain JAX in fp64."""
    x, *_, history = inputs
    if history is None:
        history = jnp.zeros((len(x), TAPS - 1, *x.shape[2:]), x.dtype)
    with jax.enable_x64(True):
        wide = [np.asarray(v, np.float64) for v in (*inputs[:3], history)]

        def plain(x, weight, bias, history):
            return plain_conv(x, weight, bias, starts, history)

        y, pull = jax.vjp(plain, *map(jnp.asarray, wide))
        gradients = pull(jnp.asarray(np.asarray(d_y, np.float64)))
        return jax.tree.map(np.asarray, (y, *gradients))


# Lengths and channels that fill no tile, rows of fewer tokens than taps, documents anywhere.
# dtype, length, channels, tokens and width of a tile, packed, with a history
CASES = [
    ("float32", 37, (70,), ConvTile(16, 32, 1), True, True),
    ("float32", 32, (64,), ConvTile(16, 64, 1), False, False),
    ("float32", 2, (5,), ConvTile(16, 32, 1), True, True),
    ("float32", 1, (5,), ConvTile(16, 32, 1), False, True),
    ("bfloat16", 21, (2, 3, 8), ConvTile(8, 32, 1), True, False),
    ("float16", 18, (64,), ConvTile(4, 64, 1), False, True),
]


@pytest.mark.grid
@pytest.mark.parametrize("dtype, length, channels, tile, packed, history", CASES)
def test_equals_fp64(monkeypatch, dtype, length, channels, tile, packed, history):
    interpret(monkeypatch)
    inputs, starts, d_y = draw(length, channels, dtype, packed, history)
    monkeypatch.setattr(kernels, "FORWARD", tile)
    monkeypatch.setattr(kernels, "BACKWARD", tile)
    mine = functools.partial(fused_conv, starts=starts)
    y, pull = jax.vjp(lambda x, w, b, history: mine(x, w, b, history=history), *inputs)
    got = y, *pull(d_y)
    ulp = float(jnp.finfo(dtype).eps)
    assert (got[4] is None) == (not history)
    bounds = ulp, ulp, 0, 0, ulp
    for a, e, bound in zip(got, by_fp64(inputs, starts, d_y), bounds, strict=True):
        if a is None:
            continue
        assert a.shape == e.shape and a.dtype == (jnp.dtype(dtype) if bound else jnp.float32)
        error = np.abs(np.asarray(a, np.float64) - e)
        assert (error <= bound * np.abs(e) + 2e-6 * np.abs(e).max()).all()


@exhaustive
def test_the_chooser_decides_forward_and_backward(monkeypatch):
    names = interpret(monkeypatch)
    choose_for(monkeypatch, GPU, "causal_conv")
    inputs, starts, d_y = draw(8, (64,), "float32", packed=True, history=False)

    def gradient(x, weight):
        return jax.vjp(lambda x: causal_conv(x, weight, starts=starts), x)[1](d_y)[0]

    plain = gradient(*inputs[:2])
    assert not names  # too few elements
    monkeypatch.setitem(chooser.FEWEST, "causal_conv", 1)
    mine = gradient(*inputs[:2])
    assert names == ["conv_forward", "conv_backward"]
    np.testing.assert_allclose(mine, plain, atol=1e-5)
    gradient(inputs[0], inputs[1][:, :3])
    assert len(names) == 2  # three taps
