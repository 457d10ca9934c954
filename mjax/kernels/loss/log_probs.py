"""Log-probabilities of given tokens, a chunk of logits at a time in both directions.

The forward pass keeps the normalizer of each token, and nothing of the size of logits. The backward
makes a chunk's logits anew and needs no further sums over the vocabulary. On request the forward
pass keeps the gradient of logits instead, and makes them once, where one chunk of our kernel holds
all tokens. Losses over sequences (of pairs, of groups of samples) start from here;
`cross_entropy.py` is for losses of tokens alone.
"""

import functools
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mjax.kernels.loss import rows as loss_rows
from mjax.kernels.loss.cross_entropy import (
    chunk_size,
    cut_of,
    rows_by_parts,
    scaled_rows,
    token_chunks,
)
from mjax.kernels.loss.logits import (
    exponentials,
    gradient_of_scores,
    logits_of_chunk,
    score_labels,
    wide,
)
from mjax.kernels.loss.rows import Terms
from mjax.kernels.loss.token_functions import TokenScores
from mjax.sharding.collectives import Parallel

_ELEMENTS = 5 * 2**26  # of a chunk's fp32 logits in the forward pass: 1.3 GB
_BACKWARD_ELEMENTS = 2**28  # in the backward, which holds the fp32 gradient of w, too


def token_scores(
    x: jax.Array,
    w: jax.Array,
    labels: jax.Array,
    *,
    terms: Terms,
    parallel: Parallel,
    chunk: int | None = None,
    bias: jax.Array | None = None,
    entropy: bool = False,
    keep: bool = False,
) -> TokenScores:
    """The log-probability of each label, fp32 [T], and with `entropy` each token's entropy.

    x [T, D] whole along tp, w [V/tp, D], `bias` [V/tp] or None. labels int32 [T] < vocab_size, or
    [T, K]: K labels of each token, whose log-probabilities are [T, K]. `chunk` tokens at a time
    (None: by memory). `terms`: only softcap and temperature. Results are equal on all tp devices,
    and differentiable by x, w and bias, as often as they are used. `keep`: a gradient [T, V] of the
    logits, in x's dtype, where our kernel runs and holds all tokens; it allows no `vmap`.
    """
    terms = replace(terms, label_smoothing=0.0, z_loss=0.0)
    found = _scores(x, w, bias, labels, terms, parallel, chunk, entropy, keep)
    return TokenScores(*found)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6, 7, 8))
def _scores(x, w, bias, labels, terms, parallel, chunk, entropy, keep):
    return _scores_by_chunks(x, w, bias, labels, terms, parallel, chunk, entropy)[0]


def _scores_by_chunks(x, w, bias, labels, terms, parallel, chunk, entropy):
    """((log-probabilities, entropies or None), logarithms of the normalizers)."""
    size = chunk_size(len(x), w.shape[0], chunk, _ELEMENTS)

    def body(_, cut):
        z, _, real = logits_of_chunk(cut[0], w, bias, terms, parallel)
        return None, score_labels(z, real, cut[1], parallel, entropy=entropy)

    _, found = lax.scan(body, None, (token_chunks(x, size), token_chunks(labels, size)))
    return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:])[: len(x)], found)


class _Normalizers(NamedTuple):
    """Arrays [T] from which the backward makes the logits of a chunk, and their gradient, anew."""

    labels: jax.Array
    log_z: jax.Array
    entropies: jax.Array | None


def _scores_fwd(x, w, bias, labels, terms, parallel, chunk, entropy, keep):
    size = len(x), w.shape[0]
    is_plain = labels.ndim == 1 and not entropy and x.dtype != jnp.float16
    if keep and is_plain and loss_rows.supports_rows(*size, parallel.tp, chunk):
        cut = cut_of(*size, chunk, fused=True)
        if cut.chunk >= len(x):
            given = (token_chunks(a, cut.chunk)[0] for a in (x, labels))
            mask = jnp.ones(cut.chunk, jnp.float32)
            losses, d_z = rows_by_parts(*given, mask, w, bias, terms, cut.part)
            return TokenScores(-losses[: len(x)]), (x, w, bias, d_z)
    scores, log_z = _scores_by_chunks(x, w, bias, labels, terms, parallel, chunk, entropy)
    return scores, (x, w, bias, _Normalizers(labels, log_z, scores.entropy))


def _scores_bwd(terms, parallel, chunk, entropy, keep, saved, slopes):
    x, w, bias, kept = saved
    # A score is one value on all tp devices: its cotangents there add up.
    slopes = jax.tree.map(lambda g: parallel.psum(g, "tp"), slopes)
    if isinstance(kept, _Normalizers):
        return _gradients_by_chunks(x, w, bias, kept, slopes, terms, parallel, chunk)
    factors = token_chunks(-slopes.log_p / terms.temperature, len(kept))[0]
    sums = wide(x)
    d_x = scaled_rows(jnp.einsum("tv,vd->td", kept, w), factors)[: len(x)]
    rows = scaled_rows(token_chunks(x, len(kept))[0], factors)
    d_w = jnp.einsum("tv,td->vd", kept, rows, preferred_element_type=sums).astype(w.dtype)
    if bias is None:
        return d_x, d_w, None, None
    return d_x, d_w, scaled_rows(kept, factors).sum(0, dtype=sums).astype(bias.dtype), None


def _gradients_by_chunks(x, w, bias, normalizers, slopes, terms, parallel, chunk):
    """The gradients by x, w and bias, and None, from logits that are made anew."""
    size = chunk_size(len(x), w.shape[0], chunk, _BACKWARD_ELEMENTS)
    sums = wide(x)

    def body(carry, cut):
        d_w, d_bias = carry
        x, (labels, log_z, entropies), slopes = cut
        z, slope, real = logits_of_chunk(x, w, bias, terms, parallel)
        d_z = gradient_of_scores(z, real, labels, parallel, log_z, entropies, slopes) * slope
        d_z = d_z.astype(x.dtype)
        if bias is not None:
            d_bias = d_bias + d_z.sum(0, dtype=sums)
        d_w = d_w + jnp.einsum("tv,td->vd", d_z, x, preferred_element_type=sums)
        return (d_w, d_bias), jnp.einsum("tv,vd->td", d_z, w)

    d_bias = None if bias is None else jnp.zeros(bias.shape, sums)
    start = jnp.zeros(w.shape, sums), d_bias
    tokens = jax.tree.map(lambda a: token_chunks(a, size), (x, normalizers, slopes))
    (d_w, d_bias), d_x = lax.scan(body, start, tokens)
    d_bias = None if bias is None else d_bias.astype(bias.dtype)
    return d_x.reshape(-1, x.shape[1])[: len(x)], d_w.astype(w.dtype), d_bias, None


_scores.defvjp(_scores_fwd, _scores_bwd)


class TopLogProbs(NamedTuple):
    """The likeliest tokens, int32 [T, K], and their log-probabilities, fp32 [T, K], in order."""

    ids: jax.Array
    log_p: jax.Array


def top_log_probs(
    x: jax.Array,
    w: jax.Array,
    *,
    most: int,
    terms: Terms,
    parallel: Parallel,
    chunk: int | None = None,
    bias: jax.Array | None = None,
) -> TopLogProbs:
    """The `most` likeliest tokens of each place; arguments as for `token_scores`.

    Among equal ones it is the first of the vocabulary. Results are equal on all tp devices, and not
    differentiable.
    """
    size = chunk_size(len(x), w.shape[0], chunk, _ELEMENTS)

    def body(_, x):
        z, _, _ = logits_of_chunk(x, w, bias, terms, parallel)
        top, _, total = exponentials(z, parallel)
        best, ids = lax.top_k(z, min(most, w.shape[0]))
        ids = ids + parallel.index("tp") * w.shape[0]
        best, ids = (parallel.all_gather(a, "tp", 1) for a in (best, ids))
        best, places = lax.top_k(best, most)
        log_p = best - (top + jnp.log(total))[:, None]
        return None, TopLogProbs(jnp.take_along_axis(ids, places, 1), log_p)

    _, found = lax.scan(body, None, token_chunks(lax.stop_gradient(x), size))
    return jax.tree.map(lambda a: a.reshape(-1, most)[: len(x)], found)


def sequence_sums(
    values: jax.Array,
    segments: jax.Array | None,
    *,
    parallel: Parallel,
    most: int | None = None,
) -> jax.Array:
    """Sums of values [B, S/cp] over the tokens of each document, [B, N], in the dtype of values.

    - segments: int32 [B, S/cp], the number of each token's document in its row, 0 <= number < N;
      None for rows of one document, and then N is 1.
    - most: N, a bound on those numbers; None is the length of a whole row plus 1, which always is.
    - Values that shall not count (padding, prompts) must be 0.

    A document may lie on several cp devices. Sums are equal on all of them, so a loss made of them
    counts 1/cp on each device (share convention), as does one that all tp devices compute.
    """
    if segments is None:
        return parallel.psum(values.sum(1, keepdims=True), "cp")
    count = values.shape[1] * parallel.cp + 1 if most is None else most

    def of_row(values: jax.Array, segments: jax.Array) -> jax.Array:
        return jax.ops.segment_sum(values, segments, count)

    return parallel.psum(jax.vmap(of_row)(values, segments), "cp")


def of_each_token(sums: jax.Array, segments: jax.Array | None, columns: int) -> jax.Array:
    """The entry of sums [B, N] for the document of each token, [B, columns]."""
    if segments is None:
        return jnp.broadcast_to(sums, (len(sums), columns))
    return jnp.take_along_axis(sums, segments, 1)
