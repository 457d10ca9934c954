"""Mosaic GPU kernels for Hopper of matmuls with an activation function between them.

Forward: act(u) and act'(u) of u = x @ w + bias, which itself is not kept. Backward, of the matmul
behind the function: the gradient g @ w.T of act(u) times act'(u), and its sums over rows for the
bias. So no pass over memory is the function's own.

A thread block has a warpgroup that moves tiles through a ring of shared memory, and two that
multiply, each half of the tile's lines (as in `grouped_mosaic.py`). They leave the sums of a tile
in a stage. While the tensor cores multiply the next tile, its multipliers take the sums out of the
stage piece by piece, compute, and write. u is rounded to x's dtype before act(u) is computed, and
g @ w.T before it is multiplied. Measured: docs/lab/2026-11-26-activated-matmuls.md.
Invariant: each element is summed by one block, in order: results are equal bit for bit.
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

from mjax.kernels.matmul.grouped_mosaic import (
    BLOCKS,
    depth_of,
    drain,
    fill_slot,
    in_bands,
    swizzled_tiles,
)
from mjax.kernels.matmul.grouped_tiles import HALVES, GroupTile

TILE = GroupTile(128, 256, 3)
PART = 64  # columns of a tile that leave together: 128 bytes of a line
LOG2E = 1.4426950408889634
_REGISTERS_OF_THREADS = 40, 232  # of a moving and of a multiplying thread
_COLUMNS = plgpu.Layout.WGMMA.reduce(0)  # how a value for each column of a product is held


@dataclass(frozen=True)
class ActivatedJob:
    """A product [lines, columns] of sums over `depth`, and how half a tile of it is finished.

    turned: the right operand is [columns, depth]. pieces: of work, of half a tile.
    finish(job, refs, half, place, piece) does one. before(job, refs, half, place) is called when
    sums are known, and returns what they leave through: (values, first column of the tile) ->
    values.
    """

    lines: int
    columns: int
    depth: int
    tile: GroupTile
    turned: bool
    pieces: int
    finish: Callable
    before: Callable


def multiply_and_activate(
    x: jax.Array, w: jax.Array, bias: jax.Array, name: str, tile: GroupTile = TILE
) -> tuple[jax.Array, jax.Array]:
    """u = x [M, K] @ w [K, N] + bias fp32 [N] -> act(u), act'(u), [M, N] in the dtype of x."""
    (m, depth), n = x.shape, w.shape[1]
    parts, out = tile.columns // PART, jax.ShapeDtypeStruct((m, n), x.dtype)
    scratch = dict(
        bias_ring=plgpu.SMEM((2, tile.columns), jnp.float32),
        bias_ready=plgpu.Barrier(num_barriers=2),
        bias_free=plgpu.Barrier(num_arrivals=HALVES, num_barriers=2),
        stage=_swizzled(x.dtype, HALVES, parts, tile.half, PART),
        outs=_swizzled(x.dtype, HALVES, tile.half, PART),
    )
    job = ActivatedJob(m, n, depth, tile, False, parts, partial(_activate, name), _with_bias)
    return _launch_activated(job, dict(x=x, w=w, bias=bias), dict(out=out, slope=out), scratch)


def multiply_by_slope(
    g: jax.Array, w: jax.Array, slope: jax.Array, tile: GroupTile = TILE
) -> tuple[jax.Array, jax.Array]:
    """g [M, K], w [N, K], slope [M, N] -> (g @ w.T * slope in g's dtype, its sums fp32 [N])."""
    (m, depth), n = g.shape, w.shape[0]
    parts = tile.columns // PART
    sums = jax.ShapeDtypeStruct((-(-m // tile.lines) * HALVES, n), jnp.float32)
    scratch = dict(
        stage=_swizzled(g.dtype, HALVES, parts, tile.half, PART),
        slopes=_swizzled(g.dtype, HALVES, tile.half, PART),
        slopes_ready=plgpu.Barrier(num_barriers=HALVES),
        sum_stage=plgpu.SMEM((HALVES, tile.columns), jnp.float32),
    )
    job = ActivatedJob(m, n, depth, tile, True, 2 * parts, _times_slope, _ask_for_slopes)
    outs = dict(out=jax.ShapeDtypeStruct((m, n), g.dtype), sums=sums)
    du, sums = _launch_activated(job, dict(x=g, w=w, slope=slope), outs, scratch)
    return du, sums.sum(0)


def _swizzled(dtype, *shape):
    """Shared memory of tiles as TMA and the tensor cores want them."""
    return plgpu.SMEM(shape, dtype, transforms=swizzled_tiles(dtype))


def _launch_activated(job, operands, outs, scratch):
    """Walk over all tiles of the product; each is finished while the next is multiplied."""
    tile, dtype = job.tile, operands["x"].dtype
    lines, across, step = -(-job.lines // tile.lines), tile.across(job.columns), depth_of(dtype)
    total, names = lines * across, [*operands, *outs]
    width = min(BLOCKS, total)
    right = (tile.columns, step) if job.turned else (step, tile.columns)
    scratch = scratch | dict(
        left=_swizzled(dtype, tile.slots, HALVES, tile.half, step),
        right=_swizzled(dtype, tile.slots, *right),
        ready=plgpu.Barrier(num_arrivals=HALVES + 1, num_barriers=tile.slots),
        free=plgpu.Barrier(num_arrivals=HALVES, num_barriers=tile.slots),
    )

    def body(*gmem, **smem):
        refs = SimpleNamespace(**dict(zip(names, gmem, strict=True)), **smem)
        half, block = lax.axis_index("half"), lax.axis_index("block")
        rounds = lax.div(total - block + width - 1, jnp.int32(width))

        def place(i):
            line, column = in_bands(i * width + block, lines, across, tile.band)
            return SimpleNamespace(line=line * tile.lines, column=column * tile.columns, i=i)

        def walk(one: Callable) -> jax.Array:
            return lax.fori_loop(0, rounds, one, jnp.int32(0))

        @pl.when(half == HALVES)
        def _():
            plgpu.set_max_registers(_REGISTERS_OF_THREADS[0], action="decrease")
            drain(refs, walk(lambda i, count: _move(job, refs, place(i), count)))
            if hasattr(refs, "bias"):
                _drain_biases(refs, rounds)

        @pl.when(half < HALVES)
        def _():
            plgpu.set_max_registers(_REGISTERS_OF_THREADS[1], action="increase")
            walk(lambda i, count: _multiply(job, refs, half, place, i, count))
            last = place(rounds - 1)
            pl.loop(0, job.pieces)(lambda piece: job.finish(job, refs, half, last, piece))
            plgpu.wait_smem_to_gmem(0)

    run = plgpu.kernel(
        body,
        out_type=tuple(outs.values()),
        scratch_types=scratch,
        grid=(width,),
        grid_names=("block",),
        num_threads=HALVES + 1,
        thread_name="half",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
    )
    return run(*operands.values())


def _steps_of_sum(job, refs):
    """The steps of a sum, and what each adds."""
    depth = depth_of(refs.x.dtype)
    return job.depth // depth, depth


def _move(job, refs, at, count):
    """Fill the ring with a tile's operands."""
    tile, columns = job.tile, pl.ds(at.column, job.tile.columns)
    steps, depth = _steps_of_sum(job, refs)
    if hasattr(refs, "bias"):
        slot = lax.rem(at.i, 2)
        pl.when(at.i >= 2)(lambda: plgpu.barrier_wait(refs.bias_free.at[slot]))
        into = refs.bias_ring.at[slot], refs.bias_ready.at[slot]
        plgpu.copy_gmem_to_smem(refs.bias.at[columns], *into)

    @pl.loop(0, steps)
    def _step(step):
        part = pl.ds(step * depth, depth)
        lines = [pl.ds(at.line + half * tile.half, tile.half) for half in range(HALVES)]
        right = (columns, part) if job.turned else (part, columns)
        fill_slot(
            tile, refs, count + step, [refs.x.at[line, part] for line in lines], refs.w.at[right]
        )

    return count + steps


def _drain_biases(refs, rounds):
    """Wait until the last biases are read: barriers outlive their arrivals."""

    @pl.loop(jnp.maximum(rounds - 2, 0), rounds)
    def _slot(i):
        plgpu.barrier_wait(refs.bias_free.at[lax.rem(i, 2)])


def _multiply(job, refs, half, place, i, count):
    """Multiply a tile and leave its sums in the stage; meanwhile finish the tile before."""
    tile, before, (steps, _) = job.tile, place(i - 1), _steps_of_sum(job, refs)
    apart = max(1, steps // job.pieces)  # steps from piece to piece

    def release(step):
        plgpu.barrier_arrive(refs.free.at[lax.rem(count + step, tile.slots)])

    def run(acc):
        @pl.loop(0, steps)
        def _step(step):
            slot = lax.rem(count + step, tile.slots)
            plgpu.barrier_wait(refs.ready.at[slot])
            right = refs.right.at[slot]
            right = right.transpose((1, 0)) if job.turned else right
            plgpu.wgmma(acc, refs.left.at[slot, half], right)
            plgpu.wgmma_wait(1)  # the one before is done
            pl.when(step > 0)(lambda: release(step - 1))
            # The halves take turns where there are steps enough: the cores wait less for them.
            since = step - half * (apart // 2)
            piece = lax.div(since, apart)
            has_piece = (since >= 0) & (lax.rem(since, apart) == 0) & (piece < job.pieces)
            pl.when(has_piece & (i > 0))(lambda: job.finish(job, refs, half, before, piece))

        return acc[...]

    acc = pl.run_scoped(run, plgpu.ACC((tile.half, tile.columns), jnp.float32))
    release(steps - 1)
    if steps < job.pieces:

        @pl.when(i > 0)
        def _rest():
            rest = pl.loop(steps, job.pieces)
            rest(lambda piece: job.finish(job, refs, half, before, piece))

    leaving = job.before(job, refs, half, place(i))
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for part, start in enumerate(range(0, tile.columns, PART)):
        values = leaving(acc[:, start : start + PART], start)
        refs.stage[half, part] = values.astype(refs.stage.dtype)
    plgpu.commit_smem()
    if hasattr(refs, "bias"):
        plgpu.barrier_arrive(refs.bias_free.at[lax.rem(i, 2)])
    return count + steps


def _place_of_part(job, half, at, part):
    """The place in the output of a part of half a tile."""
    lines = pl.ds(at.line + half * job.tile.half, job.tile.half)
    return lines, pl.ds(at.column + part * PART, PART)


def _wide_of(ref):
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA).astype(jnp.float32)


# ---- forward -----------------------------------------------------------------------------------


def _with_bias(job, refs, half, at):
    """Wait for the biases of a tile; sums leave with them."""
    slot = lax.rem(at.i, 2)
    plgpu.barrier_wait(refs.bias_ready.at[slot])

    def leaving(values, start):
        bias = plgpu.load(refs.bias_ring.at[slot, pl.ds(start, PART)], layout=_COLUMNS)
        return values + lax.broadcast_in_dim(bias, values.shape, [1])

    return leaving


def _activate(name, job, refs, half, at, part):
    """Write act(u), and act'(u) by way of u's place in the stage."""
    of_slope, of_out = refs.stage.at[half, part], refs.outs.at[half]
    u, place = _wide_of(of_slope), _place_of_part(job, half, at, part)
    share, slope = _share_of_act(name, u)
    out, slope = u * share, share + u * slope
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    of_out[...] = out.astype(of_out.dtype)
    of_slope[...] = slope.astype(of_slope.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(of_out, refs.out.at[place], commit_group=False)
    plgpu.copy_smem_to_gmem(of_slope, refs.slope.at[place])


# ---- backward ----------------------------------------------------------------------------------


def _ask_for_slopes(job, refs, half, at):
    """Begin to copy the slopes of the first part; sums leave as they are."""
    _copy_slopes(job, refs, half, at, 0)
    return lambda values, _: values


def _copy_slopes(job, refs, half, at, part):
    source = refs.slope.at[_place_of_part(job, half, at, part)]
    plgpu.copy_gmem_to_smem(source, refs.slopes.at[half], refs.slopes_ready.at[half])


def _times_slope(job, refs, half, at, piece):
    """Two pieces of each part: write the product of sums and slopes; sum that over lines."""
    part, parts = lax.div(piece, 2), job.tile.columns // PART
    stage, columns = refs.stage.at[half, part], pl.ds(part * PART, PART)

    @pl.when(lax.rem(piece, 2) == 0)
    def _multiply_part():
        plgpu.barrier_wait(refs.slopes_ready.at[half])
        stage[...] = (_wide_of(stage) * _wide_of(refs.slopes.at[half])).astype(stage.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(stage, refs.out.at[_place_of_part(job, half, at, part)])
        pl.when(part + 1 < parts)(lambda: _copy_slopes(job, refs, half, at, part + 1))

    @pl.when(lax.rem(piece, 2) == 1)
    def _sum_part():
        # Read turned, so that a thread holds a line's columns: no sum crosses warps.
        turned = plgpu.load(stage.transpose((1, 0)), layout=plgpu.Layout.WGMMA_TRANSPOSED)
        refs.sum_stage[half, columns] = turned.astype(jnp.float32).sum(axis=1)

    @pl.when(piece == job.pieces - 1)
    def _write_sums():
        plgpu.commit_smem()
        row = lax.div(at.line, job.tile.lines) * HALVES + half
        target = refs.sums.at[row, pl.ds(at.column, job.tile.columns)]
        plgpu.copy_smem_to_gmem(refs.sum_stage.at[half], target)


# ---- activation functions ----------------------------------------------------------------------

# erfc(t / sqrt(2)) / 2 over the density of the normal distribution, for t from 0 to 5, to 1.4e-4 of
# itself: a minimax fit of our own. bf16 keeps 2e-3.
_TAIL = (
    1.25316784,
    -0.995794424,
    0.604828964,
    -0.286177254,
    0.100913636,
    -0.0248695015,
    0.00396821743,
    -0.000364246701,
    1.45142094e-05,
)


def _share_of_act(name, x):
    """s of act(x) = x * s(x), and its derivative."""
    if name == "gelu":
        return _normal_and_density(x)
    if name == "gelu_tanh":
        outer, square = 1.5957691216057308, x * x  # 2 * sqrt(2 / pi): (1 + tanh(y)) / 2 = s(2 * y)
        s = _sigmoid(x * (outer + outer * 0.044715 * square))
        return s, (outer + 3 * outer * 0.044715 * square) * (s * (1 - s))
    steep = {"silu": 1.0, "quick_gelu": 1.702}[name]
    s = _sigmoid(steep * x)
    return s, steep * s * (1 - s)


def _sigmoid(x):
    """1 / (1 + exp(-x)), by the one instruction that GPUs have for tanh: within 2e-4."""
    return 0.5 + 0.5 * jnp.tanh(0.5 * x)


def _normal_and_density(x):
    """The normal distribution function and its density."""
    density = jnp.exp2(-0.5 * LOG2E * (x * x) - 1.3257480648)  # log2(sqrt(2 * pi))
    t = jnp.minimum(jnp.abs(x), 5.0)
    p = _TAIL[-1] * t + _TAIL[-2]
    for c in _TAIL[-3::-1]:
        p = p * t + c
    tail = p * density
    return jnp.where(x < 0, tail, 1.0 - tail), density
