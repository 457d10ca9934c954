"""Parts of the Mosaic GPU attention kernels, and the forward (see `mosaic.py`).

One warpgroup moves tiles by TMA through a ring of shared-memory slots; the others hold 64 rows
each. In the forward they take turns on the tensor core, so that one computes its softmax while
another multiplies (FlashAttention-3, arXiv 2407.08608). A launch has one thread block for each
multiprocessor, which walks over its share of the work; the mover runs ahead into the next item.

A query sees one interval of keys, [low, its own index]; a key is seen by [its own index, high]. A
window and contiguous documents only move `low` and `high`, so blocks outside the interval
are never read and blocks wholly inside it need no mask. No sum is shared between thread blocks: no
atomics, and results are equal bit for bit. Invariant: mover and computers count ring slots alike.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

LOG2E = 1.4426950408889634
_BLOCKS = 132  # multiprocessors of an H100 SXM or H200
_FLOOR = -1e30  # a running maximum before any key, finite: a block may hide all keys of a row
ROW_VALUES = plgpu.Layout.WGMMA.reduce(1)  # how a value for each row of a product is held
_TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


@dataclass(frozen=True)
class MosaicTile:
    """Warpgroups that compute (64 rows each), columns of a block, and slots of the ring."""

    groups: int
    block: int
    slots: int

    @property
    def rows(self) -> int:
        return 64 * self.groups


@dataclass(frozen=True)
class AttentionJob:
    """Sizes and options of one attention; queries and keys are multiples of the tiles."""

    batch: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    size: int
    scale: float
    window: int | None
    softcap: float | None
    causal: bool
    real_keys: int  # keys beyond these are padding

    @property
    def per_kv(self) -> int:
        return self.heads // self.kv_heads

    @property
    def staged(self) -> bool:
        """Whether shared memory has room for outputs beside the inputs they replace."""
        return self.size < 256

    def logits(self, raw: jax.Array) -> tuple[jax.Array, float]:
        """Products q.k -> (logits / factor, factor), logits to base 2."""
        if self.softcap is None:
            return raw, self.scale * LOG2E
        return jnp.tanh(raw * (self.scale / self.softcap)), self.softcap * LOG2E

    def split(self, item: jax.Array, heads: int, last: int | None = None) -> tuple[jax.Array, ...]:
        """Work item -> (head, row, tile); tiles change slowest, from `last` down if given."""
        head, item = lax.rem(item, heads), lax.div(item, heads)
        row, tile = lax.rem(item, self.batch), lax.div(item, self.batch)
        return head, row, tile if last is None else last - tile


# ---- parts -------------------------------------------------------------------------------------


def _walk_items(total: int, one: Callable) -> None:
    """Run `one(item, count)` -> count over this thread block's share of `total` items.

    Items are dealt to and fro: shares are even where items come sorted by size.
    """
    block, width = lax.axis_index("block"), min(_BLOCKS, total)
    whole, rest = divmod(total, width)

    def place(i):
        return i * width + jnp.where(lax.rem(i, 2) == 0, block, width - 1 - block)

    rounds = whole + jnp.where(place(jnp.int32(whole)) < total, 1, 0) if rest else whole
    lax.fori_loop(0, rounds, lambda i, count: one(place(i), count), jnp.int32(0))


def launch(total, tile, move, compute, operands, out_type, scratch, registers=(24, 240)):
    """Run `move` in one warpgroup and `compute` in the others; operands are by name.

    `registers` are those of a moving and of a computing thread.
    """
    names = [*operands, *out_type]

    def body(*gmem, **smem):
        refs = SimpleNamespace(**dict(zip(names, gmem, strict=True)), **smem)
        group = lax.axis_index("group")

        @pl.when(group == tile.groups)
        def _():
            plgpu.set_max_registers(registers[0], action="decrease")
            _walk_items(total, partial(move, refs))

        @pl.when(group < tile.groups)
        def _():
            plgpu.set_max_registers(registers[1], action="increase")
            if "turn" in scratch:
                last = group == tile.groups - 1
                pl.when(last)(lambda: plgpu.barrier_arrive(refs.turn.at[0]))
            _walk_items(total, partial(compute, refs, group))
            plgpu.wait_smem_to_gmem(0)

    run = plgpu.kernel(
        body,
        out_type=tuple(out_type.values()),
        scratch_types=scratch,
        grid=(min(_BLOCKS, total),),
        grid_names=("block",),
        num_threads=tile.groups + 1,
        thread_name="group",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    return run(*operands.values())


def fill_ring_slot(slot, again, free, ready, *copies):
    """Copy each (source, ring) into `slot` once its readers of the last time are done."""
    pl.when(again)(lambda: plgpu.barrier_wait(free.at[slot]))
    for source, ring in copies:
        plgpu.copy_gmem_to_smem(source, ring.at[slot], ready.at[slot])


def sweep(step, carry, ranges):
    for begin, end, masked in ranges:
        carry = lax.fori_loop(begin, end, partial(step, masked=masked), carry)
    return carry


def key_blocks(job: AttentionJob, tile: MosaicTile, refs, row, start):
    """(end of the last key block, ranges of steps down from it: begin, end, masked)."""
    blocks, c = job.keys // tile.block, job.causal
    last = jnp.int32(blocks)
    if c:
        last = jnp.minimum(last, lax.div(start + tile.rows + tile.block - 1, tile.block))
    steps = clear = last
    whole = last - jnp.minimum(lax.div(start + 1, tile.block), last) if c else jnp.int32(1)
    ranges = [(0, whole, True)] if c or job.real_keys != job.keys else []
    whole = whole if ranges else 0
    bounded = hasattr(refs, "low")
    if bounded or job.window is not None:
        if bounded:
            bottom, top = refs.low[row, start], refs.low[row, start + tile.rows - 1]
        else:
            bottom = jnp.maximum(start - job.window + 1, 0)
            top = jnp.maximum(start + tile.rows - job.window, 0)
        steps = last - lax.div(bottom, tile.block)
        clear = jnp.clip(last - lax.div(top + tile.block - 1, tile.block), whole, steps)
        return last, [*ranges, (whole, clear, False), (clear, steps, True)]
    return last, [*ranges, (whole, clear, False)]


def mask_unseen(job: AttentionJob, values, fill, line, column, line_axis, bound):
    """Fill where query `line` + i does not see key `column` + j; `bound` is low or high by row."""
    shape = values.shape
    line += plgpu.broadcasted_iota(jnp.int32, shape, line_axis, layout=plgpu.Layout.WGMMA)
    column += plgpu.broadcasted_iota(jnp.int32, shape, 1 - line_axis, layout=plgpu.Layout.WGMMA)
    seen = line >= column if job.causal else column < job.real_keys
    if bound is not None:
        edge = lax.broadcast_in_dim(bound, shape, [0])
        seen &= column >= edge if line_axis == 0 else line <= edge
    elif job.window is not None:
        seen &= line - column < job.window
    return jnp.where(seen, values, fill)


def zeros(*shape):
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)


def move_keys(job: AttentionJob, tile: MosaicTile, own, refs, item, count):
    """The mover of `forward` and `d_queries`: the item's own tiles, then its keys and values."""
    head, row, place = job.split(item, job.heads, job.queries // tile.rows - 1)
    start = place * tile.rows
    last, ranges = key_blocks(job, tile, refs, row, start)
    for i in range(tile.groups):
        at = row, pl.ds(start + i * 64, 64), head
        tiles = [(getattr(refs, name).at[at], getattr(refs, f"{name}_own")) for name in own]
        fill_ring_slot(i, count > 0, refs.own_free, refs.own_ready, *tiles)
    kv_head = lax.div(head, job.per_kv)

    @pl.loop(0, ranges[-1][1])
    def _block(i):
        at = row, pl.ds((last - 1 - i) * tile.block, tile.block), kv_head
        slot, again = lax.rem(count + i, tile.slots), count + i >= tile.slots
        fill_ring_slot(slot, again, refs.k_free, refs.k_ready, (refs.k.at[at], refs.k_ring))
        fill_ring_slot(slot, again, refs.v_free, refs.v_ready, (refs.v.at[at], refs.v_ring))

    return count + ranges[-1][1]


def common_scratch(
    job: AttentionJob, tile: MosaicTile, own: list[str], ring: list[str], tiles_ready: int
):
    """Shared memory and barriers common to the kernels, by name."""
    kept = plgpu.SMEM((tile.groups, 64, job.size), jnp.bfloat16, transforms=_TILED)
    slot = plgpu.SMEM((tile.slots, tile.block, job.size), jnp.bfloat16, transforms=_TILED)
    out = {f"{name}_own": kept for name in own} | {f"{name}_ring": slot for name in ring}
    out["own_ready"] = plgpu.Barrier(num_arrivals=len(own), num_barriers=tile.groups)
    out["own_free"] = plgpu.Barrier(num_barriers=tile.groups)
    for name in ring:
        arrivals = dict(num_arrivals=tiles_ready, num_barriers=tile.slots)
        out[f"{name}_ready"] = plgpu.Barrier(**arrivals)
        out[f"{name}_free"] = plgpu.Barrier(num_arrivals=tile.groups, num_barriers=tile.slots)
    return out


def store(job: AttentionJob, refs, group, *outs):
    """Write each (values, buffer, destination) out by TMA; free the item's own tiles at last."""
    if job.staged:  # the last item's stores have read the buffers by now
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for values, buffer, _ in outs:
        buffer.at[group][...] = values.astype(buffer.dtype)
    plgpu.commit_smem()
    for _, buffer, target in outs:
        plgpu.copy_smem_to_gmem(buffer.at[group], target)
    if not job.staged:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(refs.own_free.at[group])


def release(job: AttentionJob, refs, group):
    """Let the mover overwrite this item's own tiles, unless its outputs still go there."""
    if job.staged:
        plgpu.barrier_arrive(refs.own_free.at[group])


# ---- forward -----------------------------------------------------------------------------------


def forward(job: AttentionJob, tile: MosaicTile, q, k, v, low=None, sinks=None):
    """q [B, S, N, H], k, v [B, T, K, H] bf16, `low` int32 [B, S] the first key each query sees,
    `sinks` fp32 [N] -> out [B, S, N, H], natural log-sum-exp fp32 [B, N, S]."""
    optional = {n: x for n, x in (("low", low), ("sinks", sinks)) if x is not None}
    scratch = common_scratch(job, tile, ["q"], ["k", "v"], 1)
    scratch["turn"] = plgpu.Barrier(num_barriers=tile.groups)
    scratch["lse_stage"] = plgpu.SMEM((tile.groups, 64), jnp.float32)
    if job.staged:
        scratch["stage"] = scratch["q_own"]
    return launch(
        job.heads * job.batch * (job.queries // tile.rows),
        tile,
        partial(move_keys, job, tile, ["q"]),
        partial(_forward_item, job, tile),
        dict(q=q, k=k, v=v, **optional),
        dict(
            out=jax.ShapeDtypeStruct(q.shape, q.dtype),
            lse=jax.ShapeDtypeStruct((job.batch, job.heads, job.queries), jnp.float32),
        ),
        scratch,
        (40, 232),
    )


def _forward_item(job: AttentionJob, tile: MosaicTile, refs, group, item, count):
    head, row, place = job.split(item, job.heads, job.queries // tile.rows - 1)
    start = place * tile.rows
    last, ranges = key_blocks(job, tile, refs, row, start)
    start += group * 64
    span, steps = pl.ds(start, 64), ranges[-1][1]
    low = sinks = None
    if hasattr(refs, "low"):
        low = plgpu.load(refs.low.at[row, span], layout=ROW_VALUES, optimized=False)
    floor = _FLOOR
    if hasattr(refs, "sinks"):
        sinks = True
        floor = refs.sinks[head] * LOG2E
    peak = plgpu.layout_cast(jnp.full((64,), floor, jnp.float32), ROW_VALUES)
    total = plgpu.layout_cast(jnp.full((64,), float(sinks is not None)), ROW_VALUES)

    def masked_scores(scores, i):
        return mask_unseen(job, scores, -jnp.inf, start, (last - 1 - i) * tile.block, 0, low)

    def slot_of(i):
        return lax.rem(count + i, tile.slots)

    plgpu.barrier_wait(refs.own_ready.at[group])
    plgpu.barrier_wait(refs.turn.at[group])
    step = partial(_forward_step, job, tile, refs, group, slot_of, masked_scores, steps)
    acc, peak, total = sweep(step, (zeros(64, job.size), peak, total), ranges)
    _pass_turn(tile, refs, group)
    acc *= lax.broadcast_in_dim(1.0 / total, acc.shape, [0])
    out = acc, getattr(refs, "stage", refs.q_own), refs.out.at[row, span, head]
    lse = (peak + jnp.log2(total)) * (1 / LOG2E)
    store(job, refs, group, out, (lse, refs.lse_stage, refs.lse.at[row, head, span]))
    return count + steps


def _pass_turn(tile, refs, group):
    plgpu.barrier_arrive(refs.turn.at[lax.rem(group + 1, tile.groups)])


def _forward_step(job, tile, refs, group, slot_of, mask, steps, i, carry, masked):
    """One block of keys: scores, softmax while other warpgroups have the turn, then values."""
    acc, peak, total = carry
    slot, square = slot_of(i), (64, tile.block)
    plgpu.barrier_wait(refs.k_ready.at[slot])

    def multiply(scores):
        plgpu.wgmma(scores, refs.q_own.at[group], refs.k_ring.at[slot].transpose((1, 0)))
        _pass_turn(tile, refs, group)
        return scores[...]

    scores = pl.run_scoped(multiply, plgpu.ACC(square, jnp.float32))
    plgpu.barrier_arrive(refs.k_free.at[slot])
    pl.when(i == steps - 1)(lambda: release(job, refs, group))  # the last use of the queries
    scores, factor = job.logits(scores)
    if masked:
        scores = mask(scores, i)
    top = jnp.maximum(peak, scores.max(axis=1) * factor)
    decay = jnp.exp2(peak - top)
    probs = jnp.exp2(scores * factor - lax.broadcast_in_dim(top, square, [0]))
    acc *= lax.broadcast_in_dim(decay, acc.shape, [0])
    total = total * decay + probs.sum(axis=1)
    p16 = probs.astype(jnp.bfloat16)
    acc, total, top, p16 = lax.optimization_barrier((acc, total, top, p16))
    plgpu.barrier_wait(refs.v_ready.at[slot])
    plgpu.barrier_wait(refs.turn.at[group])

    def add(acc):
        plgpu.wgmma(acc, p16, refs.v_ring.at[slot])

    acc = pl.run_state(add)(plgpu.ACC.init(acc))
    plgpu.barrier_arrive(refs.v_free.at[slot])
    return acc, top, total
