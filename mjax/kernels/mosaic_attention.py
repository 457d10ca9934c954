"""Flash attention for Hopper in Pallas Mosaic GPU: bf16, fp32 softmax, forward.

One warpgroup moves keys and values by TMA through a ring of shared-memory slots; the others hold
64 queries each and take turns on the tensor core, so that one computes its softmax while another
multiplies (FlashAttention-3, arXiv 2407.08608). What a query sees is one interval of keys,
[low, its own index]: a window and contiguous documents only raise `low`. So blocks outside the
interval are never read, and blocks wholly inside need no mask. The backward is in
`mosaic_backward.py`; `mosaic_attention` joins the two.
"""

import functools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class Tile:
    """Warpgroups that compute (64 rows each), columns of a block, and slots of the ring."""

    groups: int
    block: int
    slots: int
    pingpong: bool = True
    pipelined: bool = False

    @property
    def rows(self) -> int:
        return 64 * self.groups


BLOCKS = 132  # thread blocks launched, one for each multiprocessor
_FLOOR = -1e30
FORWARD = {64: Tile(3, 128, 2), 128: Tile(2, 128, 2), 256: Tile(2, 64, 2)}


def walk(total, one):
    """Run `one(item, count)` -> count over this thread block's share of `total` items.

    Items are dealt to and fro, so that blocks share them evenly when they are sorted by size.
    """
    block = lax.axis_index("block")
    width = min(BLOCKS, total)
    whole, rest = divmod(total, width)

    def place(i):
        return i * width + jnp.where(lax.rem(i, 2) == 0, block, width - 1 - block)

    rounds = whole + jnp.where(place(jnp.int32(whole)) < total, 1, 0) if rest else whole
    lax.fori_loop(0, rounds, lambda i, count: one(place(i), count), jnp.int32(0))


def forward(q, k, v, low, sinks, *, scale, window, softcap, causal, keys, tile=None):
    """q [B, S, N, H], k, v [B, T, K, H], low [B, S] or None -> (out [B, S, N, H], lse [B, N, S]).

    S and T are multiples of the tile; the first `keys` keys count. `lse` is natural, fp32.
    """
    import jax.experimental.pallas as pl
    import jax.experimental.pallas.mosaic_gpu as plgpu

    b, s, n, h = q.shape
    tile = tile or FORWARD[h]
    blocks, per_kv = k.shape[1] // tile.block, n // k.shape[2]
    factor = (scale if softcap is None else softcap) * LOG2E
    total_items = n * b * (s // tile.rows)
    shared = h == 256  # shared memory holds no output buffer beside the queries
    masked_end = not causal and keys != k.shape[1]
    optional = [x for x in (low, sinks) if x is not None]

    def body(q_gmem, k_gmem, v_gmem, *refs):
        refs = list(refs)
        low_gmem = refs.pop(0) if low is not None else None
        sinks_gmem = refs.pop(0) if sinks is not None else None
        out_gmem, lse_gmem, q_smem, k_smem, v_smem, lse_smem, out_smem, *barriers = refs
        q_ready, q_free, k_ready, v_ready, k_free, v_free, turn = barriers
        out_smem = out_smem[0] if out_smem else q_smem
        group = lax.axis_index("group")
        slot_of = lambda i: lax.rem(i, tile.slots)

        def extent(item):
            """Head, row, first query, and key blocks [first, last), masked outside [inside, own).

            Blocks are visited from the last to the first.
            """
            head, item = lax.rem(item, n), lax.div(item, n)
            row, start = lax.rem(item, b), lax.div(item, b)
            start = (s // tile.rows - 1 - start) * tile.rows
            last = jnp.int32(blocks)
            if causal:
                last = jnp.minimum(last, lax.div(start + tile.rows + tile.block - 1, tile.block))
            first = inside = jnp.int32(0)
            if low is not None:
                bottom, top = low_gmem[row, start], low_gmem[row, start + tile.rows - 1]
            elif window is not None:
                bottom = jnp.maximum(start - window + 1, 0)
                top = jnp.maximum(start + tile.rows - window, 0)
            if low is not None or window is not None:
                first = lax.div(bottom, tile.block)
                inside = jnp.minimum(lax.div(top + tile.block - 1, tile.block), last)
            own = last
            if causal:
                own = jnp.minimum(lax.div(start + 1, tile.block), last)
            elif masked_end:
                own = last - 1
            return head, row, start, first, inside, own, last

        def move(item, count):
            head, row, start, first, _, _, last = extent(item)
            kv_head = lax.div(head, per_kv)
            for i in range(tile.groups):

                @pl.when(count > 0)
                def _():
                    plgpu.barrier_wait(q_free.at[i])

                at = row, pl.ds(start + i * 64, 64), head
                plgpu.copy_gmem_to_smem(q_gmem.at[at], q_smem.at[i], q_ready.at[i])

            @pl.loop(0, last - first)
            def _block(i):
                slot = slot_of(count + i)
                at = row, pl.ds((last - 1 - i) * tile.block, tile.block), kv_head

                @pl.when(count + i >= tile.slots)
                def _():
                    plgpu.barrier_wait(k_free.at[slot])

                plgpu.copy_gmem_to_smem(k_gmem.at[at], k_smem.at[slot], k_ready.at[slot])

                @pl.when(count + i >= tile.slots)
                def _():
                    plgpu.barrier_wait(v_free.at[slot])

                plgpu.copy_gmem_to_smem(v_gmem.at[at], v_smem.at[slot], v_ready.at[slot])

            return count + last - first

        def await_turn():
            if tile.pingpong:
                plgpu.barrier_wait(turn.at[group])

        def pass_turn():
            if tile.pingpong:
                plgpu.barrier_arrive(turn.at[lax.rem(group + 1, tile.groups)])

        def compute(item, count):
            head, row, start, first, inside, own, last = extent(item)
            steps = last - first
            q_own, out_own = q_smem.at[group], out_smem.at[group]
            at = row, pl.ds(start + group * 64, 64), head
            rows, wide, square = plgpu.Layout.WGMMA.reduce(1), (64, h), (64, tile.block)
            if low is not None:
                low_rows = plgpu.load(
                    low_gmem.at[row, pl.ds(start + group * 64, 64)], layout=rows, optimized=False
                )
            floor = _FLOOR if sinks is None else sinks_gmem[head].astype(jnp.float32) * LOG2E
            peak = plgpu.layout_cast(jnp.full((64,), floor, jnp.float32), rows)
            total = plgpu.layout_cast(jnp.full((64,), float(sinks is not None)), rows)
            acc = plgpu.layout_cast(jnp.zeros(wide, jnp.float32), plgpu.Layout.WGMMA)
            plgpu.barrier_wait(q_ready.at[group])

            def free_query(i):
                if not shared:
                    pl.when(i == steps - 1)(lambda: plgpu.barrier_arrive(q_free.at[group]))

            def mask(scores, i):
                column = plgpu.broadcasted_iota(jnp.int32, square, 1, layout=plgpu.Layout.WGMMA)
                column += (last - 1 - i) * tile.block
                line = plgpu.broadcasted_iota(jnp.int32, square, 0, layout=plgpu.Layout.WGMMA)
                line += start + group * 64
                seen = column < keys if masked_end else None
                if causal:
                    seen = line >= column
                if low is not None:
                    seen &= column >= lax.broadcast_in_dim(low_rows, square, [0])
                elif window is not None:
                    seen &= line - column < window
                return scores if seen is None else jnp.where(seen, scores, -jnp.inf)

            def softmax(scores, peak, i, masked):
                if softcap is not None:
                    scores = jnp.tanh(scores * (scale / softcap))
                if masked:
                    scores = mask(scores, i)
                new = jnp.maximum(peak, scores.max(axis=1) * factor)
                decay = jnp.exp2(peak - new)
                probs = jnp.exp2(scores * factor - lax.broadcast_in_dim(new, square, [0]))
                return probs, new, decay

            def step(i, carry, masked):
                acc, peak, total = carry
                slot = slot_of(count + i)
                plgpu.barrier_wait(k_ready.at[slot])

                def multiply(scores):
                    plgpu.wgmma(scores, q_own, k_smem.at[slot].transpose((1, 0)))
                    pass_turn()
                    return scores[...]

                scores = pl.run_scoped(multiply, plgpu.ACC(square, jnp.float32))
                plgpu.barrier_arrive(k_free.at[slot])
                free_query(i)
                probs, peak, decay = softmax(scores, peak, i, masked)
                acc *= lax.broadcast_in_dim(decay, wide, [0])
                total = total * decay + probs.sum(axis=1)
                p16 = probs.astype(q.dtype)
                acc, total, peak, p16 = lax.optimization_barrier((acc, total, peak, p16))
                plgpu.barrier_wait(v_ready.at[slot])
                await_turn()

                def add(acc):
                    plgpu.wgmma(acc, p16, v_smem.at[slot])

                acc = pl.run_state(add)(plgpu.ACC.init(acc))
                plgpu.barrier_arrive(v_free.at[slot])
                return acc, peak, total

            def start_pipe():
                slot = slot_of(count)
                plgpu.barrier_wait(k_ready.at[slot])
                await_turn()

                def multiply(scores):
                    plgpu.wgmma(scores, q_own, k_smem.at[slot].transpose((1, 0)))
                    pass_turn()
                    return scores[...]

                scores = pl.run_scoped(multiply, plgpu.ACC(square, jnp.float32))
                plgpu.barrier_arrive(k_free.at[slot])
                free_query(0)
                probs, new, decay = softmax(scores, peak, 0, True)
                return acc, new, total * decay + probs.sum(axis=1), probs.astype(q.dtype)

            def piped(i, carry, masked):
                acc, peak, total, p16 = carry
                slot, before = slot_of(count + i), slot_of(count + i - 1)
                plgpu.barrier_wait(k_ready.at[slot])

                def both(scores_ref, acc_ref):
                    acc_ref[...] = acc
                    await_turn()
                    plgpu.wgmma(scores_ref, q_own, k_smem.at[slot].transpose((1, 0)))
                    plgpu.barrier_wait(v_ready.at[before])
                    plgpu.wgmma(acc_ref, p16, v_smem.at[before])
                    pass_turn()
                    scores = plgpu.wgmma_accumulator_load(scores_ref, wait_n=1)
                    plgpu.barrier_arrive(k_free.at[slot])
                    free_query(i)
                    probs, new, decay = softmax(scores, peak, i, masked)
                    summed = total * decay + probs.sum(axis=1)
                    probs, new, summed, decay = lax.optimization_barrier(
                        (probs, new, summed, decay)
                    )
                    result = acc_ref[...]
                    plgpu.barrier_arrive(v_free.at[before])
                    return result * lax.broadcast_in_dim(decay, wide, [0]), new, summed, probs

                acc, peak, total, probs = pl.run_scoped(
                    both, plgpu.ACC(square, jnp.float32), plgpu.ACC(wide, jnp.float32)
                )
                return acc, peak, total, probs.astype(q.dtype)

            def end_pipe(acc, p16):
                slot = slot_of(count + steps - 1)
                plgpu.barrier_wait(v_ready.at[slot])

                def add(acc):
                    plgpu.wgmma(acc, p16, v_smem.at[slot])

                return pl.run_state(add)(plgpu.ACC.init(acc))

            a = last - own
            c = jnp.maximum(last - inside, a)
            if tile.pipelined:
                carry = start_pipe()
                carry = lax.fori_loop(1, a, functools.partial(piped, masked=True), carry)
                carry = lax.fori_loop(
                    jnp.maximum(a, 1), c, functools.partial(piped, masked=False), carry
                )
                if low is not None or window is not None:
                    carry = lax.fori_loop(
                        jnp.maximum(c, 1), steps, functools.partial(piped, masked=True), carry
                    )
                acc, peak, total, p16 = carry
                acc = end_pipe(acc, p16)
            else:
                await_turn()
                carry = acc, peak, total
                if causal or masked_end:
                    carry = lax.fori_loop(0, a, functools.partial(step, masked=True), carry)
                carry = lax.fori_loop(a, c, functools.partial(step, masked=False), carry)
                if low is not None or window is not None:
                    carry = lax.fori_loop(c, steps, functools.partial(step, masked=True), carry)
                acc, peak, total = carry
                pass_turn()

            acc *= lax.broadcast_in_dim(1.0 / total, wide, [0])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            out_own[...] = acc.astype(q.dtype)
            lse_smem[group] = (peak + jnp.log2(total)) * (1 / LOG2E)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out_own, out_gmem.at[at], commit_group=False)
            plgpu.copy_smem_to_gmem(
                lse_smem.at[group], lse_gmem.at[row, head, pl.ds(start + group * 64, 64)]
            )
            if shared:
                plgpu.wait_smem_to_gmem(0)
                plgpu.barrier_arrive(q_free.at[group])
            return count + steps

        @pl.when(group == tile.groups)
        def _():
            plgpu.set_max_registers(24 if tile.groups >= 3 else 40, action="decrease")
            walk(total_items, move)

        @pl.when(group < tile.groups)
        def _():
            registers = {1: 232, 2: 232, 3: 160, 4: 112}[tile.groups]
            plgpu.set_max_registers(registers, action="increase")
            pl.when(group == tile.groups - 1)(pass_turn)
            walk(total_items, compute)
            plgpu.wait_smem_to_gmem(0)

    layout = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    own = plgpu.SMEM((tile.groups, 64, h), q.dtype, transforms=layout)
    ring = (tile.slots, tile.block, h)
    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((b, n, s), jnp.float32),
        ),
        scratch_types=[
            own,
            plgpu.SMEM(ring, q.dtype, transforms=layout),
            plgpu.SMEM(ring, q.dtype, transforms=layout),
            plgpu.SMEM((tile.groups, 64), jnp.float32),
            [] if shared else [own],
            plgpu.Barrier(num_barriers=tile.groups),
            plgpu.Barrier(num_barriers=tile.groups),
            plgpu.Barrier(num_barriers=tile.slots),
            plgpu.Barrier(num_barriers=tile.slots),
            plgpu.Barrier(num_arrivals=tile.groups, num_barriers=tile.slots),
            plgpu.Barrier(num_arrivals=tile.groups, num_barriers=tile.slots),
            plgpu.Barrier(num_barriers=tile.groups),
        ],
        grid=(min(BLOCKS, total_items),),
        grid_names=("block",),
        num_threads=tile.groups + 1,
        thread_name="group",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(q, k, v, *optional)
