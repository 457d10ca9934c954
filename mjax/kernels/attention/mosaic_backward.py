"""Mosaic GPU kernels of the attention's gradients: d_q, and d_k with d_v.

Probabilities are computed anew from the log-sum-exp, so nothing of size S x T is stored. One kernel
sums over keys (d_q), one over queries (d_k, d_v): 7 products where one kernel with atomic sums
needs 5, in exchange for results that are equal bit for bit (FlashAttention-2, arXiv 2307.08691,
with its two sums apart).
"""

from functools import partial

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from mjax.kernels.attention.mosaic_forward import (
    ROW_VALUES,
    AttentionJob,
    MosaicTile,
    common_scratch,
    fill_ring_slot,
    key_blocks,
    launch,
    mask_unseen,
    move_keys,
    release,
    store,
    sweep,
    zeros,
)

COLUMN_VALUES = plgpu.Layout.WGMMA.reduce(0)  # how a value for each column of a product is held


def gradients_of_queries(job: AttentionJob, tile: MosaicTile, q, k, v, d_out, lse, delta, low=None):
    """d_q [B, S, N, H]; `lse` to base 2 and `delta` = sum(out * d_out) are fp32 [B, N, S]."""
    optional = {} if low is None else {"low": low}
    scratch = common_scratch(job, tile, ["q", "d_out"], ["k", "v"], 1)
    if job.staged:
        scratch["stage"] = scratch["q_own"]
    (d_q,) = launch(
        job.heads * job.batch * (job.queries // tile.rows),
        tile,
        partial(move_keys, job, tile, ["q", "d_out"]),
        partial(_d_queries_item, job, tile),
        dict(q=q, k=k, v=v, d_out=d_out, lse=lse, delta=delta, **optional),
        dict(d_q=jax.ShapeDtypeStruct(q.shape, q.dtype)),
        scratch,
    )
    return d_q


def _d_queries_item(job: AttentionJob, tile: MosaicTile, refs, group, item, count):
    head, row, place = job.split(item, job.heads, job.queries // tile.rows - 1)
    start = place * tile.rows
    last, ranges = key_blocks(job, tile, refs, row, start)
    start += group * 64
    span = pl.ds(start, 64)
    load = partial(plgpu.load, layout=ROW_VALUES, optimized=False)
    lse, delta = load(refs.lse.at[row, head, span]), load(refs.delta.at[row, head, span])
    low = load(refs.low.at[row, span]) if hasattr(refs, "low") else None
    square = (64, tile.block)

    def step(i, d_q, masked):
        slot = lax.rem(count + i, tile.slots)
        k, v = refs.k_ring.at[slot], refs.v_ring.at[slot]

        def multiply(raw_ref, dp_ref, dq_ref):
            dq_ref[...] = d_q
            plgpu.barrier_wait(refs.k_ready.at[slot])
            plgpu.wgmma(raw_ref, refs.q_own.at[group], k.transpose((1, 0)))
            plgpu.barrier_wait(refs.v_ready.at[slot])
            plgpu.wgmma(dp_ref, refs.d_out_own.at[group], v.transpose((1, 0)))
            logits, factor = job.logits(plgpu.wgmma_accumulator_load(raw_ref, wait_n=1))
            probs = jnp.exp2(logits * factor - lax.broadcast_in_dim(lse, square, [0]))
            if masked:
                probs = mask_unseen(job, probs, 0.0, start, (last - 1 - i) * tile.block, 0, low)
            d_probs = plgpu.wgmma_accumulator_load(dp_ref, wait_n=0)
            plgpu.barrier_arrive(refs.v_free.at[slot])
            d_raw = probs * (d_probs - lax.broadcast_in_dim(delta, square, [0]))
            if job.softcap is not None:
                d_raw *= 1 - logits * logits
            plgpu.wgmma(dq_ref, d_raw.astype(jnp.bfloat16), k)
            done = dq_ref[...]
            plgpu.barrier_arrive(refs.k_free.at[slot])
            return done

        products = [plgpu.ACC(square, jnp.float32)] * 2
        return pl.run_scoped(multiply, *products, plgpu.ACC((64, job.size), jnp.float32))

    plgpu.barrier_wait(refs.own_ready.at[group])
    d_q = sweep(step, zeros(64, job.size), ranges) * job.scale
    release(job, refs, group)
    buffer = getattr(refs, "stage", refs.q_own)
    store(job, refs, group, (d_q, buffer, refs.d_q.at[row, span, head]))
    return count + ranges[-1][1]


# ---- d_k and d_v -------------------------------------------------------------------------------


def query_blocks(job: AttentionJob, tile: MosaicTile, refs, row, start):
    """(first query block, ranges of steps up from it: begin, end, masked)."""
    first, last, ranges = jnp.int32(0), jnp.int32(job.queries // tile.block), []
    whole = 0
    if job.causal:
        first = jnp.minimum(lax.div(start, tile.block), last)
        whole = lax.div(start + tile.rows + tile.block - 2, tile.block)
        whole = jnp.minimum(whole, last) - first
        ranges = [(0, whole, True)]
    bounded = hasattr(refs, "high")
    if not bounded and job.window is None:
        return first, [*ranges, (whole, last - first, False)]
    if bounded:
        least, most = refs.high[row, start], refs.high[row, start + tile.rows - 1]
    else:
        least, most = start + job.window - 1, start + tile.rows + job.window - 2
    steps = jnp.minimum(lax.div(most, tile.block) + 1, last) - first
    whole = jnp.minimum(whole, steps)
    clear = jnp.clip(lax.div(least + 1, tile.block) - first, whole, steps)
    return first, [(0, whole, True), (whole, clear, False), (clear, steps, True)]


def gradients_of_keys(
    job: AttentionJob, tile: MosaicTile, q, k, v, d_out, lse, delta, high=None, parts=("k", "v")
):
    """d_k and d_v [B, T, K, H], those of `parts`; `high` int32 [B, T] is the last query that sees
    each key, the other arguments are those of `gradients_of_queries`. Scores are transposed, keys
    by queries, and the sum runs over the query heads of a group too."""
    optional = {} if high is None else {"high": high}
    scratch = common_scratch(job, tile, ["k", "v"], ["q", "d_out"], 2)
    line = plgpu.SMEM((tile.slots, tile.block), jnp.float32)
    scratch |= {"lse_ring": line, "delta_ring": line}
    if job.staged:
        scratch |= {f"{part}_stage": scratch["k_own"] for part in parts}
    return launch(
        job.kv_heads * job.batch * (job.keys // tile.rows),
        tile,
        partial(_move_queries, job, tile),
        partial(_d_keys_item, job, tile, parts),
        dict(q=q, k=k, v=v, d_out=d_out, lse=lse, delta=delta, **optional),
        {f"d_{part}": jax.ShapeDtypeStruct(k.shape, k.dtype) for part in parts},
        scratch,
    )


def _move_queries(job: AttentionJob, tile: MosaicTile, refs, item, count):
    head, row, place = job.split(item, job.kv_heads)
    start = place * tile.rows
    first, ranges = query_blocks(job, tile, refs, row, start)
    steps = ranges[-1][1]
    for i in range(tile.groups):
        at = row, pl.ds(start + i * 64, 64), head
        tiles = (refs.k.at[at], refs.k_own), (refs.v.at[at], refs.v_own)
        fill_ring_slot(i, count > 0, refs.own_free, refs.own_ready, *tiles)

    @pl.loop(0, job.per_kv * steps)
    def _block(i):
        q_head = head * job.per_kv + lax.div(i, steps)
        span = pl.ds((first + lax.rem(i, steps)) * tile.block, tile.block)
        slot, again = lax.rem(count + i, tile.slots), count + i >= tile.slots
        lse, delta = refs.lse.at[row, q_head, span], refs.delta.at[row, q_head, span]
        q = (refs.q.at[row, span, q_head], refs.q_ring), (lse, refs.lse_ring)
        fill_ring_slot(slot, again, refs.q_free, refs.q_ready, *q)
        d_out = (refs.d_out.at[row, span, q_head], refs.d_out_ring), (delta, refs.delta_ring)
        fill_ring_slot(slot, again, refs.d_out_free, refs.d_out_ready, *d_out)

    return count + job.per_kv * steps


def _d_keys_item(job: AttentionJob, tile: MosaicTile, parts, refs, group, item, count):
    head, row, place = job.split(item, job.kv_heads)
    start = place * tile.rows
    first, ranges = query_blocks(job, tile, refs, row, start)
    start += group * 64
    span, steps = pl.ds(start, 64), ranges[-1][1]
    high = None
    if hasattr(refs, "high"):
        high = plgpu.load(refs.high.at[row, span], layout=ROW_VALUES, optimized=False)
    plgpu.barrier_wait(refs.own_ready.at[group])

    def mask(probs, j):
        return mask_unseen(job, probs, 0.0, (first + j) * tile.block, start, 1, high)

    def one_head(member, sums):
        def slot_of(j):
            return lax.rem(count + member * steps + j, tile.slots)

        step = partial(_d_keys_step, job, tile, parts, refs, group, slot_of, mask)
        return sweep(step, sums, ranges)

    zero = tuple(zeros(64, job.size) for _ in parts)
    sums = dict(zip(parts, lax.fori_loop(0, job.per_kv, one_head, zero), strict=True))
    release(job, refs, group)
    if "k" in parts:
        sums["k"] = sums["k"] * job.scale
    outs = []
    for part in parts:
        buffer = getattr(refs, f"{part}_stage" if job.staged else f"{part}_own")
        outs.append((sums[part], buffer, getattr(refs, f"d_{part}").at[row, span, head]))
    store(job, refs, group, *outs)
    return count + job.per_kv * steps


def _d_keys_step(job, tile, parts, refs, group, slot_of, mask, j, sums, masked):
    """One block of queries. Columns of lse and delta are read late: registers are all in use."""
    slot, square = slot_of(j), (64, tile.block)
    q, d_out = refs.q_ring.at[slot], refs.d_out_ring.at[slot]

    def across(line):
        return lax.broadcast_in_dim(plgpu.load(line.at[slot], layout=COLUMN_VALUES), square, [1])

    def multiply(raw_ref, dp_ref, *sum_refs):
        ref = dict(zip(parts, sum_refs, strict=True))
        for part, value in zip(parts, sums, strict=True):
            ref[part][...] = value
        plgpu.barrier_wait(refs.q_ready.at[slot])
        plgpu.wgmma(raw_ref, refs.k_own.at[group], q.transpose((1, 0)))
        plgpu.barrier_wait(refs.d_out_ready.at[slot])
        if "k" in parts:
            plgpu.wgmma(dp_ref, refs.v_own.at[group], d_out.transpose((1, 0)))
        lse = across(refs.lse_ring)
        raw = plgpu.wgmma_accumulator_load(raw_ref, wait_n=int("k" in parts))
        logits, factor = job.logits(raw)
        probs = jnp.exp2(logits * factor - lse)
        if masked:
            probs = mask(probs, j)
        if "k" in parts:
            d_probs = plgpu.wgmma_accumulator_load(dp_ref, wait_n=0)
            d_raw = probs * (d_probs - across(refs.delta_ring))
            if job.softcap is not None:
                d_raw *= 1 - logits * logits
        if "v" in parts:
            plgpu.wgmma(ref["v"], probs.astype(jnp.bfloat16), d_out)
        if "k" in parts:
            plgpu.wgmma(ref["k"], d_raw.astype(jnp.bfloat16), q)
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(refs.d_out_free.at[slot])
        plgpu.barrier_arrive(refs.q_free.at[slot])
        return tuple(plgpu.wgmma_accumulator_load(ref[part], wait_n=None) for part in parts)

    products = [plgpu.ACC(square, jnp.float32)] * 2
    own = [plgpu.ACC((64, job.size), jnp.float32)] * len(parts)
    return pl.run_scoped(multiply, *products, *own)
