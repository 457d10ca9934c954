"""Attention whose forward multiplies in E4M3, by cuDNN on Hopper; its backward is that of 16 bits.

Scales are powers of two and need no state. The largest magnitudes of q, k and v on this device give
theirs. A softmax weight is at most 1, and an output at most the largest value, but for
the rounding of weights: both scales are known beforehand. Invariant: a scale changes what is below
2**-14 of the largest magnitude only, so every mesh rounds alike.

The gradient goes straight through the roundings: it is that of attention of the rounded q, k and v,
which `compute` holds exactly, with the forward's output and log-sum-exp. The residuals are bytes.
XLA's 8-bit backward gives gradients in E4M3 by scales that must be known beforehand. No bound on
them is tight, so that would take maxima of earlier steps; it is not built. Transformer Engine has
the same pair of passes (NVTE_FP8_DPA_BWD=0).
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from mjax.kernels.attention.cudnn import bind_backward, bind_forward_8_bits
from mjax.kernels.base.attention_call import AttentionCall
from mjax.kernels.elementwise.gate import E4M3
from mjax.kernels.fp8.quantize import SCALES, amax_of, quantize_to, scale_of

_OF_WEIGHTS = 256.0  # the scale of softmax's weights
_MASKED_OUT = -1e30

_f32 = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


class _Rounded(NamedTuple):
    """A tensor times its scale, in E4M3."""

    values: jax.Array
    scale: jax.Array

    def exactly(self, dtype: jnp.dtype) -> jax.Array:
        """The numbers that it stands for; scales are powers of two."""
        return self.values.astype(dtype) * (1 / self.scale).astype(dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def attention_in_8_bits(q: jax.Array, k: jax.Array, v: jax.Array, call: AttentionCall) -> jax.Array:
    """q [B, S, N, H], k and v [B, T, K, H] -> [B, S, N, H] in q's dtype, under no mask but causal.

    The call is one that `implementation_in_8_bits` allows: of "cudnn", or of "xla", which rounds
    the same in plain JAX and holds all scores.
    """
    return _forward_8_bits(q, k, v, call)[0]


def _forward_8_bits(q, k, v, call):
    operands = tuple(_rounded_by_maximum(x) for x in (q, k, v))
    of_out = operands[2].scale / 2  # weights rounded up may add to more than 1
    if call.implementation == "xla":
        out, lse = _emulated_forward(operands, of_out, call)
    else:
        scales = *(x.scale for x in operands), _OF_WEIGHTS, of_out
        out, lse = bind_forward_8_bits(tuple(x.values for x in operands), scales, call)
    out = checkpoint_name(_Rounded(out, of_out).exactly(q.dtype), "attn_out")
    return out, (operands, out, checkpoint_name(lse, "attn_lse"))


def _backward_8_bits(call, saved, d_out):
    operands, out, lse = saved
    operands = jax.lax.optimization_barrier(
        operands
    )  # or XLA keeps the numbers that they stand for
    q, k, v = (x.exactly(d_out.dtype) for x in operands)
    if call.implementation == "xla":
        return _emulated_backward(q, k, v, out, lse, d_out, call)
    return bind_backward(q, k, v, None, None, out, lse, d_out, call)


attention_in_8_bits.defvjp(_forward_8_bits, _backward_8_bits)


def _rounded_by_maximum(x: jax.Array) -> _Rounded:
    scale = checkpoint_name(scale_of(amax_of(x), E4M3), SCALES)
    return _Rounded(quantize_to(x, scale, E4M3), scale)


# ---- in plain JAX ------------------------------------------------------------------------------


def _emulated_forward(operands, of_out, call):
    """cuDNN's roundings, but that it rounds weights by the maximum over the keys seen so far."""
    q, k, v = operands
    scores = _scores_of(q.exactly(jnp.float32), k.exactly(jnp.float32), call)
    top = scores.max(-1, keepdims=True)
    weights = jnp.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    rounded = quantize_to(weights, jnp.float32(_OF_WEIGHTS), E4M3).astype(jnp.float32)
    out = _f32("bkgst,btkh->bkgsh", rounded / _OF_WEIGHTS, v.exactly(jnp.float32)) / total
    out = jnp.moveaxis(out, 3, 1).reshape(q.values.shape)
    lse = (top + jnp.log(total)).reshape(len(out), -1, out.shape[1])
    return quantize_to(out, of_out, E4M3), lse


def _emulated_backward(q, k, v, out, lse, d_out, call):
    groups = (*q.shape[:2], k.shape[2], -1, q.shape[3])
    scores = _scores_of(q, k, call)
    probs = jnp.exp(scores - lse.reshape(scores.shape[:-1])[..., None])
    delta = jnp.sum((out.astype(jnp.float32) * d_out).reshape(groups), -1)
    q_, d_out_ = q.reshape(groups), d_out.reshape(groups)
    d_probs = _f32("bskgh,btkh->bkgst", d_out_, v)
    d_scores = probs * (d_probs - jnp.moveaxis(delta, 1, -1)[..., None]) * call.scale
    probs, d_scores = probs.astype(v.dtype), d_scores.astype(v.dtype)
    d_q = _f32("bkgst,btkh->bskgh", d_scores, k).reshape(q.shape)
    d_k = _f32("bkgst,bskgh->btkh", d_scores, q_)
    d_v = _f32("bkgst,bskgh->btkh", probs, d_out_)
    return tuple(g.astype(q.dtype) for g in (d_q, d_k, d_v))


def _scores_of(q, k, call):
    """Masked fp32 scores [B, K, N/K, S, T]."""
    grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
    scores = _f32("bskgh,btkh->bkgst", grouped, k) * call.scale
    if call.mask == "full":
        return scores
    seen = jnp.arange(q.shape[1])[:, None] >= jnp.arange(k.shape[1])
    return jnp.where(seen, scores, _MASKED_OUT)
