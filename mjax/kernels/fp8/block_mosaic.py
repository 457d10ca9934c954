"""Mosaic GPU kernel for Hopper: products of 8-bit matrices with a factor for each 128 of a sum.

A thread block has a warpgroup that moves tiles by TMA through a ring of shared memory, and two that
multiply, each half of the tile's lines (as in `matmul/grouped_mosaic.py`). The tensor cores sum 128
terms; the sum is then multiplied by its factors and added to the total in registers (DeepSeek-V3,
arXiv 2412.19437, section 3.3.2). While one warpgroup does so, the other's products run. It takes 64
lines at a time, and factors of columns late, so that few registers are needed beside the totals.
Two blocks of a cluster may share the larger operand: each copies half of it to both.

Experts' products are two grouped forms (`BlockJob.grouped`). Rows sorted by expert take tiles as in
`matmul/grouped_mosaic.py`. A weight's gradient sums over its expert's blocks only: in the turned
operands each expert's tokens begin at a block, and zeros fill up its last one.

The left operand has a factor for each line. The right one has one for each column, or one for 128
columns, as weights do; these are read from memory one step ahead.
Invariants: mover and multipliers count ring slots alike; each element is summed by one block, in
order, so results are equal bit for bit.
"""

import itertools
import math
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Literal

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from mjax.kernels.fp8.blocks import Blocks
from mjax.kernels.matmul import grouped_mosaic as grouped
from mjax.kernels.matmul.grouped_mosaic import SLICE_BYTES, PartOfSum, swizzled_tiles
from mjax.kernels.matmul.grouped_tiles import (
    HALVES,
    TMA_ROWS,
    GroupTile,
    bounds_of_groups,
    tiles_of_rows,
)

DEPTH = 128  # terms of a sum in the tensor cores: a block's side, and the bytes of a slot's line
PROMOTED = 64  # columns that are promoted at once where each has a factor of its own
WAVE = 64  # lines of a product of the tensor cores
_REGISTERS_OF_ROLES = 24, 240  # of a moving and of a multiplying thread
_FACTORS_OF_LINES = plgpu.Layout.WGMMA.reduce(1)
_FACTORS_OF_COLUMNS = plgpu.Layout.WGMMA.reduce(0)


@dataclass(frozen=True)
class BlockTile:
    """Lines and columns of a product that a block takes, slots of its ring, and tiles of a band.

    Lines are a multiple of 128, columns one of 64. The blocks of a `cluster` have neighboring tiles
    that share their lines, or their columns if these are more. Parts of a tile leave through
    `stages` that take turns, of each half.
    """

    lines: int
    columns: int
    slots: int
    band: int = 8
    cluster: int = 1
    stages: int = 2

    @property
    def half(self) -> int:
        return self.lines // HALVES

    @property
    def shares_lines(self) -> bool:
        return self.lines >= self.columns

    @property
    def of_cluster(self) -> tuple[int, int]:
        """Lines and columns of a cluster's tiles."""
        if self.shares_lines:
            return self.lines, self.columns * self.cluster
        return self.lines * self.cluster, self.columns


# Two waves of a multiplier, and 256 columns, spill registers.
SQUARE_TILE = BlockTile(128, 192, 4, band=16, cluster=2)  # the right one's blocks are 128 x 128
LINES_TILE = BlockTile(128, 192, 4, cluster=2)  # both are in blocks of 1 x 128


@dataclass(frozen=True)
class BlockJob:
    """A product [lines, columns] of sums of `steps` blocks, square ones of the right operand.

    adds: to what is there. grouped: whether lines have groups, each with a right operand of its
    own, or sums have, each with a product of its own. groups: how many there are.
    """

    lines: int
    columns: int
    steps: int
    square: bool
    adds: bool
    tile: BlockTile
    grouped: Literal["lines", "sums"] | None = None
    groups: int = 1

    @property
    def chunk(self) -> int:
        """Columns of a tile that are promoted together; in a square block they have one factor."""
        return math.gcd(self.tile.columns, DEPTH if self.square else PROMOTED)

    @property
    def cluster_tile(self) -> GroupTile:
        """Lines and columns of a cluster's tiles, as a tile."""
        return GroupTile(*self.tile.of_cluster, self.tile.slots, self.tile.band)

    @property
    def grid(self) -> tuple[int, int]:
        """Clusters that cover the lines, and the columns."""
        return pl.cdiv(self.lines, self.cluster_tile.lines), self.cluster_tile.across(self.columns)


def multiply_on_hopper(
    a: Blocks,
    b: Blocks,
    dtype: jnp.dtype,
    total: jax.Array | None = None,
    tile: BlockTile | None = None,
) -> jax.Array:
    """`multiply_blocks` of a [M, K] in blocks of 1 x 128 and b [N, K] in 1 x 128 or 128 x 128.

    K is a multiple of 128, N one of 64, and `dtype` of 16 or 32 bits. A `total` fp32 [M, N] with
    M a multiple of 8 is added to where it lies, any other afterwards.
    """
    if total is not None and (total.dtype != jnp.float32 or len(total) % TMA_ROWS):
        return total + multiply_on_hopper(a, b, dtype, tile=tile)
    square, operands = b.block[0] > 1, _operands_of(a, b)
    tile = tile or (SQUARE_TILE if square else LINES_TILE)
    sizes = len(operands["a"]), len(b.values), a.values.shape[1] // DEPTH
    job = BlockJob(*sizes, square, total is not None, tile)
    return _launch_blocks(job, operands, sizes[:2], dtype, total)[: len(a.values)]


def multiply_rows_of_groups(
    a: Blocks, b: Blocks, sizes: jax.Array, dtype: jnp.dtype, tile: BlockTile | None = None
) -> jax.Array:
    """Rows a [M, K], sorted by group, times the transpose of b [G, N, K] of their group, [M, N].

    Blocks of b are square; `sizes` int32 [G] count the rows. Rows of no group become zeros.
    """
    operands, (groups, n, _) = _operands_of(a, b), b.values.shape
    m, steps = len(operands["a"]), a.values.shape[1] // DEPTH
    job = BlockJob(m, n, steps, True, False, tile or SQUARE_TILE, "lines", groups)
    tiles, last = tiles_of_rows(sizes, m, job.cluster_tile.lines)
    operands |= dict(tiles=tiles, last=last)
    most = len(tiles) * job.grid[1]
    return _launch_blocks(job, operands, (m, n), dtype, most=most)[: len(a.values)]


def weight_gradient_of_groups(
    a: Blocks,
    b: Blocks,
    sizes: jax.Array,
    dtype: jnp.dtype,
    total: jax.Array | None = None,
    tile: BlockTile = LINES_TILE,
) -> jax.Array:
    """[G, K, N]: a [K, P] times the transpose of b [N, P], over the columns of each group alone.

    Groups of `sizes` int32 [G] columns begin at multiples of 128, and zeros fill them up. A `total`
    fp32 [G, K, N] is added to where it lies, any other afterwards.
    """
    if total is not None and total.dtype != jnp.float32:
        return total + weight_gradient_of_groups(a, b, sizes, dtype, tile=tile)
    begins, ends = bounds_of_groups(-(-sizes // DEPTH) * DEPTH)
    operands = _operands_of(a, b) | dict(begins=begins, ends=ends)
    shape = len(sizes), len(a.values), len(b.values)
    steps = a.values.shape[1] // DEPTH
    job = BlockJob(*shape[1:], steps, False, total is not None, tile, "sums", len(sizes))
    return _launch_blocks(job, operands, shape, dtype, total)


def _operands_of(a, b):
    """Values, and factors as the kernel reads them; the rows of a are filled up for TMA."""
    missing = -len(a.values) % TMA_ROWS
    return dict(
        a=jnp.pad(a.values, ((0, missing), (0, 0))),
        b=b.values,
        a_factors=jnp.pad(a.factors.T, ((0, 0), (0, missing))),
        b_factors=b.factors if b.block[0] > 1 else b.factors.T,
    )


def _launch_blocks(job, operands, shape, dtype, total=None, most=None):
    """Walk over all tiles of the product; factors are [K / 128, M], [K / 128, N] or square ones.

    There are at most `most` clusters' tiles.
    """
    out = jax.ShapeDtypeStruct(shape, dtype)
    if job.adds:
        operands["out"], out = jax.new_ref(total), total
    made = grouped.launch_items(
        most or job.groups * math.prod(job.grid),
        partial(_item_of_tiles, job),
        partial(_move_blocks, job),
        partial(_multiply_tile, job),
        operands,
        None if job.adds else out,
        _ring_of_blocks(job, operands["a"].dtype, operands["b"].dtype, out.dtype),
        _REGISTERS_OF_ROLES,
        job.tile.cluster,
    )
    return jax.freeze(operands["out"]) if job.adds else made


def _item_of_tiles(job, refs):
    """How `launch_items` finds tiles: line and column, first block and steps of the sums, groups.

    `right` and `out` are the index of a group's right operand, and of its product.
    """
    tile, size, grid = job.tile, job.cluster_tile, job.grid
    if job.grouped == "lines":
        number, read, facts = grouped.item_of_rows(size, job.steps, grid[1], job.groups, refs)
    elif job.grouped == "sums":
        number, read, facts = grouped.item_of_weights(size, job.groups, grid, DEPTH, DEPTH, refs)
    else:
        number, read = jnp.int32(math.prod(grid)), lambda _: ()

    def of_cluster(item, known):
        if job.grouped is None:
            line, column = grouped.in_bands(item, *grid, tile.band)
            place = dict(line=line * size.lines, column=column * size.columns)
            return SimpleNamespace(**place, block=0, steps=job.steps, right=(), out=())
        at = facts(item, known)
        if job.grouped == "sums":
            at.block, at.right, at.out = lax.div(at.start, DEPTH), (), (at.group,)
        else:
            at.begin, at.end = at.start + at.first, at.start + at.stop
            at.right, at.out = (jnp.minimum(at.group, job.groups - 1),), ()
            at.line, at.block = at.start, 0
        return at

    def own(item, known):
        at = of_cluster(item, known)
        if tile.cluster > 1 and tile.shares_lines:
            at.column += lax.axis_index("neighbor") * tile.columns
        elif tile.cluster > 1:
            at.line += lax.axis_index("neighbor") * tile.lines
        return at

    return number, read, own


def _ring_of_blocks(job, a_dtype, b_dtype, dtype):
    """Shared memory and barriers, by name."""
    tile, width = job.tile, SLICE_BYTES // dtype.itemsize

    def swizzled(of, *shape):
        return plgpu.SMEM(shape, of, transforms=swizzled_tiles(of))

    arrivals = dict(num_arrivals=HALVES, num_barriers=tile.slots)
    free = plgpu.Barrier(**arrivals)
    if tile.cluster > 1:
        free = plgpu.ClusterBarrier(collective_axes=("neighbor",), **arrivals)
    ring = dict(
        left=swizzled(a_dtype, tile.slots, HALVES, tile.half, DEPTH),
        right=swizzled(b_dtype, tile.slots, tile.columns, DEPTH),
        of_lines=plgpu.SMEM((tile.slots, tile.lines), jnp.float32),
        ready=plgpu.Barrier(
            num_arrivals=HALVES + (2 if job.square else 3), num_barriers=tile.slots
        ),
        free=free,
        stages=swizzled(dtype, HALVES, tile.stages, WAVE, width),
    )
    if not job.square:
        ring["of_columns"] = plgpu.SMEM((tile.slots, tile.columns), jnp.float32)
    if job.grouped == "lines":
        ring["some"] = plgpu.SMEM((HALVES, WAVE, width), dtype)  # any row of it can be copied alone
    return ring


def _move_blocks(job, refs, at, count):
    """Fill the ring with a tile's operands and their factors."""
    tile, columns = job.tile, pl.ds(at.column, job.tile.columns)
    lines = [pl.ds(at.line + half * tile.half, tile.half) for half in range(HALVES)]
    both = dict(collective_axes="neighbor") if tile.cluster > 1 else {}
    left, right = (both, {}) if tile.shares_lines else ({}, both)

    @pl.loop(0, at.steps)
    def _step(i):
        slot, block = lax.rem(count + i, tile.slots), at.block + i
        part = pl.ds(block * DEPTH, DEPTH)
        pl.when(count + i >= tile.slots)(lambda: plgpu.barrier_wait(refs.free.at[slot]))
        ready = refs.ready.at[slot]
        for half, line in enumerate(lines):
            plgpu.copy_gmem_to_smem(refs.a.at[line, part], refs.left.at[slot, half], ready, **left)
        right_of_step = refs.b.at[*at.right, columns, part]
        plgpu.copy_gmem_to_smem(right_of_step, refs.right.at[slot], ready, **right)
        of_lines = refs.a_factors.at[block, pl.ds(at.line, tile.lines)]
        plgpu.copy_gmem_to_smem(of_lines, refs.of_lines.at[slot], ready)
        if not job.square:
            of_columns = refs.b_factors.at[block, columns]
            plgpu.copy_gmem_to_smem(of_columns, refs.of_columns.at[slot], ready)

    return count + at.steps


def _multiply_tile(job, refs, half, at, count):
    """Sum half a tile, and write it."""
    waves, chunks = job.tile.half // WAVE, job.tile.columns // job.chunk

    def squares(i):
        """The factors of each chunk's block in a step."""
        if not job.square:
            return ()
        last = refs.b_factors.shape[-2] - 1
        starts = (at.column + chunk * job.chunk for chunk in range(chunks))
        blocks = [jnp.minimum(lax.div(n, DEPTH), last) for n in starts]
        return tuple(refs.b_factors[*at.right, block, i] for block in blocks)

    def step(i, state):
        totals, factors = state
        ahead = squares(jnp.minimum(i + 1, at.steps - 1))
        slot = lax.rem(count + i, job.tile.slots)
        plgpu.barrier_wait(refs.ready.at[slot])
        add = partial(_add_slot, job, refs, half, slot, of_squares=factors)
        made = [add(wave, totals[wave]) for wave in range(waves)]
        # Or TMA may write before factors are read: in a cluster one thread frees for all.
        plgpu.commit_smem()
        plgpu.barrier_arrive(refs.free.at[slot])
        return made, ahead

    zeros = plgpu.layout_cast(jnp.zeros((WAVE, job.chunk), jnp.float32), plgpu.Layout.WGMMA)
    first = [[zeros] * chunks] * waves, squares(0)
    totals, _ = lax.fori_loop(0, at.steps, step, first)
    _write_tile(job, refs, half, totals, at)
    return count + at.steps


def _add_slot(job, refs, half, slot, wave, totals, of_squares):
    """The totals of each chunk and a slot's sums [64, columns] times their factors."""
    lines, rows = pl.ds(wave * WAVE, WAVE), pl.ds(half * job.tile.half + wave * WAVE, WAVE)

    def run(acc):
        plgpu.wgmma(acc, refs.left.at[slot, half, lines], refs.right.at[slot].transpose((1, 0)))
        of_lines = plgpu.load(refs.of_lines.at[slot, rows], layout=_FACTORS_OF_LINES)
        sums, made = acc[...], []
        for n, total in enumerate(totals):
            own = sums[:, n * job.chunk : (n + 1) * job.chunk]
            made.append(total + _by_factors(job, refs, slot, n, own, of_lines, of_squares))
        return made

    return pl.run_scoped(run, plgpu.ACC((WAVE, job.tile.columns), jnp.float32))


def _by_factors(job, refs, slot, n, sums, of_lines, of_squares):
    """The sums of the n-th chunk times their factors."""
    if job.square:
        return sums * lax.broadcast_in_dim(of_lines * of_squares[n], sums.shape, [0])
    factor = refs.of_columns.at[slot, pl.ds(n * job.chunk, job.chunk)]
    factor = plgpu.load(factor, layout=_FACTORS_OF_COLUMNS)
    sums = sums * lax.broadcast_in_dim(factor, sums.shape, [1])
    return sums * lax.broadcast_in_dim(of_lines, sums.shape, [0])


def _write_tile(job, refs, half, totals, at):
    """Write half a tile part by part; parts beyond the edges are left out.

    A copy of as much as there is in memory would begin at the first line or column.
    """
    tile, width = job.tile, SLICE_BYTES // refs.out.dtype.itemsize
    by_rows = job.grouped == "lines"
    skips = len(totals) > 1 and (job.columns % tile.columns or by_rows)  # parts before others
    starts, reduction = range(0, tile.columns, width), "add" if job.adds else None

    def leave(number, line, part):
        # The last copy from this stage has read it; a tile before may have ended with any stage.
        pending = 0 if skips else min(number, tile.stages - 1)
        stage = refs.stages.at[half, number % tile.stages]
        plgpu.wait_smem_to_gmem(pending, wait_read_only=True)
        stage[...] = part.values
        plgpu.commit_smem()
        target = refs.out.at[*at.out, pl.ds(line, WAVE), pl.ds(part.column, width)]
        plgpu.copy_smem_to_gmem(stage, target, reduction_op=reduction)

    for number, (wave, first) in enumerate(itertools.product(range(len(totals)), starts)):
        line, column = at.line + half * tile.half + wave * WAVE, at.column + first
        chunk, start = totals[wave][first // job.chunk], first % job.chunk
        part = PartOfSum(chunk[:, start : start + width].astype(refs.out.dtype), column)
        is_inside = (line < job.lines) & (column < job.columns)
        if by_rows:
            begin, end = jnp.maximum(at.begin - line, 0), jnp.minimum(at.end - line, WAVE)
            is_inside &= end - begin == WAVE
            some = partial(grouped.store_some, refs.some.at[half], part, refs.out, line, begin, end)
            pl.when((end > begin) & (end - begin < WAVE))(some)
        elif job.grouped and job.adds:
            is_inside &= at.steps > 0
        pl.when(is_inside)(partial(leave, number, line, part))
