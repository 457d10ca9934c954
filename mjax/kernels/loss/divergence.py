"""Chunked, vocabulary-parallel divergence of a student's next-token distribution from a teacher's.

A scan over chunks of tokens makes the fp32 logits of both models, the losses and both gradients of
the student at once: nothing of the size of logits is kept. The teacher has no gradient. Each device
holds V/tp rows of both tables, which have the same vocabulary; sums are combined over tp.

With q the student's and p the teacher's softmax of logits / T, and m = beta p + (1 - beta) q:
D = beta KL(p || m) + (1 - beta) KL(q || m), the generalized Jensen-Shannon divergence of GKD
(arXiv 2306.13649); beta = 0 is KL(p || q) and beta = 1 is KL(q || p), without a factor.
"""

import functools
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mjax.kernels.loss.cross_entropy import chunk_size, token_chunks
from mjax.kernels.loss.logits import (
    exponentials,
    finite_logits,
    logits_of_chunk,
    logits_of_labels,
    wide,
)
from mjax.kernels.loss.rows import Terms
from mjax.sharding.collectives import Parallel

_LOGITS_OF_BOTH = 2**27  # fp32 logits of a chunk; some six arrays of this size are alive
_LEAST_REST = 1e-7  # of the probability that is left beside stored ones


@dataclass(frozen=True)
class Divergence:
    """The loss of a token: (1 - label_weight) T^2 D - label_weight log q(label at T = 1).

    beta: 0 <= beta <= 1, as in the module's formula.
    temperature: T > 0; T^2 keeps the size of gradients (arXiv 1503.02531).
    """

    beta: float = 0.0
    temperature: float = 1.0
    label_weight: float = 0.0


class LogitSource(NamedTuple):
    """The arrays that logits of T tokens are made from: x [T, D], w [V/tp, D], bias [V/tp]."""

    x: jax.Array
    w: jax.Array
    bias: jax.Array | None = None


class _How(NamedTuple):
    """The static choices of `divergence_sums`."""

    divergence: Divergence
    terms: Terms
    teacher_terms: Terms
    parallel: Parallel
    chunk: int | None


def divergence_sums(
    student: LogitSource,
    teacher: LogitSource,
    labels: jax.Array,
    mask: jax.Array,
    divergence: Divergence,
    *,
    terms: Terms,
    teacher_terms: Terms,
    parallel: Parallel,
    chunk: int | None = None,
) -> dict[str, jax.Array]:
    """Sums over tokens of mask * "loss", and of mask * "divergence" (D) and "nll", fp32 scalars.

    labels int32 [T], mask fp32 [T]; both x are whole along tp. `terms`: only vocab_size and softcap
    of each model. `chunk` tokens at a time (None: by memory). "loss" is differentiable by the
    student's arrays; the others move nothing.
    """
    terms, teacher_terms = (
        replace(each, temperature=divergence.temperature) for each in (terms, teacher_terms)
    )
    how = _How(divergence, terms, teacher_terms, parallel, chunk)
    return _divergences(student, teacher, labels, mask, how)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _divergences(student, teacher, labels, mask, how):
    return _divergences_fwd(student, teacher, labels, mask, how)[0]  # XLA drops the gradients


def _divergences_fwd(student, teacher, labels, mask, how):
    x, w, bias = student
    sums = wide(x)

    def body(carry, cut):
        totals, d_w, d_bias = carry
        found, d_z = _losses_of_chunk(*cut, student, teacher, how)
        if bias is not None:
            d_bias = d_bias + d_z.sum(0)
        d_z = d_z.astype(x.dtype)
        d_w = d_w + jnp.einsum("tv,td->vd", d_z, cut[0], preferred_element_type=sums)
        totals = jax.tree.map(jnp.add, totals, found)
        return (totals, d_w, d_bias), jnp.einsum("tv,vd->td", d_z, w)

    d_bias = None if bias is None else jnp.zeros(bias.shape, sums)
    start = _no_totals(student), jnp.zeros(w.shape, sums), d_bias
    size = chunk_size(labels.size, w.shape[0], how.chunk, _LOGITS_OF_BOTH)
    chunks = tuple(token_chunks(a, size) for a in (x, teacher.x, labels, mask))
    (totals, d_w, d_bias), d_x = lax.scan(body, start, chunks)
    d_x = d_x.reshape(-1, x.shape[1])[: len(x)]
    return totals, LogitSource(d_x, d_w, d_bias)


def _divergences_bwd(how, saved, g):
    # A sum is one value on all tp devices: its cotangents there add up.
    g = how.parallel.psum(g["loss"], "tp")
    return jax.tree.map(lambda a: (a * g).astype(saved.x.dtype), saved), None, None, None


_divergences.defvjp(_divergences_fwd, _divergences_bwd)


def _no_totals(student):
    return dict.fromkeys(("loss", "divergence", "nll"), jnp.zeros((), wide(student.x)))


def _losses_of_chunk(x, teacher_x, labels, mask, student, teacher, how):
    """(sums of a chunk by name, d loss / d student's logits [T, V/tp])."""
    divergence, parallel = how.divergence, how.parallel
    alpha, temperature = divergence.label_weight, divergence.temperature
    z, slope, real = logits_of_chunk(x, student.w, student.bias, how.terms, parallel)
    of_teacher = logits_of_chunk(teacher_x, teacher.w, teacher.bias, how.teacher_terms, parallel)
    found, d_u = _divergence(z, of_teacher[0], real, divergence.beta, parallel)
    nll, d_one = _label_loss(z * temperature, labels, parallel)
    losses = (1 - alpha) * temperature**2 * found + alpha * nll
    # `slope` is that of z, logits / T: by the logits at T = 1 it is T times that.
    d_z = ((1 - alpha) * temperature**2 * d_u + alpha * temperature * d_one) * slope
    d_z = jnp.where(mask[:, None] == 0, 0, d_z * mask[:, None])
    figures = {"loss": losses, "divergence": found, "nll": nll}
    return {name: jnp.where(mask == 0, 0, a * mask).sum() for name, a in figures.items()}, d_z


def _divergence(z, teacher_z, real, beta, parallel):
    """(D [T], its derivative by z [T, V/tp]) of scaled logits; `real` as of `logits_of_chunk`."""

    def log_softmax(z):
        top, weights, total = exponentials(z, parallel)
        log_p = finite_logits(z - (top + jnp.log(total))[:, None], real)
        return log_p, weights / total[:, None]

    def total(values):
        return parallel.psum(values.sum(-1), "tp")

    (log_q, q), (log_p, p) = log_softmax(z), log_softmax(teacher_z)
    log_m, of_student, of_teacher = _mixture(log_q, log_p, beta)
    from_mixture = total(q * (log_q - log_m))
    found = of_student * from_mixture + of_teacher * total(p * (log_p - log_m))
    if beta == 0:
        return found, q - p
    return found, of_student * q * (log_q - log_m - from_mixture[:, None])


def _mixture(log_q, log_p, beta):
    """(log m, the factors of KL(q || m) and KL(p || m) in D); at the ends of beta m is p or q."""
    if beta in (0, 1):
        return (log_p if beta else log_q), beta, 1 - beta
    return jnp.logaddexp(log_p + jnp.log(beta), log_q + jnp.log1p(-beta)), 1 - beta, beta


def _label_loss(z, labels, parallel):
    """(-log softmax(z)[label] [T], its derivative by z)."""
    top, weights, total = exponentials(z, parallel)
    target, place = logits_of_labels(z, labels, parallel)
    hit = jnp.arange(z.shape[1])[None, :] == place[:, None]
    return top + jnp.log(total) - target, weights / total[:, None] - hit


def stored_divergence(log_q: jax.Array, log_p: jax.Array, beta: float = 0.0) -> jax.Array:
    """D of distributions of which K probabilities are known, [T]: the rest is one more outcome.

    log_q, log_p fp32 [T, K]: the student's and the teacher's log-probabilities of the same tokens,
    whose probabilities sum to 1 at most. By the log sum inequality it is D at most, and D if no
    probability is left. Differentiable.
    """

    def with_rest(log_k):
        known = jnp.minimum(jnp.exp(log_k).sum(-1, keepdims=True), 1 - _LEAST_REST)
        return jnp.concatenate([log_k, jnp.log1p(-known)], -1)

    log_q, log_p = with_rest(log_q), with_rest(log_p)
    log_m, of_student, of_teacher = _mixture(log_q, log_p, beta)
    student, teacher = jnp.exp(log_q) * (log_q - log_m), jnp.exp(log_p) * (log_p - log_m)
    return (of_student * student + of_teacher * teacher).sum(-1)
