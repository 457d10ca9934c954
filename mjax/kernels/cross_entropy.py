"""Chunked, vocabulary-parallel linear + softmax cross-entropy: the logits are never whole.

A scan over chunks of tokens makes each chunk's fp32 logits, its loss, and both gradients at once:
three matmuls in all, nothing recomputed, nothing kept but d_x and the fp32 d_w. Each device holds
V/tp rows of `w`; maximum, normaliser and target logit are combined over tp. Rows beyond
`vocab_size` are padding and take part in nothing. The returned sum is equal on all tp devices;
d_x is this device's vocabulary part of the gradient, which the transpose of the sequence gather
sums (share convention, DESIGN section 3). Follows Cut Cross-Entropy (arXiv 2411.09009) and Liger.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from mjax.sharding.collectives import Parallel

_CHUNK_ELEMENTS = 5 * 2**26  # default chunk: about 1.3 GB of fp32 logits on each device
_TILE = 256  # rows of a matmul's tile, or of two that share an operand


@dataclass(frozen=True)
class Terms:
    """What the loss of a token is made of, besides -log p(label).

    `softcap` c maps logits z to c * tanh(z / c). `label_smoothing` e mixes in e times the mean of
    -log p over the vocabulary (Szegedy et al., arXiv 1512.00567, as torch defines it). `z_loss`
    adds that times log(sum exp z)^2 (PaLM, arXiv 2204.02311).
    """

    vocab_size: int
    softcap: float | None = None
    label_smoothing: float = 0.0
    z_loss: float = 0.0


def cross_entropy(
    x: jax.Array,
    w: jax.Array,
    labels: jax.Array,
    mask: jax.Array,
    *,
    terms: Terms,
    parallel: Parallel,
    chunk: int | None = None,
) -> jax.Array:
    """Sum over tokens of mask * loss, fp32 scalar.

    x [T, D] whole along tp, w [V/tp, D], labels int32 [T] < vocab_size, mask fp32 [T]; `chunk`
    tokens at a time (None: by memory).
    """
    return _loss(*_cut(x, w, labels, mask, chunk), terms, parallel)


def token_losses(
    x: jax.Array,
    w: jax.Array,
    labels: jax.Array,
    *,
    terms: Terms,
    parallel: Parallel,
    chunk: int | None = None,
) -> jax.Array:
    """The loss of each token, fp32 [T], for losses that are no plain sum (DPO, perplexity).

    Arguments as for `cross_entropy`. Its backward makes the logits of a chunk again: four matmuls.
    """
    tokens = labels.size
    x, w, labels, ones = _cut(x, w, labels, jnp.ones(tokens, jnp.float32), chunk)

    @jax.checkpoint
    def part(xs):
        return _chunk(xs[0], w, *xs[1:], terms, parallel)[0]

    return jax.lax.map(part, (x, labels, ones)).reshape(-1)[:tokens]


def chunk_size(tokens: int, rows: int, chunk: int | None = None) -> int:
    """Tokens of a chunk for `rows` of the vocabulary, at most `chunk` or by memory: whole tiles, as
    little padding as can be (7 chunks of 5376 tokens do the work of 37632 for 32768)."""
    most = chunk or max(_TILE, _CHUNK_ELEMENTS // rows)
    fewest, tile = -(-tokens // most), min(_TILE, most)
    size = lambda parts: -(-tokens // (parts * tile)) * tile  # noqa: E731
    parts = min(range(fewest, 2 * fewest), key=lambda n: n * size(n))
    return min(tokens, size(parts))


def _cut(x, w, labels, mask, chunk):
    """x, labels and mask padded and cut into chunks of tokens; w as it is."""
    t = x.shape[0]
    chunk = chunk_size(t, w.shape[0], chunk)
    pad = -t % chunk

    def cut(a):
        a = jnp.pad(a, ((0, pad),) + ((0, 0),) * (a.ndim - 1))
        return a.reshape(-1, chunk, *a.shape[1:])

    return cut(x), w, cut(labels), cut(mask)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _loss(x, w, labels, mask, terms, parallel):
    def body(total, part):
        return total + _chunk(part[0], w, *part[1:], terms, parallel)[0].sum(), None

    return jax.lax.scan(body, jnp.float32(0), (x, labels, mask))[0]


def _loss_fwd(x, w, labels, mask, terms, parallel):
    def body(carry, part):
        total, d_w = carry
        losses, d_z = _chunk(part[0], w, *part[1:], terms, parallel)
        d_z = d_z.astype(x.dtype)
        d_x = jnp.einsum("tv,vd->td", d_z, w)
        d_w = d_w + jnp.einsum("tv,td->vd", d_z, part[0], preferred_element_type=jnp.float32)
        return (total + losses.sum(), d_w), d_x

    start = (jnp.float32(0), jnp.zeros(w.shape, jnp.float32))
    (total, d_w), d_x = jax.lax.scan(body, start, (x, labels, mask))
    return total, (d_x, d_w.astype(w.dtype))


def _loss_bwd(terms, parallel, saved, g):
    g = parallel.psum(g, "tp")  # the sum is one value: its cotangents on the tp devices add up
    d_x, d_w = (a * g.astype(a.dtype) for a in saved)
    return d_x, d_w, None, None


_loss.defvjp(_loss_fwd, _loss_bwd)


def _chunk(x, w, labels, mask, terms, parallel):
    """(masked losses [T], their d / d logits) of a chunk, this device's rows of the vocabulary."""
    rows, softcap, smooth = w.shape[0], terms.softcap, terms.label_smoothing
    first = parallel.index("tp") * rows
    z = jnp.einsum("td,vd->tv", x, w, preferred_element_type=jnp.float32)
    if softcap is not None:
        z = softcap * jnp.tanh(z / softcap)
    slope = 1.0 if softcap is None else 1.0 - jnp.square(z / softcap)
    real = None
    if parallel.tp * rows > terms.vocab_size:  # padding
        real = first + jnp.arange(rows) < terms.vocab_size
        z = jnp.where(real, z, -jnp.inf)
    top = parallel.pmax(jnp.maximum(z.max(-1), -1e30), "tp")  # a shard may be all padding
    weights = jnp.exp(z - top[:, None])
    total = parallel.psum(weights.sum(-1), "tp")
    place = labels - first
    here = (place >= 0) & (place < rows)
    target = jnp.take_along_axis(z, jnp.clip(place, 0, rows - 1)[:, None], 1)[:, 0]
    target = parallel.psum(jnp.where(here, target, 0.0), "tp")
    log_z = top + jnp.log(total)
    losses, scale = log_z - (1 - smooth) * target, 1 / total
    if terms.z_loss:
        losses = losses + terms.z_loss * jnp.square(log_z)
        scale = scale * (1 + 2 * terms.z_loss * log_z)
    hit = jnp.arange(rows)[None, :] == place[:, None]
    d_z = weights * scale[:, None] - (1 - smooth) * hit
    if smooth:
        mean = z if real is None else jnp.where(real, z, 0.0)
        mean = parallel.psum(mean.sum(-1), "tp") / terms.vocab_size
        losses = losses - smooth * mean
        d_z = d_z - smooth / terms.vocab_size * (1 if real is None else real)
    return losses * mask, d_z * slope * mask[:, None]


def reference(x, w, labels, mask, terms):
    """The same loss with whole logits, for tests."""
    z = jnp.einsum("td,vd->tv", x, w, preferred_element_type=jnp.float32)[:, : terms.vocab_size]
    if terms.softcap is not None:
        z = terms.softcap * jnp.tanh(z / terms.softcap)
    log_z = jax.nn.logsumexp(z, -1)
    target = jnp.take_along_axis(z, labels[:, None], 1)[:, 0]
    e = terms.label_smoothing
    losses = log_z - (1 - e) * target - e * z.mean(-1) + terms.z_loss * jnp.square(log_z)
    return (losses * mask).sum()
