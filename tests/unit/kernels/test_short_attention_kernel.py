"""Attention of short rows, in Triton's interpreter: against fp64, by mask, tile and sizes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.errors import UserError
from mjax.kernels.attention.api import attention
from mjax.kernels.attention.short import (
    SeenRows,
    ShortTile,
    Tiles,
    _short_backward,
    require_short,
    short_attention,
)
from mjax.kernels.base.attention_call import AttentionArrays, AttentionCall
from mjax.kernels.base.chooser import believed
from tests.devices import GPU
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
    "half a tile": ("full", 50, 50, 1, 1, None, None, (32, 16)),
}


def seen_of(kind: str | None, s: int, t: int) -> tuple[tuple | None, SeenRows]:
    """(the segments of two rows for the reference, what the kernels take in their place)."""
    if kind == "packed":
        ids = jnp.repeat(jnp.arange(3), jnp.array([10, s - 22, 12]), total_repeat_length=s)
        segments = (jnp.tile(ids, (2, 1)),) * 2
        return segments, SeenRows(segments=segments)
    if kind == "padded":
        lengths = jnp.array([t - 17, t])
        # The reference sees a padded key from padding only, the kernels from nowhere.
        keys = (jnp.arange(t) >= lengths[:, None]).astype(jnp.int32)
        return (jnp.zeros((2, s), jnp.int32), keys), SeenRows(lengths=lengths)
    return None, SeenRows()


@pytest.mark.parametrize("case", quick(CASES, 0, 4))
def test_kernels_equal_fp64(monkeypatch, case):
    mask, s, t, heads, kv_heads, window, kind, tile = CASES[case]
    ran = interpret(monkeypatch)
    call = AttentionCall(scale=0.2, mask=mask, window=window, implementation="xla")
    segments, rows = seen_of(kind, s, t)
    rng = np.random.default_rng(s)

    def draw(length, heads):
        return rng.normal(size=(2, length, heads, 16)) * 3

    q, k, v, d_out = draw(s, heads), draw(t, kv_heads), draw(t, kv_heads), draw(s, heads)
    tiles = Tiles(*[ShortTile(*tile, 4, 1)] * 3)
    low = [jnp.asarray(x, jnp.float32) for x in (q, k, v, d_out)]
    out, back = jax.vjp(lambda *qkv: short_attention(qkv, None, rows, call, "", tiles), *low[:3])
    got = out, *back(low[3])
    assert "attention_d_keys" in ran
    with jax.enable_x64(True):
        columns = jnp.arange(s), jnp.arange(t)
        arrays = AttentionArrays(columns=columns, segments=segments)
        wide = [jnp.asarray(x) for x in (q, k, v, d_out)]
        out, back = jax.vjp(lambda *x: attention(*x, call, arrays), *wide[:3])
        wanted = out, *back(wide[3])
    for mine, right in zip(got, wanted, strict=True):
        scale = float(np.abs(right).max())
        np.testing.assert_allclose(mine, right, rtol=0, atol=4e-6 * scale)


def test_rows_beyond_32_bits_and_tiles_that_would_read_what_none_wrote_are_refused():
    call, arrays = AttentionCall(scale=1.0), AttentionArrays(columns=(None, None))

    def require(heads):
        q, all_three = (
            jax.ShapeDtypeStruct((1, 2**20, *more, heads, 64), jnp.bfloat16) for more in ((), (3,))
        )
        require_short(q, all_three, call, arrays)

    with believed(GPU):
        require(10)
        with pytest.raises(UserError, match="32-bit offsets do not reach all of a row's 2,214,592"):
            require(11)
    tile = ShortTile(16, 16, 4, 1)
    tiles = Tiles(tile, tile._replace(queries=32), tile)
    q = jnp.zeros((1, 20, 1, 16))
    with pytest.raises(AssertionError, match="unwritten"):
        jax.eval_shape(
            lambda q: _short_backward(call, "", tiles, ((q, q, q), None, SeenRows(), q, q), q), q
        )


# One array of all three needs as many heads of keys as of queries.
JOINED = [("full", False), ("full", True), ("causal", False), ("padded", False)]
JOINED += [("packed", False), ("packed", True), ("wide window", False), ("wide window", True)]


@pytest.mark.parametrize("case,joined", quick(JOINED, 1, 2))
def test_keys_and_values_in_one_array_with_biases(monkeypatch, case, joined):
    """The reference adds both biases. That of keys changes nothing, so the kernels never see it."""
    mask, s, _, heads, kv_heads, window, kind, tile = CASES[case]
    interpret(monkeypatch)
    call = AttentionCall(scale=0.2, mask=mask, window=window, implementation="xla")
    segments, rows = seen_of(kind, s, s)
    rng = np.random.default_rng(s)
    q, d_out = (rng.normal(size=(2, s, heads, 16)) * 3 for _ in range(2))
    kv, biases = rng.normal(size=(2, s, 2, kv_heads, 16)) * 3, rng.normal(size=(2, kv_heads, 16))
    q_bias = rng.normal(size=(heads, 16))
    tiles = Tiles(*[ShortTile(*tile, 4, 1)] * 3)

    def ours(q, kv, q_bias, v_bias):
        products = (jnp.concatenate([q[:, :, None], kv], 2),) if joined else (q, kv)
        return short_attention(products, (q_bias, v_bias), rows, call, "", tiles)

    low = [jnp.asarray(x, jnp.float32) for x in (q, kv, q_bias, biases[1], d_out)]
    out, back = jax.vjp(ours, *low[:4])
    got = out, *back(low[4])
    with jax.enable_x64(True):
        columns = jnp.arange(s), jnp.arange(s)
        arrays = AttentionArrays(columns=columns, segments=segments)

        def reference(q, kv, q_bias, biases):
            pairs = kv + biases
            return attention(q + q_bias, pairs[:, :, 0], pairs[:, :, 1], call, arrays)

        out, back = jax.vjp(reference, *map(jnp.asarray, (q, kv, q_bias, biases)))
        *d_inputs, d_biases = back(jnp.asarray(d_out))
        assert jnp.abs(d_biases[0]).max() < 2e-6 * jnp.abs(d_biases[1]).max()
    for mine, right in zip(got, (out, *d_inputs, d_biases[1]), strict=True):
        scale = float(np.abs(right).max())
        np.testing.assert_allclose(mine, right, rtol=0, atol=4e-6 * scale)
