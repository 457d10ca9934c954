"""Attention to pages on a GPU against fp64, and a row's output whatever the other rows are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.kernels.attention.paged import PagedRows, paged_attention
from mjax.kernels.base.attention_call import AttentionCall
from tests.unit.kernels.test_paged_attention import Case, arrays_of, computed, drawn, wanted

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")

PAGE, TABLE = 64, 48
RAGGED = [(5, 5), (300, 200), (2100, 100), (1, 1), (1000, 7), (64, 64)]
DECODE = [(1, 1), (64, 1), (65, 1), (0, 1), (3000, 1), (777, 1), (1024, 1)]
ALL = {"window": 300, "softcap": 20.0, "sinks": True}
CASES = {
    "decode": Case(DECODE, each=1, heads=8, width=128),
    "decode, all": Case(DECODE, each=1, heads=8, width=128, scales=True, **ALL),
    "drafts of 7 heads": Case([(n, 3) for n, _ in DECODE], each=3, heads=14, width=128),
    "decode, 64": Case(DECODE, each=1, heads=8, width=64),
    "decode, 16": Case(DECODE, each=1, heads=8, width=16, scales=True),
    "decode, 96": Case(DECODE, each=1, heads=8, width=96),
    "decode, 256": Case(DECODE, each=1, heads=4, width=256),
    "decode, latent": Case(DECODE, each=1, heads=128, kv_heads=1, width=576, latent=512),
    "decode, latent of 16 heads": Case(DECODE, each=1, heads=16, kv_heads=1, width=576, latent=512),
    "ragged": Case(RAGGED, padding=9, heads=8, width=128),
    "ragged, all": Case(RAGGED, padding=9, heads=8, width=128, scales=True, **ALL),
    "ragged, 7 heads": Case(RAGGED, heads=14, width=128),
    "ragged, 64": Case(RAGGED, heads=8, width=64),
    "ragged, 80": Case(RAGGED, heads=8, width=80),
    "ragged, 256": Case(RAGGED, heads=4, width=256),
    "ragged, latent": Case(RAGGED, heads=16, kv_heads=1, width=576, latent=512),
}


@pytest.mark.parametrize("name", CASES)
def test_kernels_equal_fp64(name):
    case = CASES[name]
    made = drawn(case, np.random.default_rng(len(name)), PAGE, TABLE, jnp.bfloat16)
    arrays = arrays_of(case, made, jnp.bfloat16)
    got = np.asarray(jax.jit(lambda a: computed(case, a, "auto"))(arrays), np.float64)
    with jax.default_device(jax.devices("cpu")[0]):  # cuBLASLt has no fp64
        right = wanted(case, made)
    np.testing.assert_allclose(got, right, rtol=0, atol=0.01 * np.abs(right).max())


def test_a_row_is_the_same_in_any_batch():
    call = AttentionCall(scale=0.1)
    keys, values = jax.random.normal(jax.random.key(0), (2, 200, 4, PAGE, 128), jnp.bfloat16)
    q = jax.random.normal(jax.random.key(1), (8, 16, 128), jnp.bfloat16)
    tables = jnp.arange(8 * 24, dtype=jnp.int32).reshape(8, 24) + 1

    @jax.jit
    def decode(lengths):
        rows = PagedRows(tables, lengths, jnp.arange(9, dtype=jnp.int32))
        return paged_attention(q, keys, values, rows, call, each=1)

    first = decode(jnp.array([1500, 3, 0, 700, 64, 1, 1, 1], jnp.int32))
    second = decode(jnp.array([1500, 900, 1, 0, 1, 1, 70, 1000], jnp.int32))
    assert (first[0] == second[0]).all() and not (first[1] == second[1]).all()
