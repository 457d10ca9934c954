"""Attention to a shared prefix by two packed calls of cuDNN, which a stand-in computes here."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.kernels.attention import shared_prefix
from mjax.kernels.attention.api import attention
from mjax.kernels.base.attention_call import AttentionArrays, AttentionCall, SharedKeys
from mjax.kernels.base.chooser import Device, choose
from tests.marks import slow

# Rows of blocks: (tokens, segment, prefix).
ROWS = [
    [(3, 1, 0), (4, 9, 0), (2, 2, 9), (1, 3, 9), (5, 4, 9), (1, 11, 0), (2, 5, 11), (6, 0, 0)],
    [(7, 5, 0), (6, 1, 5), (4, 2, 5), (3, 7, 0), (1, 3, 7), (3, 4, 7)],
    [(24, 1, 0)],
]
SIZE, HEADS, KV_HEADS, HEAD = 24, 4, 2, 8
CALL = AttentionCall(HEAD**-0.5, max_documents=8, shared=True)


def arrays_of_rows() -> AttentionArrays:
    blocks = [np.array(row).T for row in ROWS]
    segments, prefixes = (
        jnp.asarray([np.repeat(row[n], row[0]) for row in blocks], jnp.int32) for n in (1, 2)
    )
    columns = jnp.arange(SIZE)
    positions = jnp.broadcast_to(columns, segments.shape)
    shared = SharedKeys(prefixes, (positions, positions))
    return AttentionArrays((columns, columns), (segments, segments), shared=shared)


def runs_of(q, k, packing):
    """(number, queries, keys) of each run, as jax hands them to cuDNN: without gaps, in rows."""
    lengths, key_lengths, starts, key_starts = map(np.asarray, packing)
    number = 0
    for row in range(len(lengths)):
        for run in range(lengths.shape[1]):
            if lengths[row, run] < 0:
                assert key_lengths[row, run] < 0 and starts[row, run] < 0 > key_starts[row, run]
                continue
            own = row, slice(starts[row, run], starts[row, run] + lengths[row, run])
            begin = key_starts[row, run]
            yield number, own, (row, slice(begin, begin + key_lengths[row, run]))
            number += 1


def weights_of(q, k, call):
    """fp64 scores [N, S, T] of one run."""
    q, k = np.float64(q), np.repeat(np.float64(k), HEADS // KV_HEADS, 1)
    scores = np.einsum("snh,tnh->nst", q, k) * call.scale
    if call.mask == "causal":
        scores = np.where(np.tril(np.ones(scores.shape[1:], bool)), scores, -np.inf)
    return scores


def stand_in_forward(q, k, v, bias, packing, call):
    out = np.full(q.shape, np.nan)
    lse = np.full((packing[0].size, HEADS, SIZE), np.nan)
    for number, own, keys in runs_of(q, k, packing):
        scores = weights_of(q[own], k[keys], call)
        if not scores.size:
            continue
        top = scores.max(-1, keepdims=True)
        total = np.log(np.exp(scores - top).sum(-1, keepdims=True)) + top
        values = np.repeat(np.float64(v[keys]), HEADS // KV_HEADS, 1)
        out[own] = np.einsum("nst,tnh->snh", np.exp(scores - total), values)
        lse[number, :, : scores.shape[1]] = total[..., 0]
    return jnp.asarray(out, q.dtype), jnp.asarray(lse, jnp.float32)


def stand_in_backward(q, k, v, bias, packing, out, lse, d_out, call):
    found = [np.full(x.shape, np.nan) for x in (q, k, v)]
    for number, own, keys in runs_of(q, k, packing):
        scores = weights_of(q[own], k[keys], call)
        if not scores.size:
            continue
        probs = np.exp(scores - np.asarray(lse)[number, :, : scores.shape[1], None])
        repeated = [np.repeat(np.float64(x[keys]), HEADS // KV_HEADS, 1) for x in (k, v)]
        d_own = np.float64(d_out[own])
        delta = (d_own * np.float64(out[own])).sum(-1).T[..., None]
        d_scores = probs * (np.einsum("snh,tnh->nst", d_own, repeated[1]) - delta) * call.scale
        found[0][own] = np.einsum("nst,tnh->snh", d_scores, repeated[0])
        d_k = np.einsum("nst,snh->tnh", d_scores, np.float64(q[own]))
        d_v = np.einsum("nst,snh->tnh", probs, d_own)
        for gradient, total in zip(found[1:], (d_k, d_v), strict=True):
            gradient[keys] = total.reshape(len(total), KV_HEADS, -1, HEAD).sum(2)
    return [jnp.asarray(x, q.dtype) for x in found]


@slow
def test_two_calls_merge_to_one_softmax(monkeypatch):
    """What no run has is not a number in the stand-in's results, as it may be in cuDNN's."""
    monkeypatch.setattr(shared_prefix, "bind_forward", stand_in_forward)
    monkeypatch.setattr(shared_prefix, "bind_backward", stand_in_backward)
    rng, arrays = np.random.default_rng(0), arrays_of_rows()
    sizes = HEADS, KV_HEADS, KV_HEADS, HEADS
    q, k, v, d_out = (jnp.asarray(rng.normal(size=(3, SIZE, n, HEAD)), jnp.float32) for n in sizes)
    plain = AttentionCall(CALL.scale, shared=True, implementation="xla")
    wanted, back = jax.vjp(lambda *x: attention(*x, plain, arrays), q, k, v)
    for most in (8, 16):
        runs = shared_prefix.packed_runs(arrays, most)
        out, saved = shared_prefix._merged_forward(q, k, v, runs, CALL)
        gradients = shared_prefix._merged_backward(CALL, saved, d_out)[:3]
        np.testing.assert_allclose(out, wanted, atol=2e-6)
        for mine, right in zip(gradients, back(d_out), strict=True):
            np.testing.assert_allclose(mine, right, atol=2e-5)


def test_a_window_counts_positions_and_fused_kernels_refuse_what_they_lack():
    arrays = arrays_of_rows()
    rng = np.random.default_rng(1)
    q, k, v = (jnp.asarray(rng.normal(size=(3, SIZE, 2, HEAD)), jnp.float32) for _ in "qkv")
    call = AttentionCall(1.0, window=5, shared=True, implementation="xla")
    # row 1: its prefix of 7 tokens and its second answer of 4, apart
    path = np.r_[0:7, 13:17]
    positions = arrays.shared.positions[0].at[1, 13:17].set(jnp.arange(7, 11))
    shared = SharedKeys(arrays.shared.prefixes, (positions, positions))
    found = attention(
        q, k, v, call, AttentionArrays(arrays.columns, arrays.segments, shared=shared)
    )
    alone = AttentionArrays((jnp.arange(11), jnp.arange(11)))
    one = [x[1:2, path] for x in (q, k, v)]
    wanted = attention(*one, AttentionCall(1.0, window=5, implementation="xla"), alone)
    np.testing.assert_allclose(found[1, 13:17], wanted[0, 7:], atol=1e-6)
    gpu = Device("gpu", hopper=True)
    chosen = choose("attention", "bfloat16", (2, 64, 4, 64), gpu, call=CALL)
    assert chosen.name == "cudnn" and "shared" in chosen.why
    windowed = AttentionCall(1.0, window=5, shared=True)
    assert choose("attention", "bfloat16", (2, 64, 4, 64), gpu, call=windowed).name == "xla"
    for name in ("mosaic", "triton"):
        call = AttentionCall(1.0, shared=True, implementation=name)
        with pytest.raises(Exception, match="shared prefixes|GPU|Hopper"):
            attention(q, k, v, call, arrays)
