"""cuDNN's two calls to shared prefixes against the fp32 reference, forward and backward."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.kernels.attention.api import attention
from mjax.kernels.base.attention_call import AttentionArrays, AttentionCall, SharedKeys

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")

# Rows of blocks (tokens, segment, prefix): padding, a prefix of one token, documents without one.
ROWS = [
    [(300, 9, 0), (100, 1, 9), (1, 2, 9), (171, 3, 9), (1, 11, 0), (50, 4, 11), (401, 0, 0)],
    [(7, 5, 0), (200, 7, 0), (150, 1, 7), (150, 2, 7), (250, 3, 7), (267, 4, 7)],
    [(1024, 1, 0)],
]


@pytest.mark.parametrize("kv_heads, head, value", [(4, 128, 128), (2, 64, 64), (4, 192, 128)])
@pytest.mark.parametrize("deterministic", [False, True])
def test_two_calls_equal_one_softmax(kv_heads, head, value, deterministic):
    blocks = [np.array(row).T for row in ROWS]
    segments, prefixes = (
        jnp.asarray([np.repeat(row[n], row[0]) for row in blocks], jnp.int32) for n in (1, 2)
    )
    columns = jnp.arange(segments.shape[1])
    positions = jnp.broadcast_to(columns, segments.shape)
    shared = SharedKeys(prefixes, (positions, positions))
    arrays = AttentionArrays((columns, columns), (segments, segments), shared=shared)
    rng = np.random.default_rng(0)
    sizes = (4, head), (kv_heads, head), (kv_heads, value), (4, value)
    q, k, v, d_out = (
        jnp.asarray(rng.normal(size=(*segments.shape, *size)), jnp.float32) for size in sizes
    )
    call = AttentionCall(head**-0.5, max_documents=16, shared=True, deterministic=deterministic)

    def run(implementation: str, dtype: jnp.dtype):
        one = replace(call, implementation=implementation)
        args = [x.astype(dtype) for x in (q, k, v)]
        out, back = jax.vjp(jax.jit(lambda *args: attention(*args, one, arrays)), *args)
        return out, *back(d_out.astype(dtype))

    wanted, found = run("xla", jnp.float32), run("cudnn", jnp.bfloat16)
    for mine, right in zip(found, wanted, strict=True):
        mine, right = np.asarray(mine, np.float32), np.asarray(right)
        assert np.isfinite(mine).all()
        assert np.abs(mine - right).max() < 0.02 * np.abs(right).max()
        assert np.linalg.norm(mine - right) < 0.01 * np.linalg.norm(right)
