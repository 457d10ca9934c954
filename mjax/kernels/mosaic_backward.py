"""Gradients of `mosaic_attention`: one kernel sums over queries (d_k, d_v), one over keys (d_q).

Probabilities are computed anew from the log-sum-exp, so nothing of size S x T is stored, and no
sum is shared between blocks: no atomics, so results are equal bit for bit (FlashAttention-2, arXiv
2307.08691, with its loops split in two). The d_k, d_v kernel works on transposed scores, keys by
queries, and sums over the query heads of a group itself.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from mjax.kernels.mosaic_attention import LOG2E, Tile

QUERIES = {64: Tile(2, 128, 2), 128: Tile(2, 128, 2), 256: Tile(1, 64, 2)}  # the d_q kernel
KEYS = {64: Tile(2, 64, 2), 128: Tile(2, 64, 2), 256: Tile(1, 64, 2)}  # the d_k, d_v kernel


def _scores(raw, scale, softcap):
    """(factor to base-2 logits, logits / factor, their slope by `raw` / scale) of raw products."""
    if softcap is None:
        return scale * LOG2E, raw, None
    capped = jnp.tanh(raw * (scale / softcap))
    return softcap * LOG2E, capped, 1 - capped * capped


def d_keys(q, k, v, d_out, lse, delta, high, *, scale, window, softcap, causal, tile=None):
    """d_k and d_v [B, T, K, H]. `lse` (base 2) and `delta` are fp32 [B, N, S].

    `high` int32 [B, T], where given, is the last query that sees each key.
    """
    import jax.experimental.pallas as pl
    import jax.experimental.pallas.mosaic_gpu as plgpu

    (b, s, n, h), (t, kv_heads) = q.shape, k.shape[1:3]
    if h == 256 and tile is None:
        pass
    tile = tile or KEYS[h]
    per_kv, blocks = n // kv_heads, s // tile.block
    optional = [] if high is None else [high]

    def body(q_gmem, k_gmem, v_gmem, do_gmem, lse_gmem, delta_gmem, *refs):
        refs = list(refs)
        high_gmem = refs.pop(0) if high is not None else None
        dk_gmem, dv_gmem, k_smem, v_smem, q_smem, do_smem, lse_smem, delta_smem, *barriers = refs
        kv_ready, q_ready, do_ready, q_free, do_free = barriers
        head, row, group = (lax.axis_index(a) for a in ("head", "row", "group"))
        start = lax.axis_index("tile") * tile.rows
        # Query blocks [first, last); no mask is needed in [inside, below)
        first, inside, last = jnp.int32(0), jnp.int32(0), jnp.int32(blocks)
        if causal:
            first = lax.div(start, tile.block)
            inside = lax.div(start + tile.rows + tile.block - 2, tile.block)
        below = last
        if high is not None:
            least, most = high_gmem[row, start], high_gmem[row, start + tile.rows - 1]
        elif window is not None:
            least, most = start + window - 1, start + tile.rows + window - 2
        if high is not None or window is not None:
            below = jnp.minimum(lax.div(least + 1, tile.block), last)
            last = jnp.minimum(lax.div(most, tile.block) + 1, last)
        inside = jnp.minimum(inside, last)
        below = jnp.maximum(below, inside)
        steps = last - first
        slot_of = lambda i: lax.rem(i, tile.slots)

        @pl.when(group == tile.groups)
        def _move():
            plgpu.set_max_registers(24, action="decrease")

            @pl.loop(0, per_kv)
            def _head(member):
                @pl.loop(0, steps)
                def _block(j):
                    i = member * steps + j
                    slot, q_head = slot_of(i), head * per_kv + member
                    span = pl.ds((first + j) * tile.block, tile.block)

                    @pl.when(i >= tile.slots)
                    def _():
                        plgpu.barrier_wait(q_free.at[slot])

                    plgpu.copy_gmem_to_smem(
                        q_gmem.at[row, span, q_head], q_smem.at[slot], q_ready.at[slot]
                    )
                    plgpu.copy_gmem_to_smem(
                        lse_gmem.at[row, q_head, span], lse_smem.at[slot], q_ready.at[slot]
                    )

                    @pl.when(i >= tile.slots)
                    def _():
                        plgpu.barrier_wait(do_free.at[slot])

                    plgpu.copy_gmem_to_smem(
                        do_gmem.at[row, span, q_head], do_smem.at[slot], do_ready.at[slot]
                    )
                    plgpu.copy_gmem_to_smem(
                        delta_gmem.at[row, q_head, span], delta_smem.at[slot], do_ready.at[slot]
                    )

        @pl.when(group < tile.groups)
        def _compute():
            plgpu.set_max_registers(240 if tile.groups <= 2 else 160, action="increase")
            k_own, v_own = k_smem.at[group], v_smem.at[group]
            at = row, pl.ds(start + group * 64, 64), head
            plgpu.copy_gmem_to_smem(k_gmem.at[at], k_own, kv_ready.at[group])
            plgpu.copy_gmem_to_smem(v_gmem.at[at], v_own, kv_ready.at[group])
            square, wide = (64, tile.block), (64, h)
            if high is not None:
                high_rows = plgpu.load(
                    high_gmem.at[row, pl.ds(start + group * 64, 64)],
                    layout=plgpu.Layout.WGMMA.reduce(1),
                    optimized=False,
                )

            def mask(probs, block):
                line = plgpu.broadcasted_iota(jnp.int32, square, 1, layout=plgpu.Layout.WGMMA)
                line += block * tile.block
                column = plgpu.broadcasted_iota(jnp.int32, square, 0, layout=plgpu.Layout.WGMMA)
                column += start + group * 64
                seen = line >= column
                if high is not None:
                    seen &= line <= lax.broadcast_in_dim(high_rows, square, [0])
                elif window is not None:
                    seen &= line - column < window
                return jnp.where(seen, probs, 0.0)

            def step(j, carry, i0, masked):
                slot = slot_of(i0 + j - first)
                across = plgpu.Layout.WGMMA.reduce(0)

                def multiply(raw_ref, dp_ref, dk_ref, dv_ref):
                    dk_ref[...], dv_ref[...] = carry
                    plgpu.barrier_wait(q_ready.at[slot])
                    plgpu.wgmma(raw_ref, k_own, q_smem.at[slot].transpose((1, 0)))
                    plgpu.barrier_wait(do_ready.at[slot])
                    plgpu.wgmma(dp_ref, v_own, do_smem.at[slot].transpose((1, 0)))
                    lse = plgpu.load(lse_smem.at[slot], layout=across)
                    raw = plgpu.wgmma_accumulator_load(raw_ref, wait_n=1)
                    factor, logits, slope = _scores(raw, scale, softcap)
                    probs = jnp.exp2(logits * factor - lax.broadcast_in_dim(lse, square, [1]))
                    if masked:
                        probs = mask(probs, j)
                    d_probs = plgpu.wgmma_accumulator_load(dp_ref, wait_n=0)
                    p16 = probs.astype(q.dtype)
                    delta = plgpu.load(delta_smem.at[slot], layout=across)
                    plgpu.wgmma(dv_ref, p16, do_smem.at[slot])
                    d_raw = probs * (d_probs - lax.broadcast_in_dim(delta, square, [1]))
                    if slope is not None:
                        d_raw *= slope
                    plgpu.wgmma(dk_ref, d_raw.astype(q.dtype), q_smem.at[slot])
                    dv = plgpu.wgmma_accumulator_load(dv_ref, wait_n=1)
                    plgpu.barrier_arrive(do_free.at[slot])
                    dk = plgpu.wgmma_accumulator_load(dk_ref, wait_n=0)
                    plgpu.barrier_arrive(q_free.at[slot])
                    return dk, dv

                return pl.run_scoped(
                    multiply, *[plgpu.ACC(square, jnp.float32)] * 2, *[plgpu.ACC(wide)] * 2
                )

            zero = plgpu.layout_cast(jnp.zeros(wide, jnp.float32), plgpu.Layout.WGMMA)
            plgpu.barrier_wait(kv_ready.at[group])

            def one_head(member, carry):
                run = functools.partial(step, i0=member * steps)
                if causal:
                    carry = lax.fori_loop(first, inside, functools.partial(run, masked=True), carry)
                carry = lax.fori_loop(inside, below, functools.partial(run, masked=False), carry)
                if high is not None or window is not None:
                    carry = lax.fori_loop(below, last, functools.partial(run, masked=True), carry)
                return carry

            dk, dv = lax.fori_loop(0, per_kv, one_head, (zero, zero))
            k_own[...] = (dk * scale).astype(k.dtype)
            v_own[...] = dv.astype(v.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(k_own, dk_gmem.at[at], commit_group=False)
            plgpu.copy_smem_to_gmem(v_own, dv_gmem.at[at])
            plgpu.wait_smem_to_gmem(0)

    layout = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    kept = plgpu.SMEM((tile.groups, 64, h), k.dtype, transforms=layout)
    ring = plgpu.SMEM((tile.slots, tile.block, h), q.dtype, transforms=layout)
    line = plgpu.SMEM((tile.slots, tile.block), jnp.float32)
    free = plgpu.Barrier(num_arrivals=tile.groups, num_barriers=tile.slots)
    ready = plgpu.Barrier(num_arrivals=2, num_barriers=tile.slots)
    return plgpu.kernel(
        body,
        out_type=(jax.ShapeDtypeStruct(k.shape, k.dtype), jax.ShapeDtypeStruct(v.shape, v.dtype)),
        scratch_types=[
            *[kept] * 2,
            *[ring] * 2,
            *[line] * 2,
            plgpu.Barrier(num_arrivals=2, num_barriers=tile.groups),
            *[ready] * 2,
            *[free] * 2,
        ],
        grid=(kv_heads, t // tile.rows, b),
        grid_names=("head", "tile", "row"),
        num_threads=tile.groups + 1,
        thread_name="group",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(q, k, v, d_out, lse, delta, *optional)


def d_queries(q, k, v, d_out, lse, delta, low, *, scale, window, softcap, causal, tile=None):
    """d_q [B, S, N, H]; the arguments are those of `d_keys`, and `low` that of `forward`."""
    import jax.experimental.pallas as pl
    import jax.experimental.pallas.mosaic_gpu as plgpu

    b, s, n, h = q.shape
    tile = tile or QUERIES[h]
    blocks, per_kv = k.shape[1] // tile.block, n // k.shape[2]
    optional = [] if low is None else [low]

    def body(q_gmem, k_gmem, v_gmem, do_gmem, lse_gmem, delta_gmem, *refs):
        refs = list(refs)
        low_gmem = refs.pop(0) if low is not None else None
        dq_gmem, q_smem, do_smem, k_smem, v_smem, *barriers = refs
        q_ready, k_ready, v_ready, k_free, v_free = barriers
        head, row, group = (lax.axis_index(a) for a in ("head", "row", "group"))
        start = lax.axis_index("tile")
        start = (s // tile.rows - 1 - start if causal else start) * tile.rows
        # Key blocks [first, last); no mask is needed in [inside, own)
        first, inside, last = jnp.int32(0), jnp.int32(0), jnp.int32(blocks)
        if causal:
            last = jnp.minimum(last, lax.div(start + tile.rows + tile.block - 1, tile.block))
        if low is not None:
            bottom, top = low_gmem[row, start], low_gmem[row, start + tile.rows - 1]
        elif window is not None:
            bottom = jnp.maximum(start - window + 1, 0)
            top = jnp.maximum(start + tile.rows - window, 0)
        if low is not None or window is not None:
            first = lax.div(bottom, tile.block)
            inside = jnp.minimum(lax.div(top + tile.block - 1, tile.block), last)
        own = jnp.minimum(lax.div(start + 1, tile.block), last) if causal else last
        inside = jnp.maximum(inside, first)
        own = jnp.maximum(own, inside)
        slot_of = lambda i: lax.rem(i, tile.slots)

        @pl.when(group == tile.groups)
        def _move():
            plgpu.set_max_registers(24, action="decrease")
            kv_head = lax.div(head, per_kv)

            @pl.loop(0, last - first)
            def _block(i):
                slot = slot_of(i)
                at = row, pl.ds((first + i) * tile.block, tile.block), kv_head

                @pl.when(i >= tile.slots)
                def _():
                    plgpu.barrier_wait(k_free.at[slot])

                plgpu.copy_gmem_to_smem(k_gmem.at[at], k_smem.at[slot], k_ready.at[slot])

                @pl.when(i >= tile.slots)
                def _():
                    plgpu.barrier_wait(v_free.at[slot])

                plgpu.copy_gmem_to_smem(v_gmem.at[at], v_smem.at[slot], v_ready.at[slot])

        @pl.when(group < tile.groups)
        def _compute():
            plgpu.set_max_registers(240 if tile.groups <= 2 else 160, action="increase")
            q_own, do_own = q_smem.at[group], do_smem.at[group]
            span = pl.ds(start + group * 64, 64)
            at = row, span, head
            plgpu.copy_gmem_to_smem(q_gmem.at[at], q_own, q_ready.at[group])
            plgpu.copy_gmem_to_smem(do_gmem.at[at], do_own, q_ready.at[group])
            square, wide, rows = (64, tile.block), (64, h), plgpu.Layout.WGMMA.reduce(1)
            load = functools.partial(plgpu.load, layout=rows, optimized=False)
            lse, delta = load(lse_gmem.at[row, head, span]), load(delta_gmem.at[row, head, span])
            low_rows = None if low is None else load(low_gmem.at[row, span])

            def mask(probs, block):
                column = plgpu.broadcasted_iota(jnp.int32, square, 1, layout=plgpu.Layout.WGMMA)
                column += block * tile.block
                line = plgpu.broadcasted_iota(jnp.int32, square, 0, layout=plgpu.Layout.WGMMA)
                line += start + group * 64
                seen = line >= column
                if low is not None:
                    seen &= column >= lax.broadcast_in_dim(low_rows, square, [0])
                elif window is not None:
                    seen &= line - column < window
                return jnp.where(seen, probs, 0.0)

            def step(j, dq, masked):
                slot = slot_of(j - first)

                def multiply(raw_ref, dp_ref, dq_ref):
                    dq_ref[...] = dq
                    plgpu.barrier_wait(k_ready.at[slot])
                    plgpu.wgmma(raw_ref, q_own, k_smem.at[slot].transpose((1, 0)))
                    plgpu.barrier_wait(v_ready.at[slot])
                    plgpu.wgmma(dp_ref, do_own, v_smem.at[slot].transpose((1, 0)))
                    raw = plgpu.wgmma_accumulator_load(raw_ref, wait_n=1)
                    factor, logits, slope = _scores(raw, scale, softcap)
                    probs = jnp.exp2(logits * factor - lax.broadcast_in_dim(lse, square, [0]))
                    if masked:
                        probs = mask(probs, j)
                    d_probs = plgpu.wgmma_accumulator_load(dp_ref, wait_n=0)
                    plgpu.barrier_arrive(v_free.at[slot])
                    d_raw = probs * (d_probs - lax.broadcast_in_dim(delta, square, [0]))
                    if slope is not None:
                        d_raw *= slope
                    plgpu.wgmma(dq_ref, d_raw.astype(q.dtype), k_smem.at[slot])
                    done = dq_ref[...]
                    plgpu.barrier_arrive(k_free.at[slot])
                    return done

                return pl.run_scoped(
                    multiply, *[plgpu.ACC(square, jnp.float32)] * 2, plgpu.ACC(wide)
                )

            dq = plgpu.layout_cast(jnp.zeros(wide, jnp.float32), plgpu.Layout.WGMMA)
            plgpu.barrier_wait(q_ready.at[group])
            if low is not None or window is not None:
                dq = lax.fori_loop(first, inside, functools.partial(step, masked=True), dq)
            dq = lax.fori_loop(inside, own, functools.partial(step, masked=False), dq)
            if causal:
                dq = lax.fori_loop(own, last, functools.partial(step, masked=True), dq)
            q_own[...] = (dq * scale).astype(q.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q_own, dq_gmem.at[at])
            plgpu.wait_smem_to_gmem(0)

    layout = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    kept = plgpu.SMEM((tile.groups, 64, h), q.dtype, transforms=layout)
    ring = plgpu.SMEM((tile.slots, tile.block, h), k.dtype, transforms=layout)
    free = plgpu.Barrier(num_arrivals=tile.groups, num_barriers=tile.slots)
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_types=[
            *[kept] * 2,
            *[ring] * 2,
            plgpu.Barrier(num_arrivals=2, num_barriers=tile.groups),
            *[plgpu.Barrier(num_barriers=tile.slots)] * 2,
            *[free] * 2,
        ],
        grid=(n, s // tile.rows, b),
        grid_names=("head", "tile", "row"),
        num_threads=tile.groups + 1,
        thread_name="group",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(q, k, v, d_out, lse, delta, *optional)
