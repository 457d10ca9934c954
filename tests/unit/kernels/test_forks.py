"""Recurrences that start from a prefix's state equal those of prefix and answer in one piece."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.kernels.recurrence.causal_conv import causal_conv
from mjax.kernels.recurrence.gated_delta import DeltaInputs, gated_delta
from mjax.kernels.recurrence.ssd import SsdInputs, ssd
from mjax.models.recurrent.recurrent_context import forks_of
from tests.marks import quick, slow

# (tokens, segment, prefix) of the blocks of a row: a plain document, a prefix with three answers, a
# prefix of one token with two, a document, a prefix that goes over chunks with one, padding.
BLOCKS = [(3, 1, 0), (4, 9, 0), (2, 2, 9), (1, 3, 9), (6, 4, 9), (1, 11, 0), (3, 5, 11), (2, 6, 11)]
BLOCKS += [(2, 7, 0), (9, 13, 0), (4, 8, 13), (2, 0, 0)]
LENGTH = sum(block[0] for block in BLOCKS)
HEADS, GROUPS, SIZE, WIDTH = 4, 2, 3, 5


def layout() -> tuple[jax.Array, jax.Array, np.ndarray, np.ndarray]:
    """(segments, prefixes [1, S], the row of columns of each segment's prefix and then its own [R,
    S], 0 filled; the column in that row of each token, -1 elsewhere)."""
    counts, segments, prefixes = (np.array(x) for x in zip(*BLOCKS, strict=True))
    segments, prefixes = np.repeat(segments, counts), np.repeat(prefixes, counts)
    rows, places = np.zeros((2, len(BLOCKS), LENGTH), int)
    for row, (_, segment, prefix) in enumerate(BLOCKS):
        own = np.flatnonzero(segments == segment)
        path = np.append(np.flatnonzero(segments == prefix) if prefix else own[:0], own)
        rows[row, : len(path)] = path
        places[row, own] = 1 + len(path) - len(own) + np.arange(len(own))
    return jnp.asarray(segments[None]), jnp.asarray(prefixes[None]), rows, places - 1


def whole_rows(function, x, rows: np.ndarray, places: np.ndarray) -> jax.Array:
    """`function` of each path in one piece, in the places of the shared row [1, S, ...]."""
    y = function(jax.tree.map(lambda a: a[0, rows] if a.ndim > 1 else a, x))
    row = np.argmax(places >= 0, axis=0)
    return y[row, places.max(0)][None]


def inputs_of(kind: str, dtype=jnp.float64):
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=(1, LENGTH, *shape)), dtype)

    rates = jax.nn.sigmoid(normal(HEADS))
    if kind == "ssd":
        a = -jnp.asarray(rng.uniform(0.05, 0.5, HEADS), dtype)
        return SsdInputs(normal(HEADS, SIZE), rates, a, *(normal(GROUPS, WIDTH) for _ in "bc"))
    q, k = (normal(GROUPS, WIDTH) for _ in "qk")
    k = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
    return DeltaInputs(q, k, normal(HEADS, SIZE), -0.3 * rates, jax.nn.sigmoid(normal(HEADS)))


def run(kind: str, inputs, chunk: int, starts=None) -> jax.Array:
    function = ssd if kind == "ssd" else gated_delta
    return function(inputs, chunk=chunk, starts=starts)[0]


@slow
@pytest.mark.parametrize("kind", quick(["gated_delta", "ssd"], 1))
def test_answers_start_from_the_state_of_their_prefix(kind):
    with jax.enable_x64(True):
        segments, prefixes, *paths = layout()
        inputs, forks = inputs_of(kind), forks_of(segments, prefixes)
        weights = jnp.asarray(np.random.default_rng(1).normal(size=(1, LENGTH, HEADS, SIZE)))

        def graded(function):
            def total(inputs):
                return jnp.sum(weights * function(inputs))

            return jax.jit(jax.value_and_grad(total))(inputs)

        plain = partial(run, kind, chunk=64)
        wanted = graded(lambda inputs: whole_rows(plain, inputs, *paths))
        assert np.abs(wanted[1][0]).max() > 0.1
        for chunk in (4, 64):
            got = graded(partial(run, kind, chunk=chunk, starts=forks))
            for mine, right in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
                np.testing.assert_allclose(mine, right, rtol=1e-9, atol=1e-11)


def test_the_convolution_reads_the_end_of_the_prefix():
    with jax.enable_x64(True):
        segments, prefixes, *paths = layout()
        rng = np.random.default_rng(0)
        x, weight = (jnp.asarray(rng.normal(size=size)) for size in ((1, LENGTH, 3), (3, 4)))
        found = causal_conv(x, weight, None, starts=forks_of(segments, prefixes))
        wanted = whole_rows(lambda x: causal_conv(x, weight, None), x, *paths)
        np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-12)
