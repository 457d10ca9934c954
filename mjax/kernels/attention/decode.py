"""Attention of one new token a row to the keys and values of a cache, in plain JAX.

Memory bounds it: the cache is read once, as it lies. Query heads that share a kv head are one
matmul with its keys, so nothing is repeated, and no array besides it has the size of the cache. The
cache is [B, K, T, H]: matmuls batch over leading axes, and XLA for GPUs transposes another order.
Invariant: the output is that of `kernels.attention`, for which XLA runs the softmax in three
kernels instead of one.
"""

import jax
import jax.numpy as jnp

from mjax.kernels.attention.api import masked_scores, seen_keys
from mjax.kernels.attention.relative_bias import relative_bias
from mjax.kernels.base.attention_call import AttentionArrays, AttentionCall


@jax.named_scope("sdpa")
def decode_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, call: AttentionCall, arrays: AttentionArrays
) -> jax.Array:
    """q [B, 1, N, H], k [B, K, T, H], v [B, K, T, H'], N a multiple of K -> [B, 1, N, H'].

    The output has q's dtype; scores and softmax are fp32. There is no dropout.
    """
    assert call.dropout == 0, "a cache is not for training"
    batch, _, heads, head = q.shape
    kv_heads = k.shape[1]
    q_BKGH = q.reshape(batch, kv_heads, -1, head)
    scores = jnp.einsum("bkgh,bkth->bkgt", q_BKGH, k, preferred_element_type=jnp.float32)
    seen = seen_keys(call, arrays)
    bias = None
    if arrays.relative is not None:
        bias = relative_bias(call, arrays)
        bias = bias.reshape(*bias.shape[:-3], kv_heads, -1, k.shape[2])
    scores = masked_scores(scores, None if seen is None else seen[..., 0, :], call, bias)
    top = scores.max(-1, keepdims=True)
    sink = None
    if arrays.sinks is not None:
        sink = arrays.sinks.astype(jnp.float32).reshape(1, kv_heads, -1, 1)
        top = jnp.maximum(top, sink)
    weights = jnp.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    if sink is not None:
        total = total + jnp.exp(sink - top)
    probs = (weights / total).astype(v.dtype)
    out = jnp.einsum("bkgt,bkth->bkgh", probs, v)
    return out.reshape(batch, 1, heads, v.shape[-1])


def write_slots(cache: jax.Array, new: jax.Array, first: jax.Array, axis: int) -> jax.Array:
    """A cache with `new` in the slots of `axis` from `first` on, int32 [B]: of each row.

    One row is a slice, written in place by every compiler; slots of several rows are one scatter.
    """
    new = new.astype(cache.dtype)
    if len(cache) == 1:
        return jax.lax.dynamic_update_slice_in_dim(cache, new, first[0], axis)

    def of_row(cache: jax.Array, new: jax.Array, first: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(cache, new, first, axis - 1)

    return jax.vmap(of_row)(cache, new, first)
