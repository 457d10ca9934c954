"""Arrays that are copied to other devices: the same numbers, each where it is read."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mjax.models.attention.zigzag import zigzag
from mjax.post.base.device_copies import columns_of_copy, copied_field, copied_shards

ROWS, COLUMNS = 12, 16


def mesh_of(devices, rows: int) -> Mesh:
    return Mesh(np.array(devices).reshape(rows, -1), ("dp", "cp"))


@pytest.mark.parametrize("given", [(1, 1), (4, 4), (4, 2), (3, 3), (2, 1)], ids=str)
@pytest.mark.parametrize("wanted", [(4, 4), (4, 2), (4, 1), (3, 3)], ids=str)
def test_a_copy_is_the_field_on_devices_of_any_number(given, wanted):
    """(devices, parts of the rows) of both; the columns are cut where a part has several."""
    devices = jax.devices()
    own, theirs = (
        mesh_of(devices[4 : 4 + given[0]], given[1]),
        mesh_of(devices[: wanted[0]], wanted[1]),
    )
    field = np.arange(ROWS * COLUMNS * 2.0).reshape(ROWS, COLUMNS, 2)
    placed = jax.device_put(field, NamedSharding(own, P("dp")))
    target = NamedSharding(theirs, P("dp", "cp"))
    order = np.random.default_rng(0).permutation(COLUMNS)
    for columns, expected in ((None, field), (order, field[:, order])):
        found = copied_field(placed, columns, target, own)
        assert found.sharding == target
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("given,wanted", [(1, 2), (2, 1), (2, 4), (4, 4)])
def test_columns_go_where_context_parallelism_wants_them(given, wanted):
    def on(cp: int) -> np.ndarray:
        return zigzag(COLUMNS, cp) if cp > 1 else np.arange(COLUMNS)

    columns = columns_of_copy(COLUMNS, given, wanted)
    found = on(given) if columns is None else on(given)[columns]
    np.testing.assert_array_equal(found, on(wanted))


def pairs_of(devices) -> Mesh:
    return Mesh(np.array(devices).reshape(-1, 2), ("dp", "tp"))


@pytest.mark.parametrize("cut", [P("tp"), P(None, "tp"), P()], ids=str)
@pytest.mark.parametrize("wanted", [2, 4])
def test_a_copy_has_the_shards_of_the_array_whatever_its_replicas(cut, wanted):
    values, devices = np.arange(24.0).reshape(4, 6), jax.devices()
    array = jax.device_put(values, NamedSharding(pairs_of(devices[:4]), cut))
    target = NamedSharding(pairs_of(devices[4 : 4 + wanted]), cut)
    found = copied_shards(array, target)
    assert found.sharding == target
    np.testing.assert_array_equal(found, values)
