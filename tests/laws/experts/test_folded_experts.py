"""Laws of whole experts over ep and tp (`mesh.expert_tp=1`): every mesh, one answer."""

from dataclasses import replace

import pytest
from jax.sharding import PartitionSpec as P

from mjax.models.moe import exchange
from mjax.prove import Cell, compare, holds
from mjax.sharding.collectives import Parallel
from mjax.sharding.rules import stored_partition, tp_cuts, weight_partition
from mjax.sharding.spec import ParamSpec
from tests.marks import exhaustive, quick, slow

CASES = [
    ({"ep": 2, "tp": 2}, 2, 2, 1),
    ({"pp": 2, "tp": 4}, 1, 3, 4),
    ({"dp": 2, "cp": 2, "tp": 2}, 3, 2, 4),
]


@slow
@pytest.mark.parametrize("mesh,zero,micro_batches,layers", quick(CASES))
def test_every_mesh_equals_one_device(mesh, zero, micro_batches, layers):
    cell = Cell(mesh, zero, micro_batches)
    record = compare("folded experts", cell, f"model.num_hidden_layers={layers}", steps=2)
    assert holds(record), record


ALL_CASES = [
    ({"ep": 2, "tp": 2}, 3, 1, 1.5, "train.experts=xla"),
    ({"cp": 2, "tp": 4}, 1, 2, 0.6, "train.experts=loop"),  # most exchanges overflow
    ({"pp": 2, "ep": 2, "tp": 2}, 1, 2, 1.5, "train.experts=batched"),
]


@exhaustive
@pytest.mark.parametrize("mesh,zero,micro_batches,room,kernel", ALL_CASES)
def test_with_all_that_experts_may_have(mesh, zero, micro_batches, room, kernel, monkeypatch):
    monkeypatch.setattr(exchange, "ROOM", room)
    cell = Cell(mesh, zero, micro_batches)
    record = compare("folded, with all", cell, kernel, "train.remat=full", steps=2)
    assert holds(record), record


FOLDED = Parallel(dp=2, ep=2, tp=4, folds_experts=True)
UP = ParamSpec((3, 16, 64, 2, 96), ("layers", "experts", "embed", "pair", "mlp"), "matrix")
DOWN = ParamSpec((3, 16, 96, 64), ("layers", "experts", "mlp", "embed"), "matrix")
WHOLE = replace(DOWN, whole=True)
DENSE = ParamSpec((3, 64, 96), ("layers", "embed", "mlp"), "matrix")


@pytest.mark.parametrize(
    "spec,read,stored",
    [
        (UP, P(None, ("ep", "tp"), None, None, None), P(None, ("ep", "tp", "dp"), *3 * [None])),
        (DOWN, P(None, ("ep", "tp"), None, None), P(None, ("ep", "tp", "dp"), None, None)),
        (DENSE, P(None, None, "tp"), P(None, ("dp", "ep"), "tp")),
        (
            replace(DOWN, whole=True),
            P(None, "ep", None, None),
            P(None, ("ep", "dp", "tp"), *2 * [None]),
        ),
    ],
    ids=["up", "down", "dense", "of a tower with tp=1"],
)
def test_tp_divides_experts_and_cuts_the_rest(spec, read, stored):
    assert weight_partition(spec, FOLDED) == read
    assert stored_partition(spec, FOLDED, None) == stored
    assert tp_cuts(spec, spec.axes, FOLDED) == (spec is DENSE)


def test_experts_are_cut_where_tp_holds_all_tokens():
    """As in generation, whose steps have one token a row."""
    decoding = replace(FOLDED, cuts_sequence=False)
    assert FOLDED.expert_axes == (("ep", "tp"), ())
    assert decoding.expert_axes == (("ep",), ("tp",))
    assert weight_partition(DOWN, decoding) == P(None, "ep", "tp", None)
