"""Barriers change no number, and many small gradients wait as one array; the norm of gradients."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.models.base.barriers import gradients_before_previous_layer
from mjax.sharding.collectives import LOCAL, global_norm

SIZES = {"w": (200, 100), "b": (2, 3, 4), "c": (1,), "d": (16384,), "e": (3, 5), "f": ()}
SIZES |= dict.fromkeys("aghij", (7,))


def draw(names, dtypes):
    rng = np.random.default_rng(0)
    kinds = [dtypes[i % len(dtypes)] for i in range(len(names))]
    return {n: jnp.asarray(rng.normal(size=SIZES[n]), k) for n, k in zip(names, kinds, strict=True)}


@pytest.mark.parametrize(
    "names, dtypes, operands",
    [
        ("wbcdef", ["float32"], 3),  # the input of the layer, the matrix, all others
        ("wbcdef", ["bfloat16"], 3),
        ("bcdef", ["float32"], 2),
        ("wbcde", ["float32"], 6),  # four small ones, each by itself
        ("wbcdef", ["float32", "bfloat16"], 7),  # few of either dtype
        ("wbcdefaghij", ["float32", "bfloat16"], 4),
    ],
)
def test_small_gradients_wait_as_one_and_are_what_they_were(names, dtypes, operands):
    x, weights = jnp.full((300, 100), 0.5, dtypes[0]), draw(names, dtypes)
    unread = {"z": jnp.ones(7)}  # it has no gradient, and waits for nothing

    def gradients(waits):
        def loss(x, weights):
            if waits:
                x, weights = gradients_before_previous_layer(x, weights | unread)
            squares = jnp.square(x.astype(jnp.float32)).sum()
            read = [weights[n].astype(jnp.float32) for n in names]
            return squares + sum(jnp.sin(w).sum() for w in read)

        return jax.grad(loss, (0, 1))

    equations = jax.make_jaxpr(gradients(True))(x, weights).eqns
    (barrier,) = [e for e in equations if e.primitive.name == "optimization_barrier"]
    assert len(barrier.invars) == operands
    got, expected = (gradients(waits)(x, weights) for waits in (True, False))
    for a, e in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.shape == e.shape and a.dtype == e.dtype and bool((a == e).all())


def test_the_norm_of_gradients_is_theirs_and_ends_in_one_sum():
    """However many they are, XLA reduces to a number once for each length of their sums."""
    shapes = [(1024,), (3, 2048), (64, 16, 5), (7,), (300, 11), (), (4096, 33)]
    rng = np.random.default_rng(1)
    values = [rng.normal(size=shape) * 10.0**i for i, shape in enumerate(shapes)]
    tree = {"a": [jnp.asarray(v, jnp.float32) for v in values[:3]], "b": jnp.asarray(values[3])}
    tree |= {f"c{i}": jnp.asarray(v, jnp.float32) for i, v in enumerate(values[4:])}
    spec = jax.sharding.PartitionSpec()
    cuts = dict.fromkeys(tree, spec)

    def norm(tree):
        return global_norm(tree, cuts, LOCAL)

    expected = np.sqrt(sum((v.astype(np.float32).astype(float) ** 2).sum() for v in values))
    np.testing.assert_allclose(norm(tree), expected, rtol=2e-7)
    sums = re.findall(r":f32\[\] = reduce_sum", str(jax.make_jaxpr(norm)(tree)))
    assert len(sums) == 2
