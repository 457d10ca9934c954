"""Our Hopper kernels against attention in fp32, forward and backward, and bit-equal twice."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.kernels.attention import mosaic
from mjax.kernels.base import chooser
from mjax.kernels.base.attention_call import AttentionCall

pytestmark = pytest.mark.skipif(not chooser.on_hopper(), reason="needs a Hopper GPU, jax >= 0.11")

CASES = {
    "causal": {},
    "gqa": {"n": 8, "k": 2},
    "mqa_h64": {"n": 4, "k": 1, "h": 64},
    "h64_many_items": {"b": 4, "s": 1024, "n": 12, "k": 12, "h": 64},
    "h256": {"h": 256, "k": 2},
    "h256_capped": {"h": 256, "softcap": 5.0, "window": 130},
    "ragged": {"s": 333},
    "one_query": {"s": 1},
    "windowed": {"window": 100},
    "window_of_one": {"window": 1, "s": 257},
    "window_beyond": {"window": 4096},
    "packed": {"documents": 7, "k": 2},
    "packed_each_alone": {"documents": 300, "s": 300},
    "packed_windowed_h64": {"documents": 4, "window": 50, "h": 64, "s": 700},
    "capped": {"softcap": 5.0},
    "sinks": {"sinks": True},
    "all_h64": {"sinks": True, "softcap": 3.0, "window": 77, "documents": 3, "h": 64, "s": 901},
    "all_h128": {"sinks": True, "softcap": 3.0, "window": 77, "documents": 3, "s": 901},
}


def _reference(q, k, v, sinks, segments, scale, window, softcap):
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], 2) for x in (k, v))
    scores = jnp.einsum("bsnh,btnh->bnst", q, k, precision="highest") * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    behind = jnp.arange(q.shape[1])[:, None] - jnp.arange(k.shape[1])
    seen = (behind >= 0) & (behind < (window or q.shape[1]))
    seen = seen & (segments[:, :, None] == segments[:, None])[:, None]
    scores = jnp.where(seen, scores, -jnp.inf)
    if sinks is not None:
        column = jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:3], 1))
        scores = jnp.concatenate([scores, column], -1)
    lse = jax.nn.logsumexp(scores, -1)
    probs = jnp.exp(scores - lse[..., None])[..., : k.shape[1]]
    return jnp.einsum("bnst,btnh->bsnh", probs, v, precision="highest"), lse


def _close(mine, theirs, bound=0.006):
    mine, theirs = np.asarray(mine, np.float32), np.asarray(theirs, np.float32)
    assert mine.shape == theirs.shape and np.isfinite(mine).all()
    error = np.linalg.norm(mine - theirs) / max(np.linalg.norm(theirs), 1.0)
    assert error < bound, error


def _poison():
    """Leave NaN in the memory that the next outputs get: a tile not written is seen."""
    jax.block_until_ready([jnp.full((1 << 24,), jnp.nan, jnp.float32) for _ in range(4)])


def _inputs(case):
    b, s, n, k, h = (case[x] for x in "bsnkh")
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = [(b, s, n, h), (b, s, k, h), (b, s, k, h), (b, s, n, h)]
    q, k, v, d_out = (
        jax.random.normal(key, shape).astype(jnp.bfloat16)
        for key, shape in zip(keys, shapes, strict=False)
    )
    rng = np.random.default_rng(1)
    cuts = np.stack([rng.permutation(np.arange(s) < case["documents"]) for _ in range(b)])
    segments = jnp.asarray(np.cumsum(cuts, axis=1), jnp.int32)
    sinks = jax.random.normal(keys[4], (n,)) if case["sinks"] else None
    return q, k, v, sinks, segments, d_out


@pytest.mark.parametrize("name", CASES)
def test_mosaic_equals_reference(name):
    case = {"b": 2, "s": 512, "n": 4, "k": 4, "h": 128, "documents": 0, "window": None}
    case |= {"softcap": None, "sinks": False, **CASES[name]}
    q, k, v, sinks, segments, d_out = _inputs(case)
    call = AttentionCall(case["h"] ** -0.5, case["window"], case["softcap"])

    @jax.jit
    def mine(q, k, v, sinks):
        packed = segments if case["documents"] else None
        out, pull = jax.vjp(lambda *x: mosaic.mosaic_attention(*x, packed, call), q, k, v, sinks)
        return out, *pull(d_out)

    @functools.partial(jax.jit, compiler_options={"xla_gpu_autotune_level": 0})  # soon compiled
    def theirs(q, k, v, sinks):
        wide = [x.astype(jnp.float32) for x in (q, k, v)]

        def f(q, k, v, sinks):
            return _reference(q, k, v, sinks, segments, call.scale, call.window, call.softcap)[0]

        out, pull = jax.vjp(f, *wide, sinks)
        return out, *pull(d_out.astype(jnp.float32))

    expected = theirs(q, k, v, sinks)
    _poison()
    got = mine(q, k, v, sinks)
    for a, e in zip(got, expected, strict=True):
        if e is not None:
            _close(a, e)
    _poison()
    for a, again in zip(got, mine(q, k, v, sinks), strict=True):
        assert a is None or bool((a == again).all())


@pytest.mark.parametrize("sizes", [(256, 384), (200, 333)])
def test_blocks_of_keys_without_a_mask(sizes):
    """As context parallelism uses it: all keys, a log-sum-exp, and lengths that differ."""
    s, t = sizes
    q, d_out = (jax.random.normal(jax.random.key(i), (2, s, 4, 128)) for i in (0, 3))
    k, v = (jax.random.normal(jax.random.key(i), (2, t, 2, 128)) for i in (1, 2))
    q, k, v, d_out = (x.astype(jnp.bfloat16) for x in (q, k, v, d_out))
    call = AttentionCall(scale=0.1, mask="full")

    def unmasked(q, k, v):
        k, v = (jnp.repeat(x, 2, 2) for x in (k, v))
        scores = jnp.einsum("bsnh,btnh->bnst", q, k, precision="highest") * 0.1
        lse = jax.nn.logsumexp(scores, -1)
        probs = jnp.exp(scores - lse[..., None])
        return jnp.einsum("bnst,btnh->bsnh", probs, v, precision="highest"), lse

    (out, lse), pull = jax.vjp(jax.jit(unmasked), *(x.astype(jnp.float32) for x in (q, k, v)))
    _poison()
    mine, my_lse = jax.jit(lambda *x: mosaic.mosaic_forward(*x, call))(q, k, v)
    _close(mine, out)
    np.testing.assert_allclose(my_lse, lse, atol=1e-4)
    grads = jax.jit(lambda *x: mosaic.mosaic_backward(*x, call))(q, k, v, mine, lse, d_out)
    for a, e in zip(grads, pull((d_out.astype(jnp.float32), jnp.zeros_like(lse))), strict=True):
        _close(a, e)
