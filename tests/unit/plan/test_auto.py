"""`mesh: auto` proposes what fits, in order of simplicity; Megatron's sizes map onto ours."""

import pytest

from mjax.config import load
from mjax.config.rules.mesh_rules import folds_experts
from mjax.errors import UserError
from mjax.models import definition_of
from mjax.plan.auto import bytes_per_device, choose_expert_tp, from_megatron, propose_mesh

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


@pytest.mark.parametrize(
    "model,mesh,expert_tp,words",
    [
        ("qwen3_30b_a3b", ["tp=4"], 1, "cuts experts of 768 to 192, too narrow"),
        ("deepseek_v2_lite", ["tp=2", "ep=4"], 1, "cuts experts of 1408 to 704, too narrow"),
        ("mixtral_8x7b", ["tp=4"], 4, "cuts experts of 14336 to 3584, wide enough"),
        ("gpt_oss_20b", ["tp=8", "ep=8"], 8, "to 360; ep x tp does not divide 32 experts"),
        ("qwen3_30b_a3b", ["ep=4"], "auto", None),
        ("qwen3_30b_a3b", ["tp=4", "expert_tp=4"], 4, None),
        ("llama3_8b", ["tp=4"], "auto", None),
    ],
)
def test_narrow_experts_are_not_cut(model, mesh, expert_tp, words):
    cfg = load(f"configs/models/{model}.yaml", [f"mesh.{size}" for size in mesh])
    resolved, why = choose_expert_tp(cfg)
    assert resolved.mesh.expert_tp == expert_tp
    assert why is None if words is None else words in why
    assert folds_experts(cfg.model, cfg.mesh) == (expert_tp == 1)


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
        ({"world": 8, "tp": 2, "etp": 1}, {"dp": 4, "tp": 2, "pp": 1, "cp": 1, "ep": 1}),
        (
            {"world": 32, "tp": 2, "ep": 8, "etp": 1},
            {"dp": 4, "tp": 2, "pp": 1, "cp": 1, "ep": 4, "expert_tp": 1},
        ),
    ],
)
def test_megatron_sizes(sizes, ours):
    assert from_megatron(**sizes) == ours


@pytest.mark.parametrize(
    "sizes",
    [
        {"world": 8, "tp": 3},
        {"world": 8, "tp": 4, "ep": 4},
        {"world": 8, "ep": 2, "etp": 4},
        {"world": 16, "tp": 4, "ep": 4, "etp": 2},
        {"world": 16, "tp": 4, "ep": 2, "etp": 1},
    ],
)
def test_megatron_sizes_without_counterpart(sizes):
    with pytest.raises(UserError):
        from_megatron(**sizes)
