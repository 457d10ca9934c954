"""Depthwise causal convolution over a few tokens, then SiLU: what Mamba-2 does before its scan.

Each channel has K weights, of which the last is for the token itself. Tokens of other documents
count as zeros. The backward keeps x alone. XLA makes one pass over x of it, at 1.3 of 4.2 TB/s on
an H200, and several of its backward. Our Triton kernels (`causal_conv_triton.py`) read and write
each array once in both: 2 and 3 times the size of x. A program sums its part of the gradients of
weights and biases; the parts are summed afterwards, without atomics, equal bit for bit each time.
Invariant: products and sums are fp32 (fp64 for inputs of fp64); what leaves is rounded once.
Source: causal-conv1d of Mamba (arXiv 2312.00752).
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mjax.kernels.base.chooser import choose
from mjax.kernels.base.triton_call import triton_call
from mjax.kernels.recurrence.forks import Forks, forked_conv


class ConvTile(NamedTuple):
    """Tokens that a program walks, its channels, and its warps."""

    tokens: int
    width: int
    warps: int


# Fastest on an H200.
FORWARD = ConvTile(128, 512, 4)
BACKWARD = ConvTile(128, 256, 4)


def causal_conv(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None = None,
    *,
    starts: jax.Array | Forks | None = None,
    history: jax.Array | None = None,
) -> jax.Array:
    """silu(bias + sum over k of weight[..., k] * x of K - 1 - k tokens before): like x.

    x is [B, S, ...] with any axes of channels, weight [..., K], bias [...]. `starts` bool [B, S]
    marks tokens that start a document. `history` [B, K - 1, ...] are the tokens before the first
    one, zero where they are of another document; None: there are none. With `Forks` there are none.
    """
    if isinstance(starts, Forks):
        return forked_conv(x, weight, bias, starts)
    if choose("causal_conv", x.dtype, x.shape, taps=weight.shape[-1]).name == "triton":
        return fused_conv(x, weight, bias, starts=starts, history=history)
    if history is None:
        history = jnp.zeros((x.shape[0], weight.shape[-1] - 1, *x.shape[2:]), x.dtype)
    return _convolve(x, weight, bias, starts, history)


def plain_conv(x, weight, bias, starts, history) -> jax.Array:
    """`causal_conv` without its backward."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    taps, length = weight.shape[-1], x.shape[1]
    # In fp32 before they are cut, so that gradients of the taps are summed before they are rounded.
    all_tokens = jnp.concatenate([history.astype(x.dtype), x], 1).astype(wide)
    documents = None
    if starts is not None:
        documents = jnp.cumsum(starts, 1, dtype=jnp.int32)
        documents = jnp.pad(documents, [(0, 0), (taps - 1, 0)])
    total = jnp.zeros(x.shape, wide)
    for k in range(taps):
        taken = lax.slice_in_dim(all_tokens, k, k + length, axis=1)
        if documents is not None and k < taps - 1:
            same = documents[:, k : k + length] == documents[:, taps - 1 :]
            taken = jnp.where(same.reshape(*same.shape, *[1] * (x.ndim - 2)), taken, 0)
        total = total + taken * weight[..., k].astype(wide)
    if bias is not None:
        total = total + bias.astype(wide)
    return jax.nn.silu(total).astype(x.dtype)


# The backward keeps the arguments alone.
_convolve = jax.checkpoint(plain_conv)


# ---- the kernels ---------------------------------------------------------------------------------


def fused_conv(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    *,
    starts: jax.Array | None,
    history: jax.Array | None,
) -> jax.Array:
    """`causal_conv` by the kernels."""
    channels = weight.shape[:-1]
    wide = weight.astype(jnp.float32)
    bias = jnp.zeros(channels) if bias is None else bias.astype(jnp.float32)
    weight = jnp.moveaxis(jnp.concatenate([wide, bias[..., None]], -1), -1, 0)
    begins = None
    if starts is not None:
        tokens = jnp.arange(x.shape[1], dtype=jnp.int32)
        begins = lax.cummax(jnp.where(starts, tokens, 1 - wide.shape[-1]), 1)
    if history is not None:
        history = history.astype(x.dtype)
    return _fused_rows(x, weight, begins, history)


@jax.custom_vjp
def _fused_rows(x, weight, begins, history) -> jax.Array:
    """`weight` fp32 [K + 1, ...] are taps and bias; `begins` [B, S], where documents begin."""
    from mjax.kernels.recurrence import causal_conv_triton

    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    kernel = causal_conv_triton.conv_forward
    return _call_conv(kernel, FORWARD, [x, weight, begins, history], [], [like])[0]


def _conv_forward(*inputs):
    return _fused_rows(*inputs), inputs


def _conv_backward(inputs: tuple, gradient: jax.Array):
    from mjax.kernels.recurrence import causal_conv_triton

    x, weight, _, history = inputs
    parts = len(x) * -(-x.shape[1] // BACKWARD.tokens), *weight.shape
    outputs = [jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct(parts, jnp.float32)]
    if history is not None:
        outputs.append(jax.ShapeDtypeStruct(history.shape, x.dtype))
    kernel = causal_conv_triton.conv_backward
    d_x, parts, *d_history = _call_conv(kernel, BACKWARD, [*inputs], [gradient], outputs)
    return d_x, jnp.sum(parts, 0), None, *(d_history or [None])


_fused_rows.defvjp(_conv_forward, _conv_backward)


def _call_conv(kernel, tile: ConvTile, inputs: list, more: list, outputs: list) -> list[jax.Array]:
    x, weight, begins, history = inputs
    channels = weight[0].size
    without = {"d_history": None} if history is None and more else {}
    nothing = jnp.zeros((1,), jnp.int32)
    return triton_call(
        kernel,
        [x, weight, *(nothing if v is None else v for v in (begins, history)), *more],
        outputs,
        programs=len(x) * -(-x.shape[1] // tile.tokens) * -(-channels // tile.width),
        warps=tile.warps,
        LENGTH=x.shape[1],
        CHANNELS=channels,
        TOKENS=tile.tokens,
        WIDTH=tile.width,
        PACKED=begins is not None,
        HISTORY=history is not None,
        **without,
    )


# ---- generation ----------------------------------------------------------------------------------


def last_tokens(x: jax.Array, history: jax.Array, count: jax.Array | None = None) -> jax.Array:
    """The history [B, K - 1, ...] after the tokens x [B, S, ...], or the first `count` [B] of each
    row."""
    both = jnp.concatenate([history, x.astype(history.dtype)], 1)
    if count is None:
        return both[:, x.shape[1] :]
    of_row = functools.partial(jax.lax.dynamic_slice_in_dim, slice_size=history.shape[1])
    return jax.vmap(of_row)(both, count)
