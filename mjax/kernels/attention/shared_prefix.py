"""cuDNN's attention where segments share a prefix: two calls, merged by their log-sum-exps.

One call is causal within segments. In the other the queries of all segments that share a prefix, a
run of columns, see all of its keys. Both are packed calls of cuDNN, so that no call has a mask, and
the output is that of one softmax over both sets of keys: with its log-sum-exp, the gradients of
each call are its part of the whole's, and add up (as in `models/attention/ring.py`).

FLOPs forward, of a prefix of P tokens and G answers of R: 4 N H (P^2 / 2 + G R^2 / 2 + G R P), in
the place of 4 N H G (P + R)^2 / 2; backward 2.5 times that. At G = 8 and P = R it is 12.5 of 16 P^2
units, while all that is linear in tokens falls to 9/16. The second call reads q once more, and
writes and reads one output in bf16 and its log-sum-exp: 2 + 1/H passes over q more forward, and
backward once more what attention reads and writes.

cuDNN leaves rows that no segment has as they were in memory, so they are masked here. Its
log-sum-exps are [segments of the batch, N, S], each from its segment's first token on.
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
    """Queries and keys of a packed call.

    packing: cuDNN's lengths of queries and keys [B, M], and their offsets [B, M + 1], -1 filled.
    row, column: int32 [B, S], the place of each token's log-sum-exp in cuDNN's array; a row that it
        lacks where the token is in no run.
    queries, keys: bool [B, S], the tokens that are in one.
    """

    packing: tuple[jax.Array, ...]
    row: jax.Array
    column: jax.Array
    queries: jax.Array
    keys: jax.Array

    @property
    def segments(self) -> int:
        """The segments of the batch, B M."""
        return self.packing[0].size

    def of_tokens(self, lse: jax.Array) -> jax.Array:
        """cuDNN's log-sum-exps in the order of tokens, [B, N, S]."""
        found = lse.at[self.row, :, self.column].get(mode="fill", fill_value=_NOTHING)
        return jnp.moveaxis(found, 2, 1)

    def of_segments(self, lse: jax.Array) -> jax.Array:
        """The inverse of `of_tokens`."""
        empty = jnp.zeros((self.segments, lse.shape[1], lse.shape[2]), lse.dtype)
        return empty.at[self.row, :, self.column].set(jnp.moveaxis(lse, 1, 2), mode="drop")


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
    runs = own_runs(arrays.segments[0], most), prefix_runs(arrays, max(most // 2, 2))
    return _merged(q, k, v, runs, call)[..., :size]


def own_runs(segments: jax.Array, most: int) -> PackedRuns:
    """Each segment with itself, of at most `most` in a row."""
    lengths, starts = document_offsets(segments, most)
    begins = jnp.diff(segments, axis=1, prepend=segments[:, :1] - 1) != 0
    everywhere = jnp.ones(segments.shape, bool)
    packing = lengths, lengths, starts, starts
    return PackedRuns(packing, *_stored_places(begins, everywhere, most), everywhere, everywhere)


def prefix_runs(arrays: AttentionArrays, most: int) -> PackedRuns:
    """The segments that share a prefix with it, which lies before them; at most `most` in a row."""
    segments, prefixes = arrays.segments[0], arrays.shared.prefixes
    size = segments.shape[1]
    place = jnp.arange(size, dtype=jnp.int32)
    has_one = prefixes > 0
    changed = jnp.diff(prefixes, axis=1) != 0
    begins = has_one & jnp.pad(changed, ((0, 0), (1, 0)), constant_values=True)
    ends = has_one & jnp.pad(changed, ((0, 0), (0, 1)), constant_values=True)
    new = jnp.diff(segments, axis=1) != 0
    of_segment = lax.cummax(jnp.where(jnp.pad(new, ((0, 0), (1, 0))), place, 0), axis=1)
    after = jnp.where(jnp.pad(new, ((0, 0), (0, 1))), place + 1, size)
    after = lax.cummin(after, axis=1, reverse=True)
    reader = jnp.take_along_axis(prefixes, jnp.minimum(after, size - 1), 1)
    is_read = (reader == segments) & (after < size) & (reader > 0)

    def listed(where: jax.Array, behind: int) -> jax.Array:
        places = jnp.sort(jnp.where(where, place + behind, size + 1), axis=1)
        return jnp.pad(places, ((0, 0), (0, most)), constant_values=size + 1)[:, :most]

    first, last = listed(begins, 0), listed(ends, 1)
    is_run = first < size
    before = jnp.take_along_axis(of_segment, jnp.clip(first - 1, 0, size - 1), 1)

    def filled(x: jax.Array, more: int = 0) -> jax.Array:
        return jnp.pad(jnp.where(is_run, x, -1), ((0, 0), (0, more)), constant_values=-1)

    lengths = filled(last - first), filled(first - before)
    packing = *lengths, filled(first, 1), filled(before, 1)
    return PackedRuns(packing, *_stored_places(begins, has_one, most), has_one, is_read)


def _stored_places(begins: jax.Array, queries: jax.Array, most: int) -> tuple[jax.Array, jax.Array]:
    """`row` and `column` of `PackedRuns`: jax lists the runs of all rows without gaps."""
    place = jnp.arange(begins.shape[1], dtype=jnp.int32)
    first = lax.cummax(jnp.where(begins, place, 0), axis=1)
    number = jnp.cumsum(begins, axis=1, dtype=jnp.int32) - 1
    in_row = number[:, -1] + 1
    row = number + (jnp.cumsum(in_row) - in_row)[:, None]
    return jnp.where(queries, row, most * len(begins)), place - first


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _merged(q, k, v, runs, call):
    return _merged_forward(q, k, v, runs, call)[0]


def _merged_forward(q, k, v, runs, call):
    total, lse = None, None
    for run, block in zip(runs, _blocks(call), strict=True):
        out, found = bind_forward(q, k, v, None, run.packing, block)
        out = jnp.where(run.queries[..., None, None], out, 0).astype(jnp.float32)
        found = run.of_tokens(found)
        if lse is None:
            total, lse = out, found
            continue
        both = jnp.logaddexp(lse, found)
        total = total * _share(lse, both) + out * _share(found, both)
        lse = both
    out, lse = checkpoint_name(total.astype(q.dtype), "attn_out"), checkpoint_name(lse, "attn_lse")
    return out, (q, k, v, runs, out, lse)


def _merged_backward(call, saved, d_out):
    q, k, v, runs, out, lse = saved
    sums = [jnp.zeros(x.shape, jnp.float32) for x in (q, k, v)]
    for run, block in zip(runs, _blocks(call), strict=True):
        stored = run.of_segments(lse)
        found = bind_backward(q, k, v, None, run.packing, out, stored, d_out, block)
        for n, (gradient, is_set) in enumerate(zip(found, (run.queries, run.keys, run.keys))):
            sums[n] += jnp.where(is_set[..., None, None], gradient, 0).astype(jnp.float32)
    return *(total.astype(q.dtype) for total in sums), None


_merged.defvjp(_merged_forward, _merged_backward)


def _blocks(call: AttentionCall) -> tuple[AttentionCall, AttentionCall]:
    """The calls of a segment's own keys and of its prefix's."""
    return call, AttentionCall(call.scale, mask="full", deterministic=call.deterministic)


def _share(lse: jax.Array, total: jax.Array) -> jax.Array:
    """The share of a part in a softmax over all, [B, S, N, 1]."""
    return jnp.exp(jnp.swapaxes(lse - total, 1, 2))[..., None]
