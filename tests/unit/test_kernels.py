"""Kernels against references, forward and backward, on odd shapes; attention's masks by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.errors import UserError
from mjax.kernels import attention as kernel
from mjax.kernels.attention import attention, document_offsets
from mjax.kernels.cross_entropy import Terms, cross_entropy, reference, token_losses
from mjax.sharding.collectives import LOCAL


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

        def each(x, w):
            losses = token_losses(x, w, labels, terms=terms, parallel=LOCAL, chunk=chunk)
            return (losses * mask).sum()

        def theirs(x, w):
            return reference(x, w, labels, mask, terms)

        mine, grads = jax.value_and_grad(ours, (0, 1))(x, w)
        for a, b in zip(jax.value_and_grad(each, (0, 1))(x, w)[1], grads, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=3e-6 * np.abs(b).max())
        wide = [a.astype(jnp.float64) for a in (x, w)]
        expected, expected_grads = jax.value_and_grad(theirs, (0, 1))(*wide)
    np.testing.assert_allclose(mine, expected, rtol=2e-6)
    for a, b in zip(grads, expected_grads, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=3e-6 * np.abs(b).max())
    assert np.abs(grads[1][vocab:]).max(initial=0) == 0


def naive_attention(q, k, v, *, scale, window=None, softcap=None, sinks=None, segments=None):
    """Loops over heads and queries, fp64."""
    out = np.zeros(q.shape)
    group = q.shape[2] // k.shape[2]
    for b, i, n in np.ndindex(q.shape[:3]):
        first = 0 if window is None else max(0, i - window + 1)
        keys = [
            j for j in range(first, i + 1) if segments is None or segments[b, j] == segments[b, i]
        ]
        scores = np.array([q[b, i, n] @ k[b, j, n // group] for j in keys]) * scale
        if softcap:
            scores = softcap * np.tanh(scores / softcap)
        extra = [] if sinks is None else [sinks[n]]
        weights = np.exp(scores) / (np.exp(scores).sum() + np.exp(extra).sum())
        out[b, i, n] = sum(p * v[b, j, n // group] for p, j in zip(weights, keys, strict=True))
    return out


@pytest.mark.parametrize(
    "case",
    [
        {},
        {"window": 3},
        {"softcap": 1.5},
        {"sinks": True},
        {"segments": True},
        {"segments": True, "window": 4, "softcap": 2.0, "sinks": True},
    ],
    ids=lambda c: "+".join(c) or "plain",
)
def test_reference_attention_equals_loops(case, monkeypatch):
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(2, 12, n, 5)) for n in (6, 2, 2))
    case = dict(case)
    if case.pop("sinks", False):
        case["sinks"] = rng.normal(size=6)
    if case.pop("segments", False):
        case["segments"] = np.cumsum(rng.random((2, 12)) < 0.3, axis=1)
    expected = naive_attention(q, k, v, scale=0.4, **case)
    segments = case.pop("segments", None)
    columns = jnp.arange(12)

    def run():
        with jax.enable_x64(True):
            options = {n: jnp.asarray(x) if n == "sinks" else x for n, x in case.items()}
            return attention(
                *map(jnp.asarray, (q, k, v)),
                scale=0.4,
                columns=(columns, columns),
                segments=None if segments is None else (jnp.asarray(segments),) * 2,
                implementation="xla",
                **options,
            )

    np.testing.assert_allclose(run(), expected, atol=1e-6)
    monkeypatch.setattr(kernel, "_QUERY_CHUNK", 4)
    np.testing.assert_allclose(run(), expected, atol=1e-6)


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
        ({"softcap": 2.0}, "attn_logit_softcapping"),
        ({"sinks": jnp.zeros(4)}, "attention_sinks"),
        ({"dtype": jnp.float32}, "precision.compute"),
        ({"size": 12}, "head_dim"),
    ],
)
def test_cudnn_refuses_what_it_lacks(options, words):
    options = dict(options)
    q = jnp.zeros((1, 8, 4, options.pop("size", 16)), options.pop("dtype", jnp.bfloat16))
    columns = jnp.arange(8), jnp.arange(8)
    with pytest.raises(UserError, match=words):
        attention(q, q, q, scale=1.0, columns=columns, implementation="cudnn", **options)
