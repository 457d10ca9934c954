"""Every row of the table in mjax/plan/execution.py: what is decided for which run."""

import pytest

from mjax.config import load
from mjax.config.languages.pipeline_layout import EMPTY
from mjax.config.rules.mesh_rules import mesh_sizes
from mjax.plan.execution import (
    DeviceFacts,
    decide_evaluation,
    decide_execution,
    execution_lines,
    tp_overlap_rows,
)

GPU = DeviceFacts()
CPU = DeviceFacts(on_cpu=True)
NO_COPIES = DeviceFacts(copies_permutes=False, copies_exchanges=False)

MODEL = ["model.num_hidden_layers=4", "data.mock=true", "train.micro_batch_size=1"]
ONE = ["train.global_batch_size=4"]  # on dp=4 one micro-batch, on one device four
EIGHT = ["train.global_batch_size=32"]


def decided(*keys: str, devices: DeviceFacts = GPU):
    cfg = load(None, [*MODEL, *keys])
    return decide_execution(cfg, mesh_sizes(cfg.mesh, 4), devices)


# (keys, fields of the execution)
ROWS = {
    "ZeRO-0, several micro-batches: sums in the matmuls": (
        ["mesh.dp=4", "mesh.zero=0", *EIGHT],
        dict(micro_batches=8, unroll=0, apart=True, sums_in_matmuls=True, overlap=False),
    ),
    "adapters, several, layers recompute all: a loop, which copies no base": (
        ["mesh.dp=4", "mesh.zero=0", "lora.rank=4", "train.remat=full", *EIGHT],
        dict(unroll=1, apart=False),
    ),
    "adapters in one micro-batch: no loop": (
        ["mesh.dp=4", "mesh.zero=0", "lora.rank=4", "train.remat=full", *ONE],
        dict(unroll=0, apart=True),
    ),
    "adapters whose layers keep products: no loop": (
        ["mesh.dp=4", "mesh.zero=0", "lora.rank=4", "train.remat=dots", *EIGHT],
        dict(unroll=0, apart=True),
    ),
    "adapters in a pipeline: no loop": (
        ["mesh.pp=2", "mesh.dp=2", "lora.rank=4", "train.remat=full", *EIGHT],
        dict(unroll=0),
    ),
    "ZeRO-0, one micro-batch: nothing to sum": (
        ["mesh.dp=4", "mesh.zero=0", "train.remat=none", *ONE],
        dict(micro_batches=1, apart=True, sums_in_matmuls=False, overlap=False, gather="step"),
    ),
    "ZeRO-1, several: sums in the matmuls, exchanges once a step": (
        ["mesh.dp=4", "mesh.zero=1", *EIGHT],
        dict(sums_in_matmuls=True, gather="step", reduce="step", overlap=False),
    ),
    "ZeRO-1, one, layers keep all: exchanges under matmuls": (
        ["mesh.dp=4", "mesh.zero=1", "train.remat=none", *ONE],
        dict(overlap=True, gather="layer", reduce="layer", sums_in_matmuls=False),
    ),
    "ZeRO-1, one, layers recompute: exchanges once a step": (
        ["mesh.dp=4", "mesh.zero=1", "train.remat=dots", *ONE],
        dict(overlap=False, gather="step", reduce="step"),
    ),
    "ZeRO-1, one layer recomputes: exchanges once a step": (
        ["mesh.dp=4", "mesh.zero=1", "train.remat='full*1,none'", *ONE],
        dict(overlap=False, gather="step", reduce="step"),
    ),
    "ZeRO-1 in groups of one device: nothing is cut": (
        ["mesh.dp=4", "mesh.zero=1", "mesh.zero_group=1", "train.remat=none", *ONE],
        dict(overlap=False, gather="step", reduce="step"),
    ),
    "ZeRO-2, several: reduced after each micro-batch": (
        ["mesh.dp=4", "mesh.zero=2", *EIGHT],
        dict(gather="step", reduce="micro_batch", sums_in_matmuls=False),
    ),
    "ZeRO-2, one: as ZeRO-1": (
        ["mesh.dp=4", "mesh.zero=2", "train.remat=none", *ONE],
        dict(overlap=True, gather="layer", reduce="layer"),
    ),
    "ZeRO-3: each layer gathers and reduces": (
        ["mesh.dp=4", "mesh.zero=3", *EIGHT],
        dict(gather="layer", reduce="layer", sums_in_matmuls=False, overlap=False, apart=True),
    ),
    "context parallelism cuts as dp does": (
        ["mesh.cp=4", "mesh.dp=1", "mesh.zero=3", *ONE],
        dict(gather="layer", reduce="layer", micro_batches=4),
    ),
    "tp alone leaves nothing to cut": (
        ["mesh.tp=4", "mesh.dp=1", "mesh.zero=3", *ONE],
        dict(gather="step", reduce="step", micro_batches=4, sums_in_matmuls=True),
    ),
    "a loop: stacks, sums after a micro-batch": (
        ["mesh.dp=4", "mesh.zero=1", "train.unroll=1", "train.remat=none", *ONE],
        dict(unroll=1, apart=False, overlap=False, sums_in_matmuls=False),
    ),
    "what is offloaded needs a loop": (
        ["mesh.dp=4", "train.remat=dots", "train.offload=[attn_proj]", *EIGHT],
        dict(unroll=1, apart=False, offload=("attn_proj",)),
    ),
    "a pipeline: stacks, its slots are the layers": (
        ["mesh.pp=2", "mesh.dp=2", *EIGHT],
        dict(pipelined=True, apart=False, sums_in_matmuls=False, micro_batches=16),
    ),
    "FP8: weights are rounded where they are stored": (
        ["mesh.dp=4", "precision.fp8=delayed", *EIGHT],
        dict(quantize_stored=True, sums_in_matmuls=True),
    ),
    "FP8 that skips layers, gathered once a step: rounded in the matmuls": (
        ["mesh.dp=4", "precision.fp8=delayed", "precision.fp8_skip_layers=1", *EIGHT],
        dict(quantize_stored=False),
    ),
    "FP8 that skips layers, gathered by each layer: rounded where stored": (
        ["mesh.dp=4", "mesh.zero=3", "precision.fp8=current", "precision.fp8_skip_layers=1"],
        dict(quantize_stored=True),
    ),
}


@pytest.mark.parametrize("row", ROWS)
def test_a_row_of_the_table(row):
    keys, fields = ROWS[row]
    execution = decided(*keys)
    assert {name: getattr(execution, name) for name in fields} == fields


def test_devices_that_cannot_copy_exchange_at_the_end():
    keys = ["mesh.dp=4", "mesh.zero=1", "train.remat=none", *ONE]
    assert decided(*keys).overlap
    assert not decided(*keys, devices=NO_COPIES).overlap


def test_cpus_run_layers_in_a_loop():
    assert decided(*EIGHT, "mesh.dp=4", devices=CPU).unroll == 1
    assert decided(*EIGHT, "mesh.dp=4", "train.unroll=0", devices=CPU).apart


def test_each_layer_has_its_kind_row_policy_and_precision():
    keys = ["model.layer_pattern='LG'", "train.remat='full*1,dots'", "precision.fp8=delayed"]
    layers = decided(
        *keys, "model.attention.sliding_window=8", "precision.fp8_skip_layers=1"
    ).layers
    assert [plan.kinds for plan in layers] == [("window+mlp",), ("full+mlp",)] * 2
    assert [plan.row for plan in layers] == [0, 1, 2, 3]
    assert [plan.remat for plan in layers] == ["full", "dots", "dots", "dots"]
    assert [plan.fp8 for plan in layers] == [False, True, True, False]


def test_slots_of_uneven_stages_may_be_empty():
    layout = "mesh.pipeline_layout='Et*3|tL'"
    slots = decided("mesh.pp=2", "mesh.dp=2", layout, "train.remat=none", *EIGHT).layers
    assert [EMPTY in plan.kinds for plan in slots] == [False, True, True]
    assert len({plan.remat for plan in slots} - {"none"}) == 1  # a stash keeps no copies of weights


@pytest.mark.parametrize("zero, gather", [(1, "step"), (3, "layer")])
def test_evaluation_runs_in_a_loop_and_keeps_nothing(zero, gather):
    cfg = load(None, [*MODEL, *ONE, "mesh.dp=4", f"mesh.zero={zero}", "train.remat=none"])
    execution = decide_evaluation(cfg, mesh_sizes(cfg.mesh, 4))
    assert (execution.unroll, execution.apart, execution.gather) == (1, False, gather)
    assert not execution.overlap and not execution.sums_in_matmuls


def test_a_smaller_batch_has_fewer_micro_batches():
    cfg = load(None, [*MODEL, *EIGHT, "mesh.dp=4"])
    sizes = mesh_sizes(cfg.mesh, 4)
    assert decide_execution(cfg, sizes, rows=8).micro_batches == 2
    assert decide_execution(cfg, sizes, rows=4).micro_batches == 1


@pytest.mark.parametrize(
    "devices, tp, uniform, found",
    [
        (GPU, 4, True, True),
        (GPU, 4, False, False),
        (GPU, 3, True, False),
        (GPU, 1, True, False),
        (CPU, 4, True, False),
        (NO_COPIES, 4, True, False),
    ],
)
def test_when_tp_runs_its_exchanges_under_matmuls(devices, tp, uniform, found):
    heads = [
        "model.attention.num_attention_heads=12",
        "model.hidden_size=192",
        "model.intermediate_size=192",
    ]
    cfg = load(
        None,
        [
            *MODEL,
            *heads,
            "model.vocab_multiple=384",
            "data.seq_length=96",
            f"mesh.tp={tp}",
            "mesh.dp=1",
        ],
    )
    assert (tp_overlap_rows(cfg.mesh, devices, uniform) is not None) == found


def test_the_words_say_what_differs():
    keys = ["mesh.dp=4", "mesh.zero=1", "train.remat=none"]
    overlapped, summed = (execution_lines(decided(*keys, *batch)) for batch in (ONE, EIGHT))
    assert "under other layers' matmuls" in overlapped[1]
    assert "gathered once a step" in summed[1] and "by the matmuls" in summed[2]
    assert "in a loop" in execution_lines(decided(*keys, *ONE, devices=CPU))[0]
    fp8 = execution_lines(decided(*keys, *EIGHT, "precision.fp8=delayed"))[3]
    assert "delayed scaling by xla" in fp8 and "0 layers left out" in fp8
