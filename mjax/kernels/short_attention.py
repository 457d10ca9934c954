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


Keys = tuple[jax.Array, jax.Array] | tuple[jax.Array]  # k and v, or both in one array
Biases = tuple[jax.Array, jax.Array]  # of queries [N, H] and of values [K, H]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def short_attention(
    q: jax.Array,
    keys: Keys,
    biases: Biases | None,
    rows: Rows,
    call: AttentionCall,
    tiles: Tiles | None = None,
) -> jax.Array:
    """Attention of q [B, S, N, H] to `keys`, bf16 or fp16 -> [B, S, N, H].

    `keys` are k and v [B, T, K, H], or the array [B, T, 2, K, H] of both. Of `biases` that of
    values comes to every value; each query must see some key then. That of queries is in q already:
    its gradient alone is made here, as it costs nothing. `tiles` are by the number of keys unless
    given. The residuals are named `attn_out` and `attn_lse`.
    """
    return _fwd(q, keys, biases, rows, call, tiles)[0]


def _fwd(q, keys, biases, rows, call, tiles):
    from mjax.kernels.short_attention_triton import attention_forward

    batch, size, heads, _ = q.shape
    tiles = tiles or tiles_for(keys[0].shape[1])
    out, lse = triton_call(
        attention_forward,
        [q, keys[0], keys[-1], *_arrays(rows), _of_values(biases)],
        [_like(q), jax.ShapeDtypeStruct((batch, heads, size), jnp.float32)],
        programs=batch * heads * -(-size // tiles.forward.queries),
        **_constants(q, keys, rows, call, tiles.forward),
        BIASED=biases is not None,
    )
    out, lse = checkpoint_name(out, "attn_out"), checkpoint_name(lse, "attn_lse")
    return out, (q, keys, biases, rows, out, lse)


def _bwd(call, tiles, saved, d_out):
    q, keys, biases, rows, out, lse = saved
    tiles = tiles or tiles_for(keys[0].shape[1])
    d_out = d_out.astype(q.dtype)
    d_q, deltas, d_biases = d_queries(q, keys, biases, rows, out, lse, d_out, call, tiles.d_queries)
    d_k_v = d_keys(q, keys, rows, lse, deltas, d_out, call, tiles.d_keys)
    return d_q, d_k_v, d_biases, None


def d_queries(q, keys, biases, rows, out, lse, d_out, call, tile):
    """(the gradient of q, sum(out * d_out) over H: fp32 [B, N, S], the gradients of biases)."""
    from mjax.kernels.short_attention_triton import attention_d_queries

    batch, size, heads, width = q.shape
    parts = -(-size // tile.queries)
    sums = jax.ShapeDtypeStruct((batch, parts, 2, heads, width), jnp.float32)
    d_q, deltas, *sums = triton_call(
        attention_d_queries,
        [q, keys[0], keys[-1], *_arrays(rows), _of_values(biases), out, lse, d_out],
        [_like(q), _like(lse)] + ([sums] if biases else []),
        programs=batch * heads * parts,
        **_constants(q, keys, rows, call, tile),
        BIASED=biases is not None,
        **({} if biases else {"d_sums": None}),
    )
    if not biases:
        return d_q, deltas, None
    of_q, of_v = biases
    found = sums[0].sum((0, 1))
    d_v_bias = found[1].reshape(of_v.shape[0], -1, width).sum(1)  # over heads that share values
    return d_q, deltas, (found[0].astype(of_q.dtype), d_v_bias.astype(of_v.dtype))


def d_keys(q, keys, rows, lse, deltas, d_out, call, tile):
    """The gradients of keys; `deltas` are of `d_queries`."""
    from mjax.kernels.short_attention_triton import attention_d_keys

    batch, size, kv_heads = keys[0].shape[0], keys[0].shape[1], keys[0].shape[-2]
    found = triton_call(
        attention_d_keys,
        [q, keys[0], keys[-1], *_arrays(rows), lse, deltas, d_out],
        [_like(x) for x in keys],
        programs=batch * kv_heads * -(-size // tile.keys),
        **_constants(q, keys, rows, call, tile),
        **({"d_v": None} if len(keys) == 1 else {}),
    )
    return tuple(found)


short_attention.defvjp(_fwd, _bwd)


def _of_values(biases: Biases | None) -> jax.Array:
    """What a kernel wants for the bias of values, which it does not read where there is none."""
    return biases[1] if biases else jnp.zeros(1, jnp.float32)


def _arrays(rows: Rows) -> tuple[jax.Array, ...]:
    """The three arrays that a kernel wants; those that it does not read have one element."""
    unread = jnp.zeros(1, jnp.int32)
    lengths = unread if rows.lengths is None else rows.lengths
    return *(rows.segments or (unread, unread)), lengths


def _like(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _constants(q, keys, rows, call, tile) -> dict:
    """What both kernels are compiled for; a window as long as the row is none."""
    assert rows.lengths is None or call.mask != "causal", "a causal query sees no padding"
    (_, size, heads, width), length = q.shape, keys[0].shape[1]
    assert size == length or call.mask == "cross", "masks are by the index of a token in its row"
    window = call.window if call.window is not None and call.window < max(size, length) else 0
    return dict(
        warps=tile.warps,
        S=size,
        T=length,
        HEADS=heads,
        KV_HEADS=keys[0].shape[-2],
        H=width,
        SCALE=call.scale,
        CAUSAL=call.mask == "causal",
        WINDOW=window,
        SEGMENTED=rows.segments is not None,
        PADDED=rows.lengths is not None,
        PAIRS=int(len(keys) == 1),
        QUERIES=tile.queries,
        KEYS=tile.keys,
        STAGES=tile.stages,
    )
