"""Mosaic GPU kernels of the grouped matmul for Hopper: rows by weights, and weights' gradients.

A thread block is one warpgroup that moves tiles by TMA through a ring of shared-memory slots, and
two that multiply, each half of the tile's lines. A launch has one block for each multiprocessor,
which walks over its share of the tiles; the mover runs ahead into the next tile. Neighboring blocks
take tiles of one band, so that they read the same rows and columns from the L2 cache.

A tile of rows begins at a multiple of 8, as TMA with swizzled tiles needs. So the first tile of a
group may hold up to 7 rows of the group before it, and its last one rows of the next. These rows
are masked where the tile leaves: 64 rows that are all of the group leave at once, others by a
ladder of copies of 32, 16, .. 1 rows. Rows of no group are a last group, whose sum has no steps.
Invariants: mover and multipliers count ring slots alike; each element is summed by one block, in
order, so results are equal bit for bit.
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

BLOCKS = 132  # multiprocessors of an H100 SXM or H200
HALVES = 2  # warpgroups that multiply
DEPTH = 64  # elements of a sum that a slot holds
ALIGNED = 8  # rows of a swizzled tile, where TMA begins
SLICE = 128  # bytes of a line that leave together
_REGISTERS = 40, 232  # of a moving and of a multiplying thread


@dataclass(frozen=True)
class Tile:
    """Lines and columns of a product that a block takes, slots of its ring, and tiles of a band.

    Lines are a multiple of 128, columns one of 64. Those of 16-bit tiles take 128 bytes a slot.
    """

    lines: int
    columns: int
    slots: int
    band: int = 16

    @property
    def half(self) -> int:
        return self.lines // HALVES


# Candidates for timing. The first is predicted to be fastest: it reads least from the L2 cache.
TILES = Tile(128, 256, 4), Tile(256, 128, 4), Tile(128, 192, 4), Tile(128, 128, 6)


def usual_tile(columns: int) -> Tile:
    """The tile for a product of so many columns: wide where the last tile is not mostly empty."""

    def computed(tile):
        return pl.cdiv(columns, tile.columns) * tile.columns

    wide, _, _, narrow = TILES
    return wide if computed(wide) <= 1.1 * columns else narrow


def multiply_rows(
    rows: jax.Array, w: jax.Array, sizes: jax.Array, tile: Tile, transposed: bool
) -> jax.Array:
    """Rows [M, K] times w [G, K, N] of their group -> [M, N]; `transposed`: [M, N] -> [M, K]."""
    m, depth = rows.shape
    columns = w.shape[1] if transposed else w.shape[2]
    tiles, last = tiles_of_rows(sizes, m, tile.lines)
    most = len(tiles) * pl.cdiv(columns, tile.columns)
    shape = (tile.columns, DEPTH) if transposed else (DEPTH, tile.columns)
    return _launch(
        most,
        partial(_item_of_rows, tile, depth // DEPTH, pl.cdiv(columns, tile.columns), len(w)),
        partial(_move_rows, tile, transposed),
        partial(_multiply_rows, tile, transposed),
        dict(rows=rows, w=w, tiles=tiles, last=last),
        jax.ShapeDtypeStruct((m, columns), rows.dtype),
        _scratch(tile, rows.dtype, (tile.half, DEPTH), shape, rows.dtype),
    )


def weight_gradient(
    x: jax.Array, g: jax.Array, sizes: jax.Array, total: jax.Array | None, tile: Tile
) -> jax.Array:
    """x.T @ g over the rows of each group, in x's dtype, or added to `total` fp32 [G, K, N]."""
    groups, lines, columns = len(sizes), x.shape[1], g.shape[1]
    grid = pl.cdiv(lines, tile.lines), pl.cdiv(columns, tile.columns)
    begins, ends = bounds_of_groups(sizes)
    shapes = (DEPTH, tile.half), (DEPTH, tile.columns)
    dtype = x.dtype if total is None else total.dtype
    operands = dict(x=x, g=g, begins=begins, ends=ends)
    out = jax.ShapeDtypeStruct((groups, lines, columns), dtype)
    if total is not None:
        operands["out"] = jax.new_ref(total)
    made = _launch(
        groups * grid[0] * grid[1],
        partial(_item_of_weights, tile, groups, grid),
        partial(_move_weights, tile),
        partial(_multiply_weights, tile, total is not None),
        operands,
        out if total is None else None,
        _scratch(tile, x.dtype, *shapes, dtype),
    )
    return made if total is None else jax.freeze(operands["out"])


# ---- parts -------------------------------------------------------------------------------------


def tiles_of_rows(sizes: jax.Array, m: int, lines: int) -> tuple[jax.Array, jax.Array]:
    """(int32 [T, 4] of each tile of rows, int32 [G + 1] whose last is the number of tiles).

    A tile has its group, the row it starts at less `lines` times its own number, and the first and
    the last row of the group, plus 1. T bounds the number of tiles for all sizes. Group G are the
    rows of no group. Sums are dense, so XLA makes few kernels of them.
    """
    groups = jnp.arange(len(sizes) + 1, dtype=jnp.int32)
    begins, ends = bounds_of_groups(sizes)
    begins = jnp.append(begins, ends[-1])
    ends = jnp.append(ends, jnp.int32(m))
    aligned = begins // ALIGNED * ALIGNED
    tiles = jnp.where(ends > begins, (ends - aligned + lines - 1) // lines, 0)
    last = jnp.sum(jnp.where(groups <= groups[:, None], tiles, 0), 1, dtype=jnp.int32)
    first = last - tiles
    facts = jnp.stack([groups, aligned - first * lines, begins, ends], 1)
    most = (m + (ALIGNED - 1) * len(groups)) // lines + len(groups)
    index = jnp.arange(most, dtype=jnp.int32)[:, None]
    own = (index >= first) & (index < last)
    return jnp.sum(jnp.where(own[..., None], facts, 0), 1, dtype=jnp.int32), last


def bounds_of_groups(sizes: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(the first row int32 [G] of each group, its last row plus 1)."""
    sizes, groups = sizes.astype(jnp.int32), jnp.arange(len(sizes))
    ends = jnp.sum(jnp.where(groups <= groups[:, None], sizes, 0), 1, dtype=jnp.int32)
    return ends - sizes, ends


def _scratch(tile, dtype, left, right, out_dtype):
    """Shared memory and barriers, by name."""

    def ring(*shape):
        return plgpu.SMEM((tile.slots, *shape), dtype, transforms=_swizzled(dtype))

    width = SLICE // jnp.dtype(out_dtype).itemsize
    shape = HALVES, 2, 64, width
    staged = plgpu.SMEM(shape, out_dtype, transforms=_swizzled(out_dtype))
    return dict(
        left=ring(HALVES, *left),
        right=ring(*right),
        ready=plgpu.Barrier(num_arrivals=HALVES + 1, num_barriers=tile.slots),
        free=plgpu.Barrier(num_arrivals=HALVES, num_barriers=tile.slots),
        stages=plgpu.RefUnion(staged, plgpu.SMEM(shape, out_dtype)),
    )


def _swizzled(dtype):
    width = SLICE // jnp.dtype(dtype).itemsize
    return plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(SLICE)


def _launch(most, item, move, multiply, operands, out, scratch):
    """Run `move` in one warpgroup and `multiply` in the others for every item.

    `most` bounds the items. `item(refs)` gives (their number, a function from a number to facts).
    """
    names = [*operands, *(() if out is None else ("out",))]

    def body(*gmem, **smem):
        refs = SimpleNamespace(**dict(zip(names, gmem, strict=True)), **smem)
        half = lax.axis_index("half")
        number, facts = item(refs)

        def walk(one: Callable) -> jax.Array:
            block, width = lax.axis_index("block"), min(BLOCKS, most)
            rounds = lax.div(number - block + width - 1, jnp.int32(width))
            return lax.fori_loop(
                0, rounds, lambda i, count: one(facts(i * width + block), count), jnp.int32(0)
            )

        @pl.when(half == HALVES)
        def _():
            plgpu.set_max_registers(_REGISTERS[0], action="decrease")
            _drain(refs, walk(partial(move, refs)))

        @pl.when(half < HALVES)
        def _():
            plgpu.set_max_registers(_REGISTERS[1], action="increase")
            walk(partial(multiply, refs, half))
            plgpu.wait_smem_to_gmem(0)

    run = plgpu.kernel(
        body,
        out_type=() if out is None else out,
        scratch_types=scratch,
        grid=(min(BLOCKS, most),),
        grid_names=("block",),
        num_threads=HALVES + 1,
        thread_name="half",
    )
    return run(*operands.values())


def _in_bands(item, lines, columns, band):
    """Item -> (line, column) of a grid: columns of `band` lines, lines change fastest."""
    first = lax.div(item, band * columns) * band
    item = item - first * columns
    width = jnp.minimum(lines - first, band)
    return first + lax.rem(item, width), lax.div(item, width)


def _fill(tile, refs, count, halves, right):
    """Copy the halves of a left tile, and a right one, into the slot of step `count`."""
    slot = lax.rem(count, tile.slots)
    pl.when(count >= tile.slots)(lambda: plgpu.barrier_wait(refs.free.at[slot]))
    for i, half in enumerate(halves):
        plgpu.copy_gmem_to_smem(half, refs.left.at[slot, i], refs.ready.at[slot])
    plgpu.copy_gmem_to_smem(right, refs.right.at[slot], refs.ready.at[slot])


def _drain(refs, count):
    """Wait until the last copies are read: barriers outlive their arrivals."""
    slots = refs.free.shape[0]

    @pl.loop(jnp.maximum(count - slots, 0), count)
    def _slot(i):
        plgpu.barrier_wait(refs.free.at[lax.rem(i, slots)])


def _sum(tile, refs, count, steps, product):
    """The sum fp32 [half, columns] of `steps` products; `product(acc, slot, i)` adds one."""

    def slot_of(i):
        return lax.rem(count + i, tile.slots)

    def release(i):
        plgpu.barrier_arrive(refs.free.at[slot_of(i)])

    def run(acc):
        @pl.loop(0, steps)
        def _step(i):
            plgpu.barrier_wait(refs.ready.at[slot_of(i)])
            product(acc, slot_of(i), i)
            plgpu.wgmma_wait(1)  # the one before is done
            pl.when(i > 0)(lambda: release(i - 1))

        return acc[...]

    acc = pl.run_scoped(run, plgpu.ACC((tile.half, tile.columns), jnp.float32))
    pl.when(steps > 0)(lambda: release(steps - 1))
    return acc


def _slices(acc, dtype):
    """(line, column, values) of each part [64, 128 bytes] of a sum."""
    width = SLICE // jnp.dtype(dtype).itemsize
    for line in range(0, acc.shape[0], 64):
        for column in range(0, acc.shape[1], width):
            yield line, column, acc[line : line + 64, column : column + width].astype(dtype)


# ---- rows by weights ---------------------------------------------------------------------------


def _item_of_rows(tile, steps, columns, groups, refs):
    count = refs.last[groups]

    def facts(item):
        place, column = _in_bands(item, count, columns, tile.band)
        group, offset, begin, end = (refs.tiles[place, i] for i in range(4))
        start = place * tile.lines + offset
        return SimpleNamespace(
            group=group,
            start=pl.multiple_of(start, ALIGNED),
            first=begin - start,
            stop=end - start,
            column=column * tile.columns,
            steps=jnp.where(group < groups, steps, 0),
        )

    return count * columns, facts


def _move_rows(tile, transposed, refs, at, count):
    @pl.loop(0, at.steps)
    def _step(i):
        part, columns = pl.ds(i * DEPTH, DEPTH), pl.ds(at.column, tile.columns)
        lines = [pl.ds(at.start + half * tile.half, tile.half) for half in range(HALVES)]
        right = (columns, part) if transposed else (part, columns)
        halves = [refs.rows.at[line, part] for line in lines]
        _fill(tile, refs, count + i, halves, refs.w.at[at.group, *right])

    return count + at.steps


def _multiply_rows(tile, transposed, refs, half, at, count):
    def product(acc, slot, _):
        right = refs.right.at[slot]
        plgpu.wgmma(acc, refs.left.at[slot, half], right.transpose((1, 0)) if transposed else right)

    acc = _sum(tile, refs, count, at.steps, product)
    for i, (line, column, values) in enumerate(_slices(acc, refs.out.dtype)):
        line = half * tile.half + line
        first, stop = jnp.maximum(at.first - line, 0), jnp.minimum(at.stop - line, 64)
        columns = pl.ds(at.column + column, values.shape[1])
        pl.when(stop - first == 64)(
            partial(_store_all, refs, half, i, values, at.start + line, columns)
        )
        pl.when((stop > first) & (stop - first < 64))(
            partial(_store_some, refs, half, values, at.start + line, columns, first, stop)
        )
    return count + at.steps


def _store_all(refs, half, i, values, row, columns):
    stage = refs.stages[0].at[half, i % 2]
    plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # the last copy from it has read it
    stage[...] = values
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(stage, refs.out.at[pl.ds(row, 64), columns])


def _store_some(refs, half, values, row, columns, first, stop):
    """Rows from `first` to `stop` only, in powers of two: the sizes of copies are static."""
    stage = refs.stages[1].at[half, 0]
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    stage[...] = values
    plgpu.commit_smem()
    rows = stop - first
    for size in (32, 16, 8, 4, 2, 1):
        source = stage.at[pl.ds(first, size)]
        target = refs.out.at[pl.ds(row + first, size), columns]
        taken = lax.rem(lax.div(rows, jnp.int32(size)), jnp.int32(2))
        pl.when(taken == 1)(partial(plgpu.copy_smem_to_gmem, source, target))
        first += taken * size
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


# ---- gradients of weights ----------------------------------------------------------------------


def _item_of_weights(tile, groups, grid, refs):
    each = grid[0] * grid[1]

    def facts(item):
        group = lax.div(item, each)
        line, column = _in_bands(lax.rem(item, each), grid[0], grid[1], tile.band)
        first, stop = refs.begins[group], refs.ends[group]
        start = pl.multiple_of(lax.div(first, ALIGNED) * ALIGNED, ALIGNED)
        steps = lax.div(stop - start + DEPTH - 1, DEPTH)
        return SimpleNamespace(
            group=group,
            start=start,
            first=first - start,
            stop=stop - start,
            line=line * tile.lines,
            column=column * tile.columns,
            steps=jnp.where(stop > first, steps, 0),
        )

    return jnp.int32(groups * each), facts


def _move_weights(tile, refs, at, count):
    @pl.loop(0, at.steps)
    def _step(i):
        rows = pl.ds(at.start + i * DEPTH, DEPTH)
        lines = [pl.ds(at.line + half * tile.half, tile.half) for half in range(HALVES)]
        halves = [refs.x.at[rows, line] for line in lines]
        _fill(tile, refs, count + i, halves, refs.g.at[rows, pl.ds(at.column, tile.columns)])

    return count + at.steps


def _multiply_weights(tile, adds, refs, half, at, count):
    def product(acc, slot, i):
        left = refs.left.at[slot, half]
        first, stop = at.first - i * DEPTH, at.stop - i * DEPTH

        @pl.when((first > 0) | (stop < DEPTH))
        def _mask():
            values = plgpu.load(left, layout=plgpu.Layout.WGMMA)
            row = plgpu.broadcasted_iota(jnp.int32, left.shape, 0, layout=plgpu.Layout.WGMMA)
            left[...] = jnp.where((row >= first) & (row < stop), values, 0).astype(values.dtype)
            plgpu.commit_smem()

        plgpu.wgmma(acc, left.transpose((1, 0)), refs.right.at[slot])

    acc = _sum(tile, refs, count, at.steps, product)

    @pl.when((at.steps > 0) | (not adds))
    def _store():
        for i, (line, column, values) in enumerate(_slices(acc, refs.out.dtype)):
            stage = refs.stages[0].at[half, i % 2]
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            stage[...] = values
            plgpu.commit_smem()
            lines = pl.ds(at.line + half * tile.half + line, 64)
            columns = pl.ds(at.column + column, values.shape[1])
            target = refs.out.at[at.group, lines, columns]
            plgpu.copy_smem_to_gmem(stage, target, reduction_op="add" if adds else None)

    return count + at.steps
