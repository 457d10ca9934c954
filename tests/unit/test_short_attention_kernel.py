"""Attention of short rows, in Triton's interpreter: against fp64, by mask, tile and sizes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.kernels.attention import attention
from mjax.kernels.attention_call import AttentionArrays, AttentionCall
from mjax.kernels.short_attention import Rows, Tile, Tiles, short_attention
from tests.marks import quick
from tests.triton_interpreter import interpret

# mask, queries, keys, heads, heads of keys, window, segments, tiles: rows that fill no tile and
# that fill some, windows within a tile and across tiles.
CASES = {
    "full": ("full", 37, 37, 2, 2, None, None, (16, 32)),
    "whole tiles": ("full", 64, 64, 1, 1, None, None, (32, 16)),
    "causal": ("causal", 41, 41, 2, 1, None, None, (16, 16)),
    "causal, window": ("causal", 50, 50, 2, 2, 7, None, (16, 16)),
    "window": ("full", 70, 70, 2, 1, 9, None, (16, 32)),
    "wide window": ("full", 70, 70, 1, 1, 40, "packed", (32, 16)),
    "padded": ("full", 33, 33, 4, 2, None, "padded", (16, 16)),
    "window, padded": ("full", 50, 50, 2, 2, 20, "padded", (16, 16)),
    "packed": ("causal", 33, 33, 2, 2, None, "packed", (16, 32)),
    "cross": ("cross", 21, 45, 2, 2, None, None, (16, 32)),
    "cross, padded": ("cross", 21, 45, 2, 1, None, "padded", (16, 16)),
}


@pytest.mark.parametrize("case", quick(CASES, 0, 2, 4, 6))
def test_kernels_equal_fp64(monkeypatch, case):
    mask, s, t, heads, kv_heads, window, kind, tile = CASES[case]
    interpret(monkeypatch)
    call = AttentionCall(scale=0.2, mask=mask, window=window, implementation="xla")
    rng = np.random.default_rng(s)
    segments, rows = None, Rows()
    if kind == "packed":
        ids = jnp.repeat(jnp.arange(3), jnp.array([10, s - 22, 12]), total_repeat_length=s)
        segments = (jnp.tile(ids, (2, 1)),) * 2
        rows = Rows(segments=segments)
    elif kind == "padded":
        lengths = jnp.array([t - 17, t])
        # The reference sees a padded key from padding only, the kernels from nowhere.
        keys = (jnp.arange(t) >= lengths[:, None]).astype(jnp.int32)
        segments = jnp.zeros((2, s), jnp.int32), keys
        rows = Rows(lengths=lengths)

    def draw(length, heads):
        return rng.normal(size=(2, length, heads, 16)) * 3

    q, k, v, d_out = draw(s, heads), draw(t, kv_heads), draw(t, kv_heads), draw(s, heads)
    tiles = Tiles(*[Tile(*tile, 4, 1)] * 3)
    low = [jnp.asarray(x, jnp.float32) for x in (q, k, v, d_out)]
    out, back = jax.vjp(lambda *x: short_attention(*x, rows, call, tiles), *low[:3])
    got = out, *back(low[3])
    with jax.enable_x64(True):
        columns = jnp.arange(s), jnp.arange(t)
        arrays = AttentionArrays(columns=columns, segments=segments)
        wide = [jnp.asarray(x) for x in (q, k, v, d_out)]
        out, back = jax.vjp(lambda *x: attention(*x, call, arrays), *wide[:3])
        wanted = out, *back(wide[3])
    for mine, right in zip(got, wanted, strict=True):
        scale = float(np.abs(right).max())
        np.testing.assert_allclose(mine, right, rtol=0, atol=4e-6 * scale)
