"""Kernels against references, forward and backward, on odd shapes; attention's masks by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.errors import UserError
from mjax.kernels.attention import api as kernel
from mjax.kernels.attention.api import attention
from mjax.kernels.attention.cudnn import document_offsets
from mjax.kernels.attention.decode import decode_attention
from mjax.kernels.base.attention_call import AttentionArrays, AttentionCall
from mjax.kernels.loss.cross_entropy import Terms, count_hits, cross_entropy, loss_reference
from mjax.sharding.collectives import LOCAL


@pytest.mark.grid
@pytest.mark.parametrize(
    "terms", [{}, {"softcap": 2.0}, {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 5.0}]
)
@pytest.mark.parametrize(
    "tokens,vocab,padded,chunk", [(37, 251, 256, 8), (5, 3, 128, None), (9, 64, 64, 4)]
)
def test_cross_entropy_equals_whole_logits(tokens, vocab, padded, chunk, terms):
    terms = Terms(vocab, **terms)
    keys = jax.random.split(jax.random.key(0), 4)
    with jax.enable_x64(True):
        x = jax.random.normal(keys[0], (tokens, 24), jnp.float32)
        w = jax.random.normal(keys[1], (padded, 24), jnp.float32)
        w = w.at[vocab:].set(1e3)  # poison: padding rows must not take part
        labels = jax.random.randint(keys[2], (tokens,), 0, vocab)
        mask = jax.random.bernoulli(keys[3], 0.7, (tokens,)).astype(jnp.float32)

        def ours(x, w):
            return cross_entropy(x, w, labels, mask, terms=terms, parallel=LOCAL, chunk=chunk)

        def theirs(x, w):
            return loss_reference(x, w, labels, mask, terms)

        mine, grads = jax.value_and_grad(ours, (0, 1))(x, w)
        wide = [a.astype(jnp.float64) for a in (x, w)]
        expected, expected_grads = jax.value_and_grad(theirs, (0, 1))(*wide)
    np.testing.assert_allclose(mine, expected, rtol=2e-6)
    for a, b in zip(grads, expected_grads, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=3e-6 * np.abs(b).max())
    assert np.abs(grads[1][vocab:]).max(initial=0) == 0


@pytest.mark.parametrize("share", [0.0, 0.15, 0.5, 1.0])
@pytest.mark.parametrize("chunk", [None, 8])
def test_a_loss_of_few_tokens_is_that_of_all_with_a_mask(share, chunk):
    tokens, vocab = 77, 100
    keys = jax.random.split(jax.random.key(1), 5)
    x = jax.random.normal(keys[0], (tokens, 24))
    w = jax.random.normal(keys[1], (128, 24))
    bias = jax.random.normal(keys[2], (128,))
    labels = jax.random.randint(keys[3], (tokens,), 0, vocab)
    mask = jax.random.uniform(keys[4], (tokens,))
    mask = jnp.where(mask < share, 0.5 + mask, 0.0)  # weights need not be one
    more = {"terms": Terms(vocab), "parallel": LOCAL, "chunk": chunk}

    def run(few):
        def loss(x, w, bias):
            return cross_entropy(x, w, labels, mask, bias=bias, few=few, **more)

        hits = count_hits(x, w, labels, mask, bias=bias, few=few, **more)
        return *jax.value_and_grad(loss, (0, 1, 2))(x, w, bias), hits

    for mine, theirs in zip(jax.tree.leaves(run(True)), jax.tree.leaves(run(False)), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5 * np.abs(theirs).max())


def test_tokens_that_do_not_count_cost_no_logits():
    """A chunk without a token that counts is not run: what it holds may be NaN."""
    x, w = jnp.ones((64, 8)).at[32:].set(jnp.nan), jnp.ones((128, 8))
    labels, mask = jnp.zeros(64, jnp.int32), (jnp.arange(64) < 32).astype(jnp.float32)
    more = {"terms": Terms(128), "parallel": LOCAL, "chunk": 32}

    def loss(few):
        return cross_entropy(x, w, labels, mask, few=few, **more)

    assert np.isnan(loss(False))
    assert np.isclose(loss(True), 32 * np.log(128))


def naive_attention(q, k, v, call, *, sinks=None, segments=None, prefix=None):
    """Loops over heads and queries, fp64."""
    out = np.zeros((*q.shape[:3], v.shape[-1]))
    group = q.shape[2] // k.shape[2]
    for b, i, n in np.ndindex(q.shape[:3]):
        keys = []
        for j in range(k.shape[1]):
            seen = call.mask in ("full", "cross") or j <= i
            seen = seen and (call.window is None or abs(i - j) < call.window)
            seen = seen or (prefix is not None and prefix[b, j])
            if seen and (segments is None or segments[1][b, j] == segments[0][b, i]):
                keys.append(j)
        scores = np.array([q[b, i, n] @ k[b, j, n // group] for j in keys]) * call.scale
        if call.softcap:
            scores = call.softcap * np.tanh(scores / call.softcap)
        extra = [] if sinks is None else [sinks[n]]
        weights = np.exp(scores) / (np.exp(scores).sum() + np.exp(extra).sum())
        out[b, i, n] = sum(p * v[b, j, n // group] for p, j in zip(weights, keys, strict=True))
    return out


CASES = [
    {},
    {"window": 3},
    {"softcap": 1.5},
    {"sinks": True},
    {"segments": True},
    {"segments": True, "window": 4, "softcap": 2.0, "sinks": True},
    {"mask": "full"},
    {"mask": "full", "segments": True, "softcap": 2.0, "sinks": True},
    {"mask": "full", "window": 3},
    {"mask": "full", "window": 3, "segments": True, "value": 7},
    {"mask": "full", "window": 4, "segments": True, "sinks": True},
    {"mask": "prefix"},
    {"mask": "prefix", "segments": True, "sinks": True},
    {"mask": "cross"},
    {"mask": "cross", "segments": True},
    {"value": 3},
    {"mask": "full", "value": 7, "segments": True},
]


def drawn(case, seed=0):
    """(q, k, v, the call, its arrays but columns) of a case, in numpy."""
    rng = np.random.default_rng(seed)
    case = dict(case)
    keys = 7 if case.get("mask") == "cross" else 12
    q, k = rng.normal(size=(2, 12, 6, 5)), rng.normal(size=(2, keys, 2, 5))
    v = rng.normal(size=(2, keys, 2, case.pop("value", 5)))
    arrays = {}
    if case.pop("sinks", False):
        arrays["sinks"] = rng.normal(size=6)
    if case.pop("segments", False):
        ids = np.cumsum(rng.random((2, 12)) < 0.3, axis=1)
        arrays["segments"] = ids, ids
        if keys < 12:  # each segment has a key
            arrays["segments"] = ids % 3, np.arange(keys) % 3 + np.zeros((2, 1), int)
    if case.get("mask") == "prefix":
        arrays["prefix"] = rng.random((2, keys)) < 0.4
    return q, k, v, AttentionCall(0.4, implementation="xla", **case), arrays


def of_case(call, arrays, size):
    """The function that a case differentiates."""
    columns = jnp.arange(12), jnp.arange(size)

    def run(q, k, v):
        return attention(
            q, k, v, call, AttentionArrays(columns, **jax.tree.map(jnp.asarray, arrays))
        )

    return run


@pytest.mark.grid
@pytest.mark.parametrize("case", CASES, ids=lambda c: "+".join(map(str, c.values())) or "plain")
def test_reference_attention_equals_loops(case, monkeypatch):
    q, k, v, call, arrays = drawn(case)
    expected = naive_attention(q, k, v, call, **arrays)
    with jax.enable_x64(True):
        run = of_case(call, arrays, k.shape[1])
        np.testing.assert_allclose(run(*map(jnp.asarray, (q, k, v))), expected, atol=1e-6)
        monkeypatch.setattr(kernel, "QUERY_CHUNK", 4)
        np.testing.assert_allclose(run(*map(jnp.asarray, (q, k, v))), expected, atol=1e-6)
        monkeypatch.setattr(kernel, "_FEWEST_NEAR", 1)  # blocks of a window, of the keys near by
        np.testing.assert_allclose(run(*map(jnp.asarray, (q, k, v))), expected, atol=1e-6)


def test_windows_to_both_sides_cost_what_is_near():
    """Products of 4096 queries with keys of three blocks of 64, not with all keys."""
    call = AttentionCall(1.0, window=65, mask="full", implementation="xla")
    columns = (jnp.arange(4096),) * 2

    def run(q):
        return attention(q, q, q, call, AttentionArrays(columns))

    compiled = jax.jit(run).lower(jnp.zeros((1, 4096, 1, 8))).compile()
    assert compiled.cost_analysis()["flops"] < 4096 * 192 * (4 * 8 + 32)


@pytest.mark.parametrize("case", CASES, ids=lambda c: "+".join(map(str, c.values())) or "plain")
def test_one_query_to_a_cache_equals_loops(case):
    q, k, v, call, arrays = drawn(case)
    expected = naive_attention(q, k, v, call, **arrays)
    with jax.enable_x64(True):
        cache = [jnp.asarray(a).swapaxes(1, 2) for a in (k, v)]
        run = jax.jit(decode_attention, static_argnums=3)
        for i in (0, 5, 11):
            own = dict(arrays)
            if "segments" in own:
                own["segments"] = own["segments"][0][:, i : i + 1], own["segments"][1]
            columns = jnp.array([i]), jnp.arange(k.shape[1])
            at = AttentionArrays(columns, **jax.tree.map(jnp.asarray, own))
            found = run(jnp.asarray(q[:, i : i + 1]), *cache, call, at)
            np.testing.assert_allclose(found, expected[:, i : i + 1], atol=1e-6)


@pytest.mark.parametrize("chunk", [1024, 4])
@pytest.mark.parametrize("mask", ["causal", "full", "prefix", "cross", "window"])
def test_gradients_are_the_differences_of_loops(mask, chunk, monkeypatch):
    """Along a random direction, by central differences in fp64; value heads of another size."""
    monkeypatch.setattr(kernel, "QUERY_CHUNK", chunk)
    monkeypatch.setattr(kernel, "_FEWEST_NEAR", chunk // 4)
    kind = {"mask": "full", "window": 3} if mask == "window" else {"mask": mask}
    *qkv, call, arrays = drawn({**kind, "segments": True, "value": 3})
    rng = np.random.default_rng(1)
    step = [1e-3 * rng.normal(size=x.shape) for x in qkv]
    weight = rng.normal(size=(*qkv[0].shape[:3], 3))

    def naive(sign):
        moved = [x + sign * d for x, d in zip(qkv, step, strict=True)]
        return np.sum(naive_attention(*moved, call, **arrays) * weight)

    with jax.enable_x64(True):
        run = of_case(call, arrays, qkv[1].shape[1])
        _, pull = jax.vjp(run, *map(jnp.asarray, qkv))
        grads = pull(jnp.asarray(weight))
    along = sum(np.sum(np.asarray(g) * d) for g, d in zip(grads, step, strict=True))
    np.testing.assert_allclose(along, (naive(1) - naive(-1)) / 2, rtol=1e-4)


def test_document_offsets_are_starts_and_lengths():
    segments = jnp.asarray([[1, 1, 1, 2, 2, 3], [5, 5, 5, 5, 5, 5]])
    lengths, starts = document_offsets(segments, 4)
    np.testing.assert_array_equal(lengths, [[3, 2, 1, -1], [6, -1, -1, -1]])
    np.testing.assert_array_equal(starts, [[0, 3, 5, -1, -1], [0, -1, -1, -1, -1]])
    lengths, starts = document_offsets(segments, 3)  # the bound is exact
    np.testing.assert_array_equal(lengths, [[3, 2, 1], [6, -1, -1]])


@pytest.mark.parametrize(
    "options,words",
    [
        ({"softcap": 2.0}, "model.attention.attn_logit_softcapping"),
        ({"sinks": jnp.zeros(4)}, "model.attention.attention_sinks"),
        ({"dropout": 0.1}, "model.attention.attention_dropout"),
        ({"mask": "prefix"}, "prefix mask"),
        (
            {"mask": "full", "window": 4},
            "no windows to both sides .W, vision_window.; set train.attention=auto",
        ),
        ({"mask": "cross", "segments": (jnp.zeros((1, 8), int),) * 2}, "segments of cross"),
        ({"dtype": jnp.float32}, "precision.compute"),
        ({"size": 12}, "head_dim=12"),
        ({"value": 20}, "head_dim=20"),
    ],
)
def test_cudnn_refuses_what_it_lacks(options, words):
    options = dict(options)
    dtype, size = options.pop("dtype", jnp.bfloat16), options.pop("size", 16)
    q, v = (
        jnp.zeros((1, 8, 4, size), dtype),
        jnp.zeros((1, 8, 4, options.pop("value", size)), dtype),
    )
    given = {name: options.pop(name) for name in ("sinks", "segments") if name in options}
    arrays = AttentionArrays((jnp.arange(8), jnp.arange(8)), **given)
    with pytest.raises(UserError, match=words):
        attention(q, q, v, AttentionCall(1.0, implementation="cudnn", **options), arrays)


def test_windows_are_not_of_every_mask():
    with pytest.raises(UserError, match="sliding_window"):
        AttentionCall(1.0, window=4, mask="prefix")
