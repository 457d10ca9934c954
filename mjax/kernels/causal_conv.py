"""Depthwise causal convolution over a few tokens, then SiLU: what Mamba-2 does before its scan.

Each channel has K weights, of which the last is for the token itself. Tokens of other documents
count as zeros. It is K products and sums of elements, which XLA makes one pass over x of on GPUs,
forward and backward alike. The backward keeps x alone. Invariant: products and sums are fp32 (fp64
for inputs of fp64); what leaves is rounded once. Source: causal-conv1d of Mamba (arXiv 2312.00752).
"""

import jax
import jax.numpy as jnp
from jax import lax


def causal_conv(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None = None,
    *,
    starts: jax.Array | None = None,
    history: jax.Array | None = None,
) -> jax.Array:
    """silu(bias + sum over k of weight[..., k] * x of K - 1 - k tokens before): like x.

    x is [B, S, ...] with any axes of channels, weight [..., K], bias [...]. `starts` bool [B, S]
    marks tokens that start a document. `history` [B, K - 1, ...] are the tokens before the first
    one, zero where they are of another document; None: there are none.
    """
    if history is None:
        history = jnp.zeros((x.shape[0], weight.shape[-1] - 1, *x.shape[2:]), x.dtype)
    return _convolve(x, weight, bias, starts, history)


def plain_conv(x, weight, bias, starts, history) -> jax.Array:
    """`causal_conv` without its backward."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    taps, length = weight.shape[-1], x.shape[1]
    all_tokens = jnp.concatenate([history.astype(x.dtype), x], 1)
    documents = None
    if starts is not None:
        documents = jnp.cumsum(starts, 1, dtype=jnp.int32)
        documents = jnp.pad(documents, [(0, 0), (taps - 1, 0)])
    total = jnp.zeros(x.shape, wide)
    for k in range(taps):
        taken = lax.slice_in_dim(all_tokens, k, k + length, axis=1).astype(wide)
        if documents is not None and k < taps - 1:
            same = documents[:, k : k + length] == documents[:, taps - 1 :]
            taken = jnp.where(same.reshape(*same.shape, *[1] * (x.ndim - 2)), taken, 0)
        total = total + taken * weight[..., k].astype(wide)
    if bias is not None:
        total = total + bias.astype(wide)
    return jax.nn.silu(total).astype(x.dtype)


@jax.custom_vjp
def _convolve(x, weight, bias, starts, history) -> jax.Array:
    return plain_conv(x, weight, bias, starts, history)


def _forward(x, weight, bias, starts, history):
    return plain_conv(x, weight, bias, starts, history), (x, weight, bias, starts, history)


def _backward(saved: tuple, gradient: jax.Array):
    x, weight, bias, starts, history = saved

    def convolve(x, weight, bias, history):
        return plain_conv(x, weight, bias, starts, history)

    _, through = jax.vjp(convolve, x, weight, bias, history)
    d_x, d_weight, d_bias, d_history = through(gradient)
    return d_x, d_weight, d_bias, None, d_history


_convolve.defvjp(_forward, _backward)


def last_tokens(x: jax.Array, history: jax.Array) -> jax.Array:
    """The history [B, K - 1, ...] after the tokens x [B, S, ...]."""
    both = jnp.concatenate([history, x.astype(history.dtype)], 1)
    return both[:, x.shape[1] :]
