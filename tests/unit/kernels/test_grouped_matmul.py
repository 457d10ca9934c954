"""The grouped matmul against a loop over groups in fp64, and a `Weight` that it multiplies by."""

import jax.numpy as jnp
import numpy as np
import pytest

from mjax.errors import UserError
from mjax.kernels.base.chooser import choose
from mjax.kernels.matmul import grouped
from mjax.models.base.weight import Weight
from mjax.models.moe.grouped_linear import weight_cotangent
from tests.devices import HOPPER

# rows, sizes of the groups
CASES = {
    "ragged": (50, [7, 0, 21, 1, 13]),
    "one_row": (1, [0, 1, 0]),
    "no_row": (8, [0, 0]),
    "all_in_one": (33, [0, 0, 33, 0]),
    "one_group": (16, [16]),
    "empty_ends": (20, [0, 20, 0]),
    "each_alone": (9, [1] * 9),
}


def loop(x, w, sizes):
    """Rows of each group times its matrix, fp64."""
    y = np.zeros((len(x), w.shape[2]))
    start = 0
    for matrix, size in zip(w, sizes, strict=True):
        y[start : start + size] = x[start : start + size] @ matrix
        start += size
    return y


def loop_of_gradients(x, g, sizes):
    """The products x.T @ g over the rows of each group, fp64 [G, K, N]."""
    ends = np.cumsum(sizes)
    parts = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    return np.stack([x[part].T @ g[part] for part in parts])


def draw(rows, sizes, k=12, n=10):
    """x [M, K], w [G, K, N], g [M, N] and the sum of gradients so far, numpy fp64."""
    rng = np.random.default_rng(rows)
    groups = len(sizes)
    shapes = (rows, k), (groups, k, n), (rows, n), (groups, k, n)
    return [rng.standard_normal(shape) for shape in shapes]


def narrow(*arrays):
    return [jnp.asarray(a, jnp.float32) for a in arrays]


def close(got, expected):
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_products_equal_the_loop(name):
    rows, sizes = CASES[name]
    x, w, g, total = draw(rows, sizes)
    x32, w32, g32, total32 = narrow(x, w, g, total)
    counts = jnp.asarray(sizes, jnp.int32)
    close(grouped.grouped_matmul(x32, w32, counts), loop(x, w, sizes))
    transposed = grouped.grouped_matmul(g32, w32, counts, transposed=True)
    close(transposed, loop(g, w.swapaxes(1, 2), sizes))
    gradient = loop_of_gradients(x, g, sizes)
    close(grouped.grouped_weight_gradient(x32, g32, counts), gradient)
    close(grouped.grouped_weight_gradient(x32, g32, counts, total32), total + gradient)


def test_products_of_bf16_are_rounded_once():
    rows, sizes = CASES["ragged"]
    x, w, g, total = (jnp.asarray(a, jnp.bfloat16) for a in draw(rows, sizes, k=256))
    counts = jnp.asarray(sizes, jnp.int32)
    y = grouped.grouped_matmul(x, w, counts)
    exact = loop(np.asarray(x, np.float64), np.asarray(w, np.float64), sizes)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(y, np.float64), exact, rtol=2**-8, atol=1e-4)
    gradient = grouped.grouped_weight_gradient(x, g, counts)
    assert gradient.dtype == jnp.bfloat16
    total = total.astype(jnp.float32)
    assert grouped.grouped_weight_gradient(x, g, counts, total).dtype == jnp.float32


@pytest.mark.parametrize("name", ["ragged", "no_row", "one_row"])
def test_gradients_of_a_weight_equal_the_loop(name):
    """A gate and up [G, K, 2, F] in one weight, without and with a running sum."""
    rows, sizes = CASES[name]
    x, w, g, total = draw(rows, sizes)
    x32, w32, g32, total32 = narrow(x, w, g, total)
    counts = jnp.asarray(sizes, jnp.int32)
    halves = (len(sizes), x.shape[1], 2, -1)
    gradient = loop_of_gradients(x, g, sizes)

    weight = Weight(w32.reshape(halves), name="up")
    found = weight_cotangent(weight, x32, g32, counts, "xla")
    close(found.value, gradient.reshape(halves))
    assert found.grad_sum is None

    summed = Weight(w32.reshape(halves), grad_sum=total32.reshape(halves), name="up")
    found = weight_cotangent(summed, x32, g32, counts, "xla")
    close(found.grad_sum, (total + gradient).reshape(halves))
    assert found.value is None


def test_what_is_asked_for_is_chosen():
    shape = 16384, 8, 4096, 14336
    asked = choose("grouped_matmul", jnp.bfloat16, shape, HOPPER, implementation="mosaic")
    assert asked == ("mosaic", "it is asked for")


def test_what_cannot_be_computed_is_refused_with_the_remedy():
    rows, sizes = CASES["ragged"]
    x32, w32, *_ = narrow(*draw(rows, sizes))
    with pytest.raises(UserError, match="set train.experts=auto"):
        grouped.grouped_matmul(x32, w32, jnp.asarray(sizes, jnp.int32), "mosaic")
