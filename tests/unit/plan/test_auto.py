"""`mesh: auto` proposes what fits, in order of simplicity; Megatron's sizes map onto ours."""

import pytest

from mjax.config import load
from mjax.errors import UserError
from mjax.models import definition_of
from mjax.plan.auto import bytes_per_device, from_megatron, propose_mesh

LLAMA = "configs/models/llama3_8b.yaml"
SPECS = definition_of(load(LLAMA, []).model).specs


def proposal(memory, *overrides, devices=8):
    cfg = load(LLAMA, ["mesh=auto", "train.global_batch_size=64", *overrides])
    assert cfg.mesh.auto
    return propose_mesh(cfg, devices, memory * 1e9, SPECS)


def test_the_simplest_mesh_that_fits_is_chosen_and_says_why():
    mesh, why = proposal(150)
    assert (mesh.zero, mesh.tp, mesh.cp, mesh.pp) == (1, 1, 1, 1) and "zero=1" in why
    mesh, _ = proposal(90)
    assert mesh.zero == 3 and mesh.tp == 1
    mesh, _ = proposal(40)
    assert mesh.tp > 1


def test_a_smaller_device_never_gets_a_larger_estimate():
    needs = []
    for memory in (150, 90, 60, 40):
        mesh, _ = proposal(memory)
        cfg = load(LLAMA, ["train.global_batch_size=64"])
        needs.append(sum(bytes_per_device(cfg, mesh, 8, SPECS).values()))
    assert needs == sorted(needs, reverse=True)


def test_nothing_fits_is_one_line():
    with pytest.raises(UserError, match="nothing fits 1 devices"):
        proposal(24, devices=1)


@pytest.mark.parametrize(
    "sizes,ours",
    [
        ({"world": 64, "tp": 2, "pp": 4, "ep": 4}, {"dp": 2, "tp": 2, "pp": 4, "cp": 1, "ep": 4}),
        ({"world": 8, "cp": 2}, {"dp": 4, "tp": 1, "pp": 1, "cp": 2, "ep": 1}),
    ],
)
def test_megatron_sizes(sizes, ours):
    assert from_megatron(**sizes) == ours


@pytest.mark.parametrize(
    "sizes",
    [{"world": 8, "tp": 3}, {"world": 8, "tp": 4, "ep": 4}, {"world": 8, "ep": 2, "etp": 4}],
)
def test_megatron_sizes_without_counterpart(sizes):
    with pytest.raises(UserError):
        from_megatron(**sizes)
