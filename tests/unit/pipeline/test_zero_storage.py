"""ZeRO stores every parameter of some size in shards, whatever its shape, and gives it back."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mjax.pipeline.storage import Storage, even_sharding, to_canonical, to_storage
from mjax.sharding.collectives import AXES, Parallel, mesh_axes
from mjax.sharding.rules import PADDED_FROM, padding, partition, stored_partition
from mjax.sharding.spec import ParamSpec

SHAPES = [(35, 50), (33, 1001), (7, 4096), (64, 48)]
GROUPS = [dict(dp=8), dict(dp=3), dict(dp=2, cp=3), dict(dp=5, ep=2), dict(dp=3, tp=2)]


def stored_as(spec, parallel, group=None):
    weight = partition(spec.axes, parallel, spec.shape)
    stored = stored_partition(spec, parallel, group)
    return weight, stored, padding(spec, weight, stored, parallel)


def held(spec, stored, found, parallel):
    """Elements on a device."""
    shape = list(spec.shape)
    if found is not None:
        shape[found.dim] = found.blocks * found.padded
    return math.prod(shape) // parallel.size(*mesh_axes(stored))


@pytest.mark.parametrize("shape,sizes", list(itertools.product(SHAPES, GROUPS)))
def test_a_device_holds_little_more_than_its_part(shape, sizes):
    parallel = Parallel(**sizes)
    axes = ("mlp" if shape[0] % parallel.tp == 0 else "embed", "embed")
    spec = ParamSpec((4, *shape), ("layers", *axes), "matrix")
    weight, stored, found = stored_as(spec, parallel)
    cut = parallel.size(*mesh_axes(stored))
    assert cut == parallel.size(*mesh_axes(weight)) * parallel.size("dp", "ep", "cp")
    least_waste = 1 + cut / max(n // parallel.tp for n in shape)
    assert held(spec, stored, found, parallel) <= spec.size / cut * least_waste
    assert stored[0] is None, "layers are taken one by one"


def test_what_divides_is_not_padded_and_what_is_small_stays_whole():
    parallel = Parallel(dp=4)
    even = ParamSpec((35, 48), ("embed", "mlp"), "matrix")
    assert stored_as(even, parallel)[1:] == (P(None, ("dp",)), None)
    for size, cut in ((PADDED_FROM - 1, False), (PADDED_FROM + 1, True)):
        _, stored, found = stored_as(ParamSpec((size,), ("embed",), "norm"), parallel)
        assert (mesh_axes(stored) == ("dp",), found is not None) == (cut, cut)
    assert stored_as(ParamSpec((35, 50), ("embed", "mlp"), "matrix"), parallel, group=2)[2] is None


@pytest.mark.parametrize("axes, dim", [(("dp",), 0), (("dp", "cp"), 1), (("ep", "cp"), 0)])
def test_all_to_alls_gather_and_sum_as_the_others_do(axes, dim):
    """A gather's shards lie where `gather` has them. Gradients that travel in bf16 are summed in
    fp32, equal to a reduce-scatter in fp32, over several axes in its order of shards too."""
    sizes = dict(dp=2, ep=2, cp=2)
    parallel = Parallel(**sizes)
    devices = np.array(jax.devices()[:8]).reshape(1, 2, 2, 2, 1)
    x = jax.random.normal(jax.random.key(0), (2, 2, 2, 8, 12)).astype(jnp.bfloat16)

    def both(x):
        x = x[0, 0, 0]
        exact = parallel.reduce_scatter(x.astype(jnp.float32), axes, dim)
        made = parallel.reduce_scatter_low(x, axes, dim, jnp.dtype(jnp.float32))
        whole, spread = (
            parallel.all_gather(x, axes, dim),
            parallel.all_gather_by_copies(x, axes, dim),
        )
        return [a[None, None, None] for a in (made, exact, whole, spread)]

    spec = P("dp", "ep", "cp")
    mapped = jax.shard_map(
        both, mesh=Mesh(devices, AXES), in_specs=spec, out_specs=spec, check_vma=False
    )
    made, exact, whole, spread = jax.jit(mapped)(x)
    np.testing.assert_array_equal(spread, whole)
    assert made.dtype == jnp.float32 and made.shape == exact.shape
    np.testing.assert_allclose(made, exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("sizes", [dict(dp=8), dict(dp=4, tp=2)])
def test_storing_is_a_round_trip_with_zero_padding(sizes):
    parallel = Parallel(**sizes)
    spec = ParamSpec((70, 35), ("mlp", "embed"), "matrix")
    weight, stored, found = stored_as(spec, parallel)
    storage = Storage(None, {"['w']": found})
    tree = {"mu": {"w": 1 + jnp.arange(70.0 * 35).reshape(70, 35)}, "count": jnp.int32(3)}
    kept = to_storage(storage, tree)
    assert kept["mu"]["w"].size == held(spec, stored, found, parallel) * 8
    assert (kept["mu"]["w"] != 0).sum() == 70 * 35 < kept["mu"]["w"].size
    jax.tree.map(np.testing.assert_array_equal, to_canonical(storage, kept), tree)


@pytest.mark.parametrize("shape,parts", [((35, 48), 6), ((12, 9), 6), ((5, 7), 1), ((10, 7), 1)])
def test_canonical_arrays_are_cut_as_far_as_they_divide(shape, parts):
    mesh = Mesh(np.array(jax.devices()[:6]).reshape(6, 1), ("dp", "tp"))
    made = even_sharding(NamedSharding(mesh, P(None, "dp")), shape)
    assert math.prod(shape) // math.prod(made.shard_shape(shape)) == parts
