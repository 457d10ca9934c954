"""8-bit weights with scales: the numbers of an independent program, whatever part is read."""

import json
from functools import cache

import jax
import ml_dtypes
import numpy as np
import pytest

from mjax.checkpoint.base.safetensors import INDEX, open_folder, pack
from mjax.checkpoint.base.source import flat
from mjax.config.schema.run import MeshConfig
from mjax.convert import main as convert
from mjax.errors import UserError
from mjax.interop.coded.scaled import open_weights
from mjax.interop.huggingface.families.engine import config_from_hf, slots
from mjax.interop.huggingface.files import tensor_shapes
from mjax.interop.huggingface.float8 import quantization_config, quantize_blocks
from mjax.interop.pretrained import from_pretrained
from mjax.interop.sources import source_of
from mjax.models import definition_of
from mjax.sharding.mesh import make_mesh
from tests.marks import slow

F8, BF16 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.bfloat16)
E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
QWEN3_MOE = dict(
    model_type="qwen3_moe",
    architectures=["Qwen3MoeForCausalLM"],
    vocab_size=61,
    hidden_size=40,
    intermediate_size=44,
    moe_intermediate_size=20,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=12,
    num_experts=4,
    num_experts_per_tok=2,
    mlp_only_layers=[1],
    max_position_embeddings=64,
    tie_word_embeddings=False,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    router_aux_loss_coef=0.001,
    norm_topk_prob=True,
    hidden_act="silu",
)
PHI3 = {
    k: v
    for k, v in QWEN3_MOE.items()
    if not k.startswith(("moe", "num_exp", "mlp", "norm", "router", "head_dim"))
} | dict(model_type="phi3", architectures=["Phi3ForCausalLM"], pad_token_id=0)
_NOT_GRANITE = "num_experts moe_intermediate_size mlp_only_layers head_dim norm_topk_prob".split()
GRANITE = {k: v for k, v in QWEN3_MOE.items() if k not in _NOT_GRANITE} | dict(
    model_type="granitemoe", architectures=["GraniteMoeForCausalLM"], num_local_experts=4
)
BLOCKS = dict(quant_method="fp8", activation_scheme="dynamic", weight_block_size=[16, 24])


def groups(**weights) -> dict:
    """compressed-tensors' words."""
    scheme = dict(num_bits=8, type="float", symmetric=True, dynamic=False) | weights
    group = dict(targets=["Linear"], weights=scheme, input_activations=dict(dynamic=True))
    return dict(
        quant_method="compressed-tensors",
        format="float-quantized",
        config_groups=dict(group_0=group),
        ignore=["lm_head"],
    )


# Block, name and dtype of scales, their shape for a matrix, what config.json says.
KINDS = {
    "blocks": ((16, 24), "_scale_inv", np.float32, None, BLOCKS),
    "blocks of powers of two": ((16, 24), "_scale_inv", E8M0, None, BLOCKS),
    "a matrix, static": (
        (999, 999),
        "_scale_inv",
        BF16,
        lambda shape: shape[:-2],
        BLOCKS | dict(weight_block_size=None, activation_scheme="static"),
    ),
    "tensor": ((999, 999), "_scale", np.float32, lambda shape: (1,), groups(strategy="tensor")),
    "channel": ((1, 999), "_scale", BF16, None, groups(strategy="channel")),
    "channel, flat": (
        (1, 999),
        "_scale",
        np.float16,
        lambda shape: shape[:1],
        groups(strategy="channel"),
    ),
    "group": ((1, 8), "_scale", np.float32, None, groups(strategy="group", group_size=8)),
    "block": (
        (128, 16),
        "_scale",
        np.float32,
        None,
        groups(strategy="block", block_structure=[128, 16]),
    ),
}

_FIRST = "blocks", "a matrix, static", "channel", "tensor"
_OTHERS = [kind for kind in KINDS if kind not in _FIRST]


@cache
def value_of_code(code: int) -> np.float32:
    """E4M3: a sign, four bits of exponent with bias 7, three of mantissa."""
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return np.float32(-size if sign else size)


def decoded(codes: np.ndarray, scales: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """The independent program: number by number."""
    out = np.empty(codes.shape, np.float32)
    grid = -(-codes.shape[0] // block[0]), -(-codes.shape[1] // block[1])
    scales = scales.astype(np.float32).reshape(grid)
    for i, row in enumerate(codes.view(np.uint8)):
        for j, code in enumerate(row):
            out[i, j] = value_of_code(int(code)) * scales[i // block[0], j // block[1]]
    return out


def write(folder, config: dict, tensors: dict[str, np.ndarray], scales: dict) -> None:
    """A folder whose scales are in another file than their weights."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    files = {"a.safetensors": tensors, "b.safetensors": scales}
    for file, part in files.items():
        (folder / file).write_bytes(pack(part))
    where = {name: file for file, part in files.items() for name in part}
    (folder / INDEX).write_text(json.dumps({"weight_map": where}))


def make(folder, kind: str, model: dict = QWEN3_MOE) -> None:
    """`folder`/coded, and `folder`/plain with the numbers in fp32."""
    rng = np.random.default_rng(0)
    block, suffix, dtype, shape_of, said = KINDS[kind]
    cfg = config_from_hf(model)
    specs = definition_of(cfg).specs
    tensors, scales, plain = {}, {}, {}
    for name, shape in tensor_shapes(cfg, specs, slots(cfg, specs)).items():
        if len(shape) < 2 or not name.endswith(("_proj.weight", "_linear.weight")):
            plain[name] = tensors[name] = rng.normal(size=shape).astype(BF16)
            continue
        codes = rng.integers(0, 255, shape, np.uint8)
        codes[codes == 127] = 3  # NaN, as 255 is
        *lead, height, width = shape
        grid = (*lead, -(-height // block[0]), -(-width // block[1]))
        scale = np.exp(rng.normal(size=grid)).astype(np.float32).astype(dtype)
        tensors[name] = codes.view(F8)
        matrices = codes.reshape(-1, height, width), scale.reshape(-1, *grid[-2:])
        one_by_one = zip(*matrices, strict=True)
        plain[name] = np.stack([decoded(c, s, block) for c, s in one_by_one]).reshape(shape)
        scales[name + suffix] = scale.reshape(shape_of(shape) if shape_of else grid)
        if kind == "a matrix, static":
            scales[name.replace("weight", "activation_scale")] = np.ones((), BF16)
    write(folder / "coded", model | {"quantization_config": said}, tensors, scales)
    write(folder / "plain", model, plain, {})


def assert_same_bits(found: dict, wanted: dict) -> None:
    def same(x, y):
        np.testing.assert_array_equal(np.asarray(x).view(np.uint32), np.asarray(y).view(np.uint32))

    jax.tree.map(same, found, wanted)


@pytest.mark.parametrize("kind", [*_FIRST, *(pytest.param(k, marks=slow) for k in _OTHERS)])
def test_numbers_are_those_of_an_independent_program(kind, tmp_path, capsys):
    make(tmp_path, kind)
    found, wanted = (source_of(tmp_path / name) for name in ("coded", "plain"))
    found.check()
    said = capsys.readouterr().err
    assert ("static scales, which are for servers: not used" in said) == ("static" in kind)
    for path, spec in flat(definition_of(found.cfg).specs).items():
        whole = tuple(slice(0, n) for n in spec.shape)
        ours, theirs = found.read(path, whole), wanted.read(path, whole)
        assert ours.dtype == theirs.dtype
        assert ours.tobytes() == theirs.tobytes(), path


@pytest.mark.parametrize(
    ("model", "kind"),
    [(QWEN3_MOE, "blocks"), (PHI3, "blocks"), (GRANITE, "blocks"), (GRANITE, "a matrix, static")],
    ids=["experts", "fused", "stacked", "stacked, a matrix each"],
)
def test_any_part_has_the_bits_of_the_whole(model, kind, tmp_path):
    make(tmp_path, kind, model)
    found, wanted = (source_of(tmp_path / name) for name in ("coded", "plain"))
    rng = np.random.default_rng(1)
    for path, spec in flat(definition_of(found.cfg).specs).items():
        for _ in range(8):
            ends = [sorted(rng.integers(0, n + 1, 2)) for n in spec.shape]
            index = tuple(slice(int(a), int(b)) for a, b in ends)
            np.testing.assert_array_equal(found.read(path, index), wanted.read(path, index))


def test_shards_that_end_within_a_block_have_the_bits_of_the_whole(tmp_path):
    make(tmp_path, "blocks")
    mesh = make_mesh(MeshConfig(tp=2, ep=2), jax.devices()[:4])
    split = from_pretrained(tmp_path / "coded", mesh).params
    assert any(not x.is_fully_replicated for x in jax.tree.leaves(split))
    assert_same_bits(split, from_pretrained(tmp_path / "plain").params)


def run(monkeypatch, *argv) -> None:
    monkeypatch.setattr("sys.argv", ["convert", *map(str, argv)])
    assert convert() == 0


def export(monkeypatch, ckpt, out) -> dict:
    run(monkeypatch, "export", "--ckpt", ckpt, "--hf", out, "--dtype", "float8_block")
    return {name: tensor.whole() for name, tensor in open_folder(out).items()}


@slow
def test_what_is_exported_is_read_and_written_again_with_the_same_bits(tmp_path, monkeypatch):
    make(tmp_path, "blocks")
    first = export(monkeypatch, tmp_path / "plain", tmp_path / "one")
    run(monkeypatch, "import", "--hf", tmp_path / "one", "--out", tmp_path / "ckpt")
    second = export(monkeypatch, tmp_path / "ckpt", tmp_path / "two")
    assert {n: (x.dtype, x.shape, x.tobytes()) for n, x in first.items()} == {
        n: (x.dtype, x.shape, x.tobytes()) for n, x in second.items()
    }
    params = from_pretrained(tmp_path / "one").params
    assert_same_bits(params, from_pretrained(tmp_path / "two").params)

    config = json.loads((tmp_path / "one" / "config.json").read_text())
    said = config["quantization_config"]
    assert (said["quant_method"], said["weight_block_size"]) == ("fp8", [128, 128])
    assert said["modules_to_not_convert"] == ["lm_head", "model.layers.0.mlp.gate"]
    experts = [n for n in first if ".experts." in n and first[n].dtype == F8]
    assert len(experts) == 4 * 3 and all(f"{name}_scale_inv" in first for name in experts)
    plain = open_weights(tmp_path / "plain")
    for name, codes in first.items():
        if codes.dtype == F8:
            value = decoded(codes, first[f"{name}_scale_inv"], (128, 128))
            wanted = plain[name].whole()
            assert np.abs(value - wanted).max() <= np.abs(wanted).max() / 16


@pytest.mark.parametrize("power", [False, True])
def test_the_codes_of_blocks_come_back(power):
    """Also of partial blocks, of a block of zeros, and of scales that are powers of two."""
    rng = np.random.default_rng(0)
    w = rng.normal(size=(300, 200)).astype(np.float32) * np.exp(rng.normal(size=(300, 1)))
    w[128:256, :128] = 0
    codes, scales = quantize_blocks(w.astype(np.float32), "w")
    assert scales.shape == (3, 2) and scales[1, 0] > 1e-16
    assert np.abs(codes[:128].astype(np.float32)).max() == 448
    if power:
        scales = np.exp2(np.round(np.log2(scales))).astype(np.float32)
    again = quantize_blocks(decoded(codes, scales, (128, 128)), "w")
    np.testing.assert_array_equal(again[0].view(np.uint8), codes.view(np.uint8))
    np.testing.assert_array_equal(again[1], scales)


OTHERS = {
    "Conv1D": dict(model_type="gpt2", vocab_size=61, n_embd=16, n_head=2, n_layer=1)
    | dict(n_positions=16, activation_function="gelu_new", layer_norm_epsilon=1e-5),
    "linear.weight stacks experts in one tensor": GRANITE,
}


@pytest.mark.parametrize("message", OTHERS)
def test_families_without_the_layout_are_refused(message):
    cfg = config_from_hf(OTHERS[message])
    specs = definition_of(cfg).specs
    with pytest.raises(UserError, match=f"--dtype float8_block: .*{message}"):
        quantization_config(cfg, slots(cfg, specs), flat(specs), "float8_block")


# ---- damage ------------------------------------------------------------------------------------

NAME = "model.layers.1.self_attn.q_proj.weight"


def change_scales(folder, change) -> None:
    """`change` the scales in b.safetensors, as a dictionary, and the index with them."""
    scales = {n: t.whole().copy() for n, t in open_folder(folder).items() if "scale" in n}
    change(scales)
    (folder / "b.safetensors").write_bytes(pack(scales))
    where = json.loads((folder / INDEX).read_text())["weight_map"]
    where = {n: file for n, file in where.items() if file == "a.safetensors" or n in scales}
    (folder / INDEX).write_text(json.dumps({"weight_map": where}))


def flip(scales):
    scales[f"{NAME}_scale_inv"][1, 1] = np.nan


def cut(scales):
    scales[f"{NAME}_scale_inv"] = scales[f"{NAME}_scale_inv"][:-1]


def of_whole_numbers(scales):
    scales[f"{NAME}_scale_inv"] = scales[f"{NAME}_scale_inv"].astype(np.int32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop(f"{NAME}_scale_inv"), f"tensor {NAME} has 8 bits and lacks its"),
        (cut, r"has scales F32 \(2, 2\) in .* but its config.json has blocks of \[\(16, 24\)\]"),
        (of_whole_numbers, "has scales I32"),
        (flip, f"tensor {NAME} or its {NAME}_scale_inv holds NaN or infinity"),
    ],
)
def test_damaged_scales_are_named(change, message, tmp_path):
    make(tmp_path, "blocks")
    change_scales(tmp_path / "coded", change)
    with pytest.raises(UserError, match=message) as e:
        from_pretrained(tmp_path / "coded")
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("file", ["a.safetensors", "b.safetensors"])
def test_truncated_files_are_named(file, tmp_path):
    make(tmp_path, "blocks")
    path = tmp_path / "coded" / file
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(UserError, match=f"{file}: ends within tensor"):
        from_pretrained(tmp_path / "coded")


def test_a_code_that_is_no_number_is_named(tmp_path):
    make(tmp_path, "blocks")
    path = tmp_path / "coded" / "a.safetensors"
    content = bytearray(path.read_bytes())
    content[open_folder(tmp_path / "coded")[NAME].offset + 7] = 0x7F
    path.write_bytes(content)
    with pytest.raises(UserError, match=f"tensor {NAME} or its .* holds NaN or infinity"):
        from_pretrained(tmp_path / "coded")


AWQ = "quant_method='awq', which mjax does not read .* take the bfloat16 model that it was made"


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (dict(quant_method="awq", bits=4), AWQ),
        (dict(quant_method="gptq", bits=4), "quant_method='gptq', which mjax does not read"),
        (dict(quant_method="bitsandbytes"), r"'bitsandbytes'.* model.dequantize\(\)"),
        (BLOCKS | dict(weight_block_size=[128]), r"has blocks of \[128\]; give two sizes"),
        (BLOCKS | dict(weight_block_size=[0, 128]), "give two sizes above 0"),
        (BLOCKS | dict(fmt="e5m2"), "has fmt='e5m2', which mjax does not"),
        (BLOCKS | dict(expert_dtype="fp4"), "has expert_dtype='fp4', which"),
        (groups() | dict(format="pack-quantized"), "format='pack-quantized', which mjax does"),
        (groups(type="int"), "weights of type=int, num_bits=8, symmetric=True, which mjax"),
        (groups(symmetric=False), "symmetric=False, which mjax does not read"),
        (groups(strategy="token"), "strategy='token', which mjax does not read"),
        (groups(strategy="block"), "has blocks of None; give two sizes"),
        (groups(strategy="block", block_structure=[None, 4]), r"has blocks of \[None, 4\]; give"),
        (groups() | dict(transform_config={"a": 1}), "transform_config or sparsity_config"),
        (groups() | dict(config_groups=[3]), "config_groups"),
        ("fp8", "quantization_config='fp8' is not of the kind"),
    ],
)
def test_other_codes_are_refused_by_name(said, message):
    with pytest.raises(UserError, match=message) as e:
        config_from_hf(QWEN3_MOE | {"quantization_config": said})
    assert "\n" not in str(e.value)


def test_scales_without_a_config_of_them_are_named(tmp_path):
    make(tmp_path, "blocks")
    (tmp_path / "coded" / "config.json").write_text(json.dumps(QWEN3_MOE))
    with pytest.raises(UserError, match="but its config.json has no quantization_config"):
        from_pretrained(tmp_path / "coded")
