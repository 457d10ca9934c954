"""Laws of adapters in PEFT's files and of merging; tests/oracle/test_peft.py compares with PEFT."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
from flax.traverse_util import unflatten_dict

from mjax.checkpoint.base.safetensors import read_header, write_file
from mjax.checkpoint.base.source import Source, array_source, block_shape, blocks, flat
from mjax.checkpoint.merged import Adapters, merged
from mjax.config import load
from mjax.errors import UserError
from mjax.interop.huggingface.families.engine import config_to_hf, slots
from mjax.interop.huggingface.files import export
from mjax.interop.merge import merged_source
from mjax.interop.peft.adapter_config import ADAPTER_CONFIG
from mjax.interop.peft.adapter_reader import read_adapter
from mjax.interop.peft.adapter_writer import write_adapter
from mjax.interop.peft.pair import ADAPTER_WEIGHTS
from mjax.models import definition_of
from mjax.models.base.adapted import part_path
from tests.adapters import drawn_adapters
from tests.marks import quick

SIZES = [
    "model.vocab_size=97",
    "model.hidden_size=12",
    "model.num_hidden_layers=2",
    "model.attention.num_attention_heads=3",
    "model.attention.head_dim=4",
    "model.intermediate_size=20",
    "data.mock=true",
    "data.seq_length=16",
]
MODELS = {
    "llama": ["model.model_type=llama"],
    "phi3": ["model.model_type=phi3"],
    "qwen3_moe": [
        "model.model_type=qwen3_moe",
        "model.attention.qk_norm=true",
        "model.layer_pattern=full+experts",
        "model.moe.num_experts=4",
        "model.moe.num_experts_per_tok=2",
        "model.moe.moe_intermediate_size=8",
    ],
    "mixtral": [
        "model.model_type=mixtral",
        "model.layer_pattern=full+experts",
        "model.moe.num_experts=4",
        "model.moe.num_experts_per_tok=2",
        "model.moe.moe_intermediate_size=8",
    ],
    "qwen3_5": [
        "model.model_type=qwen3_5_text",
        "model.layer_pattern='deltanet+mlp, full+mlp'",
        "model.norm_zero_centered=true",
        "model.attention.qk_norm=true",
        "model.attention.attention_output_gate=true",
        "model.deltanet.linear_num_key_heads=2",
        "model.deltanet.linear_num_value_heads=4",
        "model.deltanet.linear_key_head_dim=6",
        "model.deltanet.linear_value_head_dim=5",
    ],
}
# Experts in files of transformers 4: the list of modules, and the names of gate, up and down.
LISTED = {
    "qwen3_moe": ("mlp.experts", ("gate_proj", "up_proj", "down_proj")),
    "mixtral": ("block_sparse_moe.experts", ("w1", "w3", "w2")),
}


def model(name: str = "llama"):
    """(config, declarations) of a tiny model."""
    cfg = load(None, SIZES + MODELS[name]).model
    return cfg, definition_of(cfg).specs


def weights_of(specs: dict) -> dict:
    rng = np.random.default_rng(1)
    return {p: rng.normal(size=s.shape).astype(np.float32) for p, s in flat(specs).items()}


def source_of_arrays(cfg, arrays: dict) -> Source:
    return Source(cfg, lambda path, index: arrays[path][index], lambda: None)


@pytest.mark.parametrize("name", quick(MODELS, 1, 2, 4))
def test_reading_what_was_written_gives_the_same_bytes(name, tmp_path):
    cfg, specs = model(name)
    adapters = drawn_adapters(specs, dropout=0.0, base="there")
    write_adapter(tmp_path / "one", cfg, specs, adapters)
    back = read_adapter(tmp_path / "one", cfg, specs)
    assert back.scales == adapters.scales and back.arrays.keys() == adapters.arrays.keys()
    for path, array in adapters.arrays.items():
        np.testing.assert_array_equal(back.arrays[path], array)
    write_adapter(tmp_path / "two", cfg, specs, back)
    for file in (ADAPTER_WEIGHTS, ADAPTER_CONFIG):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def test_a_module_of_several_matrices_has_their_adapters_side_by_side(tmp_path):
    cfg, specs = model("phi3")
    adapters = drawn_adapters(specs, rank=2, scale=1.5)
    write_adapter(tmp_path / "adapter", cfg, specs, adapters)
    config = json.loads((tmp_path / "adapter" / ADAPTER_CONFIG).read_text())
    assert config["r"] == 2 and config["rank_pattern"] == {"gate_up_proj": 4, "qkv_proj": 6}
    assert config["lora_alpha"] == 3 and config["alpha_pattern"] == {
        "gate_up_proj": 6,
        "qkv_proj": 9,
    }
    tensors = read_header(tmp_path / "adapter" / ADAPTER_WEIGHTS)
    key = "base_model.model.model.layers.1.self_attn.qkv_proj.lora_{}.weight".format
    a, b = (tensors[key(letter)].whole() for letter in "AB")
    at = ("dense", "attention")
    q, kv = adapters.part((*at, "q"), "b")[1], adapters.part((*at, "kv"), "b")[1]
    wanted = np.zeros((36, 6), np.float32)
    wanted[:12, :2] = q.reshape(2, 12).T
    wanted[12:24, 2:4] = kv[:, 0].reshape(2, 12).T
    wanted[24:, 4:] = kv[:, 1].reshape(2, 12).T
    np.testing.assert_array_equal(b, wanted)
    of_kv = adapters.part((*at, "kv"), "a")[1]
    rows = [adapters.part((*at, "q"), "a")[1].T, of_kv[:, 0].T, of_kv[:, 1].T]
    np.testing.assert_array_equal(a, np.concatenate(rows))


def test_a_matrix_in_several_modules_gives_each_its_rows_and_takes_their_ranks(tmp_path):
    cfg, specs = model("qwen3_5")
    path, folder = ("deltanet_mlp", "deltanet", "ba"), tmp_path / "adapter"
    adapters = drawn_adapters(specs, lambda spec: spec.matmul == "delta_ba", rank=2, dora=True)
    write_adapter(folder, cfg, specs, adapters)
    start = "base_model.model.model.layers.0.linear_attn.in_proj_{}.lora_{}".format
    a, b, length = (adapters.part(path, name)[0] for name in ("a", "b", "magnitude"))
    columns = {"b": slice(2), "a": slice(2, 4)}  # of each of two heads of keys
    found = {n: t.whole() for n, t in read_header(folder / ADAPTER_WEIGHTS).items()}
    for name, own in columns.items():
        np.testing.assert_array_equal(found[start(name, "A.weight")], a.T)
        np.testing.assert_array_equal(found[start(name, "B.weight")], b[..., own].reshape(2, 4).T)
        rows = found[start(name, "magnitude_vector")]
        np.testing.assert_array_equal(rows, length[..., own].reshape(4))
    # PEFT trains each A apart.
    key = start("a", "A.weight")
    rewrite(folder / ADAPTER_WEIGHTS, lambda tensors: tensors | {key: 3 * tensors[key]})
    back = read_adapter(folder, cfg, specs)
    product = np.einsum("ir,rhw->ihw", back.part(path, "a")[0], back.part(path, "b")[0])
    wanted = np.einsum("ir,rhw->ihw", a, b) * np.array([1, 1, 3, 3])
    np.testing.assert_allclose(product, wanted, rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(back.part(path, "magnitude")[0], length)
    # What has no adapter gets none.
    rewrite(
        folder / ADAPTER_WEIGHTS, lambda tensors: {n: t for n, t in tensors.items() if "_b." in n}
    )
    write_adapter(tmp_path / "again", cfg, specs, read_adapter(folder, cfg, specs))
    again = read_header(tmp_path / "again" / ADAPTER_WEIGHTS)
    assert sorted(again) == sorted(name for name in found if "_b." in name)


def test_ranks_and_scales_of_single_layers_keep_the_product(tmp_path):
    cfg, specs = model()
    adapters = drawn_adapters(specs, lambda spec: spec.matmul == "down", rank=3)
    path = ("dense", "mlp", "down")
    adapters.arrays[part_path(path, "a")][0, :, 1:] = 0
    adapters.arrays[part_path(path, "b")][0, 1:] = 0
    write_adapter(tmp_path / "adapter", cfg, specs, adapters)
    file = tmp_path / "adapter" / ADAPTER_CONFIG
    config = json.loads(file.read_text())
    assert config["r"] == 1 and config["rank_pattern"] == {"layers.1.mlp.down_proj": 3}
    assert config["alpha_pattern"] == {"layers.1.mlp.down_proj": 6}
    config["alpha_pattern"] = {"layers.1.mlp.down_proj": 60}
    file.write_text(json.dumps(config))
    back = read_adapter(tmp_path / "adapter", cfg, specs)
    products = [
        each.scales[path] * each.part(path, "a") @ each.part(path, "b") for each in (adapters, back)
    ]
    np.testing.assert_allclose(products[1][0], products[0][0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(products[1][1], 10 * products[0][1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", quick(LISTED, 0, 1))
def test_adapters_of_modules_an_expert_are_read_beside_such_a_base(name, tmp_path):
    """As transformers 4 has experts; one of them has no adapter."""
    cfg, specs = model(name)
    params, rng = unflatten_dict(weights_of(specs)), np.random.default_rng(3)
    extras = {"config.json": json.dumps(config_to_hf(cfg)).encode()}
    base, adapter, read = tmp_path / "base", tmp_path / "adapter", array_source(cfg, params).read
    export(read, cfg, specs, slots(cfg, specs), base, "float32", extras=extras)
    owner, names = LISTED[name]
    wanted, tensors = {}, {}
    for layer, expert, end in itertools.product(range(2), range(4), names):
        module = f"model.layers.{layer}.{owner}.{expert}.{end}"
        weight = read_header(base / "model.safetensors")[f"{module}.weight"].whole()
        outputs, inputs = weight.shape
        b, a = (rng.normal(size=s).astype(np.float32) for s in ((outputs, 3), (3, inputs)))
        if (layer, expert) != (1, 2):
            tensors[f"base_model.model.{module}.lora_A.weight"] = a
            tensors[f"base_model.model.{module}.lora_B.weight"] = b
            weight = weight + 2 * (b @ a)
        wanted[layer, expert, end] = weight
    adapter.mkdir()
    config = dict(peft_type="LORA", r=3, lora_alpha=6, target_modules=[*names], bias="none")
    (adapter / ADAPTER_CONFIG).write_text(json.dumps(config))
    write_file(
        adapter / ADAPTER_WEIGHTS,
        {key: (array.shape, array.dtype) for key, array in tensors.items()},
        lambda key: [tensors[key]],
    )
    found = merged_source(base, adapter)
    gate, up, down = names
    for layer, expert in np.ndindex(2, 4):
        at = slice(layer, layer + 1), slice(expert, expert + 1)
        whole = found.read(("moe", "mlp", "up"), (*at, slice(0, 12), slice(0, 2), slice(0, 8)))
        pair = np.stack([wanted[layer, expert, gate].T, wanted[layer, expert, up].T], 1)
        np.testing.assert_allclose(whole[0, 0], pair, rtol=1e-5, atol=1e-5)
        whole = found.read(("moe", "mlp", "down"), (*at, slice(0, 8), slice(0, 12)))
        np.testing.assert_allclose(whole[0, 0], wanted[layer, expert, down].T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "family, dora", [("qwen3_moe", False), ("llama", True), ("qwen3_moe", True)]
)
def test_merged_weights_are_those_of_the_formula_in_any_blocks(family, dora, monkeypatch):
    cfg, specs = model(family)
    adapters, weights = drawn_adapters(specs, dora=dora, scale=0.7), weights_of(specs)
    source = merged(source_of_arrays(cfg, weights), adapters, flat(specs))
    subscripts = {"q": "lir,lrhd->lihd", "kv": "liar,lrahd->liahd", "out": "lhdr,lro->lhdo"}
    subscripts |= {"up": "liar,lraf->liaf", "down": "lfr,lro->lfo"}
    of_experts = {"up": "leiar,leraf->leiaf", "down": "lefr,lero->lefo"}
    for path, spec in flat(specs).items():
        whole = source.read(path, tuple(map(slice, (0,) * len(spec.shape), spec.shape)))
        if path not in adapters.scales:
            np.testing.assert_array_equal(whole, weights[path])
            continue
        own = (of_experts if spec.is_of_experts else subscripts)[path[-1]]
        a, b = (adapters.part(path, name).astype(np.float64) for name in "ab")
        wanted = weights[path] + 0.7 * np.einsum(own, a, b)
        if dora:
            inputs = spec.matrix_view()[1]
            length = np.sqrt(np.square(wanted).sum(inputs, keepdims=True))
            shape = [1 if i in inputs else n for i, n in enumerate(spec.shape)]
            wanted = wanted * adapters.part(path, "magnitude").reshape(shape) / length
        np.testing.assert_allclose(whole, wanted, rtol=1e-5, atol=1e-5)
        monkeypatch.setattr("mjax.checkpoint.base.source.SOURCE_BLOCK", 96)
        for index in blocks(spec.shape, block_shape(spec.shape, 4)):
            np.testing.assert_array_equal(source.read(path, index), whole[index])
        monkeypatch.undo()


def test_parameters_trained_whole_replace_those_of_the_base(tmp_path):
    cfg, specs = model()
    adapters = drawn_adapters(specs, lambda spec: spec.matmul == "q")
    head, norm = ("head",), ("dense", "mlp_norm", "gain")
    rng = np.random.default_rng(2)
    whole = {p: rng.normal(size=flat(specs)[p].shape).astype(np.float32) for p in (head, norm)}
    whole[head][97:] = 0  # rows that pad the vocabulary
    adapters = replace(adapters, arrays={**adapters.arrays, **whole})
    write_adapter(tmp_path / "adapter", cfg, specs, adapters)
    config = json.loads((tmp_path / "adapter" / ADAPTER_CONFIG).read_text())
    assert config["modules_to_save"] == ["lm_head", "post_attention_layernorm"]
    back = read_adapter(tmp_path / "adapter", cfg, specs)
    source = merged(source_of_arrays(cfg, weights_of(specs)), back, flat(specs))
    for path in (head, norm):
        index = tuple(map(slice, (0,) * whole[path].ndim, whole[path].shape))
        np.testing.assert_array_equal(source.read(path, index), whole[path])


BAD = {
    "type": (dict(peft_type="IA3"), "peft_type='IA3' is not supported"),
    "start": (dict(init_lora_weights="pissa"), "init_lora_weights='pissa' changed the base"),
    "bias": (dict(bias="all"), "bias='all' is not supported"),
    "lora_bias": (dict(lora_bias=True), "lora_bias=True is not supported"),
    "new": (dict(use_something=True), "use_something=True is not supported"),
    "rank": (dict(r=0), "r=0 is no number above 0"),
    "other_rank": (dict(r=5), "has shape (4, 20), but the model"),
    "pattern": (dict(rank_pattern={"(": 4}), "mend it"),
    "dora": (dict(use_dora=True), "says use_dora=True"),
}


def require_refusal(folder, message: str) -> None:
    """The folder is refused in one line that says so."""
    with pytest.raises(UserError) as error:
        read_adapter(folder, *model())
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", BAD)
def test_unsupported_configs_are_one_line(name, tmp_path):
    change, message = BAD[name]
    cfg, specs = model()
    folder = tmp_path / "adapter"
    write_adapter(folder, cfg, specs, drawn_adapters(specs))
    file = folder / ADAPTER_CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    require_refusal(folder, message)


def rewrite(file, change) -> None:
    """Write the tensors of a file as `change` makes them."""
    tensors = change({name: tensor.whole() for name, tensor in read_header(file).items()})
    entries = {name: (array.shape, array.dtype) for name, array in tensors.items()}
    write_file(file, entries, lambda name: [tensors[name]])


Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
A, B = Q.format("A"), Q.format("B")
DAMAGE = {
    "no_b": (lambda t: {n: x for n, x in t.items() if n != B}, "there is no lora_B"),
    "other_model": (
        lambda t: t | {A.replace("0", "7"): t[A], B.replace("0", "7"): t[B]},
        "layers.7",
    ),
    "infinite": (lambda t: t | {B: t[B] * np.inf}, "holds inf or NaN"),
    "other_shape": (lambda t: t | {B: t[B][1:]}, "has shape (11, 4)"),
    "no_number": (lambda t: t | {B: t[B].astype(np.int32)}, "is I32"),
    "no_adapter": (lambda t: {"model.norm.weight": t[A]}, "is not of PEFT's LoRA"),
    "unknown": (lambda t: t | {"base_model.model.x.weight": t[A]}, "x.weight has no place"),
    "one_layer": (
        lambda t: t | {"base_model.model.model.layers.0.input_layernorm.weight": t[A][0]},
        "whole but not model.layers.1.input_layernorm.weight",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_and_foreign_files_are_one_line(name, tmp_path):
    change, message = DAMAGE[name]
    cfg, specs = model()
    folder = tmp_path / "adapter"
    write_adapter(folder, cfg, specs, drawn_adapters(specs))
    rewrite(folder / ADAPTER_WEIGHTS, change)
    require_refusal(folder, message)


def test_what_peft_has_no_place_for_is_not_written(tmp_path):
    cfg, specs = model()
    norm = {("dense", "mlp_norm", "gain"): np.ones((2, 12), np.float32)}
    half = drawn_adapters(specs, lambda spec: spec.matmul == "q")
    tied = cfg.model_copy(update={"tie_word_embeddings": True})
    table = replace(half, arrays={**half.arrays, ("embedding",): np.zeros((128, 12), np.float32)})
    with pytest.raises(UserError, match="apart from a head that is tied"):
        write_adapter(tmp_path / "a", tied, definition_of(tied).specs, table)
    cfg, specs = model("phi3")
    dora = drawn_adapters(specs, lambda spec: spec.matmul == "q", dora=True)
    with pytest.raises(UserError, match="no DoRA for .* model.layers.0.self_attn.qkv_proj; merge"):
        write_adapter(tmp_path / "b", cfg, specs, dora)
    part = Adapters(
        norm | {("dense", "attention", "q"): weights_of(specs)["dense", "attention", "q"]}, {}
    )
    with pytest.raises(UserError, match="was trained in part or not at all"):
        write_adapter(tmp_path / "c", cfg, specs, part)
    assert not list(tmp_path.iterdir())
