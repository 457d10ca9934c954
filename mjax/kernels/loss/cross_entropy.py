"""Chunked, vocabulary-parallel linear + softmax cross-entropy: the logits are never whole.

A scan over chunks of tokens makes each chunk's fp32 logits, its loss, and both gradients at once:
three matmuls in all, nothing recomputed, nothing kept but d_x and the fp32 d_w. Each device holds
V/tp rows of `w`; maximum, normalizer and target logit are combined over tp. Rows beyond
`vocab_size` are padding and take part in nothing. The returned sum is equal on all tp devices;
d_x is this device's vocabulary part of the gradient, which the transpose of the sequence gather
sums (share convention, DESIGN section 3). Follows Cut Cross-Entropy (arXiv 2411.09009) and Liger.

On a GPU that holds the whole vocabulary a kernel (`rows.py`) reads the logits once and writes
their gradient. Then the logits are of a part of a chunk only: what is whole is their gradient, in
x's dtype, and so the fp32 d_w is read and written for twice as many tokens at a time.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from mjax.kernels.loss import rows as loss_rows
from mjax.kernels.loss.rows import Terms
from mjax.sharding.collectives import Parallel

_CHUNK_ELEMENTS = 5 * 2**26  # default chunk: about 1.3 GB of fp32 logits on each device
_FUSED_ELEMENTS = 5 * 2**27  # with our kernel: about 1.3 GB of their bf16 gradient,
_PART_ELEMENTS = 7 * 2**24  # and at most 0.5 GB of fp32 logits
# The gradient of logits in fp16 is made this many times as large: less of it is then lost below
# 6e-8, and it stays far from 65504.
_FP16_LIFT = 2.0**10
_FEW = 2048  # tokens of a chunk where few of all count
_TILE = 256  # rows of a matmul's tile, or of two that share an operand


@dataclass(frozen=True)
class ChunkSizes:
    """Tokens of a chunk, and with our kernel of a part, which divides it."""

    chunk: int
    part: int | None = None

    def bytes(self, rows: int) -> int:
        """The bytes of fp32 logits and their bf16 gradient, for `rows` of the vocabulary."""
        return rows * (4 * (self.part or self.chunk) + 2 * self.chunk)


def cross_entropy(
    x: jax.Array,
    w: jax.Array,
    labels: jax.Array,
    mask: jax.Array,
    *,
    terms: Terms,
    parallel: Parallel,
    chunk: int | None = None,
    bias: jax.Array | None = None,
    few: bool = False,
) -> jax.Array:
    """Sum over tokens of mask * loss, fp32 scalar.

    x [T, D] whole along tp, w [V/tp, D], labels int32 [T] < vocab_size, mask fp32 [T]; `chunk`
    tokens at a time (None: by memory). `bias` [V/tp] is added to the logits. `few`: most tokens do
    not count. Chunks then hold those that do, and what is left costs nothing.
    """
    if few:
        x, labels, mask = _counting_first(x, labels, mask)
        chunk = min(chunk or _FEW, _FEW)
    size = x.shape[0], w.shape[0]
    cut = cut_of(*size, chunk, fused=loss_rows.supports_rows(*size, parallel.tp, chunk))
    x, labels, mask = (_token_chunks(a, cut.chunk) for a in (x, labels, mask))
    return _loss(x, w, bias, labels, mask, terms, parallel, cut.part, few)


def count_hits(
    x: jax.Array,
    w: jax.Array,
    labels: jax.Array,
    mask: jax.Array,
    *,
    terms: Terms,
    parallel: Parallel,
    chunk: int | None = None,
    bias: jax.Array | None = None,
    few: bool = False,
) -> jax.Array:
    """Sum of mask over tokens whose label has the largest logit, fp32 scalar, without gradient.

    Arguments as for `cross_entropy`. Rounding may let two tokens be largest at once.
    """
    if few:
        x, labels, mask = _counting_first(x, labels, mask)
        chunk = min(chunk or _FEW, _FEW)
    size = chunk_size(labels.size, w.shape[0], chunk)
    x, labels, mask = (_token_chunks(a, size) for a in (x, labels, mask))

    def body(total, cut):
        z, _, _ = _logits_of_chunk(cut[0], w, bias, terms, parallel)
        top = parallel.pmax(jnp.maximum(z.max(-1), -1e30), "tp")
        hits = _of_label(z, cut[1], parallel)[0] >= top
        return total + (hits * cut[2]).sum(), None

    total, _ = _scan_token_chunks(body, jnp.float32(0), (x, labels, mask), few)
    return jax.lax.stop_gradient(total)


def _counting_first(x, labels, mask):
    """The tokens in another order: those whose mask is not zero come first."""
    order = jnp.argsort(mask == 0)
    return (jnp.take(a, order, 0, unique_indices=True, mode="clip") for a in (x, labels, mask))


def cut_of(tokens: int, rows: int, chunk: int | None = None, *, fused: bool) -> ChunkSizes:
    """How tokens are cut for `rows` of the vocabulary, at most `chunk` at a time; `fused`: for our
    kernel."""
    if not fused:
        return ChunkSizes(chunk_size(tokens, rows, chunk))
    whole = chunk_size(tokens, rows, chunk, _FUSED_ELEMENTS)
    part = chunk_size(whole, rows, None, _PART_ELEMENTS)
    return ChunkSizes(-(-whole // part) * part, part)


def chunk_size(
    tokens: int, rows: int, chunk: int | None = None, elements: int = _CHUNK_ELEMENTS
) -> int:
    """Tokens of a chunk for `rows` of the vocabulary, at most `chunk` or by memory: whole tiles, as
    little padding as can be (7 chunks of 5376 tokens do the work of 37632 for 32768)."""
    most = chunk or max(_TILE, elements // rows)
    fewest, tile = -(-tokens // most), min(_TILE, most)

    def size(parts):
        return -(-tokens // (parts * tile)) * tile

    parts = min(range(fewest, 2 * fewest), key=lambda n: n * size(n))
    return min(tokens, size(parts))


def _token_chunks(a, chunk):
    """[T, ...] padded and cut into chunks of tokens."""
    a = jnp.pad(a, ((0, -len(a) % chunk),) + ((0, 0),) * (a.ndim - 1))
    return a.reshape(-1, chunk, *a.shape[1:])


def _scan_token_chunks(body, start, chunks, few):
    """`lax.scan` over chunks (x, labels, mask); `few`: zeros for those behind the last to count."""
    if not few:
        return lax.scan(body, start, chunks)

    def step(i, state):
        carry, outputs = state
        carry, output = body(carry, jax.tree.map(lambda a: a[i], chunks))
        return carry, jax.tree.map(lambda all, one: all.at[i].set(one), outputs, output)

    shapes = jax.eval_shape(lambda: lax.scan(body, start, chunks)[1])
    outputs = jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)
    counting = (chunks[2] != 0).any(1).sum()
    return lax.fori_loop(0, counting, step, (start, outputs))


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7, 8))
def _loss(x, w, bias, labels, mask, terms, parallel, part, few):
    def body(total, part):
        return total + _chunk(part[0], w, bias, *part[1:], terms, parallel)[0].sum(), None

    return _scan_token_chunks(body, jnp.float32(0), (x, labels, mask), few)[0]


def _loss_fwd(x, w, bias, labels, mask, terms, parallel, part, few):
    lift = _FP16_LIFT if x.dtype == jnp.float16 else 1.0
    mask = mask * lift

    def body(carry, chunk):
        total, d_w, d_bias = carry
        if part:
            losses, d_z = _by_parts(chunk[0], w, bias, *chunk[1:], terms, part)
        else:
            losses, d_z = _chunk(chunk[0], w, bias, *chunk[1:], terms, parallel)
            d_z = d_z.astype(x.dtype)
        if bias is not None:
            d_bias = d_bias + d_z.sum(0, dtype=jnp.float32)
        d_x = jnp.einsum("tv,vd->td", d_z, w)
        d_w = d_w + jnp.einsum("tv,td->vd", d_z, chunk[0], preferred_element_type=jnp.float32)
        return (total + losses.sum(), d_w, d_bias), d_x

    d_bias = None if bias is None else jnp.zeros(bias.shape, jnp.float32)
    start = (jnp.float32(0), jnp.zeros(w.shape, jnp.float32), d_bias)
    (total, d_w, d_bias), d_x = _scan_token_chunks(body, start, (x, labels, mask), few)
    kept = jnp.float32 if w.dtype == jnp.float16 else w.dtype  # a sum over tokens may exceed 65504
    d_bias = None if bias is None else d_bias.astype(kept)
    return total / lift, (d_x, d_w.astype(kept), d_bias)


def _loss_bwd(terms, parallel, part, few, saved, g):
    g = parallel.psum(g, "tp")  # the sum is one value: its cotangents on the tp devices add up
    if saved[0].dtype != jnp.float16:
        return *jax.tree.map(lambda a: a * g.astype(a.dtype), saved), None, None
    g = g / _FP16_LIFT  # with the loss scale it may exceed 65504, though the product does not
    scaled = jax.tree.map(lambda a: (a.astype(jnp.float32) * g).astype(jnp.float16), saved)
    return *scaled, None, None


_loss.defvjp(_loss_fwd, _loss_bwd)


def _by_parts(x, w, bias, labels, mask, terms, part):
    """The result of `_chunk`, its gradient in the dtype of x, from logits of a part at a time."""

    def body(d_z, cut):
        x, labels, mask, first = cut
        z = _wide_logits(x, w, bias)
        losses, d_z = loss_rows.rows(z, labels, mask, d_z, first, terms)
        return d_z, losses

    tokens = labels.size
    cut = [a.reshape(-1, part, *a.shape[1:]) for a in (x, labels, mask)]
    firsts = jnp.arange(0, tokens, part, dtype=jnp.int32)[:, None]
    d_z = lax.empty((tokens, w.shape[0]), x.dtype)  # each part writes its own rows
    d_z, losses = lax.scan(body, d_z, (*cut, firsts))
    return losses, d_z


def _wide_logits(x, w, bias):
    """fp32 logits [T, V/tp] as the weights make them."""
    z = jnp.einsum("td,vd->tv", x, w, preferred_element_type=jnp.float32)
    return z if bias is None else z + bias.astype(jnp.float32)


def _logits_of_chunk(x, w, bias, terms, parallel):
    """(fp32 logits [T, V/tp], -inf where padding is, their slope by the products, what is none)."""
    rows, softcap = w.shape[0], terms.softcap
    z = _wide_logits(x, w, bias)
    if softcap is not None:
        z = softcap * jnp.tanh(z / softcap)
    slope = 1.0 if softcap is None else 1.0 - jnp.square(z / softcap)
    real = None
    if parallel.tp * rows > terms.vocab_size:  # padding
        real = parallel.index("tp") * rows + jnp.arange(rows) < terms.vocab_size
        z = jnp.where(real, z, -jnp.inf)
    return z, slope, real


def _of_label(z, labels, parallel):
    """(the logit of each label [T], its place among this device's rows of the vocabulary)."""
    rows = z.shape[1]
    place = labels - parallel.index("tp") * rows
    here = (place >= 0) & (place < rows)
    target = jnp.take_along_axis(z, jnp.clip(place, 0, rows - 1)[:, None], 1)[:, 0]
    return parallel.psum(jnp.where(here, target, 0.0), "tp"), place


def _chunk(x, w, bias, labels, mask, terms, parallel):
    """(masked losses [T], their d / d logits) of a chunk, this device's rows of the vocabulary."""
    rows, smooth = w.shape[0], terms.label_smoothing
    z, slope, real = _logits_of_chunk(x, w, bias, terms, parallel)
    top = parallel.pmax(jnp.maximum(z.max(-1), -1e30), "tp")  # a shard may be all padding
    weights = jnp.exp(z - top[:, None])
    total = parallel.psum(weights.sum(-1), "tp")
    target, place = _of_label(z, labels, parallel)
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


def loss_reference(x, w, labels, mask, terms):
    """The same loss with whole logits, for tests."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    z = jnp.einsum("td,vd->tv", x, w, preferred_element_type=wide)[:, : terms.vocab_size]
    if terms.softcap is not None:
        z = terms.softcap * jnp.tanh(z / terms.softcap)
    log_z = jax.nn.logsumexp(z, -1)
    target = jnp.take_along_axis(z, labels[:, None], 1)[:, 0]
    e = terms.label_smoothing
    losses = log_z - (1 - e) * target - e * z.mean(-1) + terms.z_loss * jnp.square(log_z)
    return (losses * mask).sum()
