"""The kernels of Mamba-2 on a GPU: the scan against its recurrence in fp32, the convolution against
fp64, forward and backward; bit-equal twice."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.kernels.base.chooser import choose
from mjax.kernels.recurrence.causal_conv import causal_conv, plain_conv
from mjax.kernels.recurrence.ssd import SsdInputs, ssd, ssd_step

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")


def _normal(seed, shape, dtype="float32"):
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def _starts(seed, batch, length, packed):
    """Documents of about 100 tokens, and one that starts in the middle."""
    if not packed:
        return None
    drawn = jax.random.uniform(jax.random.key(seed), (batch, length)) < 0.01
    return drawn.at[:, length // 2].set(True)


def _poison():
    """Leave NaN in the memory that the next outputs get: what is not written is seen."""
    jax.block_until_ready([jnp.full((1 << 25,), jnp.nan, jnp.float32) for _ in range(4)])


def _twice(function, *args):
    """What it returns, the same bits each time."""
    compiled = jax.jit(function).lower(*args).compile()
    text = compiled.as_text()
    assert "triton_kernel_call" in text
    _poison()
    first = compiled(*args)
    _poison()
    again = compiled(*args)
    assert all(map(np.array_equal, *map(jax.tree.leaves, (first, again))))
    return first


# ---- the scan ------------------------------------------------------------------------------------


def _recurrence(starts, inputs, state):
    """`ssd`, a token at a time."""
    x, dt, a, b, c = inputs
    starts = jnp.zeros(x.shape[:2], bool) if starts is None else starts

    def step(state, token):
        *token, start = token
        state = jnp.where(start[:, None, None, None], 0, state)
        return ssd_step(state, SsdInputs(token[0], token[1], a, *token[2:]))

    tokens = tuple(jnp.moveaxis(v, 1, 0) for v in (x, dt, b, c, starts))
    state, y = jax.lax.scan(step, state, tokens)
    return jnp.moveaxis(y, 0, 1), state


# batch, length, heads, groups, size, state, decay of a step, packed
SCANS = [
    (2, 512, 8, 2, 64, 128, 0.05, True),
    (1, 777, 4, 1, 64, 64, 1e-4, True),  # states stay
    (2, 130, 4, 2, 128, 128, 2.0, False),  # and are gone at once
    (1, 1, 2, 1, 64, 128, 1.0, True),
    (3, 300, 4, 2, 64, 128, 0.3, True),
]


@pytest.mark.parametrize("batch, length, heads, groups, size, state, decay, packed", SCANS)
def test_scan_equals_its_recurrence(batch, length, heads, groups, size, state, decay, packed):
    of_heads, of_groups = (batch, length, heads, size), (batch, length, groups, state)
    b, c = (_normal(seed, of_groups) * state**-0.25 for seed in (1, 2))
    inputs = SsdInputs(
        x=_normal(0, of_heads, "bfloat16"),
        dt=jax.random.uniform(jax.random.key(3), of_heads[:3]),
        a=-decay * jax.random.uniform(jax.random.key(4), (heads,), minval=0.5, maxval=2),
        b=b.astype("bfloat16"),
        c=c.astype("bfloat16"),
    )
    starts, initial = _starts(5, batch, length, packed), _normal(6, (batch, heads, size, state))
    gradient = _normal(7, of_heads, "bfloat16"), _normal(8, initial.shape)
    assert choose("ssd", inputs.x.dtype, inputs.x.shape, state=state).name == "triton"

    def through(scan, inputs, initial, gradient):
        out, pull = jax.vjp(scan, inputs, initial)
        return out, pull(gradient)

    def mine(inputs, initial):
        return ssd(inputs, chunk=256, starts=starts, initial=initial)

    got = _twice(functools.partial(through, mine), inputs, initial, gradient)
    wide = jax.tree.map(lambda v: v.astype(jnp.float32), (inputs, initial, gradient))
    plain = functools.partial(_recurrence, starts)
    with jax.default_matmul_precision("highest"):
        expected = jax.jit(functools.partial(through, plain))(*wide)
    for a, e in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
        a, e = np.asarray(a, np.float64), np.asarray(e, np.float64)
        assert np.linalg.norm(a - e) <= 8e-3 * np.linalg.norm(e)  # 4.2e-3 at most on an H200


# ---- the convolution -----------------------------------------------------------------------------

# batch, length, channels, dtype, packed, with a history
CONVOLUTIONS = [
    (2, 4096, (80, 64), "bfloat16", False, False),
    (2, 1000, (2, 8, 128), "bfloat16", True, True),
    (3, 777, (24, 64), "float16", True, False),
    (4, 1023, (3, 259), "float32", True, True),  # no wide loads
]


@pytest.mark.parametrize("batch, length, channels, dtype, packed, history", CONVOLUTIONS)
def test_convolution_equals_fp64(batch, length, channels, dtype, packed, history):
    x, d_y = (_normal(seed, (batch, length, *channels), dtype) for seed in (0, 1))
    weight, bias = _normal(2, (*channels, 4)), _normal(3, channels)
    before = _normal(4, (batch, 3, *channels), dtype) if history else None
    starts = _starts(5, batch, length, packed)
    assert choose("causal_conv", x.dtype, x.shape, taps=4).name == "triton"

    def through(convolve, d_y, *inputs):
        y, pull = jax.vjp(convolve, *inputs)
        return y, pull(d_y)

    def mine(x, weight, bias, before):
        return causal_conv(x, weight, bias, starts=starts, history=before)

    inputs = x, weight, bias, before
    y, gradients = _twice(functools.partial(through, mine), d_y, *inputs)
    before = jnp.zeros((batch, 3, *channels)) if before is None else before

    def plain(x, weight, bias, before):
        return plain_conv(x, weight, bias, starts, before)

    with jax.enable_x64(True):
        wide = [v.astype(jnp.float64) for v in (d_y, *inputs[:3], before)]
        expected = jax.jit(functools.partial(through, plain))(*wide)
    ulp = float(jnp.finfo(dtype).eps)
    bounds = ulp, ulp, 0, 0, ulp
    for a, e, bound in zip((y, *gradients), (expected[0], *expected[1]), bounds, strict=True):
        if a is not None:
            e = np.asarray(e)
            error = np.abs(np.asarray(a, np.float64) - e)
            assert (error <= bound * np.abs(e) + 2e-5 * np.abs(e).max()).all()
