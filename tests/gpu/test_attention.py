"""cuDNN attention and our own of short rows against the fp32 reference, forward and backward."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.kernels.attention.api import attention
from mjax.kernels.attention.short import SeenRows, short_attention
from mjax.kernels.base.attention_call import AttentionArrays, AttentionCall

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")

CASES = {
    "causal": {},
    "gqa": {"k": 2},
    "mqa_h64": {"k": 1, "h": 64},
    "windowed": {"window": 100},
    "packed": {"documents": 7},
    "packed_gqa": {"documents": 7, "k": 2},
    "packed_loose_bound": {"documents": 3, "bound": 16, "k": 2},
    "packed_windowed": {"documents": 4, "window": 50},
    "full": {"mask": "full", "k": 2},
    "full_packed": {"mask": "full", "documents": 7},
    "cross": {"mask": "cross", "t": 384},
    "value_heads": {"h": 192, "value": 128},
    "packed_value_heads": {"h": 192, "value": 128, "documents": 7},
    "relative": {"relative": True},
    "relative_full": {"relative": True, "mask": "full", "h": 64},
    "relative_padded": {"relative": True, "padded": True},
    "relative_full_padded": {"relative": True, "mask": "full", "padded": True},
    "padded": {"padded": True, "k": 2},
    "full_padded": {"mask": "full", "padded": True, "h": 64},
    "cross_padded": {"mask": "cross", "t": 384, "padded": True},
}
OURS = {
    "causal": {},
    "gqa": {"k": 2, "s": 77},
    "windowed": {"window": 100, "s": 300},
    "packed": {"documents": 7},
    "packed_windowed": {"documents": 4, "window": 50},
    "full": {"mask": "full", "k": 2, "s": 197},
    "full_long": {"mask": "full", "s": 640},
    "full_packed": {"mask": "full", "documents": 7},
    "full_windowed": {"mask": "full", "window": 65, "s": 1024},
    "full_windowed_packed": {"mask": "full", "window": 33, "documents": 5},
    "full_windowed_padded": {"mask": "full", "window": 65, "padded": True},
    "cross": {"mask": "cross", "t": 384, "s": 100},
    "padded": {"padded": True, "k": 2},
    "full_padded": {"mask": "full", "padded": True, "s": 208},
    "cross_padded": {"mask": "cross", "t": 384, "padded": True},
}


@pytest.mark.parametrize(
    "kernel,name", [("cudnn", name) for name in CASES] + [("triton", name) for name in OURS]
)
def test_fused_kernels_equal_the_reference(kernel, name):
    case = {"k": 8, "h": 128, "documents": 1, "window": None, "mask": "causal"}
    case |= CASES[name] if kernel == "cudnn" else {"h": 64, **OURS[name]}
    b, s, n = 2, case.get("s", 512), 8
    keys = jax.random.split(jax.random.key(0), 4)
    h, t = case["h"], case.get("t", s)
    value = case.get("value", h)
    shapes = [(b, s, n, h), (b, t, case["k"], h), (b, t, case["k"], value), (b, s, n, value)]
    q, k, v, weight = (
        jax.random.normal(key, shape, jnp.float32).astype(jnp.bfloat16)
        for key, shape in zip(keys, shapes, strict=True)
    )
    rng = np.random.default_rng(1)
    cuts = np.stack([rng.permutation(np.arange(s) < case["documents"] - 1) for _ in range(b)])
    cuts[:, 0] = False
    segments = jnp.asarray(np.cumsum(cuts, axis=1), jnp.int32)

    arrays = AttentionArrays(
        (jnp.arange(s), jnp.arange(t)), None if case["mask"] == "cross" else (segments, segments)
    )
    if "padded" in case:
        segments = [
            jnp.int32(jnp.arange(size) < jnp.array([[size], [size // 3]])) for size in (s, t)
        ]
        arrays = replace(arrays, segments=tuple(segments))
        weight = jnp.where(segments[0][..., None, None] == 1, weight, 0)
    table = 0.5 * jax.random.normal(keys[0], (n, 32)) if "relative" in case else None

    def run(implementation, dtype):
        call = AttentionCall(
            scale=h**-0.5,
            window=case["window"],
            mask=case["mask"],
            max_documents=2 if "padded" in case else case.get("bound", case["documents"]),
            padded="padded" in case,
            max_distance=128,
            implementation=implementation,
        )

        def f(q, k, v, table):
            out = attention(q, k, v, call, replace(arrays, relative=table))
            return jnp.sum(out.astype(jnp.float32) * weight.astype(jnp.float32)), out

        grads, out = jax.jit(jax.grad(f, (0, 1, 2) if table is None else range(4), has_aux=True))(
            *(a.astype(dtype) for a in (q, k, v)), table
        )
        out = jnp.where(weight == 0, 0, out)
        return [np.asarray(a, np.float32) for a in (out, *grads)]

    with jax.default_matmul_precision("highest"):
        expected = run("xla", jnp.float32)
    for mine, theirs in zip(run(kernel, jnp.bfloat16), expected, strict=True):
        error = np.linalg.norm(mine - theirs) / np.linalg.norm(theirs)
        assert np.isfinite(mine).all() and error < 0.01, error


# rows that fill no tile: CLIP's texts and images, ViT
@pytest.mark.parametrize("tokens, mask", [(77, "causal"), (257, "full"), (197, "full")])
def test_one_product_with_biases_equals_the_reference(tokens, mask):
    keys = jax.random.split(jax.random.key(0), 4)
    qkv, weight = (
        jax.random.normal(key, (3, tokens, *heads, 64), jnp.bfloat16)
        for key, heads in zip(keys, ((3, 4), (4,)), strict=False)
    )
    biases = tuple(jax.random.normal(key, (4, 64), jnp.bfloat16) for key in keys[2:])
    call = AttentionCall(scale=0.125, mask=mask, implementation="xla")
    columns = (jnp.arange(tokens),) * 2

    def ours(qkv, biases):
        return short_attention((qkv,), biases, SeenRows(), call)

    def reference(qkv, biases):
        q, k, v = (qkv[:, :, i] for i in range(3))
        return attention(q + biases[0], k, v + biases[1], call, AttentionArrays(columns))

    def run(f, *inputs):
        out, back = jax.vjp(f, *inputs)
        return jax.tree.leaves((out, *back(weight.astype(out.dtype))))

    got = jax.jit(lambda *inputs: run(ours, *inputs))(qkv, biases)
    with jax.default_matmul_precision("highest"):
        expected = run(reference, *jax.tree.map(lambda a: a.astype(jnp.float32), (qkv, biases)))
    for mine, theirs in zip(got, expected, strict=True):
        mine, theirs = np.asarray(mine, np.float32), np.asarray(theirs)
        error = np.linalg.norm(mine - theirs) / np.linalg.norm(theirs)
        assert np.isfinite(mine).all() and error < 0.01, error
