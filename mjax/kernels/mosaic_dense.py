"""Mosaic GPU kernels for Hopper of matmuls with an activation function between them.

Forward: act(u) and the slope act'(u) of u = x @ w + bias, which itself is not kept. Backward, of
the matmul behind the function: the gradient g @ w.T of act(u) times the slope, and its sums over
rows for the bias. So no pass over memory is the function's own. A thread block has a warpgroup that
moves tiles through a ring of shared memory (as in `mosaic_grouped.py`), and two that multiply, each
half of the tile's lines, and then compute on their sums. Invariant: each element is summed by one
block, in order: results are equal bit for bit.
"""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from mjax.kernels.grouped_tiles import HALVES, Tile
from mjax.kernels.mosaic_grouped import BLOCKS, _drain, _fill, _in_bands, _swizzled, depth_of

REGISTERS = 40, 232  # of a moving and of a multiplying thread
COLUMNS = plgpu.Layout.WGMMA.reduce(0)  # how a value for each column of a product is held
TILE = Tile(128, 256, 3)
ACTIVATED, SLOPED = 32, 64  # columns that are finished at a time, forward and backward


def multiply_and_activate(
    x: jax.Array, w: jax.Array, bias: jax.Array, name: str, tile: Tile = TILE
) -> tuple[jax.Array, jax.Array]:
    """u = x [M, K] @ w [K, N] + bias fp32 [N] -> act(u), act'(u), [M, N] in the dtype of x."""
    (m, depth), n, half = x.shape, w.shape[1], tile.half
    out = jax.ShapeDtypeStruct((m, n), x.dtype)
    scratch = dict(
        bias_ring=plgpu.SMEM((2, tile.columns), jnp.float32),
        bias_ready=plgpu.Barrier(num_barriers=2),
        bias_free=plgpu.Barrier(num_arrivals=HALVES, num_barriers=2),
        stage=_tiled(x.dtype, HALVES, tile.columns // ACTIVATED, half, ACTIVATED),
        parts=_tiled(x.dtype, HALVES, 2, half, ACTIVATED),
    )
    operands, outs = dict(x=x, w=w, bias=bias), dict(out=out, slope=out)
    job = SimpleNamespace(
        tile=tile,
        sizes=(m, n, depth),
        turned=False,
        width=ACTIVATED,
        steps_of_part=1,
        before=_wait_for_bias,
        finish=partial(_activate, name),
    )
    return _launch(job, operands, outs, scratch)


def multiply_by_slope(
    g: jax.Array, w: jax.Array, slope: jax.Array, tile: Tile = TILE
) -> tuple[jax.Array, jax.Array]:
    """g [M, K], w [N, K], slope [M, N] -> (g @ w.T * slope in g's dtype, its sums fp32 [N])."""
    (m, depth), n, half = g.shape, w.shape[0], tile.half
    sums = jax.ShapeDtypeStruct((-(-m // tile.lines) * HALVES, n), jnp.float32)
    scratch = dict(
        stage=_tiled(g.dtype, HALVES, tile.columns // SLOPED, half, SLOPED),
        parts=_tiled(g.dtype, HALVES, half, SLOPED),
        part_ready=plgpu.Barrier(num_barriers=HALVES),
        sum_stage=plgpu.SMEM((HALVES, tile.columns), jnp.float32),
    )
    job = SimpleNamespace(
        tile=tile,
        sizes=(m, n, depth),
        turned=True,
        width=SLOPED,
        steps_of_part=2,
        before=_ask_for_slope,
        finish=_times_slope,
    )
    outs = dict(out=jax.ShapeDtypeStruct((m, n), g.dtype), sums=sums)
    du, sums = _launch(job, dict(x=g, w=w, slope=slope), outs, scratch)
    return du, sums.sum(0)


def _tiled(dtype, *shape):
    """Shared memory of tiles whose lines are `shape[-1]` long, swizzled."""
    width = shape[-1]
    swizzle = plgpu.SwizzleTransform(width * jnp.dtype(dtype).itemsize)
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, width)), swizzle))


def _launch(job, operands, outs, scratch):
    """Walk over all tiles of the product; each is finished while the next is multiplied."""
    tile, (m, n, depth) = job.tile, job.sizes
    lines, across, dtype = -(-m // tile.lines), tile.across(n), operands["x"].dtype
    job.depth = depth_of(dtype)
    job.steps = depth // job.depth
    total, names = lines * across, [*operands, *outs]
    width = min(BLOCKS, total)
    right = (tile.columns, job.depth) if job.turned else (job.depth, tile.columns)

    def ring(*shape):
        return plgpu.SMEM((tile.slots, *shape), dtype, transforms=_swizzled(dtype))

    scratch = scratch | dict(
        left=ring(HALVES, tile.half, job.depth),
        right=ring(*right),
        ready=plgpu.Barrier(num_arrivals=HALVES + 1, num_barriers=tile.slots),
        free=plgpu.Barrier(num_arrivals=HALVES, num_barriers=tile.slots),
    )

    def body(*gmem, **smem):
        refs = SimpleNamespace(**dict(zip(names, gmem, strict=True)), **smem)
        half, block = lax.axis_index("half"), lax.axis_index("block")
        rounds = lax.div(total - block + width - 1, jnp.int32(width))

        def place(i):
            line, column = _in_bands(i * width + block, lines, across, tile.band)
            return SimpleNamespace(line=line * tile.lines, column=column * tile.columns, i=i)

        def walk(one: Callable) -> jax.Array:
            return lax.fori_loop(0, rounds, one, jnp.int32(0))

        @pl.when(half == HALVES)
        def _():
            plgpu.set_max_registers(REGISTERS[0], action="decrease")
            _drain(refs, walk(lambda i, count: _move(job, refs, place(i), count)))
            if hasattr(refs, "bias"):
                _drain_bias(refs, rounds)

        @pl.when(half < HALVES)
        def _():
            plgpu.set_max_registers(REGISTERS[1], action="increase")
            walk(lambda i, count: _multiply(job, refs, half, place, i, count))
            last = place(rounds - 1)
            pl.loop(0, _pieces(job))(lambda piece: job.finish(job, refs, half, last, piece))
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


def _pieces(job):
    """The pieces of work that finish half a tile."""
    return job.tile.columns // job.width * job.steps_of_part


def _move(job, refs, at, count):
    """Fill the ring with a tile's operands."""
    tile, columns = job.tile, pl.ds(at.column, job.tile.columns)
    if hasattr(refs, "bias"):
        slot = lax.rem(at.i, 2)
        pl.when(at.i >= 2)(lambda: plgpu.barrier_wait(refs.bias_free.at[slot]))
        into = refs.bias_ring.at[slot], refs.bias_ready.at[slot]
        plgpu.copy_gmem_to_smem(refs.bias.at[columns], *into)

    @pl.loop(0, job.steps)
    def _step(step):
        part = pl.ds(step * job.depth, job.depth)
        lines = [pl.ds(at.line + half * tile.half, tile.half) for half in range(HALVES)]
        right = (columns, part) if job.turned else (part, columns)
        _fill(tile, refs, count + step, [refs.x.at[line, part] for line in lines], refs.w.at[right])

    return count + job.steps


def _drain_bias(refs, rounds):
    """Wait until the last biases are read."""

    @pl.loop(jnp.maximum(rounds - 2, 0), rounds)
    def _slot(i):
        plgpu.barrier_wait(refs.bias_free.at[lax.rem(i, 2)])


def _multiply(job, refs, half, place, i, count):
    """Multiply a tile and leave its sums in the stage; meanwhile finish the tile before."""
    tile, pieces, before = job.tile, _pieces(job), place(i - 1)

    def release(step):
        plgpu.barrier_arrive(refs.free.at[lax.rem(count + step, tile.slots)])

    def run(acc):
        @pl.loop(0, job.steps)
        def _step(step):
            slot = lax.rem(count + step, tile.slots)
            plgpu.barrier_wait(refs.ready.at[slot])
            right = refs.right.at[slot]
            right = right.transpose((1, 0)) if job.turned else right
            plgpu.wgmma(acc, refs.left.at[slot, half], right)
            plgpu.wgmma_wait(1)  # the one before is done
            pl.when(step > 0)(lambda: release(step - 1))
            has_piece = (step > 0) & (step <= pieces) & (i > 0)
            pl.when(has_piece)(lambda: job.finish(job, refs, half, before, step - 1))

        return acc[...]

    acc = pl.run_scoped(run, plgpu.ACC((tile.half, tile.columns), jnp.float32))
    release(job.steps - 1)
    if job.steps - 1 < pieces:

        @pl.when(i > 0)
        def _rest():
            rest = job.steps - 1, pieces
            pl.loop(*rest)(lambda piece: job.finish(job, refs, half, before, piece))

    add = job.before(job, refs, half, place(i))
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for part, start in enumerate(range(0, tile.columns, job.width)):
        values = add(acc[:, start : start + job.width], start)
        refs.stage[half, part] = values.astype(refs.stage.dtype)
    plgpu.commit_smem()
    if hasattr(refs, "bias"):
        plgpu.barrier_arrive(refs.bias_free.at[lax.rem(i, 2)])
    return count + job.steps


def _place(job, half, at, part):
    """Where a part of half a tile is in the output."""
    lines = pl.ds(at.line + half * job.tile.half, job.tile.half)
    return lines, pl.ds(at.column + part * job.width, job.width)


def _read(ref):
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA).astype(jnp.float32)


# ---- forward -----------------------------------------------------------------------------------


def _wait_for_bias(job, refs, half, at):
    """A function that adds the bias to columns of a sum."""
    slot = lax.rem(at.i, 2)
    plgpu.barrier_wait(refs.bias_ready.at[slot])

    def add(values, start):
        line = refs.bias_ring.at[slot, pl.ds(start, job.width)]
        bias = plgpu.load(line, layout=COLUMNS)
        return values + lax.broadcast_in_dim(bias, values.shape, [1])

    return add


def _activate(name, job, refs, half, at, part):
    """Write act(u) and act'(u) of a part."""
    of_slope, of_out = refs.stage.at[half, part], refs.parts.at[half, lax.rem(part, 2)]
    u, place = _read(of_slope), _place(job, half, at, part)
    share, slope = _share(name, u)
    out, slope = u * share, share + u * slope
    plgpu.wait_smem_to_gmem(1, wait_read_only=True)
    of_out[...] = out.astype(of_out.dtype)
    of_slope[...] = slope.astype(of_slope.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(of_out, refs.out.at[place], commit_group=False)
    plgpu.copy_smem_to_gmem(of_slope, refs.slope.at[place])


# ---- backward ----------------------------------------------------------------------------------


def _ask_for_slope(job, refs, half, at):
    """Begin to copy the slopes of the first part."""
    _copy_slope(job, refs, half, at, 0)
    return lambda values, _: values


def _copy_slope(job, refs, half, at, part):
    source = refs.slope.at[_place(job, half, at, part)]
    plgpu.copy_gmem_to_smem(source, refs.parts.at[half], refs.part_ready.at[half])


def _times_slope(job, refs, half, at, piece):
    """Pieces of a part: write the product of a sum and its slopes; sum that over lines."""
    part, parts = lax.div(piece, 2), job.tile.columns // job.width
    stage = refs.stage.at[half, part]

    @pl.when(lax.rem(piece, 2) == 0)
    def _():
        plgpu.barrier_wait(refs.part_ready.at[half])
        product = _read(stage) * _read(refs.parts.at[half])
        stage[...] = product.astype(stage.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(stage, refs.out.at[_place(job, half, at, part)])
        pl.when(part + 1 < parts)(lambda: _copy_slope(job, refs, half, at, part + 1))

    @pl.when(lax.rem(piece, 2) == 1)
    def _():
        turned = plgpu.load(stage.transpose((1, 0)), layout=plgpu.Layout.WGMMA_TRANSPOSED)
        columns = pl.ds(part * job.width, job.width)
        refs.sum_stage[half, columns] = turned.astype(jnp.float32).sum(axis=1)

        @pl.when(part == parts - 1)
        def _():
            plgpu.commit_smem()
            row = lax.div(at.line, job.tile.lines) * HALVES + half
            columns = pl.ds(at.column, job.tile.columns)
            plgpu.copy_smem_to_gmem(refs.sum_stage.at[half], refs.sums.at[row, columns])


# ---- activation functions ----------------------------------------------------------------------


def _share(name, x):
    """s of act(x) = x * s(x), and its derivative."""
    if name == "gelu":
        return _normal_distribution(x)
    if name == "silu":
        s = _sigmoid(-1.4426950408889634 * x)
        return s, s * (1 - s)
    if name == "quick_gelu":
        s = _sigmoid(-1.702 * 1.4426950408889634 * x)
        return s, 1.702 * s * (1 - s)
    outer, cube = 1.5957691216057308, 0.044715
    s = _sigmoid(x * (-outer * 1.4426950408889634 + (-outer * 1.4426950408889634 * cube) * (x * x)))
    return s, (outer + (3 * outer * cube) * (x * x)) * (s * (1 - s))


def _sigmoid(minus):
    return jnp.exp2(-jnp.log2(1.0 + jnp.exp2(minus)))


# Of P(-t) / density, 0 <= t <= 5, to 1.4e-4 of itself: a minimax fit of our own.
TAIL = (
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


def _normal_distribution(x):
    density = jnp.exp2(-0.7213475204 * (x * x) - 1.3257480648)
    t = jnp.minimum(jnp.abs(x), 5.0)
    p = TAIL[-1] * t + TAIL[-2]
    for c in TAIL[-3::-1]:
        p = p * t + c
    tail = p * density
    return jnp.where(x < 0, tail, 1.0 - tail), density
