"""Mosaic GPU kernel for Hopper: products of 8-bit matrices with a factor for each 128 of a sum.

A thread block has a warpgroup that moves tiles by TMA through a ring of shared memory, and two that
multiply, each half of the tile's lines (as in `matmul/grouped_mosaic.py`). The tensor cores sum 128
terms; the sum is then multiplied by its factors and added to the total in registers (DeepSeek-V3,
arXiv 2412.19437, section 3.3.2). While one warpgroup does so, the other's products run. It takes 64
lines at a time, so that a sum needs few registers beside the totals. Two blocks of a cluster may
share the larger operand: each copies half of it to both.

The left operand has a factor for each line. The right one has one for each column, or one for 128
columns, as weights do; these are read from memory one step ahead.
Invariants: mover and multipliers count ring slots alike; each element is summed by one block, in
order, so results are equal bit for bit.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from mjax.kernels.fp8.blocks import Blocks
from mjax.kernels.matmul.grouped_mosaic import BLOCKS, SLICE_BYTES, drain, in_bands, swizzled_tiles
from mjax.kernels.matmul.grouped_tiles import HALVES, TMA_ROWS

DEPTH = 128  # terms of a sum in the tensor cores: a block's side, and the bytes of a slot's line
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


# Others spill registers: 256 x 128 with square blocks, 128 x 256 and, with lines, 128 x 192.
SQUARE_TILE = BlockTile(128, 192, 4, cluster=2)  # the right operand is in blocks of 128 x 128
LINES_TILE = BlockTile(256, 128, 4, cluster=2, stages=1)  # both are in blocks of 1 x 128


@dataclass(frozen=True)
class BlockJob:
    """A product [lines, columns] of sums of `steps` blocks, square ones of the right operand.

    adds: to what is there.
    """

    lines: int
    columns: int
    steps: int
    square: bool
    adds: bool
    tile: BlockTile

    @property
    def chunk(self) -> int:
        """Columns of a tile that have one factor in a square block."""
        return math.gcd(self.tile.columns, DEPTH)


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
    m, square = len(a.values), b.block[0] > 1
    tile = tile or (SQUARE_TILE if square else LINES_TILE)
    missing = -m % TMA_ROWS
    values = jnp.pad(a.values, ((0, missing), (0, 0)))
    factors = jnp.pad(a.factors.T, ((0, 0), (0, missing)))
    of_right = b.factors if square else b.factors.T
    sizes = m + missing, len(b.values), values.shape[1] // DEPTH
    operands = dict(a=values, b=b.values, a_factors=factors, b_factors=of_right)
    if total is None:
        job, out = BlockJob(*sizes, square, False, tile), jax.ShapeDtypeStruct(sizes[:2], dtype)
        return _launch_blocks(job, operands, out)[:m]
    operands["out"] = jax.new_ref(total)
    _launch_blocks(BlockJob(*sizes, square, True, tile), operands, total)
    return jax.freeze(operands["out"])


def _launch_blocks(job, operands, out):
    """Walk over all tiles of the product; factors are [K / 128, M], [K / 128, N] or square ones."""
    tile, across = job.tile, "neighbor"
    rows, columns = (
        -(-n // size) for n, size in zip((job.lines, job.columns), tile.of_cluster, strict=True)
    )
    total = rows * columns
    width = min(BLOCKS // tile.cluster, total)
    names = [*operands, *(() if job.adds else ("out",))]

    def body(*gmem, **smem):
        refs = SimpleNamespace(**dict(zip(names, gmem, strict=True)), **smem)
        half, block = lax.axis_index("half"), lax.axis_index("block")
        rounds = lax.div(total - block + width - 1, jnp.int32(width))

        def place(i):
            line, column = in_bands(i * width + block, rows, columns, tile.band)
            line, column = line * tile.of_cluster[0], column * tile.of_cluster[1]
            own = lax.axis_index(across) if tile.cluster > 1 else 0
            if tile.shares_lines:
                return SimpleNamespace(line=line, column=column + own * tile.columns)
            return SimpleNamespace(line=line + own * tile.lines, column=column)

        def walk(one: Callable) -> jax.Array:
            return lax.fori_loop(0, rounds, one, jnp.int32(0))

        @pl.when(half == HALVES)
        def _():
            plgpu.set_max_registers(_REGISTERS_OF_ROLES[0], action="decrease")
            drain(refs, walk(lambda i, count: _move_blocks(job, refs, place(i), count)))

        @pl.when(half < HALVES)
        def _():
            plgpu.set_max_registers(_REGISTERS_OF_ROLES[1], action="increase")
            walk(lambda i, count: _multiply_tile(job, refs, half, place(i), count))
            plgpu.wait_smem_to_gmem(0)

    cluster = dict(cluster=(tile.cluster,), cluster_names=(across,)) if tile.cluster > 1 else {}
    run = plgpu.kernel(
        body,
        out_type=() if job.adds else out,
        scratch_types=_ring_of_blocks(job, operands["a"].dtype, operands["b"].dtype, out.dtype),
        grid=(width,),
        grid_names=("block",),
        num_threads=HALVES + 1,
        thread_name="half",
        **cluster,
    )
    return run(*operands.values())


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
    return ring


def _move_blocks(job, refs, at, count):
    """Fill the ring with a tile's operands and their factors."""
    tile, columns = job.tile, pl.ds(at.column, job.tile.columns)
    lines = [pl.ds(at.line + half * tile.half, tile.half) for half in range(HALVES)]
    both = dict(collective_axes="neighbor") if tile.cluster > 1 else {}
    left, right = (both, {}) if tile.shares_lines else ({}, both)

    @pl.loop(0, job.steps)
    def _step(i):
        slot, part = lax.rem(count + i, tile.slots), pl.ds(i * DEPTH, DEPTH)
        pl.when(count + i >= tile.slots)(lambda: plgpu.barrier_wait(refs.free.at[slot]))
        ready = refs.ready.at[slot]
        for half, line in enumerate(lines):
            plgpu.copy_gmem_to_smem(refs.a.at[line, part], refs.left.at[slot, half], ready, **left)
        plgpu.copy_gmem_to_smem(refs.b.at[columns, part], refs.right.at[slot], ready, **right)
        of_lines = refs.a_factors.at[i, pl.ds(at.line, tile.lines)]
        plgpu.copy_gmem_to_smem(of_lines, refs.of_lines.at[slot], ready)
        if not job.square:
            plgpu.copy_gmem_to_smem(refs.b_factors.at[i, columns], refs.of_columns.at[slot], ready)

    return count + job.steps


def _multiply_tile(job, refs, half, at, count):
    """Sum half a tile, and write it."""
    waves, chunks = job.tile.half // WAVE, job.tile.columns // job.chunk

    def squares(i):
        """The factors of each chunk's block in a step."""
        if not job.square:
            return ()
        last = refs.b_factors.shape[0] - 1
        starts = (at.column + chunk * job.chunk for chunk in range(chunks))
        return tuple(refs.b_factors[jnp.minimum(lax.div(n, DEPTH), last), i] for n in starts)

    def step(i, state):
        totals, factors = state
        ahead = squares(jnp.minimum(i + 1, job.steps - 1))
        slot = lax.rem(count + i, job.tile.slots)
        plgpu.barrier_wait(refs.ready.at[slot])
        made = []
        for wave in range(waves):
            part, scales = _scaled_sum_of_slot(job, refs, half, slot, wave, factors)
            if wave == waves - 1:
                plgpu.barrier_arrive(refs.free.at[slot])
            made.append(_promoted(job, totals[wave], part, *scales))
        return made, ahead

    zeros = plgpu.layout_cast(jnp.zeros((WAVE, job.chunk), jnp.float32), plgpu.Layout.WGMMA)
    first = [[zeros] * chunks] * waves, squares(0)
    totals, _ = lax.fori_loop(0, job.steps, step, first)
    _write_tile(job, refs, half, totals, at)
    return count + job.steps


def _scaled_sum_of_slot(job, refs, half, slot, wave, factors):
    """The sums [64, columns] of a slot's terms, and factors of their lines and chunks."""
    lines, start = pl.ds(wave * WAVE, WAVE), half * job.tile.half + wave * WAVE

    def run(acc):
        right = refs.right.at[slot].transpose((1, 0))
        plgpu.wgmma(acc, refs.left.at[slot, half, lines], right)
        of_lines = refs.of_lines.at[slot, pl.ds(start, WAVE)]
        of_lines = plgpu.load(of_lines, layout=_FACTORS_OF_LINES)
        of_chunks = factors or tuple(
            plgpu.load(refs.of_columns.at[slot, pl.ds(n, job.chunk)], layout=_FACTORS_OF_COLUMNS)
            for n in range(0, job.tile.columns, job.chunk)
        )
        # Or TMA may write before these are read: in a cluster one thread frees a slot for all.
        plgpu.commit_smem()
        return acc[...], (of_lines, of_chunks)

    return pl.run_scoped(run, plgpu.ACC((WAVE, job.tile.columns), jnp.float32))


def _promoted(job, totals, part, of_lines, of_chunks):
    """The totals of each chunk and a block's sums times their factors."""
    made = []
    for n, (total, factor) in enumerate(zip(totals, of_chunks, strict=True)):
        own = part[:, n * job.chunk : (n + 1) * job.chunk]
        if job.square:
            scale = lax.broadcast_in_dim(of_lines * factor, own.shape, [0])
        else:
            own = own * lax.broadcast_in_dim(factor, own.shape, [1])
            scale = lax.broadcast_in_dim(of_lines, own.shape, [0])
        made.append(total + own * scale)
    return made


def _write_tile(job, refs, half, totals, at):
    """Write half a tile part by part; parts beyond the edges are left out.

    A copy of as much as there is in memory would begin at the first line or column.
    """
    tile, width = job.tile, SLICE_BYTES // refs.out.dtype.itemsize
    skips = len(totals) > 1 and job.columns % tile.columns  # parts before others
    starts, reduction = range(0, tile.columns, width), "add" if job.adds else None

    def leave(number, line, column, values):
        # The last copy from this stage has read it; a tile before may have ended with any stage.
        pending = 0 if skips else min(number, tile.stages - 1)
        stage = refs.stages.at[half, number % tile.stages]
        plgpu.wait_smem_to_gmem(pending, wait_read_only=True)
        stage[...] = values.astype(stage.dtype)
        plgpu.commit_smem()
        target = refs.out.at[pl.ds(line, WAVE), pl.ds(column, width)]
        plgpu.copy_smem_to_gmem(stage, target, reduction_op=reduction)

    for number, (wave, first) in enumerate(itertools.product(range(len(totals)), starts)):
        line, column = at.line + half * tile.half + wave * WAVE, at.column + first
        chunk, start = totals[wave][first // job.chunk], first % job.chunk
        part = number, line, column, chunk[:, start : start + width]
        pl.when((line < job.lines) & (column < job.columns))(partial(leave, *part))
