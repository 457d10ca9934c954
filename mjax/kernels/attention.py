"""Causal attention: one function, a chunked XLA reference, cuDNN's fused kernels and our own.

All differentiate. The cuDNN path calls JAX's private primitives under our own custom_vjp, so that
the output and log-sum-exp carry names (`attn_out`, `attn_lse`) which every remat policy but 'full'
keeps: attention never runs twice. It is the only file that touches that private module. Packed
documents reach cuDNN as offsets, windows as `sliding_window_length` (FlashAttention-2, arXiv
2307.08691; cuDNN frontend SDPA).

Context parallelism (`models/context_attention.py`) builds softmax over keys that come in blocks:
`block_forward` also returns the log-sum-exp, by which blocks merge exactly; `block_backward` takes
the merged output and log-sum-exp, and block gradients then add up.
"""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from mjax.errors import UserError
from mjax.kernels import mosaic_attention as mosaic

_QUERY_CHUNK = 1024  # the reference holds scores of this many queries at a time
_MASKED = -1e30


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    scale: float,
    columns: tuple[jax.Array, jax.Array],
    window: int | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    segments: tuple[jax.Array, jax.Array] | None = None,
    dropout: tuple | None = None,
    max_documents: int = 0,
    implementation: str = "auto",
) -> jax.Array:
    """q [B, S, N, H], k and v [B, T, K, H] with N a multiple of K -> [B, S, N, H] in q's dtype.

    `columns` (int32 [S], [T]) order queries and keys: a query sees keys of column <= its own and,
    with `window`, > its own - window. `segments` (int32 [B, S], [B, T]) must be equal too; in
    training they are contiguous documents, at most `max_documents` of them where that is > 0.
    `sinks` [N] are extra logits; `softcap` c maps scores to c * tanh(scores / c). `dropout` is
    (rate, key, rows [B], heads [N]). Softmax is fp32. Raises `UserError` where the asked-for
    implementation lacks a feature.
    """
    chosen = resolve(implementation, q, softcap, sinks, dropout)
    if chosen == "xla":
        return _reference(q, k, v, scale, columns, window, softcap, sinks, segments, dropout)
    require(chosen, q, softcap, sinks, dropout)
    if chosen == "mosaic":
        documents = None if segments is None or max_documents == 1 else segments[0]
        return mosaic.mosaic_attention(q, k, v, sinks, documents, scale, window, softcap)
    packing = None
    if segments is not None and max_documents != 1:
        if jax.__version_info__ < (0, 11) and k.shape[2] != q.shape[2]:
            raise UserError(
                f"jax {jax.__version__}: its cuDNN offsets are wrong for packed documents with "
                "grouped heads; use jax >= 0.11 (Python >= 3.12) or train.attention=xla"
            )
        packing = document_offsets(segments[0], max_documents or q.shape[1])
    return _cudnn(q, k, v, packing, scale, window)


def resolve(
    implementation: str,
    q: jax.Array,
    softcap: float | None,
    sinks: jax.Array | None,
    dropout: tuple | None,
) -> str:
    """THE rule of train.attention=auto: 'xla' on a CPU; 'mosaic' on Hopper in bf16 where cuDNN
    lacks what is asked for (soft-caps, sinks); else 'cudnn', for whole steps were measured equal.
    """
    if implementation != "auto":
        return implementation
    if jax.default_backend() == "cpu":
        return "xla"
    beyond_cudnn = softcap is not None or sinks is not None
    return "mosaic" if beyond_cudnn and mosaic.supports(q, dropout) else "cudnn"


def require(
    implementation: str,
    q: jax.Array,
    softcap: float | None,
    sinks: jax.Array | None,
    dropout: tuple | None,
) -> None:
    """Raise `UserError` where 'cudnn' or 'mosaic' lacks a feature, dtype or head size."""
    if implementation == "mosaic":
        return mosaic.require_mosaic(q, dropout)
    lacking = {
        "attn_logit_softcapping": softcap,
        "attention_sinks": sinks,
        "attention_dropout": dropout,
    }
    for name, value in lacking.items():
        if value is not None:
            raise UserError(f"model.{name}: cuDNN attention lacks it; set train.attention=xla")
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        raise UserError(
            f"precision.compute={q.dtype}: cuDNN attention needs bfloat16; "
            "set precision.compute=bfloat16 or train.attention=xla"
        )
    if q.shape[-1] % 8 or q.shape[-1] > 256:
        raise UserError(
            f"model.head_dim={q.shape[-1]}: cuDNN attention needs a multiple of 8 up to 256; "
            "set train.attention=xla"
        )


def document_offsets(segments: jax.Array, max_documents: int) -> tuple[jax.Array, jax.Array]:
    """Contiguous segment ids [B, S] -> cuDNN's (lengths [B, M], starts [B, M + 1]), -1 filled."""
    size = segments.shape[1]
    new = jnp.diff(segments, axis=1, prepend=segments[:, :1] - 1) != 0
    place = jnp.where(new, jnp.arange(size, dtype=jnp.int32), size)
    starts = jnp.sort(place, axis=1)[:, : max_documents + 1]
    starts = jnp.pad(starts, ((0, 0), (0, max_documents + 1 - starts.shape[1])), mode="edge")
    starts = starts.at[:, max_documents].set(size)
    lengths = jnp.where(starts[:, :-1] < size, jnp.diff(starts, axis=1), -1)
    return lengths.astype(jnp.int32), jnp.where(starts < size, starts, -1).astype(jnp.int32)


# ---- reference ---------------------------------------------------------------------------------


def _reference(q, k, v, scale, columns, window, softcap, sinks, segments, dropout):
    """Plain softmax attention, a chunk of queries at a time, recomputed in the backward."""
    size = q.shape[1]

    def block(q, column, segment):
        return _dense(
            q, k, v, scale, (column, columns[1]), window, softcap, sinks, segment, dropout
        )

    def segment_of(at, n):
        if segments is None:
            return None
        return jax.lax.dynamic_slice_in_dim(segments[0], at, n, 1), segments[1]

    if size <= _QUERY_CHUNK or size % _QUERY_CHUNK:
        return block(q, columns[0], segment_of(0, size))

    def chunk(at):
        take = functools.partial(jax.lax.dynamic_slice_in_dim, slice_size=_QUERY_CHUNK)
        part = take(q, at, axis=1), take(columns[0], at, axis=0), segment_of(at, _QUERY_CHUNK)
        return jax.checkpoint(block)(*part)

    out = jax.lax.map(chunk, jnp.arange(0, size, _QUERY_CHUNK))  # [chunks, B, C, N, H]
    return jnp.moveaxis(out, 0, 1).reshape(q.shape)


def _dense(q, k, v, scale, columns, window, softcap, sinks, segments, dropout):
    b, s, n, h = q.shape
    groups = n // k.shape[2]
    q_BSKGH = q.reshape(b, s, k.shape[2], groups, h)
    scores = jnp.einsum("bskgh,btkh->bkgst", q_BSKGH, k, preferred_element_type=jnp.float32)
    scores = scores * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    behind = columns[0][:, None] - columns[1][None, :]
    seen = behind >= 0 if window is None else (behind >= 0) & (behind < window)
    if segments is not None:
        seen = seen & (segments[0][:, :, None] == segments[1][:, None, :])[:, None, None]
    scores = jnp.where(seen, scores, _MASKED)
    if sinks is None:
        probs = jax.nn.softmax(scores, axis=-1)
    else:
        sink = sinks.astype(jnp.float32).reshape(1, k.shape[2], groups, 1, 1)
        top = jax.lax.stop_gradient(jnp.maximum(scores.max(-1, keepdims=True), sink))
        weights = jnp.exp(scores - top)
        probs = weights / (weights.sum(-1, keepdims=True) + jnp.exp(sink - top))
    if dropout is not None:
        rate, key, rows, heads = dropout
        keep = _keep(key, rate, rows, heads, columns[0], k.shape[1]).reshape(scores.shape)
        probs = jnp.where(keep, probs / (1 - rate), 0)
    return jnp.einsum("bkgst,btkh->bskgh", probs.astype(v.dtype), v).reshape(q.shape)


def _keep(key, rate, rows, heads, columns, size):
    """Dropout mask [B, N, S, T]: a function of the global (row, head, column) alone."""

    def one(row, head, column):
        cell = key
        for place in (row, head, column):
            cell = jax.random.fold_in(cell, place)
        return jax.random.bernoulli(cell, 1 - rate, (size,))

    over_columns = jax.vmap(one, (None, None, 0))
    return jax.vmap(jax.vmap(over_columns, (None, 0, None)), (0, None, None))(rows, heads, columns)


# ---- cuDNN -------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _cudnn(q, k, v, packing, scale, window):
    return _cudnn_fwd(q, k, v, packing, scale, window)[0]


def _cudnn_fwd(q, k, v, packing, scale, window):
    out, lse = _bind_forward(q, k, v, packing, scale, window, causal=True)
    out, lse = checkpoint_name(out, "attn_out"), checkpoint_name(lse, "attn_lse")
    return out, (q, k, v, packing, out, lse)


def _cudnn_bwd(scale, window, saved, d_out):
    return (*_bind_backward(*saved, d_out, scale, window, causal=True), None)


def _bind_forward(q, k, v, packing, scale, window, causal):
    import jax._src.cudnn.fused_attention_stablehlo as fused

    options, sides = _cudnn_arguments(q, packing, scale, window, causal)
    bind = fused._dot_product_attention_fwd_p_wrapper.bind
    return bind(q, k, v, *sides, **options, is_training=True)


def _bind_backward(q, k, v, packing, out, lse, d_out, scale, window, causal):
    import jax._src.cudnn.fused_attention_stablehlo as fused

    options, sides = _cudnn_arguments(q, packing, scale, window, causal)
    bind = fused._dot_product_attention_bwd_p_wrapper.bind
    return bind(q, k, v, *sides, lse, out, d_out, **options)[:3]


def _cudnn_arguments(q, packing, scale, window, causal):
    """(keyword parameters, the seven optional operands) of JAX's private fused-attention ops."""
    import jax._src.cudnn.fused_attention_stablehlo as fused

    unused = jnp.zeros(0, q.dtype)
    lengths, starts = (unused, unused) if packing is None else packing
    mask = fused.MaskType.CAUSAL if causal else fused.MaskType.NO_MASK
    options = dict(
        scale=scale,
        seed=0,
        dropout_rate=0.0,
        variadic_args=(False, False),
        mask_type=mask if packing is None else fused.MaskType.PADDING_CAUSAL,
        layout=fused.AttentionLayout.BTNH.value,
        sliding_window_length=window,
    )
    return options, (unused, lengths, lengths, starts, starts, unused, unused)


_cudnn.defvjp(_cudnn_fwd, _cudnn_bwd)


# ---- blocks ------------------------------------------------------------------------------------

Places = tuple[jax.Array, jax.Array | None]  # columns [B, S]; segments [B, S] or None


def block_forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    places: tuple[Places, Places] | None,
    *,
    scale: float,
    causal: bool,
    window: int | None,
    implementation: str,
) -> tuple[jax.Array, jax.Array]:
    """Attention of q [B, S, N, H] to one block of keys -> fp32 (out [B, S, N, H], lse [B, N, S]).

    The `places` of queries and keys make the mask on XLA, as `attention` describes; a query that
    sees no key of the block gets an lse of about -1e30. Fused kernels take none: all keys are seen,
    or those up to the query's own index (`causal`).
    """
    if implementation != "xla":
        assert places is None and window is None, "a fused block masks by index alone"
    if implementation == "mosaic":
        out, lse = mosaic.mosaic_forward(q, k, v, scale=scale, causal=causal)
        return out.astype(jnp.float32), lse
    if implementation == "cudnn":
        out, lse = _bind_forward(q, k, v, None, scale, None, causal)
        return out.astype(jnp.float32), lse

    def part(q, place):
        scores = _block_scores(q, k, scale, place, places[1], window)
        lse = jax.nn.logsumexp(scores, axis=-1)
        probs = jnp.exp(scores - lse[..., None]).astype(v.dtype)
        out = jnp.einsum("bkgst,btkh->bskgh", probs, v, preferred_element_type=jnp.float32)
        return out.reshape(q.shape), lse.reshape(lse.shape[0], q.shape[2], q.shape[1])

    out, lse = jax.lax.map(lambda xs: part(*xs), _cut((q, places[0]), 1))
    return _join(out, 1), _join(lse, 2)


def block_backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    places: tuple[Places, Places] | None,
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    *,
    scale: float,
    causal: bool,
    window: int | None,
    implementation: str,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """This block's part of (d_q, d_k, d_v), fp32; `out` and `lse` are those over all blocks."""
    if implementation == "mosaic":
        saved = q, k, v, out, lse, d_out
        grads = mosaic.mosaic_backward(*saved, scale=scale, causal=causal)
        return tuple(g.astype(jnp.float32) for g in grads)
    if implementation == "cudnn":
        grads = _bind_backward(q, k, v, None, out, lse, d_out, scale, None, causal)
        return tuple(g.astype(jnp.float32) for g in grads)

    def part(carry, xs):
        q, place, out, d_out, lse = xs
        scores = _block_scores(q, k, scale, place, places[1], window)
        probs = jnp.exp(scores - lse.reshape(scores.shape[:-1])[..., None])
        grouped = (*q.shape[:2], k.shape[2], -1, q.shape[3])
        q_, d_out_ = q.reshape(grouped), d_out.reshape(grouped)
        delta = jnp.sum((out.astype(jnp.float32) * d_out).reshape(grouped), axis=-1)
        f32 = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
        d_probs = f32("bskgh,btkh->bkgst", d_out_, v)
        d_scores = probs * (d_probs - jnp.moveaxis(delta, 1, -1)[..., None]) * scale
        probs, d_scores = probs.astype(v.dtype), d_scores.astype(v.dtype)
        d_k = carry[0] + f32("bkgst,bskgh->btkh", d_scores, q_)
        d_v = carry[1] + f32("bkgst,bskgh->btkh", probs, d_out_)
        d_q = f32("bkgst,btkh->bskgh", d_scores, k).reshape(q.shape)
        return (d_k, d_v), d_q

    zero = jnp.zeros(k.shape, jnp.float32)
    xs = (*_cut((q, places[0], out, d_out), 1), _cut(lse, 2))
    (d_k, d_v), d_q = jax.lax.scan(part, (zero, zero), xs)
    return _join(d_q, 1), d_k, d_v


def _block_scores(q, k, scale, q_place, k_place, window):
    """Masked fp32 scores [B, K, N/K, S, T] of queries and keys at the given places."""
    q = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
    scores = jnp.einsum("bskgh,btkh->bkgst", q, k, preferred_element_type=jnp.float32) * scale
    behind = q_place[0][:, :, None] - k_place[0][:, None, :]
    seen = behind >= 0 if window is None else (behind >= 0) & (behind < window)
    if q_place[1] is not None:
        seen = seen & (q_place[1][:, :, None] == k_place[1][:, None, :])
    return jnp.where(seen[:, None, None], scores, _MASKED)


def _cut(tree, axis):
    """Cut `axis` of each array into chunks of queries, moved to the front."""

    def one(x):
        size = x.shape[axis]
        chunk = size if size % _QUERY_CHUNK else _QUERY_CHUNK
        shape = (*x.shape[:axis], size // chunk, chunk, *x.shape[axis + 1 :])
        return jnp.moveaxis(x.reshape(shape), axis, 0)

    return jax.tree.map(one, tree)


def _join(x, axis):
    """The inverse of `_cut`."""
    x = jnp.moveaxis(x, 0, axis)
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
