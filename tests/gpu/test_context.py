"""cuDNN under context parallelism against the fp32 reference of the whole sequence, bf16."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from mjax.kernels.attention.api import attention, block_backward, block_forward
from mjax.kernels.base.attention_call import AttentionArrays, AttentionCall
from mjax.models.attention.context_parallel import context_attention
from mjax.models.attention.zigzag import zigzag
from mjax.models.base.context import Context, Kernels
from mjax.sharding.collectives import Parallel

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
B, S, N, K, H = 2, 1024, 8, 4, 128
CASES = [(cp_type, "plain") for cp_type in ("all_gather", "ring", "a2a", "a2a_ring", "auto")]
CASES += [("a2a", "packed"), ("auto", "packed"), ("a2a", "windowed")]


def arrays():
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(B, S, N, H), (B, S, K, H), (B, S, K, H), (B, S, N, H)]
    return [
        jax.random.normal(k, s, jnp.float32).astype(jnp.bfloat16)
        for k, s in zip(keys, shapes, strict=True)
    ]


def close(mine, theirs):
    for a, b in zip(mine, theirs, strict=True):
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        assert np.isfinite(a).all() and np.linalg.norm(a - b) < 0.01 * np.linalg.norm(b)


@pytest.mark.parametrize("cp_type,kind", CASES)
@pytest.mark.parametrize("cp", [2, 4])
def test_cudnn_equals_reference(cp, cp_type, kind):
    if jax.device_count() < cp:
        pytest.skip(f"needs {cp} GPUs")
    if cp_type == "a2a_ring" and cp == 2:
        pytest.skip("a2a_ring needs 4 GPUs")
    window = 100 if kind == "windowed" else None
    cuts = np.random.default_rng(1).random((B, S)) < (0.005 if kind == "packed" else 0)
    segments = np.cumsum(cuts, axis=1).astype(np.int32)
    columns = np.arange(S, dtype=np.int32)
    call = AttentionCall(H**-0.5, window, max_documents=32, implementation="cudnn")
    ctx = Context(
        Parallel(cp=cp),
        kernels=Kernels(cp_type=cp_type, cp_a2a=2 if cp_type == "a2a_ring" else 1),
    )

    def whole(q, k, v, d_out):
        arrays = AttentionArrays((columns, columns), (segments, segments))
        f = functools.partial(attention, call=replace(call, implementation="xla"), arrays=arrays)
        out, transpose = jax.vjp(f, q, k, v)
        return out, *transpose(d_out)

    def sharded(q, k, v, d_out, columns, segments):
        arrays = AttentionArrays(
            (columns, columns), (segments, segments) if kind == "packed" else None
        )
        f = functools.partial(context_attention, call=call, arrays=arrays, ctx=ctx)
        out, transpose = jax.vjp(f, q, k, v)
        return out, *transpose(d_out)

    order = zigzag(S, cp)
    mesh = Mesh(np.array(jax.devices()[:cp]), ("cp",), axis_types=(AxisType.Auto,))
    spec = P(None, "cp")
    run = jax.jit(
        jax.shard_map(
            sharded,
            mesh=mesh,
            in_specs=(*[spec] * 4, P("cp"), spec),
            out_specs=spec,
            check_vma=False,
        )
    )
    mine = run(*(x[:, order] for x in arrays()), columns[order], segments[:, order])
    with jax.default_matmul_precision("highest"):
        theirs = jax.jit(whole)(*(x.astype(jnp.float32) for x in arrays()))
    close(mine, [x[:, order] for x in theirs])


def test_cudnn_blocks_equal_xla_blocks():
    """A block of keys: its log-sum-exp, and its gradients under statistics that are not its own."""
    q, k, v, d_out = arrays()
    late = jnp.broadcast_to(jnp.arange(S, 2 * S, dtype=jnp.int32), (B, S))
    exactly = AttentionCall(H**-0.5, implementation="xla")
    by_cudnn = replace(exactly, implementation="cudnn")
    seen = (late, None), (late - S, None)
    exact = [x.astype(jnp.float32) for x in (q, k, v, d_out)]
    with jax.default_matmul_precision("highest"):
        out, lse = block_forward(*exact[:3], seen, exactly, diagonal=False)
        stats = 0.5 * out, lse + 1.0, exact[3]
        grads = block_backward(*exact[:3], seen, *stats, exactly, diagonal=False)
    mine = block_forward(q, k, v, None, by_cudnn, diagonal=False)
    np.testing.assert_allclose(mine[1], lse, atol=1e-2)
    stats = stats[0].astype(q.dtype), stats[1], d_out
    found = block_backward(q, k, v, None, *stats, by_cudnn, diagonal=False)
    close([mine[0], *found], [out, *grads])
