"""The kernels that round blocks are `round_blocks` bit for bit, in Triton's interpreter."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.kernels.fp8 import blocks
from mjax.kernels.fp8.block_rounding import round_both_ways, round_square
from mjax.kernels.fp8.blocks import FORMATS, round_blocks
from tests.marks import quick, slow
from tests.triton_interpreter import interpret
from tests.unit.kernels.test_blocks import hostile

RULES = {True: blocks.free_scales, False: blocks.scales_of_powers}


def draw(rows, columns, dtype, finite=True):
    x = hostile(rows, columns).astype(dtype)
    if not finite:
        # XLA's maxima on CPUs leave NaN out in fp32
        x[7, 3], x[8, 4], x[9, 5] = np.inf if dtype == "float32" else np.nan, np.inf, -np.inf
    return jnp.asarray(x)


def same(got, want, rows=None):
    """Equal bits; those of a NaN may differ."""
    assert got.block == want.block and got.wide == want.wide
    for a, b in ((got.values, want.values), (got.factors, want.factors)):
        a, b = (np.asarray(v.astype(jnp.float32)) for v in (a, b))
        np.testing.assert_array_equal(a[:, : b.shape[1]], b)
        np.testing.assert_array_equal(np.signbit(a[:, : b.shape[1]])[b == 0], np.signbit(b)[b == 0])
        assert not np.nan_to_num(a[:, b.shape[1] :]).any()


CASES = [
    (200, 256, "float32", "e4m3", False, False),
    (128, 128, "bfloat16", "e5m2", True, True),
    (10, 128, "bfloat16", "e4m3", False, False),
    (132, 128, "float32", "e4m3", True, False),
]


@pytest.mark.parametrize(("m", "n", "dtype", "to", "free", "finite"), quick(CASES, 2))
def test_both_ways_are_direct_roundings(monkeypatch, m, n, dtype, to, free, finite):
    x = draw(m, n, dtype, finite)
    assert interpret(monkeypatch) == []
    plain, turned = jax.jit(lambda x: round_both_ways(x, FORMATS[to], free))(x)
    facts = (1, 128), RULES[free], FORMATS[to], not free
    same(plain, round_blocks(x, *facts))
    same(turned, round_blocks(x.T, *facts))


@slow
def test_columns_of_groups_begin_blocks_of_their_own(monkeypatch):
    """In whole blocks of each group, filled up with zeros; rows of no group are NaN."""
    sizes, m = [3, 0, 129], 140
    x = jax.random.normal(jax.random.key(0), (m, 128), jnp.bfloat16)
    x = x.at[sum(sizes) :].set(jnp.nan)
    interpret(monkeypatch)
    counts, facts = jnp.asarray(sizes, jnp.int32), ((1, 128), RULES[False], FORMATS["e4m3"])
    plain, turned = jax.jit(lambda x: round_both_ways(x, FORMATS["e4m3"], False, counts))(x)
    same(plain, round_blocks(x, *facts))
    place = row = 0
    for size in sizes:
        width = size + -size % 128
        own, blocks = slice(place, place + width), slice(place // 128, (place + width) // 128)
        got = replace(turned, values=turned.values[:, own], factors=turned.factors[:, blocks])
        same(got, round_blocks(x[row : row + size].T, *facts))
        place, row = place + width, row + size


@pytest.mark.parametrize("turned", quick([False, True], 1))
def test_square_blocks_are_direct_roundings(monkeypatch, turned):
    """Of each of a stack of matrices."""
    x = draw(256, 256, "bfloat16", finite=False).reshape(2, 128, 256)
    interpret(monkeypatch)
    got = jax.jit(lambda x: round_square(x, FORMATS["e4m3"], False, turned))(x)
    for i, matrix in enumerate(x):
        source = matrix.T if turned else matrix
        want = round_blocks(source, (128, 128), RULES[False], FORMATS["e4m3"])
        same(replace(got, values=got.values[i], factors=got.factors[i]), want)
