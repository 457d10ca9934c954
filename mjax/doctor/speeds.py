"""Speeds of devices, measured in seconds: a matmul on each of them, an all-reduce between them.

Invariant: all devices run one program at the same time, as in training, and each is timed by
itself. So a GPU that is slow only under load, or in warm company, shows.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mjax.sharding.mesh import on_shards

# (side of the matrices, products in a row), and (MB of an all-reduce, all-reduces in a row)
MATMUL_SIZE = {"gpu": (8192, 64), "cpu": (256, 4)}
ALL_REDUCE_SIZE = {"gpu": (256, 10), "cpu": (1, 2)}
REPEATS = 4  # the first compiles; the fastest counts


def matmul_tflops(devices: Sequence[jax.Device]) -> list[float]:
    """Measure TFLOP/s of a bf16 matmul on each of this process's devices."""
    side, count = MATMUL_SIZE[_platform(devices)]
    mesh = _mesh(devices)

    def products(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.fori_loop(0, count, lambda _, y: y @ w, x)

    shape = (side * len(devices), side)
    x = _normal(mesh, P("all"), shape)
    w = _normal(mesh, P(), (side, side))
    w /= side**0.5  # products keep the size of x
    inputs = P("all"), P()
    run = jax.jit(on_shards(products, mesh, inputs, P("all")))
    times = [_seconds_by_device(partial(run, x, w)) for _ in range(REPEATS)]
    work = 2 * side**3 * count / 1e12
    return [three_digits(work / seconds) for seconds in np.min(times, axis=0)]


def all_reduce_gb_per_s(devices: Sequence[jax.Device]) -> float | None:
    """Measure bus bandwidth of an all-reduce, GB/s as nccl-tests count it; None for one device.

    Every process that holds one of the devices must call it.
    """
    n = len(devices)
    if n == 1:
        return None
    megabytes, count = ALL_REDUCE_SIZE[_platform(devices)]
    mesh = _mesh(devices)

    def sums(x: jax.Array) -> jax.Array:
        return lax.fori_loop(0, count, lambda _, y: lax.psum(y, "all") / n, x)

    x = _normal(mesh, P("all"), (n, megabytes * 10**6 // 2))
    run = jax.jit(on_shards(sums, mesh, P("all"), P("all")))
    seconds = min(max(_seconds_by_device(partial(run, x))) for _ in range(REPEATS))
    gigabytes = megabytes * count / 1e3
    return three_digits(2 * (n - 1) / n * gigabytes / seconds)


def _mesh(devices: Sequence[jax.Device]) -> Mesh:
    return Mesh(np.array(devices), ("all",), axis_types=(AxisType.Auto,))


def _platform(devices: Sequence[jax.Device]) -> str:
    return "cpu" if devices[0].platform == "cpu" else "gpu"


def _normal(mesh: Mesh, partition: P, shape: tuple[int, int]) -> jax.Array:
    """Random numbers: the power that a matmul draws depends on its bits."""
    draw = partial(jax.random.normal, shape=shape, dtype=jnp.bfloat16)
    return jax.jit(draw, out_shardings=NamedSharding(mesh, partition))(jax.random.key(0))


def _seconds_by_device(run: Callable[[], jax.Array]) -> list[float]:
    """Seconds until each of this process's devices has its part of a result."""
    began = time.perf_counter()
    shards = run().addressable_shards

    def seconds_of(shard) -> float:
        shard.data.block_until_ready()
        return time.perf_counter() - began

    with ThreadPoolExecutor(len(shards)) as pool:
        return list(pool.map(seconds_of, shards))


def three_digits(x: float) -> float:
    return float(f"{x:.3g}")
