"""cuDNN's fused attention: the only file that touches JAX's private module of it.

Its primitives are called under our own custom_vjp, so that the output and log-sum-exp carry names
(`attn_out`, `attn_lse`) which every remat policy but 'full' keeps: attention never runs twice.
Packed documents reach cuDNN as offsets, padding as lengths, windows as `sliding_window_length`
(FlashAttention-2, arXiv 2307.08691; cuDNN frontend SDPA).
"""

import functools
import json

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from mjax.kernels.base.attention_call import AttentionCall

_DETERMINISTIC = 1  # the seed, which nothing else reads, of calls of deterministic programs


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def cudnn_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    bias: jax.Array | None,
    packing: tuple[jax.Array, ...] | None,
    call: AttentionCall,
) -> jax.Array:
    """q [B, S, N, H], k [B, T, K, H], v [B, T, K, H'], bf16 or fp16 -> [B, S, N, H'].

    `bias` [1, N, S, T] is added to scores. `packing` is cuDNN's lengths of queries and of keys, and
    their offsets (`document_offsets`, `row_lengths`).
    """
    return _cudnn_fwd(q, k, v, bias, packing, call)[0]


def _cudnn_fwd(q, k, v, bias, packing, call):
    out, lse = bind_forward(q, k, v, bias, packing, call)
    out, lse = checkpoint_name(out, "attn_out"), checkpoint_name(lse, "attn_lse")
    return out, (q, k, v, bias, packing, out, lse)


def _cudnn_bwd(call, saved, d_out):
    d_q, d_k, d_v, *d_bias = bind_backward(*saved, d_out, call)
    return d_q, d_k, d_v, d_bias[0] if d_bias else None, None


def bind_forward(q, k, v, bias, packing, call):
    """(out, fp32 log-sum-exp [B, N, S]) of `cudnn_attention`, which cannot be differentiated."""
    fused = _fused_ops()
    options, sides = _cudnn_arguments(q, bias, packing, call)
    bind = fused._dot_product_attention_fwd_p_wrapper.bind
    return bind(q, k, v, *sides, **options, is_training=True)


def bind_backward(q, k, v, bias, packing, out, lse, d_out, call):
    """Gradients of q, k, v, and of the bias if there is one; `lse` may be over more keys."""
    fused = _fused_ops()
    options, sides = _cudnn_arguments(q, bias, packing, call)
    bind = fused._dot_product_attention_bwd_p_wrapper.bind
    return bind(q, k, v, *sides, lse, out, d_out, **options)[: 3 if bias is None else 4]


def bind_forward_8_bits(
    operands: tuple[jax.Array, ...], scales: tuple[jax.Array | float, ...], call: AttentionCall
) -> tuple[jax.Array, jax.Array]:
    """(out, fp32 log-sum-exp [B, N, S]) of q, k, v in E4M3, which cannot be differentiated.

    `scales` of q, k, v, of softmax's weights and of the output, which is in E4M3, too: XLA takes no
    other. The weights are scaled before the sum over keys is divided by their own.
    """
    fused = _fused_ops()
    q, k, v, weights, out = (jnp.full((1, 1, 1, 1), s, jnp.float32) for s in scales)
    made, _, _, lse = fused._dot_product_attention_fp8_fwd_p_wrapper.bind(
        *operands,
        *(1 / q, 1 / k, 1 / v, 1 / weights, weights, out),
        scale=call.scale,
        use_causal_mask=call.mask == "causal",
        layout=fused.AttentionLayout.BTNH.value,
        is_training=True,
    )
    return made, lse


@functools.cache
def _fused_ops():
    """JAX's private module of cuDNN attention, whose backward can be told to be deterministic.

    In a deterministic program XLA (of jaxlib 0.11.2) marks the first of several equal backward
    calls only, and does not find the others' programs. Calls of `_DETERMINISTIC` are marked here.
    """
    import jax._src.cudnn.fused_attention_stablehlo as fused

    make = fused.create_dot_product_attention_backend_config

    def make_marked(*args, **kwargs):
        config = json.loads(make(*args, **kwargs))
        fmha = config["cudnn_fmha_backend_config"]
        if kwargs["is_bwd"] and fmha["seed"] == _DETERMINISTIC:
            fmha["force_deterministic"] = True
        return json.dumps(config)

    fused.create_dot_product_attention_backend_config = make_marked
    return fused


def _cudnn_arguments(q, bias, packing, call):
    """(keyword parameters, the seven optional operands) of JAX's private fused-attention ops."""
    fused = _fused_ops()
    unused = jnp.zeros(0, q.dtype)
    if call.mask == "causal":
        mask = fused.MaskType.CAUSAL if packing is None else fused.MaskType.PADDING_CAUSAL
    else:
        mask = fused.MaskType.NO_MASK if packing is None else fused.MaskType.PADDING
    options = dict(
        scale=call.scale,
        seed=_DETERMINISTIC if call.deterministic else 0,
        dropout_rate=0.0,
        variadic_args=(bias is not None, bias is not None),
        mask_type=mask,
        layout=fused.AttentionLayout.BTNH.value,
        sliding_window_length=call.window,
    )
    bias = unused if bias is None else bias
    return options, (bias, *([unused] * 4 if packing is None else packing), unused, unused)


cudnn_attention.defvjp(_cudnn_fwd, _cudnn_bwd)


def cudnn_with_filled_heads(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    packing: tuple[jax.Array, ...] | None,
    call: AttentionCall,
) -> jax.Array:
    """`cudnn_attention` with heads all of one size: the smaller ones are filled with zeros.

    jax gives cuDNN the offsets of documents in elements of q and k, and the same for the output and
    v. Values of another size would be read from wrong places.
    """
    size = v.shape[-1]
    widest = max(q.shape[-1], size)

    def padded(x: jax.Array) -> jax.Array:
        return jnp.pad(x, [(0, 0)] * 3 + [(0, widest - x.shape[-1])])

    return cudnn_attention(padded(q), padded(k), padded(v), None, packing, call)[..., :size]


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


def row_lengths(q: jax.Array, segments: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
    """cuDNN's lengths of queries and keys [B] where padding follows one document, no offsets."""
    lengths = (jnp.sum(ids == ids[:, :1], axis=1, dtype=jnp.int32) for ids in segments)
    return *lengths, jnp.zeros(0, q.dtype), jnp.zeros(0, q.dtype)
