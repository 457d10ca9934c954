"""Our own flash attention for Hopper GPUs: what cuDNN has, and soft-caps and sinks, in bf16.

Written in Pallas Mosaic GPU (`mosaic_forward.py`, `mosaic_backward.py`, imported on use: they need
a jax that has it). Deterministic; shares nothing with JAX's private cuDNN module. Sequences are
padded to a multiple of the tiles here, and segment ids become the interval of keys that each query
sees and of queries that see each key: documents must be contiguous, as in training.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from mjax.errors import UserError
from mjax.kernels.base import chooser
from mjax.kernels.base.attention_call import AttentionCall
from mjax.kernels.base.chooser import mosaic_attention_lacks

_MULTIPLE = 128  # of both sequence lengths
_LOG2E = math.log2(math.e)
# (warpgroups, block, slots) by head size, measured on H200; docs/lab/2026-11-22-kernels.md
_FORWARD = {64: (2, 128, 2), 128: (2, 128, 2), 256: (2, 64, 2)}
_D_QUERIES = {64: (2, 128, 2), 128: (2, 128, 2), 256: (1, 64, 2)}
_D_KEYS = {64: (2, 64, 4), 128: (2, 64, 2), 256: (1, 64, 2)}


def require_mosaic(q: jax.Array, v: jax.Array, call: AttentionCall) -> None:
    """Raise `UserError` where the kernels lack a device, dtype, head size, mask or feature."""
    if lacks := _lacks(q, v, call):
        raise UserError(f"train.attention=mosaic: {lacks}; set train.attention=auto or xla")


def supports_mosaic(q: jax.Array, v: jax.Array, call: AttentionCall) -> bool:
    """Whether `require_mosaic` raises nothing."""
    return _lacks(q, v, call) is None


def _lacks(q: jax.Array, v: jax.Array, call: AttentionCall) -> str | None:
    sizes = q.shape[-1], v.shape[-1]
    return mosaic_attention_lacks(q.dtype, *sizes, call, chooser.this_device())


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def mosaic_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sinks: jax.Array | None,
    segments: jax.Array | None,
    call: AttentionCall,
) -> jax.Array:
    """Causal attention of q [B, S, N, H] to k, v [B, S, K, H], bf16 -> [B, S, N, H].

    `sinks` [N] are extra logits, `segments` int32 [B, S] contiguous documents. The residuals are
    named `attn_out` and `attn_lse`.
    """
    return _mosaic_fwd(q, k, v, sinks, segments, call)[0]


def _mosaic_fwd(q, k, v, sinks, segments, call):
    # Without the barrier XLA fuses the call with the store of its outputs for the backward, and
    # calls it once more for the other users of `out`.
    outputs = mosaic_forward(q, k, v, call, sinks=sinks, segments=segments)
    out, lse = jax.lax.optimization_barrier(outputs)
    out, lse = checkpoint_name(out, "attn_out"), checkpoint_name(lse, "attn_lse")
    return out, (q, k, v, sinks, segments, out, lse)


def _mosaic_bwd(call, saved, d_out):
    q, k, v, sinks, segments, out, lse = saved
    grads = mosaic_backward(q, k, v, out, lse, d_out, call, segments=segments)
    d_sinks = None
    if sinks is not None:
        share = jnp.exp(sinks.astype(jnp.float32)[:, None] - lse)  # [B, N, S]
        d_sinks = -jnp.sum(share * _delta(out, d_out), axis=(0, 2)).astype(sinks.dtype)
    return *grads, d_sinks, None


mosaic_attention.defvjp(_mosaic_fwd, _mosaic_bwd)


def mosaic_forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    call: AttentionCall,
    *,
    sinks: jax.Array | None = None,
    segments: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """q [B, S, N, H], k, v [B, T, K, H] -> out [B, S, N, H] bf16, natural log-sum-exp [B, N, S].

    Under a causal mask query i sees keys up to i, within window and segment; under a full one it
    sees all keys, and there is neither.
    """
    from mjax.kernels.attention.mosaic_forward import MosaicTile, forward

    job = _job(q, k, call, segments)
    low, _ = _intervals(job, segments)
    sinks = None if sinks is None else sinks.astype(jnp.float32)
    tile = MosaicTile(*_FORWARD[job.size])
    out, lse = forward(job, tile, *_pad_tokens((q, k, v), 1), low=low, sinks=sinks)
    return out[:, : q.shape[1]], lse[..., : q.shape[1]]


def mosaic_backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    call: AttentionCall,
    *,
    segments: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients (d_q, d_k, d_v) from the output and log-sum-exp, which may be over more keys."""
    from mjax.kernels.attention.mosaic_backward import gradients_of_keys, gradients_of_queries
    from mjax.kernels.attention.mosaic_forward import MosaicTile

    job = _job(q, k, call, segments)
    low, high = _intervals(job, segments)
    lse, delta = _pad_tokens((lse * _LOG2E, _delta(out, d_out)), 2)
    operands = *_pad_tokens((q, k, v, d_out.astype(q.dtype)), 1), lse, delta
    d_q = gradients_of_queries(job, MosaicTile(*_D_QUERIES[job.size]), *operands, low=low)
    tile = MosaicTile(*_D_KEYS[job.size])
    # at head size 256 the two sums do not fit in registers together
    parts = [("k", "v")] if job.size < 256 else [("k",), ("v",)]
    d_kv = [
        g for some in parts for g in gradients_of_keys(job, tile, *operands, high=high, parts=some)
    ]
    return d_q[:, : q.shape[1]], *(g[:, : k.shape[1]] for g in d_kv)


def _job(q, k, call, segments):
    from mjax.kernels.attention.mosaic_forward import AttentionJob

    causal, window = call.mask == "causal", call.window
    assert causal or (window is None and segments is None), "only causal attention is masked"
    assert not causal or q.shape[1] == k.shape[1], "causal attention is of a sequence to itself"
    (b, s, n, h), (t, kv_heads) = q.shape, k.shape[1:3]
    s, real, t = s + -s % _MULTIPLE, t, t + -t % _MULTIPLE
    if window is not None and window >= t:
        window = None
    return AttentionJob(b, s, t, n, kv_heads, h, call.scale, window, call.softcap, causal, real)


def _intervals(job, segments):
    """(first key each query sees, last query that sees each key), int32 [B, S], by segment ids."""
    if segments is None:
        return None, None
    size = job.queries
    segments = jnp.pad(segments, ((0, 0), (0, size - segments.shape[1])), mode="edge")
    at = jnp.arange(size, dtype=jnp.int32)
    new = jnp.diff(segments, axis=1) != 0
    low = jax.lax.cummax(jnp.where(jnp.pad(new, ((0, 0), (1, 0))), at, 0), axis=1)
    ends = jnp.pad(new, ((0, 0), (0, 1)), constant_values=True)
    high = jax.lax.cummin(jnp.where(ends, at, size), axis=1, reverse=True)
    if job.window is not None:
        low = jnp.maximum(low, at - job.window + 1)
        high = jnp.minimum(high, at + job.window - 1)
    return low, high


def _delta(out, d_out):
    """sum(out * d_out) over head size, fp32 [B, N, S]; an einsum would be a slow matmul."""
    return jnp.swapaxes(jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), -1), 1, 2)


def _pad_tokens(arrays, axis):
    """Zeros at the end of `axis` up to a multiple of the tiles."""

    def one(x):
        widths = [(0, -x.shape[axis] % _MULTIPLE if i == axis else 0) for i in range(x.ndim)]
        return jnp.pad(x, widths) if widths[axis][1] else x

    return tuple(one(x) for x in arrays)
