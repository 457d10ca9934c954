"""Causal attention: one function, a chunked XLA reference, and cuDNN's fused kernels.

Both differentiate. The cuDNN path calls JAX's private primitives under our own custom_vjp, so that
the output and log-sum-exp carry names (`attn_out`, `attn_lse`) which every remat policy but 'full'
keeps: attention never runs twice. It is the only file that touches that private module. Packed
documents reach cuDNN as offsets, windows as `sliding_window_length` (FlashAttention-2, arXiv
2307.08691; cuDNN frontend SDPA).
"""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from mjax.errors import UserError

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
    if implementation == "auto":
        implementation = "xla" if jax.default_backend() == "cpu" else "cudnn"
    if implementation == "xla":
        return _reference(q, k, v, scale, columns, window, softcap, sinks, segments, dropout)
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
    packing = None
    if segments is not None and max_documents != 1:
        if jax.__version_info__ < (0, 11) and k.shape[2] != q.shape[2]:
            raise UserError(
                f"jax {jax.__version__}: its cuDNN offsets are wrong for packed documents with "
                "grouped heads; use jax >= 0.11 (Python >= 3.12) or train.attention=xla"
            )
        packing = document_offsets(segments[0], max_documents or q.shape[1])
    return _cudnn(q, k, v, packing, scale, window)


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
    import jax._src.cudnn.fused_attention_stablehlo as fused

    options, sides = _cudnn_arguments(q, packing, scale, window)
    out, lse = fused._dot_product_attention_fwd_p_wrapper.bind(
        q, k, v, *sides, **options, is_training=True
    )
    out, lse = checkpoint_name(out, "attn_out"), checkpoint_name(lse, "attn_lse")
    return out, (q, k, v, packing, out, lse)


def _cudnn_bwd(scale, window, saved, d_out):
    import jax._src.cudnn.fused_attention_stablehlo as fused

    q, k, v, packing, out, lse = saved
    options, sides = _cudnn_arguments(q, packing, scale, window)
    d_qkv = fused._dot_product_attention_bwd_p_wrapper.bind(
        q, k, v, *sides, lse, out, d_out, **options
    )
    return (*d_qkv[:3], None)


def _cudnn_arguments(q, packing, scale, window):
    """(keyword parameters, the seven optional operands) of JAX's private fused-attention ops."""
    import jax._src.cudnn.fused_attention_stablehlo as fused

    unused = jnp.zeros(0, q.dtype)
    lengths, starts = (unused, unused) if packing is None else packing
    mask = fused.MaskType.CAUSAL if packing is None else fused.MaskType.PADDING_CAUSAL
    options = dict(
        scale=scale,
        seed=0,
        dropout_rate=0.0,
        variadic_args=(False, False),
        mask_type=mask,
        layout=fused.AttentionLayout.BTNH.value,
        sliding_window_length=window,
    )
    return options, (unused, lengths, lengths, starts, starts, unused, unused)


_cudnn.defvjp(_cudnn_fwd, _cudnn_bwd)
