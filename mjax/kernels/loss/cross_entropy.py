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

A token function (`token_functions.py`) may take the place of -log p(label). Its slope by log p is a
factor on a row of the logits' gradient. Our kernel knows no function. So the slope then scales rows
of x and of d_x instead.
"""

import functools
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mjax.errors import UserError
from mjax.kernels.loss import rows as loss_rows
from mjax.kernels.loss.logits import (
    exponentials,
    gradient_of_scores,
    largest_logits,
    logits_of_chunk,
    logits_of_labels,
    score_labels,
    wide,
    wide_logits,
)
from mjax.kernels.loss.rows import Terms
from mjax.kernels.loss.token_functions import (
    Fields,
    TokenFunction,
    TokenScores,
    apply_function,
    name_of,
    negative_log_prob,
    reads_entropy,
)
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


class Cut(NamedTuple):
    """Tokens, or chunks of them: x [T, D]; the other arrays, those of `fields` too, are [T]."""

    x: jax.Array
    labels: jax.Array
    mask: jax.Array
    fields: Fields


@dataclass(frozen=True)
class Pass:
    """The static choices of a loss; `part` as in `ChunkSizes`, the rest as in `token_sums`."""

    terms: Terms
    parallel: Parallel
    part: int | None
    few: bool
    function: TokenFunction | None


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
    more = {"terms": terms, "parallel": parallel, "chunk": chunk, "bias": bias, "few": few}
    return token_sums(x, w, labels, mask, **more)["loss"]


def token_sums(
    x: jax.Array,
    w: jax.Array,
    labels: jax.Array,
    mask: jax.Array,
    function: TokenFunction | None = None,
    fields: Fields | None = None,
    *,
    terms: Terms,
    parallel: Parallel,
    chunk: int | None = None,
    bias: jax.Array | None = None,
    few: bool = False,
) -> dict[str, jax.Array]:
    """Sums over tokens of mask * a function of log p(label): "loss" and statistics, fp32 scalars.

    - function: None is -log p(label) with all of `terms`. Others allow no smoothing and no z-loss.
    - fields: what the function reads of each token, [T] each.
    - Other arguments are those of `cross_entropy`.

    The gradient by x, w and bias is that of "loss"; fields and statistics have none. A token whose
    mask is 0 adds exactly 0, whatever its fields hold.
    """
    if function is None and terms.temperature != 1:
        function = negative_log_prob
    if function is not None and (terms.label_smoothing or terms.z_loss):
        raise UserError(
            f"the token function {name_of(function)} replaces the loss that train.label_smoothing "
            "and train.z_loss are terms of; set both to 0"
        )
    tokens = Cut(x, labels, mask, fields or {})
    if few:
        tokens = _counting_first(tokens)
        chunk = min(chunk or _FEW, _FEW)
    size = len(x), w.shape[0]
    unknown = None if function is None else unknown_to_kernel(function, x.dtype)
    by_kernel = loss_rows.supports_rows(*size, parallel.tp, chunk, unknown=unknown)
    cut = cut_of(*size, chunk, fused=by_kernel)
    tokens = jax.tree.map(lambda a: token_chunks(a, cut.chunk), tokens)
    return _sums(tokens, w, bias, Pass(terms, parallel, cut.part, few, function))


def unknown_to_kernel(function: TokenFunction, dtype: jnp.dtype) -> str | None:
    """Returns why our kernel cannot run with a function, or None."""
    if reads_entropy(function):
        return f"the token function {name_of(function)} reads the entropy"
    if dtype == jnp.float16:
        return f"in fp16 the slopes of {name_of(function)} would be rounded with x"
    return None


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
    tokens = Cut(x, labels, mask, {})
    if few:
        tokens = _counting_first(tokens)
        chunk = min(chunk or _FEW, _FEW)
    size = chunk_size(labels.size, w.shape[0], chunk)
    tokens = jax.tree.map(lambda a: token_chunks(a, size), tokens)

    def body(total, cut):
        z, _, _ = logits_of_chunk(cut.x, w, bias, terms, parallel)
        top = largest_logits(z, parallel)
        hits = logits_of_labels(z, cut.labels, parallel)[0] >= top
        return total + (hits * cut.mask).sum(), None

    total, _ = _scan_token_chunks(body, jnp.float32(0), tokens, few)
    return jax.lax.stop_gradient(total)


def _counting_first(tokens):
    """The tokens in another order: those whose mask is not zero come first."""
    order = jnp.argsort(tokens.mask == 0)
    return jax.tree.map(lambda a: jnp.take(a, order, 0, unique_indices=True, mode="clip"), tokens)


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


def token_chunks(a, chunk):
    """[T, ...] padded and cut into chunks of tokens."""
    a = jnp.pad(a, ((0, -len(a) % chunk),) + ((0, 0),) * (a.ndim - 1))
    return a.reshape(-1, chunk, *a.shape[1:])


def _scan_token_chunks(body, start, chunks, few):
    """`lax.scan` over chunks of a `Cut`; `few`: zeros for those after the last that counts."""
    if not few:
        return lax.scan(body, start, chunks)

    def step(i, state):
        carry, outputs = state
        carry, output = body(carry, jax.tree.map(lambda a: a[i], chunks))
        return carry, jax.tree.map(lambda all, one: all.at[i].set(one), outputs, output)

    shapes = jax.eval_shape(lambda: lax.scan(body, start, chunks)[1])
    outputs = jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)
    counting = (chunks.mask != 0).any(1).sum()
    return lax.fori_loop(0, counting, step, (start, outputs))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _sums(tokens, w, bias, how):
    def body(totals, chunk):
        return _add_sums(totals, _chunk(chunk, w, bias, how)[0]), None

    return _scan_token_chunks(body, _no_sums(tokens, how), tokens, how.few)[0]


def _sums_fwd(tokens, w, bias, how):
    dtype, sums = tokens.x.dtype, wide(tokens.x)
    lift = _FP16_LIFT if dtype == jnp.float16 else 1.0
    tokens = tokens._replace(mask=tokens.mask * lift)

    def body(carry, chunk):
        totals, d_w, d_bias = carry
        if how.part:
            terms, d_z, slopes = _by_parts(chunk, w, bias, how)
        else:
            terms, d_z = _chunk(chunk, w, bias, how)
            d_z, slopes = d_z.astype(dtype), None
        x = scaled_rows(chunk.x, slopes)
        if bias is not None:
            d_bias = d_bias + scaled_rows(d_z, slopes).sum(0, dtype=sums)
        d_x = scaled_rows(jnp.einsum("tv,vd->td", d_z, w), slopes)
        d_w = d_w + jnp.einsum("tv,td->vd", d_z, x, preferred_element_type=sums)
        return (_add_sums(totals, terms), d_w, d_bias), d_x

    d_bias = None if bias is None else jnp.zeros(bias.shape, sums)
    start = (_no_sums(tokens, how), jnp.zeros(w.shape, sums), d_bias)
    (totals, d_w, d_bias), d_x = _scan_token_chunks(body, start, tokens, how.few)
    kept = jnp.float32 if w.dtype == jnp.float16 else w.dtype  # a sum over tokens may exceed 65504
    d_bias = None if bias is None else d_bias.astype(kept)
    totals = {name: total / lift for name, total in totals.items()}
    return totals, (d_x, d_w.astype(kept), d_bias)


def _sums_bwd(how, saved, g):
    # Each sum is one value: its cotangents on the tp devices add up.
    g = how.parallel.psum(g["loss"], "tp")
    if saved[0].dtype != jnp.float16:
        d_x, d_w, d_bias = jax.tree.map(lambda a: a * g.astype(a.dtype), saved)
    else:
        g = g / _FP16_LIFT  # with the loss scale it may exceed 65504, though the product does not
        scaled = jax.tree.map(lambda a: (a.astype(jnp.float32) * g).astype(jnp.float16), saved)
        d_x, d_w, d_bias = scaled
    return Cut(d_x, None, None, None), d_w, d_bias


_sums.defvjp(_sums_fwd, _sums_bwd)


def _no_sums(tokens, how):
    """A zero for the loss and each statistic."""
    zero = jnp.zeros((), wide(tokens.x))
    if how.function is None:
        return {"loss": zero}
    first = jax.tree.map(lambda a: a[0], tokens)
    scores = TokenScores(first.mask, first.mask)
    terms, _ = jax.eval_shape(
        lambda: apply_function(how.function, scores, first.fields, first.mask)
    )
    return dict.fromkeys(terms, zero)


def _add_sums(totals, terms):
    return {name: total + terms[name].sum() for name, total in totals.items()}


def scaled_rows(a: jax.Array, factors: jax.Array | None) -> jax.Array:
    """The rows of a [T, ...], each times its factor if there are any, in the dtype of a."""
    return a if factors is None else (a * factors[:, None]).astype(a.dtype)


def _by_parts(tokens, w, bias, how):
    """The result of `_chunk`, its gradient in the dtype of x, from logits of a part at a time.

    The last result is a factor [T] on rows of that gradient, or None: the slopes of a function.
    """
    mask, slopes = tokens.mask, None
    if how.function is not None:  # the gradient is softmax - one-hot, for any function
        mask = jnp.ones_like(mask)
    losses, d_z = rows_by_parts(tokens.x, tokens.labels, mask, w, bias, how.terms, how.part)
    found = {"loss": losses}
    if how.function is not None:
        scores = TokenScores(-losses)
        found, by_score = apply_function(how.function, scores, tokens.fields, tokens.mask)
        slopes = -by_score.log_p / how.terms.temperature
    return found, d_z, slopes


def rows_by_parts(
    x: jax.Array,
    labels: jax.Array,
    mask: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    terms: Terms,
    part: int,
) -> tuple[jax.Array, jax.Array]:
    """(mask * losses fp32 [T], their gradient by logits [T, V] in x's dtype), by our kernel.

    Logits are made for `part` tokens at a time, which divides T, and divided by the temperature;
    the gradient is by what that gives.
    """
    if terms.softcap is not None:
        terms = replace(terms, softcap=terms.softcap / terms.temperature)

    def body(d_z, cut):
        x, labels, mask, first = cut
        z = wide_logits(x, w, bias)
        if terms.temperature != 1:
            z = z / terms.temperature
        losses, d_z = loss_rows.rows(z, labels, mask, d_z, first, terms)
        return d_z, losses

    count = labels.size
    cut = [a.reshape(-1, part, *a.shape[1:]) for a in (x, labels, mask)]
    firsts = jnp.arange(0, count, part, dtype=jnp.int32)[:, None]
    d_z = lax.empty((count, w.shape[0]), x.dtype)  # each part writes its own rows
    d_z, losses = lax.scan(body, d_z, (*cut, firsts))
    return losses.reshape(-1), d_z


def _chunk(tokens, w, bias, how):
    """({name: terms of its sum [T]}, d loss / d logits) of a chunk, this device's vocabulary."""
    if how.function is not None:
        return _chunk_of_function(tokens, w, bias, how)
    (x, labels, mask, _), terms, parallel = tokens, how.terms, how.parallel
    rows, smooth = w.shape[0], terms.label_smoothing
    z, slope, real = logits_of_chunk(x, w, bias, terms, parallel)
    top, weights, total = exponentials(z, parallel)
    target, place = logits_of_labels(z, labels, parallel)
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
    return {"loss": losses * mask}, d_z * slope * mask[:, None]


def _chunk_of_function(tokens, w, bias, how):
    """`_chunk` with a token function."""
    parallel, function = how.parallel, how.function
    z, slope, real = logits_of_chunk(tokens.x, w, bias, how.terms, parallel)
    entropy = reads_entropy(function)
    scores, log_z = score_labels(z, real, tokens.labels, parallel, entropy=entropy)
    found, by_score = apply_function(function, scores, tokens.fields, tokens.mask)
    inputs = z, real, tokens.labels, parallel, log_z, scores.entropy, by_score
    return found, gradient_of_scores(*inputs) * slope


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
