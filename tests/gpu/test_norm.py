"""The norm's kernels on a GPU against fp64, at sizes of real models; bit-equal twice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.kernels.base import chooser
from mjax.kernels.elementwise import norm as kernel

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")

# rows, width: GPT-2, 1.3B, Llama-3-8B and 70B; q and k; no power of two, nothing that divides
SHAPES = [
    *((32768, 768), (16384, 2048), (16384, 4096), (4099, 8192), (131073, 128), (99999, 64)),
    *((8191, 1600), (5003, 251), (1500, 12288), (1025, 16384), (132 * 16, 4096)),
]


def _backward(x, gain, bias, eps):
    """y and, by fp64 autodiff of plain JAX, its backward."""

    def plain(x, gain, bias):
        z = x if bias is None else x - x.mean(-1, keepdims=True)
        y = z / jnp.sqrt((z * z).mean(-1, keepdims=True) + eps) * gain
        return y if bias is None else y + bias

    return jax.vjp(plain, *(None if a is None else a.astype(jnp.float64) for a in (x, gain, bias)))


# dtype, LayerNorm, with a stream's gradient
KINDS = [("bfloat16", 0, 1), ("bfloat16", 1, 0), ("float32", 0, 0), ("float32", 1, 1)]
KINDS += [("bfloat16", 1, 1)]


@pytest.mark.parametrize("dtype, layernorm, fork", KINDS)
@pytest.mark.parametrize("rows, width", SHAPES)
def test_equals_fp64_and_itself(rows, width, dtype, layernorm, fork, monkeypatch):
    monkeypatch.setattr(chooser, "WIDEST", dict.fromkeys(chooser.WIDEST, 2**14))  # where XLA wins
    keys = jax.random.split(jax.random.key(0), 6)
    x, dy, stream = (jax.random.normal(k, (rows, width)) for k in keys[:3])
    x = (x + 2) * 10.0 ** jax.random.randint(keys[5], (rows, 1), -2, 3)
    x, dy, stream = (a.astype(dtype) for a in (x, dy, stream))
    gain, bias = (jax.random.normal(k, (width,)) for k in keys[3:5])
    bias = bias if layernorm else None
    assert kernel.supports_norm(x, bias)

    @jax.jit
    def mine(x, gain, bias):
        def op(x, gain, bias):
            return (kernel.fork if fork else kernel.norm)(x, gain, bias, eps=1e-5)

        out, pull = jax.vjp(op, x, gain, bias)
        return out[0] if fork else out, *pull(kernel.NormFork(dy, stream) if fork else dy)

    _poison()
    got = mine(x, gain, bias)
    with jax.enable_x64(True):
        y, pull = _backward(x, gain, bias, 1e-5)
        dx, *rest = pull(dy.astype(jnp.float64))
        dx = dx + fork * stream.astype(jnp.float64)
        expected = jax.tree.map(np.asarray, (y, dx, *rest))
    ulp = float(jnp.finfo(dtype).eps)
    for a, e, bound in zip(got[: 3 + layernorm], expected, (ulp, ulp, 0, 0), strict=False):
        size = np.abs(e).max(-1, keepdims=True)  # of each row
        error = np.abs(np.asarray(a, np.float64) - e) / size
        assert np.isfinite(error).all() and error.max() <= bound + 1e-5, error.max()
    _poison()
    for a, again in zip(got, mine(x, gain, bias), strict=True):
        assert a is None or bool((a == again).all())


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("measured", [False, True])
def test_a_loop_of_layers_is_the_layers_one_by_one(measured, again):
    """Streams that a loop saves and reads, also to compute a layer `again`, are slices."""
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (4096, 1024)).astype("bfloat16")
    weights = tuple(jax.random.normal(k, (5, 1024)) for k in keys[1:])

    def layer(x, weights):
        gain, bias = weights
        made = kernel.fork(x, gain, None if measured else bias, eps=1e-5, measured=measured)
        return made.stream + 0.1 * made.normed, None

    layer = jax.checkpoint(layer) if again else layer

    def loop(x, weights):
        return jax.lax.scan(layer, x, weights)[0]

    def one_by_one(x, weights):
        for row in zip(*weights, strict=True):
            x, _ = layer(x, row)
        return x

    _poison()
    found, want = (jax.jit(_value_and_gradients(f))(x, weights) for f in (loop, one_by_one))
    for a, b in zip(*map(jax.tree.leaves, (found, want)), strict=True):
        a, b = (np.asarray(v, np.float64) for v in (a, b))
        assert np.linalg.norm(a - b) <= 1e-2 * np.linalg.norm(b)


def _value_and_gradients(layers):
    def total(x, weights):
        return jnp.sum(jnp.square(layers(x, weights).astype(jnp.float32)))

    return jax.value_and_grad(total, (0, 1))


def _poison():
    """Leave NaN in the memory that the next outputs get: what is not written is seen."""
    jax.block_until_ready([jnp.full((1 << 25,), jnp.nan, jnp.float32) for _ in range(4)])


@pytest.mark.parametrize("rows, width", [(16384, 4096), (5003, 251)])
def test_measured_rows_are_those_of_xla(rows, width):
    """The stream is x after other arrays have taken memory; the maximum is that of the output."""
    keys = jax.random.split(jax.random.key(0), 2)
    x = (3 * jax.random.normal(keys[0], (rows, width))).astype("bfloat16")
    gain = jax.random.normal(keys[1], (width,))

    @jax.jit
    def mine(x):
        made = jax.vjp(lambda x: kernel.fork(x, gain, eps=1e-5, measured=True), x + 1)[0]
        return *made, made.normed @ jnp.ones((width, width), x.dtype)

    y, stream, amax, _ = mine(x)
    want = kernel.norm_reference(x + 1, gain, None, 1e-5)
    np.testing.assert_allclose(np.float32(y), np.float32(want), rtol=2**-7, atol=1e-6)
    assert bool((stream == x + 1).all())
    assert amax == jnp.max(jnp.abs(y)).astype(jnp.float32)
