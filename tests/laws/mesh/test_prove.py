"""Law: every mesh gives the one-device numbers. A sample of `python -m mjax.prove`.

Gradients of the first step, the losses of eight, and replicas that stay identical to the bit; each
feature, axis, ZeRO stage and exchange of keys at least once.
"""

import pytest

from mjax.config.rules.mesh_rules import AXES
from mjax.models.runtime import store
from mjax.prove import BOUND, FEATURES, Cell, cells, compare, holds, meshes
from mjax.prove.__main__ import invariance_page
from mjax.prove.features import NAMES
from tests.marks import exhaustive, quick

SAMPLE = [
    ("experts", Cell({"pp": 2, "ep": 2, "cp": 2}, 1, 3, cp_type="a2a")),
    ("dense", Cell({"pp": 2, "cp": 2, "tp": 2}, 1, 4, cp_type="ring")),
    ("dense", Cell({"dp": 3, "pp": 2}, 0, 4)),
    ("experts", Cell({"ep": 2, "cp": 2, "tp": 2}, 3, 1)),
    ("tied", Cell({"pp": 2, "dp": 2, "tp": 2}, 3, 3)),
    ("biases", Cell({"dp": 2, "tp": 4}, 1, 2)),
    ("windows", Cell({"pp": 2, "cp": 4}, 1, 6, cp_type="ring")),
    ("learned positions", Cell({"dp": 2, "cp": 2, "tp": 2}, 2, 3, cp_type="all_gather")),
    ("sinks", Cell({"pp": 2, "tp": 4}, 0, 3)),
    ("dropout", Cell({"pp": 2, "ep": 2, "tp": 2}, 0, 4)),
    ("muon", Cell({"dp": 2, "tp": 4}, 3, 2)),
    ("uneven layers", Cell({"pp": 4, "tp": 2}, 1, 8)),
    ("odd widths", Cell({"dp": 4, "tp": 2}, 3, 2)),
    ("gpt-oss", Cell({"pp": 2, "ep": 2, "tp": 2}, 1, 3)),
    ("routing", Cell({"pp": 2, "ep": 2, "tp": 2}, 1, 3)),
    ("expert bias", Cell({"pp": 2, "ep": 2, "cp": 2}, 1, 3)),
    ("capacity", Cell({"ep": 2, "cp": 2, "tp": 2}, 3, 2)),
    ("all-to-all", Cell({"pp": 2, "ep": 2, "tp": 2}, 1, 3)),
    ("sinkhorn", Cell({"ep": 2, "cp": 2, "tp": 2}, 1, 3)),
    ("multi-token prediction", Cell({"pp": 2, "ep": 2, "cp": 2}, 1, 3, cp_type="a2a")),
    ("unlike layers", Cell({"pp": 2, "cp": 2, "dp": 2}, 3, 3, cp_type="all_gather")),
    ("frozen", Cell({"pp": 2, "dp": 2, "tp": 2}, 1, 4)),
    ("latent attention", Cell({"pp": 2, "cp": 2, "tp": 2}, 1, 4, cp_type="all_gather")),
    ("bert", Cell({"pp": 2, "cp": 2, "tp": 2}, 1, 4, cp_type="all_gather")),
    ("t5", Cell({"pp": 2, "cp": 2, "tp": 2}, 1, 4, cp_type="all_gather")),
    ("retro", Cell({"pp": 2, "cp": 2, "tp": 2}, 1, 4, cp_type="all_gather")),
    ("vit", Cell({"pp": 2, "cp": 2, "tp": 2}, 1, 4, cp_type="all_gather")),
    ("llava", Cell({"pp": 2, "cp": 2, "tp": 2}, 1, 4, cp_type="a2a")),
    ("mimo", Cell({"pp": 2, "cp": 2, "tp": 2}, 1, 4, cp_type="a2a")),
    ("mimo, own mesh", Cell({"pp": 2, "cp": 2, "tp": 2}, 1, 4, cp_type="a2a")),
    ("clip", Cell({"pp": 2, "cp": 2, "tp": 2}, 1, 1, cp_type="all_gather")),
    ("siglip", Cell({"ep": 2, "cp": 2, "tp": 2}, 3, 1, cp_type="a2a")),
    ("modernbert", Cell({"pp": 2, "cp": 2, "tp": 2}, 1, 4, cp_type="all_gather")),
    ("mamba", Cell({"cp": 8}, 1, 1)),
    ("hybrid", Cell({"pp": 2, "ep": 2, "tp": 2}, 1, 3)),
    ("gated deltanet", Cell({"pp": 2, "cp": 2, "tp": 2}, 1, 3, cp_type="all_gather")),
    ("llava-onevision", Cell({"pp": 2, "cp": 2, "tp": 2}, 1, 4, cp_type="a2a")),
    ("qwen-vl", Cell({"pp": 2, "cp": 2, "tp": 2}, 1, 4, cp_type="all_gather")),
    ("sft", Cell({"pp": 2, "dp": 2, "tp": 2}, 1, 4)),
    ("preferences", Cell({"dp": 2, "cp": 2, "tp": 2}, 3, 2)),
    ("rewards", Cell({"pp": 2, "cp": 2, "tp": 2}, 1, 4)),
    ("distillation", Cell({"dp": 2, "cp": 2, "tp": 2}, 3, 2)),
    ("policy", Cell({"pp": 2, "dp": 2, "tp": 2}, 1, 4)),
    ("policy, answers", Cell({"dp": 2, "cp": 2, "tp": 2}, 3, 2)),
    ("values", Cell({"dp": 2, "cp": 2, "tp": 2}, 2, 2)),
    ("lora", Cell({"pp": 2, "cp": 2, "tp": 2}, 1, 4, cp_type="ring")),
    ("lora, experts", Cell({"ep": 2, "cp": 2, "tp": 2}, 3, 3, cp_type="a2a")),
    ("lora, latent attention", Cell({"pp": 2, "dp": 2, "tp": 2}, 0, 3)),
    ("lora, hybrid", Cell({"dp": 2, "ep": 2, "tp": 2}, 3, 2)),
    ("dora", Cell({"dp": 2, "cp": 2, "tp": 2}, 2, 3, cp_type="all_gather")),
    ("folded experts", Cell({"cp": 2, "tp": 4}, 2, 3)),
    ("folded, with all", Cell({"pp": 2, "ep": 2, "tp": 2}, 3, 2)),
]


@pytest.mark.parametrize("feature,cell", quick(SAMPLE), ids=[f"{f}, {c}" for f, c in SAMPLE])
def test_mesh_equals_one_device(feature, cell):
    record = compare(feature, cell, steps=8)
    assert holds(record), record


SIDE_BY_SIDE = ["model.layer_pattern=full|mlp", "model.parallel_norms=true", "model.norm=layernorm"]
SIDE_BY_SIDE += ["model.lm_head_bias=true", "model.rope.rope_interleave=true"]
SIDE_BY_SIDE += ["model.rope.partial_rotary_factor=0.5"]
YARN = "{rope_type: yarn, factor: 4.0, original_max_position_embeddings: 8, "
NORMED_LATE = ["model.attention.qk_norm=true", "model.attention.qk_norm_after_rope=true"]
NORMED_LATE += [f"model.rope.rope_scaling={YARN} llama_4_scaling_beta: 0.3}}"]
NORMED_LATE += ["model.norm_gain=false", "model.norm=layernorm", "model.norm_bias=false"]
NORMED_LATE += ["model.rope.rope_reversed=true", "model.bert.embedding_norm=true"]
NORMED_LATE += ["model.layer_pattern=full+mlp, nope_window+mlp", "model.attention.sliding_window=9"]


@exhaustive
@pytest.mark.parametrize("keys", [SIDE_BY_SIDE, NORMED_LATE])
def test_parts_of_some_families_are_equal_on_a_mesh(keys):
    """GPT-NeoX's and Phi's, GLM's; OLMo's, Hunyuan's, nanochat's, Granite's, and Ministral 3's."""
    where = Cell({"pp": 2, "cp": 2, "tp": 2}, 1, 4, cp_type="ring")
    record = compare("dense", where, *keys, steps=3)
    assert holds(record), record


@exhaustive
def test_muon_takes_padded_shards():
    where = Cell({"dp": 4, "tp": 2}, 1, 2)
    record = compare("odd widths", where, "optimizer.name=muon", steps=3)
    assert holds(record), record


@exhaustive
def test_muon_takes_projections_that_share_a_tensor_apart_on_any_mesh():
    where = Cell({"dp": 2, "tp": 2}, 3, 2)
    record = compare("gated deltanet", where, "optimizer.name=muon", steps=3)
    assert holds(record), record


@exhaustive
def test_a_prediction_layer_attends_behind_a_recurrence_on_any_mesh():
    where = Cell({"pp": 2, "cp": 2, "tp": 2}, 1, 3, cp_type="all_gather")
    more = "model.num_nextn_predict_layers=1", "model.layer_pattern='full+mlp, deltanet+mlp'"
    record = compare("gated deltanet", where, *more)
    assert holds(record), record


def test_a_missing_reduction_would_be_seen(monkeypatch):
    """The law can fail: without the gradient rule each device goes its own way."""
    monkeypatch.setattr(store, "reduce_gradients", lambda grads, *_: grads)
    record = compare("dense", Cell({"dp": 2}), "model.num_hidden_layers=1", steps=2)
    assert record["gradient"] > 100 * BOUND and not record["replicas"]


def test_the_table_covers_every_mesh_stage_and_number_of_micro_batches():
    assert [len(meshes(n)) for n in (4, 6, 8)] == [15, 25, 35]
    for devices in (4, 6, 8):
        row = [cell for feature in FEATURES for cell in cells(devices, feature)]
        assert {cell.zero for cell in row} == {0, 1, 2, 3}
        assert {cell.micro_batches for cell in row} == set(range(1, 9))
        assert {cell.cp_type for cell in row} == {"all_gather", "a2a", "ring"}
    for feature in set(FEATURES) - {"odd widths", "distillation"}:
        assert [cell.mesh for cell in cells(8, feature)] == meshes(8)
    assert {feature for feature, _ in SAMPLE} == set(FEATURES)
    assert {axis for _, cell in SAMPLE for axis in cell.mesh} == set(AXES)


def test_the_page_tells_what_fails():
    good = {"feature": "dense", "devices": 8, "cell": "dp8", "gradient": 1e-6, "curve": 1e-7}
    good |= {"replicas": True}
    for bad in ({"gradient": 2e-5}, {"curve": float("nan")}, {"replicas": False}):
        records = [good, good | bad]
        assert [holds(r) for r in records] == [True, False]
        assert "1 of 2 runs hold all three" in invariance_page(records)


def test_the_page_names_features_and_no_keys():
    assert set(NAMES) == set(FEATURES) and len(set(NAMES.values())) == len(NAMES)
    assert not [name for name in NAMES.values() if "=" in name or len(name) > 80]
