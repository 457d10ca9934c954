"""Chunked, vocabulary-parallel linear + softmax cross-entropy: the logits are never whole.

A scan over chunks of tokens makes each chunk's fp32 logits, its loss, and both gradients at once:
three matmuls in all, nothing recomputed, nothing kept but d_x and the fp32 d_w. Each device holds
V/tp rows of `w`; maximum, normaliser and target logit are combined over tp. Rows beyond
`vocab_size` are padding and take part in nothing. The returned sum is equal on all tp devices;
d_x is this device's vocabulary part of the gradient, which the transpose of the sequence gather
sums (share convention, DESIGN section 3). Follows Cut Cross-Entropy (arXiv 2411.09009) and Liger.
"""

import functools

import jax
import jax.numpy as jnp

from mjax.sharding.collectives import Parallel

_CHUNK_ELEMENTS = 2**28  # default chunk: about 1 GB of fp32 logits on each device


def cross_entropy(
    x: jax.Array,
    w: jax.Array,
    labels: jax.Array,
    mask: jax.Array,
    *,
    vocab_size: int,
    parallel: Parallel,
    softcap: float | None = None,
    chunk: int | None = None,
) -> jax.Array:
    """Sum over tokens of mask * -log p(label), fp32 scalar.

    x [T, D] whole along tp, w [V/tp, D], labels int32 [T] < vocab_size, mask fp32 [T]; `softcap` c
    maps logits to c * tanh(logits / c); `chunk` tokens at a time (None: by memory).
    """
    t = x.shape[0]
    chunk = min(t, chunk or max(256, _CHUNK_ELEMENTS // w.shape[0]))
    pad = -t % chunk
    x, labels, mask = (
        jnp.pad(a, ((0, pad),) + ((0, 0),) * (a.ndim - 1)) for a in (x, labels, mask)
    )
    chunks = tuple(a.reshape(-1, chunk, *a.shape[1:]) for a in (x, labels, mask))
    return _loss(chunks[0], w, *chunks[1:], vocab_size, parallel, softcap)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _loss(x, w, labels, mask, vocab_size, parallel, softcap):
    def body(total, part):
        return total + _chunk(part[0], w, *part[1:], vocab_size, parallel, softcap)[0], None

    return jax.lax.scan(body, jnp.float32(0), (x, labels, mask))[0]


def _loss_fwd(x, w, labels, mask, vocab_size, parallel, softcap):
    def body(carry, part):
        total, d_w = carry
        nll, d_z = _chunk(part[0], w, *part[1:], vocab_size, parallel, softcap)
        d_z = d_z.astype(x.dtype)
        d_x = jnp.einsum("tv,vd->td", d_z, w)
        d_w = d_w + jnp.einsum("tv,td->vd", d_z, part[0], preferred_element_type=jnp.float32)
        return (total + nll, d_w), d_x

    start = (jnp.float32(0), jnp.zeros(w.shape, jnp.float32))
    (total, d_w), d_x = jax.lax.scan(body, start, (x, labels, mask))
    return total, (d_x, d_w.astype(w.dtype))


def _loss_bwd(vocab_size, parallel, softcap, saved, g):
    g = parallel.psum(g, "tp")  # the sum is one value: its cotangents on the tp devices add up
    d_x, d_w = (a * g.astype(a.dtype) for a in saved)
    return d_x, d_w, None, None


_loss.defvjp(_loss_fwd, _loss_bwd)


def _chunk(x, w, labels, mask, vocab_size, parallel, softcap):
    """(masked loss sum, d loss / d logits) of one chunk, this device's rows of the vocabulary."""
    rows = w.shape[0]
    first = parallel.index("tp") * rows
    z = jnp.einsum("td,vd->tv", x, w, preferred_element_type=jnp.float32)
    if softcap is not None:
        z = softcap * jnp.tanh(z / softcap)
    slope = 1.0 if softcap is None else 1.0 - jnp.square(z / softcap)
    real = first + jnp.arange(rows) < vocab_size
    z = jnp.where(real, z, -jnp.inf)
    top = parallel.pmax(jnp.maximum(z.max(-1), -1e30), "tp")  # a shard may be all padding
    weights = jnp.exp(z - top[:, None])
    total = parallel.psum(weights.sum(-1), "tp")
    place = labels - first
    here = (place >= 0) & (place < rows)
    target = jnp.take_along_axis(z, jnp.clip(place, 0, rows - 1)[:, None], 1)[:, 0]
    target = parallel.psum(jnp.where(here, target, 0.0), "tp")
    nll = (top + jnp.log(total) - target) * mask
    hit = jnp.arange(rows)[None, :] == place[:, None]
    d_z = (weights / total[:, None] - hit) * slope * mask[:, None]
    return nll.sum(), d_z


def reference(x, w, labels, mask, vocab_size, softcap=None):
    """The same loss with whole logits, for tests."""
    z = jnp.einsum("td,vd->tv", x, w, preferred_element_type=jnp.float32)[:, :vocab_size]
    if softcap is not None:
        z = softcap * jnp.tanh(z / softcap)
    nll = jax.nn.logsumexp(z, -1) - jnp.take_along_axis(z, labels[:, None], 1)[:, 0]
    return (nll * mask).sum()
