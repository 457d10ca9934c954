"""NF4: matrices of a stack are rounded apart, parts of one read as the whole, products keep codes.

`tests/oracle/test_nf4.py` compares the values with bitsandbytes'.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.kernels.nf4 import values as nf4
from mjax.kernels.nf4.values import Nf4
from mjax.sharding.collectives import Parallel
from tests.devices import GPU, choose_for
from tests.marks import slow
from tests.triton_interpreter import interpret

F32 = jnp.dtype(jnp.float32)
quantize = jax.jit(nf4.quantize, static_argnames=("lead", "inputs", "paired"))
dequantize = jax.jit(nf4.dequantize, static_argnames="dtype")


def drawn(*shape: int, dtype=jnp.float32) -> jax.Array:
    return jax.random.normal(jax.random.key(sum(shape)), shape, dtype)


def assert_same(a, b) -> None:
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_a_value_is_the_nearest_of_16_levels_over_its_block():
    w = drawn(128, 300)
    values = dequantize(quantize(w, lead=0, inputs=1), F32)
    top = jnp.abs(w.reshape(2, 64, 300)).max(1, keepdims=True)
    widest = np.diff(nf4.LEVELS).max() / 2
    # Magnitudes are rounded by some percent of their distance from the mean.
    assert np.all(np.abs(values - w).reshape(2, 64, 300) <= (widest + 0.03) * top)
    assert float(jnp.std(values - w)) < 0.1  # 4 bits of a normal distribution: 0.09


def test_a_weight_takes_4_127_bits():
    w = quantize(drawn(4096, 256), lead=0, inputs=1)
    held = sum(a.nbytes for a in jax.tree.leaves(w))
    assert 8 * held / (4096 * 256) == pytest.approx(4.127, abs=1e-3)


def test_zeros_and_one_magnitude_stay_numbers():
    for w in (jnp.zeros((64, 3)), jnp.ones((64, 3))):
        np.testing.assert_array_equal(dequantize(quantize(w, lead=0, inputs=1), F32), w)


def test_layers_experts_and_halves_are_rounded_as_matrices_of_their_own():
    w = drawn(2, 3, 128, 2, 40)  # [layers, experts, inputs, pair, outputs]
    whole = quantize(w, lead=2, inputs=1, paired=True)
    values = dequantize(whole, F32)
    assert whole.shape == w.shape and whole.scales.shape == (2, 3, 2, 1)
    for at in np.ndindex(2, 3):
        for half in range(2):
            alone = quantize(w[at][:, half], lead=0, inputs=1)
            assert_same(dequantize(alone, F32), values[at][:, half])
        layer = jax.tree.map(lambda a, at=at: a[at], whole)
        assert_same(dequantize(layer, F32), values[at])


def test_blocks_run_through_all_input_axes():
    w = drawn(8, 32, 5)
    heads = quantize(w, lead=0, inputs=2)
    flat = quantize(w.reshape(256, 5), lead=0, inputs=1)
    assert heads.codes.shape == (8, 16, 5)
    assert_same(dequantize(heads, F32).reshape(256, 5), dequantize(flat, F32))


@slow
def test_a_part_reads_as_the_whole():
    """Groups of 256 magnitudes run over outputs, so a part must know its place."""
    w = drawn(256, 2, 200)
    whole = quantize(w, lead=0, inputs=1, paired=True)
    values = dequantize(whole, F32)
    for axis, splits_inputs in ((0, True), (-1, False)):
        split = {"split": Parallel(tp=2), "splits_inputs": splits_inputs}
        parts = [jnp.stack(jnp.split(a, 2, axis)) for a in (whole.codes, whole.absmax)]

        def read(codes, absmax, split=split):
            part = Nf4(codes, absmax, whole.scales, whole.offset, 1, True, **split)
            return nf4.dequantize(part, F32)

        read_all = jax.vmap(read, axis_name="tp")
        assert_same(jnp.concatenate(read_all(*parts), axis), values)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_kernel_reads_the_same_values(monkeypatch, dtype):
    w = quantize(drawn(2, 128, 2, 300), lead=1, inputs=1, paired=True)
    expected = dequantize(w, jnp.dtype(dtype))
    choose_for(monkeypatch, GPU, "nf4")
    used = interpret(monkeypatch)
    assert_same(nf4.read(w, jnp.dtype(dtype)), expected)
    assert used == ["read_codes"]


def test_the_mean_is_rounded_once():
    for n in (1, 2, 3, 100, 917_504):
        x = jnp.abs(drawn(n))
        expected = np.asarray(x, np.float64).mean().astype(np.float32)
        np.testing.assert_allclose(jax.jit(nf4._mean)(x), expected, rtol=1.2e-7)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_product_and_its_gradient_are_those_of_the_values(dtype):
    w = quantize(drawn(128, 96), lead=0, inputs=1)
    x, g = drawn(24, 128, dtype=dtype), drawn(24, 96, dtype=dtype)
    y, pull = jax.vjp(functools.partial(nf4.nf4_matmul, w=w), x)
    values = nf4.dequantize(w, dtype)
    assert_same(y, x @ values)
    assert_same(pull(g)[0], g @ values.T)


def test_the_backward_keeps_codes_and_the_base_takes_no_gradient():
    w = quantize(drawn(128, 96), lead=0, inputs=1)

    def loss(x: jax.Array, w: Nf4) -> jax.Array:
        return jnp.sum(jnp.sin(nf4.nf4_matmul(x, w)))

    _, pull = jax.vjp(loss, drawn(24, 128), w)
    kept = [a.shape for a in jax.tree.leaves(pull) if a.dtype != jnp.uint8]
    assert (128, 96) not in kept
    of_w = jax.tree.leaves(pull(1.0)[1])
    assert not any(np.any(g) for g in of_w if g.dtype == jnp.float32)
