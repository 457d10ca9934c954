"""Mosaic GPU kernels of the grouped matmul for Hopper: rows by weights, and weights' gradients.

A thread block is one warpgroup that moves tiles by TMA through a ring of shared-memory slots, and
two that multiply, each half of the tile's lines. A launch has one block for each multiprocessor,
which walks over its share of the tiles; the mover runs ahead into the next tile. Neighboring blocks
take tiles of one band, so that they read the same rows and columns from the L2 cache.

A tile of rows begins at a multiple of 8, as TMA with swizzled tiles needs. So the first tile of a
group may hold up to 7 rows of the group before it, and its last one rows of the next. These rows
are masked where the tile leaves: 64 rows that are all of the group leave at once, others by a
ladder of copies of 32, 16, .. 1 rows. Rows of no group are a last group, whose sum has no steps.

Operands of 8 bits lie with the summed axis last, as Hopper multiplies them. So weights are there
transposed for the forward, and a weight's gradient takes both operands transposed: its groups lie
along the summed axis, and its steps begin at multiples of a slot's depth. The tensor cores keep 14
bits of a sum of 8-bit products, so `Tile.promoted` sums go on in registers (DeepSeek-V3, arXiv
2412.19437, section 3.3.2).
Invariants: mover and multipliers count ring slots alike; each element is summed by one block, in
order, so results are equal bit for bit.
"""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from mjax.kernels.matmul.grouped_tiles import (
    HALVES,
    TMA_ROWS,
    GroupTile,
    bounds_of_groups,
    tiles_of_rows,
)

BLOCKS = 132  # multiprocessors of an H100 SXM or H200
SLICE_BYTES = 128  # bytes of a line that a slot holds, and that leave together
_REGISTERS = 40, 232  # of a moving and of a multiplying thread


def multiply_rows(
    rows: jax.Array,
    w: jax.Array,
    sizes: jax.Array,
    tile: GroupTile,
    transposed: bool,
    scale: jax.Array | None = None,
) -> jax.Array:
    """Rows [M, K] times w [G, K, N] of their group -> [M, N]; `transposed`: [M, N] -> [M, K].

    Operands of 8 bits are `transposed`. Their product times `scale` fp32 [] is bf16.
    """
    m, depth = rows.shape
    columns = w.shape[1] if transposed else w.shape[2]
    tiles, last = tiles_of_rows(sizes, m, tile.lines)
    most = len(tiles) * tile.across(columns)
    step = depth_of(rows.dtype)
    shape = (tile.columns, step) if transposed else (step, tile.columns)
    operands = dict(rows=rows, w=w, tiles=tiles, last=last)
    dtype = rows.dtype
    if scale is not None:
        operands["scale"], dtype = scale.reshape(1), jnp.bfloat16
    return launch_items(
        most,
        partial(item_of_rows, tile, depth // step, tile.across(columns), len(w)),
        partial(_move_rows, tile, transposed),
        partial(_multiply_rows, tile, transposed),
        operands,
        jax.ShapeDtypeStruct((m, columns), dtype),
        _scratch(tile, (rows.dtype, w.dtype), (tile.half, step), shape, dtype),
    )


def weight_gradient(
    x: jax.Array,
    g: jax.Array,
    sizes: jax.Array,
    total: jax.Array | None,
    tile: GroupTile,
    scale: jax.Array | None = None,
) -> jax.Array:
    """x.T @ g over the rows of each group, in x's dtype, or added to `total` fp32 [G, K, N].

    Operands of 8 bits are x [K, M] and g [N, M]. Their product times `scale` fp32 [] is bf16, or
    added.
    """
    turned, step = scale is not None, depth_of(x.dtype)
    across = 0 if turned else 1  # the axis of x and g that is no sum's
    groups, lines, columns = len(sizes), x.shape[across], g.shape[across]
    grid = pl.cdiv(lines, tile.lines), tile.across(columns)
    begins, ends = bounds_of_groups(sizes)
    shapes = (step, tile.half), (step, tile.columns)
    operands = dict(x=x, g=g, begins=begins, ends=ends)
    dtype = x.dtype if total is None else total.dtype
    if turned:
        operands["scale"], shapes = scale.reshape(1), [shape[::-1] for shape in shapes]
        dtype = jnp.bfloat16 if total is None else total.dtype
    out = jax.ShapeDtypeStruct((groups, lines, columns), dtype)
    if total is not None:
        operands["out"] = jax.new_ref(total)
    aligned = step if turned else TMA_ROWS
    made = launch_items(
        groups * grid[0] * grid[1],
        partial(item_of_weights, tile, groups, grid, step, aligned),
        partial(_move_weights, tile, turned),
        partial(_multiply_weights, tile, turned, total is not None),
        operands,
        out if total is None else None,
        _scratch(tile, (x.dtype, g.dtype), *shapes, dtype),
    )
    return made if total is None else jax.freeze(operands["out"])


def depth_of(dtype: jnp.dtype) -> int:
    """The elements of a sum that a slot holds."""
    return SLICE_BYTES // jnp.dtype(dtype).itemsize


# ---- parts -------------------------------------------------------------------------------------


def _scratch(tile, dtypes, left, right, out_dtype):
    """Shared memory and barriers, by name."""

    def ring(dtype, *shape):
        return plgpu.SMEM((tile.slots, *shape), dtype, transforms=swizzled_tiles(dtype))

    width = SLICE_BYTES // jnp.dtype(out_dtype).itemsize
    swizzled = plgpu.SMEM((2, 64, width), out_dtype, transforms=swizzled_tiles(out_dtype))
    plain = plgpu.SMEM((64, width), out_dtype)  # any row of it can be copied alone
    return dict(
        left=ring(dtypes[0], HALVES, *left),
        right=ring(dtypes[1], *right),
        ready=plgpu.Barrier(num_arrivals=HALVES + 1, num_barriers=tile.slots),
        free=plgpu.Barrier(num_arrivals=HALVES, num_barriers=tile.slots),
        stages=[plgpu.RefUnion(swizzled, plain) for _ in range(HALVES)],
    )


def swizzled_tiles(dtype):
    width = SLICE_BYTES // jnp.dtype(dtype).itemsize
    return plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(SLICE_BYTES)


def launch_items(
    most, item, move, multiply, operands, out, scratch, registers=_REGISTERS, cluster=1
):
    """Run `move` in one warpgroup and `multiply` in the others for every item.

    `most` bounds the items. `item(refs)` gives their number, a function that reads what is known of
    one from memory, and a function that makes its facts of that. An item is read one ahead. Blocks
    of a cluster, each other's "neighbor", take one item.
    """
    names = [*operands, *(() if out is None else ("out",))]
    width = min(BLOCKS // cluster, most)
    together = dict(cluster=(cluster,), cluster_names=("neighbor",)) if cluster > 1 else {}

    def body(*gmem, **smem):
        refs = SimpleNamespace(**dict(zip(names, gmem, strict=True)), **smem)
        half = lax.axis_index("half")
        number, read, facts = item(refs)

        def walk(one: Callable) -> jax.Array:
            block = lax.axis_index("block")
            rounds = lax.div(number - block + width - 1, jnp.int32(width))

            def step(i, state):
                count, known = state
                own = i * width + block
                ahead = read(jnp.minimum(own + width, number - 1))
                return one(facts(own, known), count), ahead

            first = read(jnp.minimum(block, number - 1))
            return lax.fori_loop(0, rounds, step, (jnp.int32(0), first))[0]

        @pl.when(half == HALVES)
        def _():
            plgpu.set_max_registers(registers[0], action="decrease")
            drain(refs, walk(partial(move, refs)))

        @pl.when(half < HALVES)
        def _():
            plgpu.set_max_registers(registers[1], action="increase")
            walk(partial(multiply, refs, half))
            plgpu.wait_smem_to_gmem(0)

    run = plgpu.kernel(
        body,
        out_type=() if out is None else out,
        scratch_types=scratch,
        grid=(width,),
        grid_names=("block",),
        num_threads=HALVES + 1,
        thread_name="half",
        **together,
    )
    return run(*operands.values())


def in_bands(item, lines, columns, band):
    """Item -> (line, column) of a grid: columns of `band` lines, lines change fastest."""
    first = lax.div(item, band * columns) * band
    item = item - first * columns
    width = jnp.minimum(lines - first, band)
    return first + lax.rem(item, width), lax.div(item, width)


def fill_slot(tile, refs, count, halves, right):
    """Copy the halves of a left tile, and a right one, into the slot of step `count`."""
    slot = lax.rem(count, tile.slots)
    pl.when(count >= tile.slots)(lambda: plgpu.barrier_wait(refs.free.at[slot]))
    for i, half in enumerate(halves):
        plgpu.copy_gmem_to_smem(half, refs.left.at[slot, i], refs.ready.at[slot])
    plgpu.copy_gmem_to_smem(right, refs.right.at[slot], refs.ready.at[slot])


def drain(refs, count):
    """Wait until the last copies are read: barriers outlive their arrivals."""
    slots = refs.free.shape[0]

    @pl.loop(jnp.maximum(count - slots, 0), count)
    def _slot(i):
        plgpu.barrier_wait(refs.free.at[lax.rem(i, slots)])


def _sum(tile, refs, count, steps, product):
    """The sum fp32 [half, columns] of `steps` products; `product(acc, slot, i)` adds one.

    It is scaled if there is a scale. If tiles promote, each so many steps are a sum of their own,
    which is added to the sums before.
    """

    def slot_of(i):
        return lax.rem(count + i, tile.slots)

    def release(i):
        plgpu.barrier_arrive(refs.free.at[slot_of(i)])

    def run(first, stop, acc):
        @pl.loop(first, stop)
        def _step(i):
            plgpu.barrier_wait(refs.ready.at[slot_of(i)])
            product(acc, slot_of(i), i)
            plgpu.wgmma_wait(1)  # the one before is done
            pl.when(i > first)(lambda: release(i - 1))

        return acc[...]

    def part(first, stop):
        acc = plgpu.ACC((tile.half, tile.columns), jnp.float32)
        made = pl.run_scoped(partial(run, first, stop), acc)
        pl.when(stop > first)(lambda: release(stop - 1))
        return made

    def promote(i, total):
        first = i * tile.promoted
        return total + part(first, jnp.minimum(first + tile.promoted, steps))

    if not tile.promoted:
        total = part(0, steps)
    else:
        zeros = jnp.zeros((tile.half, tile.columns), jnp.float32)
        zeros = plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)
        parts = lax.div(steps + tile.promoted - 1, jnp.int32(tile.promoted))
        total = lax.fori_loop(0, parts, promote, zeros)
    return total * refs.scale[0] if hasattr(refs, "scale") else total


class PartOfSum(NamedTuple):
    """Values [64, 128 bytes] of a sum, and the first column of the output that they are of."""

    values: jax.Array
    column: jax.Array


def _parts_of_sum(acc, dtype, column):
    """(line, its parts) of each 64 lines of a sum that begins at a column of the output."""
    width = SLICE_BYTES // jnp.dtype(dtype).itemsize
    for line in range(0, acc.shape[0], 64):
        lines = acc[line : line + 64]
        starts = range(0, acc.shape[1], width)
        yield line, [PartOfSum(lines[:, i : i + width].astype(dtype), column + i) for i in starts]


def _store_sum(tile, stages, parts, columns, target, adds=False):
    """Write parts to `target(columns)` through two stages that take turns, or add them there.

    Parts beyond the output's `columns` are left out: a copy of all columns would begin at the
    first.
    """
    reduction = "add" if adds else None

    def leave(i, part):
        stage, places = stages.at[i % 2], pl.ds(part.column, part.values.shape[1])
        # The last copy from this stage has read it; a tile before may have ended with either.
        plgpu.wait_smem_to_gmem(min(i, 1), wait_read_only=True)
        stage[...] = part.values
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(stage, target(places), reduction_op=reduction)

    for i, part in enumerate(parts):
        if columns % tile.columns:
            pl.when(part.column < columns)(partial(leave, i, part))
        else:
            leave(i, part)


# ---- rows by weights ---------------------------------------------------------------------------


def item_of_rows(tile, steps, columns, groups, refs):
    count = refs.last[groups]

    def read(item):
        place, _ = in_bands(item, count, columns, tile.band)
        return tuple(refs.tiles[place, i] for i in range(4))

    def facts(item, known):
        place, column = in_bands(item, count, columns, tile.band)
        group, offset, begin, end = known
        start = place * tile.lines + offset
        return SimpleNamespace(
            group=group,
            start=pl.multiple_of(start, TMA_ROWS),
            first=begin - start,
            stop=end - start,
            column=column * tile.columns,
            steps=jnp.where(group < groups, steps, 0),
        )

    return count * columns, read, facts


def _move_rows(tile, transposed, refs, at, count):
    depth = depth_of(refs.rows.dtype)

    @pl.loop(0, at.steps)
    def _step(i):
        part, columns = pl.ds(i * depth, depth), pl.ds(at.column, tile.columns)
        lines = [pl.ds(at.start + half * tile.half, tile.half) for half in range(HALVES)]
        right = (columns, part) if transposed else (part, columns)
        halves = [refs.rows.at[line, part] for line in lines]
        fill_slot(tile, refs, count + i, halves, refs.w.at[at.group, *right])

    return count + at.steps


def _multiply_rows(tile, transposed, refs, half, at, count):
    def product(acc, slot, _):
        right = refs.right.at[slot]
        plgpu.wgmma(acc, refs.left.at[slot, half], right.transpose((1, 0)) if transposed else right)

    acc = _sum(tile, refs, count, at.steps, product)
    for own in range(HALVES):
        pl.when(half == own)(partial(_store_rows, tile, refs, own, acc, at))
    return count + at.steps


def _store_rows(tile, refs, half, acc, at):
    """Write the rows of one half that are of the group."""
    swizzled, plain = refs.stages[half]
    for line, parts in _parts_of_sum(acc, refs.out.dtype, at.column):
        line = half * tile.half + line
        row = at.start + line
        first, stop = jnp.maximum(at.first - line, 0), jnp.minimum(at.stop - line, 64)

        @pl.when(stop - first == 64)
        def _whole(row=row, parts=parts):
            rows = refs.out.at[pl.ds(row, 64)]
            _store_sum(tile, swizzled, parts, refs.out.shape[1], lambda ds: rows.at[:, ds])

        @pl.when((stop > first) & (stop - first < 64))
        def _some(row=row, parts=parts, first=first, stop=stop):
            for part in parts:
                store_some(plain, part, refs.out, row, first, stop)


def store_some(stage, part, out, row, first, stop):
    """Rows from `first` to `stop` only, in powers of two: the sizes of copies are static."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    stage[...] = part.values
    plgpu.commit_smem()
    rows, columns = stop - first, pl.ds(part.column, part.values.shape[1])
    for size in (32, 16, 8, 4, 2, 1):
        source = stage.at[pl.ds(first, size)]
        target = out.at[pl.ds(row + first, size), columns]
        taken = lax.rem(lax.div(rows, jnp.int32(size)), jnp.int32(2))
        is_taken = (taken == 1) & (part.column < out.shape[1])
        pl.when(is_taken)(partial(plgpu.copy_smem_to_gmem, source, target))
        first += taken * size
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


# ---- gradients of weights ----------------------------------------------------------------------


def item_of_weights(tile, groups, grid, depth, aligned, refs):
    each = grid[0] * grid[1]

    def read(item):
        group = lax.div(item, each)
        return refs.begins[group], refs.ends[group]

    def facts(item, known):
        line, column = in_bands(lax.rem(item, each), grid[0], grid[1], tile.band)
        first, stop = known
        start = pl.multiple_of(lax.div(first, aligned) * aligned, aligned)
        steps = lax.div(stop - start + depth - 1, depth)
        return SimpleNamespace(
            group=lax.div(item, each),
            start=start,
            first=first - start,
            stop=stop - start,
            line=line * tile.lines,
            column=column * tile.columns,
            steps=jnp.where(stop > first, steps, 0),
        )

    return jnp.int32(groups * each), read, facts


def _move_weights(tile, turned, refs, at, count):
    depth = depth_of(refs.x.dtype)

    @pl.loop(0, at.steps)
    def _step(i):
        rows, columns = pl.ds(at.start + i * depth, depth), pl.ds(at.column, tile.columns)
        lines = [pl.ds(at.line + half * tile.half, tile.half) for half in range(HALVES)]
        halves = [refs.x.at[_ordered(rows, line, turned)] for line in lines]
        fill_slot(tile, refs, count + i, halves, refs.g.at[_ordered(rows, columns, turned)])

    return count + at.steps


def _ordered(rows, others, turned):
    return (others, rows) if turned else (rows, others)


def _multiply_weights(tile, turned, adds, refs, half, at, count):
    depth, layout = depth_of(refs.x.dtype), plgpu.Layout.WGMMA
    if turned:
        layout = plgpu.Layout.WGMMA_8BIT

    def product(acc, slot, i):
        left, right = refs.left.at[slot, half], refs.right.at[slot]
        first, stop = at.first - i * depth, at.stop - i * depth

        @pl.when((first > 0) | (stop < depth))
        def _mask():
            values = plgpu.load(left, layout=layout)
            row = plgpu.broadcasted_iota(jnp.int32, left.shape, int(turned), layout=layout)
            left[...] = _where((row >= first) & (row < stop), values)
            plgpu.commit_smem()

        if turned:
            plgpu.wgmma(acc, left, right.transpose((1, 0)))
        else:
            plgpu.wgmma(acc, left.transpose((1, 0)), right)

    acc = _sum(tile, refs, count, at.steps, product)

    for own in range(HALVES):
        stored = (half == own) & ((at.steps > 0) | (not adds))
        pl.when(stored)(partial(_store_group_gradient, tile, adds, refs, own, acc, at))
    return count + at.steps


def _where(mask, values):
    """The values where the mask is True, else 0."""
    if values.dtype.itemsize > 1:
        return jnp.where(mask, values, 0).astype(values.dtype)
    # Of 8 bits Mosaic computes bitwise operations only.
    ones = jnp.where(mask, -1, 0).astype(jnp.int8)
    bits = lax.bitcast_convert_type(values, jnp.int8) & ones
    return lax.bitcast_convert_type(bits, values.dtype)


def _store_group_gradient(tile, adds, refs, half, acc, at):
    swizzled, _ = refs.stages[half]
    for line, parts in _parts_of_sum(acc, refs.out.dtype, at.column):
        lines = pl.ds(at.line + half * tile.half + line, 64)
        rows = refs.out.at[at.group, lines]
        _store_sum(
            tile, swizzled, parts, refs.out.shape[2], lambda ds, rows=rows: rows.at[:, ds], adds
        )
