"""Attention: one function, a chunked XLA reference, cuDNN's fused kernels and our own.

`AttentionCall` and `AttentionArrays` (`attention_call.py`) say what is computed. All paths
differentiate; the backward is that of the implementation that `kernels/base/chooser.py` chooses.

Context parallelism (`models/attention/context_parallel.py`) builds softmax over keys that come in
blocks: `block_forward` also returns the log-sum-exp, by which blocks merge exactly;
`block_backward` takes the merged output and log-sum-exp, and block gradients then add up.
"""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp

from mjax.errors import UserError
from mjax.kernels.attention import mosaic
from mjax.kernels.attention.cudnn import (
    bind_backward,
    bind_forward,
    cudnn_attention,
    cudnn_with_filled_heads,
    document_offsets,
    row_lengths,
)
from mjax.kernels.attention.eight_bits import attention_in_8_bits
from mjax.kernels.attention.relative_bias import relative_bias
from mjax.kernels.attention.shared_prefix import shared_prefix_attention
from mjax.kernels.attention.short import SeenRows, require_short, short_attention
from mjax.kernels.base.attention_call import (
    AttentionArrays,
    AttentionCall,
    SharedKeys,
    features_in_use,
    refuse_masks_but,
)
from mjax.kernels.base.chooser import QUERY_CHUNK, choose

_FEWEST_NEAR = 64  # tokens that a block of a small window has: matmuls want them
_MASKED = -1e30  # the score of a key that is not seen; a softmax over such alone stays finite


def attention(
    q: jax.Array, k: jax.Array, v: jax.Array, call: AttentionCall, arrays: AttentionArrays
) -> jax.Array:
    """q [B, S, N, H], k [B, T, K, H], v [B, T, K, H'], N a multiple of K -> [B, S, N, H'].

    The output has q's dtype; softmax is fp32. Raises `UserError` where the asked-for implementation
    lacks a feature.
    """
    call = resolve(call, q, v, arrays)
    if call.eight_bits:
        return attention_in_8_bits(q, k, v, call)
    if call.implementation == "xla":
        return _reference(q, k, v, call, arrays)
    require(call, q, v, arrays)
    packed = arrays.is_packed(call)
    if call.implementation == "triton":
        return short_attention((q, k, v), None, _seen_rows(q, call, arrays), call)
    if call.implementation == "mosaic":
        documents = arrays.segments[0] if packed else None
        return mosaic.mosaic_attention(q, k, v, arrays.sinks, documents, call)
    packing = bias = None
    if arrays.relative is not None:
        bias = relative_bias(call, arrays)[None].astype(q.dtype)
    if packed and call.padded:
        # Behind what a causal query sees there is padding, and what padding gives is not read.
        if call.mask != "causal":
            packing = row_lengths(q, arrays.segments)
    elif packed:
        if jax.__version_info__ < (0, 11) and k.shape[2] != q.shape[2]:
            raise UserError(
                f"jax {jax.__version__}: its cuDNN offsets are wrong for packed documents with "
                "grouped heads; use jax >= 0.11 (Python >= 3.12) or train.attention=xla"
            )
        if call.shared:
            return shared_prefix_attention(q, k, v, call, arrays)
        lengths, starts = document_offsets(arrays.segments[0], call.max_documents or q.shape[1])
        packing = lengths, lengths, starts, starts
        if v.shape[-1] != q.shape[-1]:
            return cudnn_with_filled_heads(q, k, v, packing, call)
    return cudnn_attention(q, k, v, bias, packing, call)


def reads_products(q: jax.ShapeDtypeStruct, call: AttentionCall, arrays: AttentionArrays) -> bool:
    """Whether `attention_of_products` computes a call with queries and values shaped like q."""
    return call.mask != "cross" and resolve(call, q, q, arrays).implementation == "triton"


def attention_of_products(
    products: tuple[jax.Array, ...],
    biases: tuple[jax.Array, jax.Array] | None,
    call: AttentionCall,
    arrays: AttentionArrays,
    name: str = "",
) -> jax.Array:
    """`attention` of queries, keys and values, read where their matmuls put them -> [B, S, N, H].

    `products` are q [B, S, N, H] and kv [B, S, 2, K, H], or one array [B, S, 3, N, H] of all. They
    lack the `biases`: of queries [N, H], and of keys and values [2, K, H] or of values [1, K, H].
    The keys' bias adds one number to all scores of a query, which a softmax does not see: it is
    left out, and its gradient is 0. Remat policies know the first product, with its bias, by
    `name`.
    """
    q = products[0] if len(products) == 2 else products[0][:, :, 0]
    require(replace(call, implementation="triton"), q, products[-1], arrays)
    if biases is not None:
        biases = biases[0], biases[1][-1]
    return short_attention(products, biases, _seen_rows(q, call, arrays), call, name)


def resolve(
    call: AttentionCall,
    q: jax.Array,
    v: jax.Array,
    arrays: AttentionArrays,
    by_blocks: bool = False,
) -> AttentionCall:
    """The call with an implementation in place of 'auto' (`chooser.py`).

    `by_blocks`: of one that may take keys in blocks.
    """
    facts = {"call": call, "sinks": arrays.sinks is not None, "value_size": v.shape[-1]}
    facts["by_blocks"] = by_blocks
    facts["relative"] = arrays.relative is not None
    choice = choose(call.op, q.dtype, q.shape, **facts)
    if arrays.is_packed(call) and call.max_documents == 0 and choice.name == "cudnn":
        facts["call"] = replace(call, max_documents=q.shape[1])  # each token may be a document
        if (bounded := choose(call.op, q.dtype, q.shape, **facts)).name == "mosaic":
            choice = bounded
    return replace(call, implementation=choice.name)


def require(call: AttentionCall, q: jax.Array, v: jax.Array, arrays: AttentionArrays) -> None:
    """Raise `UserError` where a fused kernel lacks a feature, mask, dtype or head size."""
    if call.implementation == "mosaic":
        return mosaic.require_mosaic(q, v, call)
    if call.implementation == "triton":
        return require_short(q, v, call, arrays)
    for name in features_in_use(call, arrays):
        if name == "position_embedding" and (call.padded or not arrays.is_packed(call)):
            continue
        raise UserError(f"model.{name}: cuDNN attention lacks it; set train.attention=xla")
    refuse_masks_but(("causal", "full", "cross"), call, "cuDNN attention")
    if call.mask == "full" and call.window is not None:
        raise UserError(
            "model.layer_pattern: cuDNN attention has no windows to both sides (W, "
            "vision_window); set train.attention=auto or xla"
        )
    if call.shared and call.window is not None:
        raise UserError(
            "model.attention.sliding_window: cuDNN attention has no windows over shared prefixes "
            "(data.shared_prefixes); set train.attention=auto or xla"
        )
    if call.mask == "cross" and arrays.is_packed(call) and not call.padded:
        raise UserError(
            "segments of cross-attention: cuDNN attention lacks them; set train.attention=xla"
        )
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        raise UserError(
            f"precision.compute={q.dtype}: cuDNN attention needs bfloat16 or float16; "
            "set precision.compute=bfloat16 or train.attention=xla"
        )
    for size in (q.shape[-1], v.shape[-1]):
        if size % 8 or size > 256:
            raise UserError(
                f"model.attention.head_dim={size}: cuDNN attention needs a multiple of 8 up to "
                "256; set train.attention=xla"
            )


def _seen_rows(q: jax.Array, call: AttentionCall, arrays: AttentionArrays) -> SeenRows:
    """The part of a row that our kernels see; padding comes after all that a causal query sees."""
    if not arrays.is_packed(call) or (call.padded and call.mask == "causal"):
        return SeenRows()
    if call.padded:
        return SeenRows(lengths=row_lengths(q, arrays.segments)[1])
    return SeenRows(segments=arrays.segments)


# ---- reference ---------------------------------------------------------------------------------


def _reference(q, k, v, call, arrays):
    """Plain softmax attention, a chunk of queries at a time, recomputed in the backward."""
    size, columns, segments, shared = q.shape[1], arrays.columns, arrays.segments, arrays.shared
    if _is_near(q, k, call, arrays):
        return _near(q, k, v, call, arrays)
    of_queries = (None if segments is None else segments[0]), None
    if shared is not None:
        of_queries = segments[0], (shared.prefixes, shared.positions[0])

    def block(q, column, of_queries):
        segment, prefixes = of_queries
        part = replace(arrays, columns=(column, columns[1]))
        if segment is not None:
            part = replace(part, segments=(segment, segments[1]))
        if prefixes is not None:
            own = SharedKeys(prefixes[0], (prefixes[1], shared.positions[1]))
            part = replace(part, shared=own)
        return _dense(q, k, v, call, part)

    if size <= QUERY_CHUNK or size % QUERY_CHUNK:
        return block(q, columns[0], of_queries)

    def chunk(at):
        take = functools.partial(jax.lax.dynamic_slice_in_dim, slice_size=QUERY_CHUNK)
        facts = jax.tree.map(lambda x: take(x, at, axis=1), of_queries)
        part = take(q, at, axis=1), take(columns[0], at, axis=-1), facts
        return jax.checkpoint(block)(*part)

    out = jax.lax.map(chunk, jnp.arange(0, size, QUERY_CHUNK))  # [chunks, B, C, N, H']
    return jnp.moveaxis(out, 0, 1).reshape(*q.shape[:3], v.shape[-1])


def _is_near(q, k, call, arrays) -> bool:
    """Whether `_near` computes it, in less. Queries and keys that are as many are the same tokens,
    in order."""
    plain = arrays.sinks is None and arrays.relative is None and call.dropout == 0
    is_window = call.mask == "full" and call.window is not None
    return is_window and plain and q.shape[1] == k.shape[1] > 3 * _near_block(call)


def _near_block(call) -> int:
    """Tokens of a block of `_near`: no window reaches beyond the next one."""
    return max(call.window - 1, _FEWEST_NEAR)


def _near(q, k, v, call, arrays):
    """Attention in windows to both sides: each block of queries to its keys and those next to it.

    The blocks are rows of their own. Keys of a missing neighbor have segment -1.
    """
    batch, size = q.shape[:2]
    block = _near_block(call)
    blocks = -(-size // block)

    def padded(x: jax.Array, front: int, fill: int) -> jax.Array:
        widths = [(0, 0), (front, front + blocks * block - size)] + [(0, 0)] * (x.ndim - 2)
        return jnp.pad(x, widths, constant_values=fill)

    def own(x: jax.Array, fill: int = 0) -> jax.Array:
        return padded(x, 0, fill).reshape(batch * blocks, block, *x.shape[2:])

    def near(x: jax.Array, fill: int = 0) -> jax.Array:
        x = padded(x, block, fill).reshape(batch, blocks + 2, block, *x.shape[2:])
        x = jnp.concatenate([x[:, :-2], x[:, 1:-1], x[:, 2:]], 2)
        return x.reshape(batch * blocks, *x.shape[2:])

    segments = arrays.segments or (jnp.zeros((batch, size), jnp.int32),) * 2
    places = jnp.arange(3 * block, dtype=jnp.int32)
    of_blocks = AttentionArrays(
        columns=(places[block : 2 * block], places),
        segments=(own(segments[0], -1), near(segments[1], -1)),
    )
    attend = jax.checkpoint(functools.partial(_dense, call=call))
    out = attend(own(q), near(k), near(v), arrays=of_blocks)
    return out.reshape(batch, blocks * block, *out.shape[2:])[:, :size]


def _dense(q, k, v, call, arrays):
    b, s, n, h = q.shape
    groups = n // k.shape[2]
    q_BSKGH = q.reshape(b, s, k.shape[2], groups, h)
    scores = jnp.einsum("bskgh,btkh->bkgst", q_BSKGH, k, preferred_element_type=jnp.float32)
    bias = None
    if arrays.relative is not None:
        bias = relative_bias(call, arrays)
        bias = bias.reshape(*bias.shape[:-3], k.shape[2], groups, s, k.shape[1])
    scores = masked_scores(scores, seen_keys(call, arrays), call, bias)
    if arrays.sinks is None:
        probs = jax.nn.softmax(scores, axis=-1)
    else:
        sink = arrays.sinks.astype(jnp.float32).reshape(1, k.shape[2], groups, 1, 1)
        top = jax.lax.stop_gradient(jnp.maximum(scores.max(-1, keepdims=True), sink))
        weights = jnp.exp(scores - top)
        probs = weights / (weights.sum(-1, keepdims=True) + jnp.exp(sink - top))
    if call.dropout > 0:
        keep = _keep(call.dropout, arrays.dropout, arrays.columns[0], k.shape[1])
        probs = jnp.where(keep.reshape(scores.shape), probs / (1 - call.dropout), 0)
    out = jnp.einsum("bkgst,btkh->bskgh", probs.astype(v.dtype), v)
    return out.reshape(b, s, n, v.shape[-1])


def masked_scores(
    products: jax.Array,
    seen: jax.Array | None,
    call: AttentionCall,
    bias: jax.Array | None = None,
) -> jax.Array:
    """The input of softmax: fp32 products of queries and keys, scaled, biased, capped and masked.

    `seen` and `bias` broadcast to them. None: all keys are seen; there is no bias.
    """
    scores = products * call.scale
    if bias is not None:
        scores = scores + bias
    if call.softcap is not None:
        scores = call.softcap * jnp.tanh(scores / call.softcap)
    return scores if seen is None else jnp.where(seen, scores, _MASKED)


def seen_keys(call: AttentionCall, arrays: AttentionArrays) -> jax.Array | None:
    """Which keys each query sees: bool, to broadcast to [B, K, N/K, S, T]; None: all."""
    seen, segments = None, arrays.segments
    behind = arrays.columns[0][..., None] - arrays.columns[1]
    if behind.ndim == 3:
        behind = behind[:, None, None]  # of rows with columns of their own
    if call.mask in ("causal", "prefix"):
        seen = behind >= 0
        if call.window is not None:
            seen = seen & (behind < call.window)
    elif call.window is not None:
        seen = jnp.abs(behind) < call.window
    if call.mask == "prefix":
        seen = seen | arrays.prefix[:, None, None, None, :]
    if segments is not None:
        same = (segments[0][:, :, None] == segments[1][:, None, :])[:, None, None]
        seen = same if seen is None else seen & same
    if arrays.shared is not None:
        seen = seen | _seen_in_prefixes(call, arrays)[:, None, None]
    return seen


def _seen_in_prefixes(call: AttentionCall, arrays: AttentionArrays) -> jax.Array:
    """Which keys each query sees in the segment that its own continues, bool [B, S, T]."""
    prefixes, positions = arrays.shared
    seen = prefixes[:, :, None] == arrays.segments[1][:, None, :]
    seen = seen & (prefixes > 0)[:, :, None]
    if call.window is not None:
        seen = seen & (positions[0][:, :, None] - positions[1][:, None, :] < call.window)
    return seen


def _keep(rate, places, columns, size):
    """Dropout mask [B, N, S, T]: a function of the global (row, head, column) alone."""

    def one(row, head, column):
        cell = places.key
        for place in (row, head, column):
            cell = jax.random.fold_in(cell, place)
        return jax.random.bernoulli(cell, 1 - rate, (size,))

    over_heads = jax.vmap(jax.vmap(one, (None, None, 0)), (None, 0, None))
    return jax.vmap(over_heads, (0, None, None))(places.rows, places.heads, columns)


# ---- blocks ------------------------------------------------------------------------------------

Places = tuple[jax.Array, jax.Array | None]  # columns [B, S]; segments [B, S] or None


def block_forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    places: tuple[Places, Places] | None,
    call: AttentionCall,
    *,
    diagonal: bool,
) -> tuple[jax.Array, jax.Array]:
    """Causal attention of q [B, S, N, H] to one block of keys -> fp32 (out, lse [B, N, S]).

    `out` is [B, S, N, H]. The `places` of queries and keys make the mask on XLA, as `attention`
    describes; a query that sees no key of the block gets an lse of about -1e30. Fused kernels take
    none: all keys are seen or, in a block on the `diagonal`, those up to the query's own index.
    """
    if call.implementation != "xla":
        assert places is None and call.window is None, "a fused block masks by index alone"
        block = _fused_block(call, diagonal)
        if call.implementation == "mosaic":
            out, lse = mosaic.mosaic_forward(q, k, v, block)
        else:
            out, lse = bind_forward(q, k, v, None, None, block)
        return out.astype(jnp.float32), lse

    def part(q, place):
        scores = _block_scores(q, k, place, places[1], call)
        lse = jax.nn.logsumexp(scores, axis=-1)
        probs = jnp.exp(scores - lse[..., None]).astype(v.dtype)
        out = jnp.einsum("bkgst,btkh->bskgh", probs, v, preferred_element_type=jnp.float32)
        return out.reshape(q.shape), lse.reshape(lse.shape[0], q.shape[2], q.shape[1])

    out, lse = jax.lax.map(lambda xs: part(*xs), _cut_queries((q, places[0]), 1))
    return _join_queries(out, 1), _join_queries(lse, 2)


def block_backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    places: tuple[Places, Places] | None,
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    call: AttentionCall,
    *,
    diagonal: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """This block's part of (d_q, d_k, d_v), fp32; `out` and `lse` are those over all blocks."""
    if call.implementation != "xla":
        block = _fused_block(call, diagonal)
        if call.implementation == "mosaic":
            grads = mosaic.mosaic_backward(q, k, v, out, lse, d_out, block)
        else:
            grads = bind_backward(q, k, v, None, None, out, lse, d_out, block)
        return tuple(g.astype(jnp.float32) for g in grads)

    def part(carry, xs):
        q, place, out, d_out, lse = xs
        scores = _block_scores(q, k, place, places[1], call)
        probs = jnp.exp(scores - lse.reshape(scores.shape[:-1])[..., None])
        grouped = (*q.shape[:2], k.shape[2], -1, q.shape[3])
        q_, d_out_ = q.reshape(grouped), d_out.reshape(grouped)
        delta = jnp.sum((out.astype(jnp.float32) * d_out).reshape(grouped), axis=-1)
        f32 = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
        d_probs = f32("bskgh,btkh->bkgst", d_out_, v)
        d_scores = probs * (d_probs - jnp.moveaxis(delta, 1, -1)[..., None]) * call.scale
        probs, d_scores = probs.astype(v.dtype), d_scores.astype(v.dtype)
        d_k = carry[0] + f32("bkgst,bskgh->btkh", d_scores, q_)
        d_v = carry[1] + f32("bkgst,bskgh->btkh", probs, d_out_)
        d_q = f32("bkgst,btkh->bskgh", d_scores, k).reshape(q.shape)
        return (d_k, d_v), d_q

    zero = jnp.zeros(k.shape, jnp.float32)
    xs = (*_cut_queries((q, places[0], out, d_out), 1), _cut_queries(lse, 2))
    (d_k, d_v), d_q = jax.lax.scan(part, (zero, zero), xs)
    return _join_queries(d_q, 1), d_k, d_v


def _fused_block(call, diagonal):
    """The call of a fused kernel that computes one block."""
    return replace(call, mask="causal" if diagonal else "full")


def _block_scores(q, k, q_place, k_place, call):
    """Masked fp32 scores [B, K, N/K, S, T] of queries and keys at the given places."""
    q = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
    scores = jnp.einsum("bskgh,btkh->bkgst", q, k, preferred_element_type=jnp.float32) * call.scale
    behind = q_place[0][:, :, None] - k_place[0][:, None, :]
    seen = behind >= 0
    if call.window is not None:
        seen = seen & (behind < call.window)
    if q_place[1] is not None:
        seen = seen & (q_place[1][:, :, None] == k_place[1][:, None, :])
    return jnp.where(seen[:, None, None], scores, _MASKED)


def _cut_queries(tree, axis):
    """Cut `axis` of each array into chunks of queries, moved to the front."""

    def one(x):
        size = x.shape[axis]
        chunk = size if size % QUERY_CHUNK else QUERY_CHUNK
        shape = (*x.shape[:axis], size // chunk, chunk, *x.shape[axis + 1 :])
        return jnp.moveaxis(x.reshape(shape), axis, 0)

    return jax.tree.map(one, tree)


def _join_queries(x, axis):
    """The inverse of `_cut_queries`."""
    x = jnp.moveaxis(x, 0, axis)
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
