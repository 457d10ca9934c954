"""Attention of short rows on GPUs, by our Triton kernels: full, causal, and windows to both sides.

Images and sentences have rows of some hundred tokens, which cuDNN's tiles fill badly, and no fused
kernel of NVIDIA's has windows to both sides. The backward is two kernels, one for queries and one
for keys, each of which computes the scores again. All of it is deterministic. Source:
FlashAttention-2 (arXiv 2307.08691). Measured: docs/lab/2026-11-25-short-rows.md.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from mjax.errors import UserError
from mjax.kernels.base import chooser
from mjax.kernels.base.attention_call import AttentionArrays, AttentionCall
from mjax.kernels.base.triton_call import triton_call


class SeenRows(NamedTuple):
    """The keys of a row that queries see.

    segments: int32 [B, S] of queries and [B, T] of keys, or None. A query sees its own segment.
    lengths: int32 [B], or None: so many keys of a row are seen, one at least.
    """

    segments: tuple[jax.Array, jax.Array] | None = None
    lengths: jax.Array | None = None


class ShortTile(NamedTuple):
    """Queries and keys of a tile, warps of a program, and loads ahead."""

    queries: int
    keys: int
    warps: int
    stages: int


class Tiles(NamedTuple):
    """Tile sizes of the forward kernel and of the two backward kernels.

    A kernel writes a number for each query as far as its last tile reaches, and a later kernel
    reads them. So none takes more queries at a time than the kernel before.
    """

    forward: ShortTile
    d_queries: ShortTile
    d_keys: ShortTile


# Measured on an H100 and an H200 with rows of 77 to 1024 tokens.
TILES = Tiles(ShortTile(64, 64, 4, 3), ShortTile(64, 32, 4, 3), ShortTile(32, 64, 4, 4))
TILES_BELOW_512 = TILES._replace(forward=ShortTile(64, 32, 4, 3))  # they fill the last tile better


def tiles_for(keys: int) -> Tiles:
    """The tiles that were fastest for rows of so many keys."""
    return TILES if keys >= 512 else TILES_BELOW_512


def require_short(q: jax.Array, v: jax.Array, call: AttentionCall, arrays: AttentionArrays) -> None:
    """Raise `UserError` where the kernels lack a device, dtype, size, mask or feature."""
    sizes = q.shape[-1], v.shape[-1]
    has = {"sinks": arrays.sinks is not None, "relative": arrays.relative is not None}
    has["row"] = max(math.prod(array.shape[1:]) for array in (q, v))
    if lacks := chooser.short_attention_lacks(q.dtype, *sizes, call, chooser.this_device(), **has):
        raise UserError(f"train.attention=triton: {lacks}; set train.attention=auto or xla")


# (q, k, v), or (q, keys and values in one array), or (all in one array,)
Products = tuple[jax.Array, ...]
Biases = tuple[jax.Array, jax.Array]  # of queries [N, H] and of values [K, H]


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def short_attention(
    products: Products,
    biases: Biases | None,
    rows: SeenRows,
    call: AttentionCall,
    name: str = "",
    tiles: Tiles | None = None,
) -> jax.Array:
    """The attention [B, S, N, H], in bf16 or fp16, of queries, keys and values in `products`.

    `products` are q [B, S, N, H] and k and v [B, T, K, H]; or q and one array [B, T, 2, K, H] of
    keys and values; or one array [B, S, 3, N, H] of all. `biases` are added to queries and values.
    Each query must see some key then. `tiles` are by the number of keys unless given. The residuals
    have names: `attn_out`, `attn_lse`, and with biases `name`, which is the first of `products`
    after queries got theirs.
    """
    return _short_forward(products, biases, rows, call, name, tiles)[0]


def _short_forward(products, biases, rows, call, name, tiles):
    from mjax.kernels.attention.short_triton import ROOM_OF, attention_forward

    sizes = sizes_of_products(products)
    tiles = tiles or tiles_for(sizes.keys)
    shape = sizes.batch, sizes.queries, sizes.heads, sizes.width
    out = jax.ShapeDtypeStruct(shape, products[0].dtype)
    room = -(-sizes.queries // ROOM_OF.value) * ROOM_OF.value
    lse = jax.ShapeDtypeStruct((sizes.batch, sizes.heads, room), jnp.float32)
    out, lse, *biased = triton_call(
        attention_forward,
        [*_product_arrays(products), *_arrays(rows), *(biases or [_unread(jnp.float32)] * 2)],
        [out, lse] + ([_shape_of(products[0])] if biases else []),
        programs=sizes.batch * sizes.heads * -(-sizes.queries // tiles.forward.queries),
        **_constants(products, rows, call, tiles.forward),
        BIASED=biases is not None,
        **({"aliases": {0: 2}} if biases else {"biased": None}),
    )
    if biases:
        products = checkpoint_name(biased[0], name), *products[1:]
    out, lse = checkpoint_name(out, "attn_out"), checkpoint_name(lse, "attn_lse")
    return out, (products, biases, rows, out, lse)


def _short_backward(call, name, tiles, saved, d_out):
    products, biases, rows, out, lse = saved
    tiles = tiles or tiles_for(sizes_of_products(products).keys)
    assert tiles.d_keys.queries <= tiles.d_queries.queries <= tiles.forward.queries, "unwritten"
    d_out = d_out.astype(out.dtype)
    d_q, deltas, d_biases = short_d_queries(*saved, d_out, call, tiles.d_queries)
    d_products = short_d_keys(products, rows, lse, deltas, d_out, d_q, call, tiles.d_keys)
    return d_products, d_biases, None


def short_d_queries(products, biases, rows, out, lse, d_out, call, tile):
    """(the gradient of the first product, sum(out * d_out) over H: like `lse`, of biases).

    If the first product holds keys and values, too, `short_d_keys` writes their part.
    """
    from mjax.kernels.attention.short_triton import attention_d_queries

    sizes = sizes_of_products(products)
    parts = -(-sizes.queries // tile.queries)
    sums = jax.ShapeDtypeStruct((sizes.batch, parts, 2, sizes.heads, sizes.width), jnp.float32)
    of_values = biases[1] if biases else _unread(jnp.float32)
    d_q, deltas, *sums = triton_call(
        attention_d_queries,
        [*_product_arrays(products), *_arrays(rows), of_values, out, lse, d_out],
        [_shape_of(products[0]), _shape_of(lse)] + ([sums] if biases else []),
        programs=sizes.batch * sizes.heads * parts,
        **_constants(products, rows, call, tile),
        BIASED=biases is not None,
        **({} if biases else {"d_sums": None}),
    )
    if not biases:
        return d_q, deltas, None
    return d_q, deltas, _of_biases(biases, sums[0].sum((0, 1)))


def _of_biases(biases: Biases, sums: jax.Array) -> Biases:
    """The gradients of biases: `sums` [2, N, H] are of the gradients of queries and of outputs."""
    of_q, of_v = biases
    d_v_bias = sums[1].reshape(len(of_v), -1, sums.shape[-1]).sum(1)  # over heads that share values
    return sums[0].astype(of_q.dtype), d_v_bias.astype(of_v.dtype)


def short_d_keys(products, rows, lse, deltas, d_out, d_q, call, tile):
    """The gradients of all products; `d_q` and `deltas` are of `short_d_queries`."""
    from mjax.kernels.attention.short_triton import attention_d_keys

    sizes, rest = sizes_of_products(products), products[1:]
    found = triton_call(
        attention_d_keys,
        [
            *_product_arrays(products),
            *_arrays(rows),
            lse,
            deltas,
            d_out,
            _unread() if rest else d_q,
        ],
        [_shape_of(x) for x in rest or products],
        programs=sizes.batch * sizes.kv_heads * -(-sizes.keys // tile.keys),
        **_constants(products, rows, call, tile),
        **({} if rest else {"aliases": {9: 0}}),
        **({} if len(rest) == 2 else {"d_v": None}),
    )
    return (d_q, *found) if rest else tuple(found)


short_attention.defvjp(_short_forward, _short_backward)


class Sizes(NamedTuple):
    """Sizes of the products of a call; queries and keys are counts of tokens, width a head's."""

    batch: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    width: int


def sizes_of_products(products: Products) -> Sizes:
    """The sizes of a call; where one array holds all, there are as many keys as queries."""
    first, keys = products[0], products[min(1, len(products) - 1)]
    batch, queries, *_, heads, width = first.shape
    return Sizes(batch, queries, keys.shape[1], heads, keys.shape[-2], width)


def _product_arrays(products: Products) -> tuple[jax.Array, ...]:
    """The three arrays that a kernel takes for queries, keys and values.

    An array that holds several is one operand. XLA would copy an operand that is there twice before
    a kernel writes to it.
    """
    return *products, *[_unread(products[0].dtype)] * (3 - len(products))


def _unread(dtype: jnp.dtype = jnp.bfloat16) -> jax.Array:
    """A placeholder for an argument that a kernel does not read."""
    return jnp.zeros(1, dtype)


def _arrays(rows: SeenRows) -> tuple[jax.Array, ...]:
    """The three arrays that a kernel wants; those that it does not read have one element."""
    unread = _unread(jnp.int32)
    lengths = unread if rows.lengths is None else rows.lengths
    return *(rows.segments or (unread, unread)), lengths


def _shape_of(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _constants(products: Products, rows: SeenRows, call: AttentionCall, tile: ShortTile) -> dict:
    """The constants that all kernels are compiled for; a window as long as the row is none."""
    assert rows.lengths is None or call.mask != "causal", "a causal query sees no padding"
    sizes = sizes_of_products(products)
    size, length = sizes.queries, sizes.keys
    assert size == length or call.mask == "cross", "masks are by the index of a token in its row"
    window = call.window if call.window is not None and call.window < max(size, length) else 0
    return dict(
        warps=tile.warps,
        S=size,
        T=length,
        HEADS=sizes.heads,
        KV_HEADS=sizes.kv_heads,
        H=sizes.width,
        SCALE=call.scale,
        CAUSAL=call.mask == "causal",
        WINDOW=window,
        SEGMENTED=rows.segments is not None,
        PADDED=rows.lengths is not None,
        PARTS=4 - len(products),
        QUERIES=tile.queries,
        KEYS=tile.keys,
        STAGES=tile.stages,
    )
