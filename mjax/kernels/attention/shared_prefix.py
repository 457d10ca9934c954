"""cuDNN's attention where segments share a prefix: two calls, merged by their log-sum-exps.

One call is causal within segments. In the other the queries of all segments that share a prefix, a
run of columns, see all of its keys. Both are packed calls of cuDNN, so that no call has a mask, and
the output is that of one softmax over both sets of keys: with its log-sum-exp, the gradients of
each call are its part of the whole's, and add up (as in `models/attention/ring.py`).

FLOPs forward, of a prefix of P tokens and G answers of R: 4 N H (P^2 / 2 + G R^2 / 2 + G R P), in
the place of 4 N H G (P + R)^2 / 2; backward 2.5 times that. At G = 8 and P = R it is 12.5 of 16 P^2
units, while all that is linear in tokens falls to 9/16. The second call reads q and the keys of
prefixes once more. It writes one more output in bf16 and its log-sum-exp, and merging reads both
outputs and writes one. Backward each call reads and writes what one would.

cuDNN leaves rows that no segment has as they were in memory, so they are masked here. Its
log-sum-exps are fp32 [segments of the batch, N, S], each from its segment's first token on. They
exist during a call; what is kept for the backward is [B, S, N].
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from mjax.kernels.attention.cudnn import bind_backward, bind_forward, document_offsets
from mjax.kernels.base.attention_call import AttentionArrays, AttentionCall

_NOTHING = -1e30  # the log-sum-exp of queries that see no key


class PackedRuns(NamedTuple):
    """Queries and keys of a packed call: runs of columns.

    packing: cuDNN's lengths of queries and of keys [B, M], and their offsets [B, M + 1], -1 filled.
    row, column: int32 [B, S], the place of each token's log-sum-exp in cuDNN's array.
    queries, keys: bool [B, S], the tokens that are in a run.
    """

    packing: tuple[jax.Array, ...]
    row: jax.Array
    column: jax.Array
    queries: jax.Array
    keys: jax.Array


def shared_prefix_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, call: AttentionCall, arrays: AttentionArrays
) -> jax.Array:
    """q [B, S, N, H], k [B, S, K, H], v [B, S, K, H'], bf16 or fp16 -> [B, S, N, H'].

    Smaller heads are filled with zeros, as jax's offsets need (`cudnn.py`).
    """
    size = v.shape[-1]
    widest = max(q.shape[-1], size)
    q, k, v = (jnp.pad(x, [(0, 0)] * 3 + [(0, widest - x.shape[-1])]) for x in (q, k, v))
    most = max(call.max_documents or q.shape[1], 2)  # cuDNN packs two segments or more
    return _merged(q, k, v, packed_runs(arrays, most), call)[..., :size]


def packed_runs(arrays: AttentionArrays, most: int) -> tuple[PackedRuns, PackedRuns]:
    """(each segment with itself, those that share a prefix with it); at most `most` in a row."""
    segments, prefixes = arrays.segments[0], arrays.shared.prefixes
    lengths, starts = document_offsets(segments, most)
    all_tokens = jnp.ones(segments.shape, bool)
    packing = lengths, lengths, starts, starts
    own = PackedRuns(packing, *_stored_places(segments), all_tokens, all_tokens)
    lengths, starts = document_offsets(prefixes, most)
    first = jnp.maximum(starts[:, :most], 0)
    of_run = jnp.take_along_axis(prefixes, first, 1)
    is_run = (of_run > 0) & (lengths > 0)
    _, column = _stored_places(segments)
    before = jnp.maximum(first - 1, 0)  # the last token of the prefix
    of_prefix = 1 + jnp.take_along_axis(column, before, 1)
    nothing = jnp.minimum(lengths, 0)  # 0 for runs without a prefix, -1 where there is no run
    keys = jnp.where(is_run, of_prefix, nothing)
    queries = jnp.where(is_run, lengths, nothing)
    of_keys = jnp.where(is_run, first - of_prefix, starts[:, :most])
    of_keys = jnp.concatenate([of_keys, starts[:, most:]], 1)
    is_read = jnp.any((segments[..., None] == of_run[:, None]) & is_run[:, None], -1)
    packing = queries, keys, starts, of_keys
    return own, PackedRuns(packing, *_stored_places(prefixes), prefixes > 0, is_read)


def _stored_places(ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(the number of a token's run of equal ids, its place there): jax lists runs without gaps."""
    place = jnp.arange(ids.shape[1], dtype=jnp.int32)
    begins = jnp.diff(ids, axis=1, prepend=ids[:, :1] - 1) != 0
    first = lax.cummax(jnp.where(begins, place, 0), axis=1)
    number = jnp.cumsum(begins, dtype=jnp.int32).reshape(ids.shape) - 1
    return number, place - first


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _merged(q, k, v, runs, call):
    return _merged_forward(q, k, v, runs, call)[0]


def _merged_forward(q, k, v, runs, call):
    total, lse = jnp.zeros(q.shape, jnp.float32), None
    for run, block in zip(runs, _two_calls(call), strict=True):
        out, found = bind_forward(q, k, v, None, run.packing, block)
        found = jnp.where(run.queries[..., None], found[run.row, :, run.column], _NOTHING)
        both = found if lse is None else jnp.logaddexp(lse, found)
        out = jnp.where(run.queries[..., None, None], out, 0).astype(jnp.float32)
        total = total if lse is None else total * jnp.exp(lse - both)[..., None]
        total, lse = total + out * jnp.exp(found - both)[..., None], both
    out, lse = checkpoint_name(total.astype(q.dtype), "attn_out"), checkpoint_name(lse, "attn_lse")
    return out, (q, k, v, runs, out, lse)  # lse [B, S, N]


def _merged_backward(call, saved, d_out):
    q, k, v, runs, out, lse = saved
    sums = [jnp.zeros(x.shape, jnp.float32) for x in (q, k, v)]
    for run, block in zip(runs, _two_calls(call), strict=True):
        stored = jnp.zeros((run.packing[0].size, q.shape[2], q.shape[1]), jnp.float32)
        stored = stored.at[run.row, :, run.column].set(lse)
        found = bind_backward(q, k, v, None, run.packing, out, stored, d_out, block)
        are_set = run.queries, run.keys, run.keys
        for n, (gradient, is_set) in enumerate(zip(found, are_set, strict=True)):
            sums[n] += jnp.where(is_set[..., None, None], gradient, 0).astype(jnp.float32)
    return *(total.astype(q.dtype) for total in sums), None


_merged.defvjp(_merged_forward, _merged_backward)


def _two_calls(call: AttentionCall) -> tuple[AttentionCall, AttentionCall]:
    """The calls of a segment's own keys and of its prefix's."""
    return call, AttentionCall(call.scale, mask="full", deterministic=call.deterministic)
