"""Logits of a chunk of tokens over a sharded vocabulary, and what a loss reads of them.

x [T, D] is whole along tp, w [V/tp, D]. Maximum, normalizer and target logit are combined over tp.
Rows beyond `vocab_size` are padding and take part in nothing. Numbers are fp32, or fp64 if x is.
"""

import jax
import jax.numpy as jnp

from mjax.kernels.loss.rows import Terms
from mjax.kernels.loss.token_functions import TokenScores
from mjax.sharding.collectives import Parallel


def wide(x: jax.Array) -> jnp.dtype:
    """The dtype of logits and of sums: fp32, or that of x if it is wider."""
    return jnp.promote_types(x.dtype, jnp.float32)


def wide_logits(x: jax.Array, w: jax.Array, bias: jax.Array | None) -> jax.Array:
    """fp32 logits [T, V/tp] as the weights make them."""
    z = jnp.einsum("td,vd->tv", x, w, preferred_element_type=wide(x))
    return z if bias is None else z + bias.astype(wide(x))


def logits_of_chunk(
    x: jax.Array, w: jax.Array, bias: jax.Array | None, terms: Terms, parallel: Parallel
) -> tuple[jax.Array, jax.Array | float, jax.Array | None]:
    """(fp32 logits [T, V/tp], -inf at padding; their slope by `wide_logits`; which are no padding).

    The last is None if there is no padding.
    """
    rows, softcap = w.shape[0], terms.softcap
    z = wide_logits(x, w, bias)
    if softcap is not None:
        z = softcap * jnp.tanh(z / softcap)
    slope = 1.0 if softcap is None else 1.0 - jnp.square(z / softcap)
    if terms.temperature != 1:
        z, slope = z / terms.temperature, slope / terms.temperature
    real = None
    if parallel.tp * rows > terms.vocab_size:  # padding
        real = parallel.index("tp") * rows + jnp.arange(rows) < terms.vocab_size
        z = jnp.where(real, z, -jnp.inf)
    return z, slope, real


def largest_logits(z: jax.Array, parallel: Parallel) -> jax.Array:
    """The largest logit of each token, [T]."""
    return parallel.pmax(jnp.maximum(z.max(-1), -1e30), "tp")  # a shard may be all padding


def exponentials(z: jax.Array, parallel: Parallel) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(the largest logits [T], e to the logits less these, its sums over the vocabulary [T])."""
    top = largest_logits(z, parallel)
    weights = jnp.exp(z - top[:, None])
    return top, weights, parallel.psum(weights.sum(-1), "tp")


def local_rows(labels: jax.Array, rows: int, parallel: Parallel) -> jax.Array:
    """The places of labels among this device's rows of the vocabulary, [T]; maybe outside."""
    return labels - parallel.index("tp") * rows


def logits_of_labels(
    z: jax.Array, labels: jax.Array, parallel: Parallel
) -> tuple[jax.Array, jax.Array]:
    """(the logit of each label, its place among this device's rows of the vocabulary).

    Labels are [T] or, K of each token, [T, K], and so are the results.
    """
    rows = z.shape[1]
    place = local_rows(labels, rows, parallel)
    here = (place >= 0) & (place < rows)
    each = jnp.clip(place, 0, rows - 1).reshape(len(z), -1)
    target = jnp.take_along_axis(z, each, 1).reshape(labels.shape)
    return parallel.psum(jnp.where(here, target, 0.0), "tp"), place


def score_labels(
    z: jax.Array,
    real: jax.Array | None,
    labels: jax.Array,
    parallel: Parallel,
    *,
    entropy: bool,
) -> tuple[TokenScores, jax.Array]:
    """(the scores of labels int32 [T] or [T, K], the logarithm of each token's normalizer [T])."""
    top, weights, total = exponentials(z, parallel)
    log_z = top + jnp.log(total)
    targets = logits_of_labels(z, labels, parallel)[0]
    log_p = targets - (log_z if labels.ndim == 1 else log_z[:, None])
    if not entropy:
        return TokenScores(log_p), log_z
    mean = parallel.psum((weights * finite_logits(z, real)).sum(-1), "tp") / total
    return TokenScores(log_p, log_z - mean), log_z


def gradient_of_scores(
    z: jax.Array,
    real: jax.Array | None,
    labels: jax.Array,
    parallel: Parallel,
    log_z: jax.Array,
    entropy: jax.Array | None,
    slopes: TokenScores,
) -> jax.Array:
    """[T, V/tp]: the derivative by the logits of the sum of slopes * scores.

    `log_z` and `entropy` are results of `score_labels`. The softmax is computed from them alone.
    """
    probabilities = jnp.exp(z - log_z[:, None])
    place = local_rows(labels, z.shape[1], parallel)
    if labels.ndim == 1:
        hit = jnp.arange(z.shape[1])[None, :] == place[:, None]
        d_z = (hit - probabilities) * slopes.log_p[:, None]
    else:
        place = jnp.where(place < 0, z.shape[1], place)  # a negative index would count from the end
        d_z = -probabilities * slopes.log_p.sum(1, keepdims=True)
        d_z = d_z.at[jnp.arange(len(z))[:, None], place].add(slopes.log_p, mode="drop")
    if slopes.entropy is None:
        return d_z
    apart = finite_logits(z, real) - (log_z - entropy)[:, None]
    return d_z - probabilities * apart * slopes.entropy[:, None]


def finite_logits(z: jax.Array, real: jax.Array | None) -> jax.Array:
    """Logits with 0 at padding."""
    return z if real is None else jnp.where(real, z, 0.0)


def below_largest(logits: jax.Array) -> jax.Array:
    """Logits [T, V] less the largest of each token."""
    return logits - logits.max(-1, keepdims=True)


def log_prob_of(differences: jax.Array, token: jax.Array) -> jax.Array:
    """Log-probabilities fp32 [T] of tokens, from differences to the largest logit of each."""
    chosen = jnp.take_along_axis(differences, token[:, None], 1)[:, 0]
    return chosen - jnp.log(jnp.exp(differences).sum(-1))
