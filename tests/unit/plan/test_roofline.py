"""The estimate of a step's time against steps that were measured: benchmarks/measurements.jsonl."""

import functools
import json
import re
import shlex
from pathlib import Path

import pytest

from mjax.config import Config, load
from mjax.config.rules.mesh_rules import mesh_sizes
from mjax.config.schema.model import ModelConfig
from mjax.models import definition_of
from mjax.models.base.branch import PASSES_OF_HEADS
from mjax.models.flops import flops_by_part, flops_per_token
from mjax.plan import roofline
from mjax.plan.chips import named_chips
from mjax.plan.execution import decide_execution

ROOT = Path(__file__).parents[3]
CHIPS = named_chips()
NOTHING_ELSE = ["optimizer.offload=false"]


def measured_rows() -> dict[str, tuple[Config, int, float]]:
    """(config, GPUs, measured seconds of a step) of the newest row of each training workload.

    The policies of memory are those that `auto` took there (docs/performance.md).
    """
    found = {}
    for line in (ROOT / "benchmarks" / "measurements.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row["bench"] != "train" or "page" in row or not row["gpus"] or "S2" in row["workload"]:
            continue
        words = shlex.split(row["command"])[4:]
        path = next(ROOT / word for word in words if word.endswith(".yaml"))
        keys = [word for word in words if "=" in word and not word.startswith("--")]
        remat = re.search(r"`([a-z0-9*,]+)`", row["workload"])
        if not any(key.startswith("train.remat") for key in keys):
            keys.append(f"train.remat={remat[1] if remat else 'none'}")
        on_host = "Llama-3-8B, whole" in row["workload"]
        cfg = load(path, [*keys, f"optimizer.offload={str(on_host).lower()}"])
        tokens = cfg.train.global_batch_size * cfg.data.seq_length / row["gpus"]
        if "ms" in row:
            seconds = row["ms"] / 1e3
        elif "tokens_per_second_per_gpu" in row:
            seconds = tokens / row["tokens_per_second_per_gpu"]
        else:
            flops = flops_per_token(cfg.model, cfg.data.seq_length)
            seconds = tokens * flops / row["tflops_per_gpu"] / 1e12
        found[f"{row['workload']}, {row['gpus']} GPUs"] = cfg, row["gpus"], seconds
    return found


def estimate(cfg: Config, devices: int, chip: str = "h200") -> roofline.Span:
    return roofline.total(parts_of(cfg, devices, chip))


def parts_of(cfg: Config, devices: int, chip: str = "h200") -> list[roofline.Part]:
    sizes = mesh_sizes(cfg.mesh, devices)
    execution, specs = decide_execution(cfg, sizes), specs_of(cfg.model.model_dump_json())
    return roofline.step_parts(cfg, sizes, execution, specs, CHIPS[chip])


@functools.cache
def specs_of(model: str) -> dict:
    return definition_of(ModelConfig.model_validate_json(model)).specs


ROWS = measured_rows()
# Rows whose middle is farther off than 7 %, in percent, rounded up (docs/train/tuning.md).
# GPT-2 on several GPUs was measured when the activation function was a pass over memory.
FARTHER = {"s131072": 11, "tp4": 9, "32 a GPU, 2": 12, "32 a GPU, 4": 12}


@pytest.mark.parametrize("name", ROWS)
def test_the_middle_of_the_estimate_is_near_what_was_measured(name):
    cfg, devices, seconds = ROWS[name]
    band = next((b for word, b in FARTHER.items() if word in name), 7) / 100
    assert abs(estimate(cfg, devices).middle / seconds - 1) < band


def test_the_rows_are_those_of_the_table():
    assert len(ROWS) >= 18
    assert {int(n[-6]) for n in ROWS} == {1, 2, 4}
    for goal in ("P3", "P4", "P5"):
        assert any(name.startswith(goal) and name.endswith("1 GPUs") for name in ROWS)


def small(*overrides: str) -> Config:
    keys = ["train.micro_batch_size=1", "train.global_batch_size=64", "train.remat=none"]
    return load(ROOT / "configs/models/llama3_8b.yaml", [*keys, *NOTHING_ELSE, *overrides])


def test_parts_of_the_flops_add_up_to_all():
    for path in ("llama3_8b", "mixtral_8x7b", "gemma2_9b"):
        cfg = load(ROOT / f"configs/models/{path}.yaml", [])
        parts = flops_by_part(cfg.model, 4096)
        assert sum(parts.values()) == flops_per_token(cfg.model, 4096)
        assert (parts["experts"] > 0) == (path == "mixtral_8x7b")


def test_no_estimate_is_faster_than_the_chip_s_peak():
    """No share above one: a roofline must not promise what the data sheet excludes."""
    for key in ("mesh.tp=4", "mesh.zero=3", "mesh.pp=2"):
        cfg = small(key, "train.remat=dots")
        flops = flops_per_token(cfg.model, 8192) * 64 * 8192 / 8
        for chip in CHIPS.values():
            assert estimate(cfg, 8, chip.name).low > flops / (chip.bf16_tflops * 1e12)


def test_more_work_takes_longer():
    base = estimate(small(), 8).middle
    assert estimate(small("train.global_batch_size=128"), 8).middle > 1.9 * base
    assert estimate(small("train.remat=full"), 8).middle > 1.2 * base
    assert estimate(small("optimizer.offload=true"), 8).middle > base
    assert estimate(small("precision.fp8=delayed"), 8).middle < 0.8 * base
    assert estimate(small("train.unroll=1"), 8).middle > 1.03 * base
    assert (
        estimate(small(), 8, "b200").middle < 0.6 * base < base < estimate(small(), 8, "a100").low
    )


@pytest.mark.parametrize("width, share", [(1408, 0.75), (1400, 1.0)])
def test_experts_are_faster_in_8_bits_where_our_kernel_takes_their_sizes(width, share):
    """Others are rounded to 8 bits and multiplied in 16."""
    keys = [f"model.moe.moe_intermediate_size={width}", "precision.fp8=delayed"]
    path = ROOT / "configs/models/deepseek_v2_lite.yaml"
    times = []
    for key in ("false", "true"):
        cfg = load(path, [*keys, *NOTHING_ELSE, "train.remat=none", f"precision.fp8_experts={key}"])
        times.append({part.name: part.time.middle for part in parts_of(cfg, 1)}["experts"])
    assert times[1] <= share * times[0] and (times[1] == times[0]) == (share == 1)


@pytest.mark.parametrize("compute, width", [("bfloat16", 2), ("float32", 4)])
def test_one_of_four_exchanges_of_experts_is_of_bytes(compute, width):
    path, keys = ROOT / "configs/models/deepseek_v2_lite.yaml", ["mesh.ep=8", "train.remat=none"]
    times = []
    for key in ("false", "true"):
        more = f"precision.fp8_dispatch={key}", f"precision.compute={compute}"
        cfg = load(path, [*keys, *NOTHING_ELSE, *more])
        parts = {part.name: part.time.middle for part in parts_of(cfg, 8)}
        times.append(parts["tokens of experts"])
    assert times[1] / times[0] == pytest.approx((3 + 129 / 128 / width) / 4)


def test_a_pipeline_pays_for_its_bubble():
    few = estimate(small("mesh.pp=4", "train.remat=dots", "train.global_batch_size=8"), 8)
    many = estimate(small("mesh.pp=4", "train.remat=dots", "train.global_batch_size=64"), 8)
    assert few.middle > 1.15 * many.middle / 8


def test_groups_across_nodes_have_the_network_of_their_gpus_in_a_node():
    sizes = {"pp": 1, "dp": 8, "ep": 1, "cp": 1, "tp": 8}
    chip = CHIPS["h200"]
    within = roofline.group_rate(sizes, ("tp",), chip)
    across = roofline.group_rate(sizes, ("dp", "ep", "cp"), chip)
    assert within == roofline.LINK.scaled(chip.details.link_gbs * 1e9)
    assert across == roofline.NETWORK.scaled(roofline.NETWORK_GBS * 1e9)  # one GPU of each node
    whole = {"pp": 1, "dp": 64, "ep": 1, "cp": 1, "tp": 1}
    assert roofline.group_rate(whole, ("dp",), chip).low == within.low  # 8 x 50 x 0.6 > 189 GB/s
    over_pp = {"pp": 2, "dp": 8, "ep": 1, "cp": 1, "tp": 1}
    assert roofline.group_rate(over_pp, ("dp",), chip) == within
    assert roofline.group_rate(over_pp, ("pp",), chip) == across


def test_parts_appear_where_the_mesh_has_them():
    names = {
        "mesh.tp=8": "activations over tp",
        "mesh.pp=4": "activations over pp",
        "mesh.cp=2": "keys and values over cp",
    }
    for key, name in names.items():
        remat = "train.remat=dots"
        assert name in {part.name for part in parts_of(small(key, remat), 8)}
        assert name not in {part.name for part in parts_of(small(remat), 8)}


@pytest.mark.parametrize("act, share", [("gelu_tanh", 1.0), ("quick_gelu", 1.0), ("relu2", 5.0)])
def test_an_activation_function_is_a_pass_over_memory_where_no_matmul_computes_it(act, share):
    keys = [*NOTHING_ELSE, f"model.hidden_act={act}", "train.micro_batch_size=32"]
    cfg = load(ROOT / "configs/models/gpt2_124m.yaml", keys)
    model, sizes = cfg.model, mesh_sizes(cfg.mesh, 1)
    per_layer = roofline._layer_bytes(cfg, sizes) / model.num_hidden_layers / 2  # of bf16
    channels = model.hidden_size * (1 + 2)  # of queries, keys and values
    rest = roofline.OF_BLOCK * model.hidden_size + PASSES_OF_HEADS * channels
    assert (per_layer - rest) / model.intermediate_size == share
