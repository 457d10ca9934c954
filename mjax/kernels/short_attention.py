"""Attention of short rows on GPUs, by our Triton kernels: full, causal, and windows to both sides.

Images and sentences have rows of some hundred tokens, which cuDNN's tiles fill badly, and no fused
kernel of NVIDIA's has windows to both sides. The backward is two kernels, one for queries and one
for keys, each of which computes the scores again. All of it is deterministic. Source:
FlashAttention-2 (arXiv 2307.08691). Measured: docs/lab/2026-11-25-short-rows.md.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from mjax.errors import UserError
from mjax.kernels import chooser
from mjax.kernels.attention_call import AttentionArrays, AttentionCall
from mjax.kernels.triton_call import triton_call


class Rows(NamedTuple):
    """What of a row of keys is seen.

    segments: int32 [B, S] of queries and [B, T] of keys, or None. A query sees its own segment.
    lengths: int32 [B], or None: so many keys of a row are seen, one at least.
    """

    segments: tuple[jax.Array, jax.Array] | None = None
    lengths: jax.Array | None = None


class Tile(NamedTuple):
    """Queries and keys of a tile, warps of a program, and loads ahead."""

    queries: int
    keys: int
    warps: int
    stages: int


class Tiles(NamedTuple):
    """Of the forward pass, and of the two kernels of the backward pass."""

    forward: Tile
    d_queries: Tile
    d_keys: Tile


# Measured on an H100 and an H200 with rows of 77 to 1024 tokens.
TILES = Tiles(Tile(64, 64, 4, 3), Tile(64, 32, 4, 3), Tile(32, 64, 4, 4))
TILES_BELOW_512 = TILES._replace(forward=Tile(64, 32, 4, 3))  # keys; they fill the last tile better


def tiles_for(keys: int) -> Tiles:
    """The tiles that were fastest for rows of so many keys."""
    return TILES if keys >= 512 else TILES_BELOW_512


def require_short(q: jax.Array, v: jax.Array, call: AttentionCall, arrays: AttentionArrays) -> None:
    """Raise `UserError` where the kernels lack a device, dtype, head size, mask or feature."""
    sizes = q.shape[-1], v.shape[-1]
    has = {"sinks": arrays.sinks is not None, "relative": arrays.relative is not None}
    if lacks := chooser.short_attention_lacks(q.dtype, *sizes, call, chooser.this_device(), **has):
        raise UserError(f"train.attention=triton: {lacks}; set train.attention=auto or xla")


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def short_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    rows: Rows,
    call: AttentionCall,
    tiles: Tiles | None = None,
) -> jax.Array:
    """Attention of q [B, S, N, H] to k, v [B, T, K, H], bf16 or fp16 -> [B, S, N, H].

    `tiles` are by the number of keys unless given. The residuals are named `attn_out` and
    `attn_lse`.
    """
    return _fwd(q, k, v, rows, call, tiles)[0]


def _fwd(q, k, v, rows, call, tiles):
    from mjax.kernels.short_attention_triton import attention_forward

    batch, size, heads, _ = q.shape
    tiles = tiles or tiles_for(k.shape[1])
    out, lse = triton_call(
        attention_forward,
        [q, k, v, *_arrays(rows)],
        [_like(q), jax.ShapeDtypeStruct((batch, heads, size), jnp.float32)],
        programs=batch * heads * -(-size // tiles.forward.queries),
        **_constants(q, k, rows, call, tiles.forward),
    )
    out, lse = checkpoint_name(out, "attn_out"), checkpoint_name(lse, "attn_lse")
    return out, (q, k, v, rows, out, lse)


def _bwd(call, tiles, saved, d_out):
    q, k, v, rows, out, lse = saved
    tiles = tiles or tiles_for(k.shape[1])
    d_out = d_out.astype(q.dtype)
    d_q, deltas = d_queries(q, k, v, rows, out, lse, d_out, call, tiles.d_queries)
    return d_q, *d_keys(q, k, v, rows, lse, deltas, d_out, call, tiles.d_keys), None


def d_queries(q, k, v, rows, out, lse, d_out, call, tile):
    """(the gradient of q, sum(out * d_out) over H: fp32 [B, N, S])."""
    from mjax.kernels.short_attention_triton import attention_d_queries

    return triton_call(
        attention_d_queries,
        [q, k, v, *_arrays(rows), out, lse, d_out],
        [_like(q), _like(lse)],
        programs=q.shape[0] * q.shape[2] * -(-q.shape[1] // tile.queries),
        **_constants(q, k, rows, call, tile),
    )


def d_keys(q, k, v, rows, lse, deltas, d_out, call, tile):
    """The gradients of k and v; `deltas` are of `d_queries`."""
    from mjax.kernels.short_attention_triton import attention_d_keys

    return triton_call(
        attention_d_keys,
        [q, k, v, *_arrays(rows), lse, deltas, d_out],
        [_like(k), _like(v)],
        programs=k.shape[0] * k.shape[2] * -(-k.shape[1] // tile.keys),
        **_constants(q, k, rows, call, tile),
    )


short_attention.defvjp(_fwd, _bwd)


def _arrays(rows: Rows) -> tuple[jax.Array, ...]:
    """The three arrays that a kernel wants; those that it does not read have one element."""
    unread = jnp.zeros(1, jnp.int32)
    lengths = unread if rows.lengths is None else rows.lengths
    return *(rows.segments or (unread, unread)), lengths


def _like(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _constants(q, k, rows, call, tile) -> dict:
    """What both kernels are compiled for; a window as long as the row is none."""
    assert rows.lengths is None or call.mask != "causal", "a causal query sees no padding"
    (_, size, heads, width), (keys, kv_heads) = q.shape, k.shape[1:3]
    assert size == keys or call.mask == "cross", "masks are by the index of a token in its row"
    window = call.window if call.window is not None and call.window < max(size, keys) else 0
    return dict(
        warps=tile.warps,
        S=size,
        T=keys,
        HEADS=heads,
        KV_HEADS=kv_heads,
        H=width,
        SCALE=call.scale,
        CAUSAL=call.mask == "causal",
        WINDOW=window,
        SEGMENTED=rows.segments is not None,
        PADDED=rows.lengths is not None,
        QUERIES=tile.queries,
        KEYS=tile.keys,
        STAGES=tile.stages,
    )
