"""`python -m mjax.bench collective`: bandwidth of the collectives over all devices.

GB/s is bus bandwidth as nccl-tests defines it: bytes of the whole array over time, times the share
that a ring must send, so that it compares with the speed of one device's links for any n. The share
is (n-1)/n for all-gather (of the result), reduce-scatter (of the input) and all-to-all (of each
device's array), 2(n-1)/n for all-reduce, 1 for permute.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mjax.bench.report import add_arguments, launch_ms, report, rounded
from mjax.errors import CommandParser, UserError, at_least, read_numbers
from mjax.sharding.mesh import on_shards

_SHARDED, _WHOLE = P("x"), P()


def collectives(n: int) -> dict[str, tuple[Callable, P, P, float]]:
    """Name -> (operation on one device, input and output partition, share of the bytes sent).

    All take and give the array whose bytes count on one side: sharded or whole on each device.
    """
    ring = [(i, (i + 1) % n) for i in range(n)]
    share = (n - 1) / n
    tiled = {"axis_name": "x", "tiled": True}
    all_gather = partial(lax.all_gather, **tiled)
    reduce_scatter = partial(lax.psum_scatter, **tiled)
    all_reduce = partial(lax.psum, axis_name="x")
    permute = partial(lax.ppermute, axis_name="x", perm=ring)
    all_to_all = partial(lax.all_to_all, split_axis=0, concat_axis=0, **tiled)
    return {
        "all_gather": (all_gather, _SHARDED, _WHOLE, share),
        "reduce_scatter": (reduce_scatter, _WHOLE, _SHARDED, share),
        "all_reduce": (all_reduce, _WHOLE, _WHOLE, 2 * share),
        "permute": (permute, _WHOLE, _WHOLE, 1.0),
        "all_to_all": (all_to_all, _WHOLE, _WHOLE, share),
    }


def main(argv: list[str]) -> int:
    parser = CommandParser("bench collective", description=__doc__)
    parser.add_argument("--sizes", default="1,16,128,1024", help="MB (1e6 bytes), with commas")
    parser.add_argument("--samples", type=at_least(1), default=20, help="the median counts")
    add_arguments(parser)
    args = parser.parse_args(argv)
    sizes = read_numbers("--sizes", args.sizes, float)
    if jax.device_count() < 2:
        raise UserError("bench collective: there is one device; it needs two or more")
    return report(args, measure_collectives(jax.devices(), sizes, args.samples))


def measure_collectives(
    devices: Sequence[jax.Device], sizes: list[float], samples: int
) -> Iterator[dict]:
    """A record for each collective and size in MB, bf16."""
    n = len(devices)
    mesh = Mesh(devices, ("x",), axis_types=(AxisType.Auto,))
    for name, (operation, before, after, share) in collectives(n).items():
        for size in sizes:
            wanted = int(size * 1e6 / 2)
            count = -(-wanted // n**2) * n**2  # every shard divides again
            # out_specs P() of values that differ: each device keeps its own
            run = jax.jit(on_shards(operation, mesh, before, after))
            normal = partial(jax.random.normal, shape=(count,), dtype=jnp.bfloat16)
            draw_sharded = jax.jit(normal, out_shardings=NamedSharding(mesh, before))
            x = draw_sharded(jax.random.key(0))
            ms = launch_ms(partial(run, x), samples)
            yield {
                "bench": "collective",
                "case": {"collective": name, "mb": size, "devices": n},
                "ms": rounded(ms),
                "gb_per_s": rounded(2 * count * share / ms / 1e6),
            }
