"""Laws of quantized weights: scales, what is shared, what is read back, what folding changes."""

import errno
import os
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mjax.checkpoint.base import safetensors
from mjax.checkpoint.base.source import array_source
from mjax.config.schema.model import ModelConfig
from mjax.convert import write_hf_folder
from mjax.errors import UserError
from mjax.interop.coded.packed import PackedMatrix
from mjax.interop.coded.scaled import open_weights
from mjax.interop.pretrained import from_pretrained
from mjax.interop.quantized import activation_aware
from mjax.interop.quantized.folder import Options, plan_of, write_quantized
from mjax.interop.quantized.scale_choice import Matrix, limit_of_fused, round_matrix
from mjax.interop.quantized.schemes import SCHEMES
from mjax.models import definition_of
from mjax.sharding.spec import is_spec
from tests.marks import quick, slow

DENSE = dict(
    model_type="qwen3",
    vocab_size=64,
    hidden_size=128,
    num_hidden_layers=2,
    attention={
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "qk_norm": True,
    },
    intermediate_size=128,
    max_position_embeddings=64,
)
EXPERTS = DENSE | dict(
    model_type="qwen3_moe",
    layer_pattern="EE",
    moe={"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
)
TOKENS = np.random.default_rng(0).integers(0, 64, (2, 12))


def made(config: dict, seed: int = 0):
    """(the config of a model, its definition, its weights)."""
    cfg, rng = ModelConfig(**config), np.random.default_rng(seed)
    definition = definition_of(cfg)

    def draw(spec):
        values = rng.normal(size=spec.shape, scale=0.05) + (spec.role == "norm")
        return values.astype(np.float32)

    return cfg, definition, jax.tree.map(draw, definition.specs, is_leaf=is_spec)


@pytest.fixture(scope="module")
def dense():
    cfg, definition, params = made(DENSE)
    return array_source(cfg, params)


def weights(shape=(128, 256), seed=0):
    rng = np.random.default_rng(seed)
    w = rng.normal(size=shape) * np.exp(rng.normal(size=(shape[0], 1)))
    w[5, 3] *= 30
    return w.astype(np.float32)


# ---- rounding ------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", quick(SCHEMES, 3, 5))
def test_what_is_stored_stands_for_the_numbers_and_mse_errs_least(scheme, tmp_path):
    """By a file of its own; of each block, by squares that count inputs by their size."""
    scheme, w = SCHEMES[scheme], weights()
    moments = np.exp(np.random.default_rng(1).normal(size=256)).astype(np.float32)
    matrix = Matrix("x.weight", w.copy(), moments)
    errors = {}
    for choice in ("max", "percentile", "mse"):
        limit = limit_of_fused([matrix], scheme, choice)
        rounded = round_matrix(matrix, scheme, choice, limit)
        np.testing.assert_array_equal(matrix.weight, w)  # the weight itself is left alone
        stored = {name: (a.shape, a.dtype) for name, a in rounded.parts.items()}
        assert stored == scheme.entries(w.shape)
        errors[choice] = float((np.square(rounded.numbers - w) * moments).sum())
    assert errors["mse"] <= min(errors.values()) and errors["mse"] < errors["max"]
    relative = np.linalg.norm(rounded.numbers - w) / np.linalg.norm(w)
    assert relative < (0.03 if "weight" in rounded.parts else 0.13)


def test_four_bit_numbers_are_those_of_ml_dtypes_and_of_the_formula():
    w = weights()
    w[0] = 0  # a block of zeros
    groups = w.reshape(128, -1, 32)
    rounded = round_matrix(Matrix("x.weight", w), SCHEMES["mxfp4"], "max", 0.0)
    ratio = np.abs(groups).max(-1) / np.float32(6)
    exponents = np.ceil(np.log2(np.maximum(ratio, 2.0**-127)))
    np.testing.assert_array_equal(rounded.parts["weight_scale"], exponents + 127)
    scale = np.exp2(exponents)[..., None].astype(np.float32)
    expected = (groups / scale).astype(ml_dtypes.float4_e2m1fn).astype(np.float32) * scale
    np.testing.assert_array_equal(rounded.numbers.reshape(groups.shape), expected)

    rounded = round_matrix(Matrix("x.weight", w), SCHEMES["int4_group128"], "max", 0.0)
    scale = rounded.parts["weight_scale"].astype(np.float32).repeat(128, 1)
    assert (np.abs(w).reshape(128, -1, 128).max(-1) <= 7 * scale[:, ::128]).all()
    assert (np.abs(rounded.numbers - w) <= scale * 0.5000001).all()
    words = rounded.parts["weight_packed"].view(np.uint32)
    codes = words[..., None] >> np.arange(0, 32, 4, dtype=np.uint32) & 15
    values = codes.reshape(w.shape).astype(np.float32) - 8
    np.testing.assert_array_equal(values * scale, rounded.numbers)


# ---- folders -------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", quick(["fp8_tensor", "nvfp4"]))
def test_matrices_that_servers_fuse_share_their_number(scheme, dense, tmp_path):
    write_quantized(dense, tmp_path, tmp_path / "out", SCHEMES[scheme], Options(choice="mse"))
    part = "weight_global_scale" if scheme == "nvfp4" else "weight_scale"
    found = safetensors.open_folder(tmp_path / "out")
    for names in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
        group = "self_attn" if len(names) == 3 else "mlp"
        shared = [found[f"model.layers.1.{group}.{name}.{part}"].whole() for name in names]
        assert len({float(each[0]) for each in shared}) == 1
    others = [found[f"model.layers.{i}.mlp.down_proj.{part}"].whole() for i in (0, 1)]
    assert others[0][0] != others[1][0]


@pytest.mark.parametrize("scheme", quick(["nvfp4", "mxfp4", "int4_group128"], 2))
def test_any_part_of_a_packed_matrix_is_that_of_the_whole(scheme, dense, tmp_path):
    write_quantized(dense, tmp_path, tmp_path / "out", SCHEMES[scheme], Options())
    tensor = open_weights(tmp_path / "out")["model.layers.0.mlp.down_proj.weight"]
    assert isinstance(tensor, PackedMatrix) and tensor.dtype == ml_dtypes.bfloat16
    whole = tensor.whole()
    with open(tensor.file, "rb") as f:
        for rows, cols in ((slice(3, 9), slice(5, 6)), (slice(0, 1), slice(31, 128))):
            part = tensor.read(f.fileno(), 0, 128, rows, cols)
            np.testing.assert_array_equal(part, whole[rows, cols])


@slow
def test_mxfp4_is_exported_as_128_blocks_without_loss(dense, tmp_path):
    write_quantized(dense, tmp_path, tmp_path / "mxfp4", SCHEMES["mxfp4"], Options())
    write_hf_folder(str(tmp_path / "mxfp4"), tmp_path / "fp8", "float8_block", 10**9)
    name = "model.layers.1.self_attn.o_proj.weight"
    stored = safetensors.open_folder(tmp_path / "fp8")
    assert stored[name].kind == "F8_E4M3" and f"{name}_scale_inv" in stored
    four, eight = (from_pretrained(tmp_path / of).params for of in ("mxfp4", "fp8"))
    jax.tree.map(np.testing.assert_array_equal, four, eight)


@slow
def test_experts_are_rounded_and_routers_are_not(tmp_path):
    cfg, definition, params = made(EXPERTS)
    source = array_source(cfg, params)
    write_quantized(source, tmp_path, tmp_path / "out", SCHEMES["nvfp4"], Options())
    stored = safetensors.open_folder(tmp_path / "out")
    assert stored["model.layers.1.mlp.experts.3.up_proj.weight_packed"].kind == "U8"
    assert stored["model.layers.1.mlp.gate.weight"].kind == "BF16"
    shared = [f"model.layers.0.mlp.experts.2.{n}_proj.weight_global_scale" for n in ("gate", "up")]
    assert len({float(stored[name].whole()[0]) for name in shared}) == 1
    read = from_pretrained(tmp_path / "out").params["moe"]["mlp"]["up"]
    error = np.linalg.norm(read - params["moe"]["mlp"]["up"])
    assert 0.05 < error / np.linalg.norm(params["moe"]["mlp"]["up"]) < 0.13


@pytest.mark.parametrize(
    "patterns, words",
    [
        (["*.q_proj"], "names model.layers.0.self_attn.q_proj and not model.layers.0.self_attn.k"),
        (["*.qproj"], "--ignore '*.qproj' names no module; names are like model.layers.0"),
        (["*"], "nothing is left to round"),
    ],
)
def test_patterns_that_fit_no_server_are_one_line(patterns, words, dense):
    with pytest.raises(UserError) as e:
        plan_of(dense, SCHEMES["nvfp4"], patterns)
    assert words in str(e.value)
    kept = plan_of(dense, SCHEMES["nvfp4"], ["*.1.mlp.down_proj"]).kept
    assert kept == ["model.layers.1.mlp.down_proj"]


def test_a_width_that_blocks_do_not_fill_is_named():
    source = array_source(ModelConfig(**DENSE | dict(intermediate_size=72)), {})
    plan_of(source, SCHEMES["fp8_channel"], [])
    with pytest.raises(
        UserError, match=r"down_proj.weight \(128, 72\) is no multiple of .* \(1, 16"
    ):
        plan_of(source, SCHEMES["nvfp4"], [])
    plan_of(source, SCHEMES["nvfp4"], ["*.down_proj"])


@pytest.mark.parametrize("scheme", quick(SCHEMES, 4))
def test_nan_is_named_and_leaves_no_folder(scheme, dense, tmp_path):
    def read(path, index):
        values = np.array(dense.read(path, index))
        if path[-1] == "down" and index[0].start == 1:
            values[0, 3, 5] = np.nan
        return values

    broken = replace(dense, read=read)
    with pytest.raises(UserError, match=r"layers.1.mlp.down_proj.weight holds values that are not"):
        write_quantized(broken, tmp_path, tmp_path / "out", SCHEMES[scheme], Options())
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_one_line_and_leaves_no_folder(dense, tmp_path, monkeypatch):
    wrote = []

    def write(file, array):
        wrote.append(array.nbytes)
        if len(wrote) > 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        file.write(array.tobytes())

    monkeypatch.setattr(safetensors, "write_array", write)
    with pytest.raises(UserError, match="cannot write folder .*No space left"):
        write_quantized(dense, tmp_path, tmp_path / "out", SCHEMES["mxfp4"], Options())
    assert len(wrote) == 6 and not list(tmp_path.iterdir())


@pytest.mark.parametrize("what", quick(["no scale", "other shape", "zero points"], 1))
def test_damaged_packed_tensors_are_named(what, dense, tmp_path):
    folder = Path(tmp_path / "out")
    write_quantized(dense, tmp_path, folder, SCHEMES["int4_group128"], Options())
    name = "model.layers.0.mlp.up_proj.weight"
    tensors = {key: tensor.whole() for key, tensor in safetensors.open_folder(folder).items()}
    words = {
        "no scale": f"lacks its {name}_scale",
        "other shape": "no layout of 4 bits that is read",
        "zero points": f"{name}_zero_point is not read",
    }
    if what == "no scale":
        del tensors[f"{name}_scale"]
    elif what == "other shape":
        tensors[f"{name}_scale"] = tensors[f"{name}_scale"][:-1]
    else:
        tensors[f"{name}_zero_point"] = np.zeros(3, np.int32)
    (folder / "model.safetensors").write_bytes(safetensors.pack(tensors))
    with pytest.raises(UserError) as e:
        from_pretrained(folder)
    assert words[what] in str(e.value)


# ---- activation-aware scales ---------------------------------------------------------------------

GEMMA = dict(norm_zero_centered=True)
FOLDED = {
    "dense": DENSE,
    "experts": EXPERTS,
    "zero-centered": DENSE | GEMMA,
    "layernorm": DENSE | dict(norm="layernorm", model_type=None),
}


@pytest.mark.parametrize("kind", quick(FOLDED, 0))
def test_folded_factors_leave_the_model_as_it_was(kind):
    cfg, definition, params = made(FOLDED[kind])
    source, rng = array_source(cfg, params), np.random.default_rng(2)
    readers = activation_aware.stream_readers(cfg)
    assert sum(map(len, readers.values())) == (4 if kind == "experts" else 3)
    factors = {
        (*norm, row): np.exp(rng.normal(size=128)).astype(np.float32)
        for norm in readers
        for row in range(2)
    }
    folded = activation_aware.folded(source, factors)

    def whole(path, leaf):
        names = tuple(key.key for key in path)
        return folded.read(names, tuple(slice(0, n) for n in leaf.shape))

    changed = jax.tree_util.tree_map_with_path(whole, params)
    logits = jax.jit(lambda p: definition.bind(p)(jnp.asarray(TOKENS)))
    before, after = map(logits, (params, changed))
    np.testing.assert_allclose(after, before, atol=2e-5 * float(np.abs(before).max()))
    moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), changed, params)
    assert moved["dense" if kind != "experts" else "moe"]["attention_norm"]["gain"] > 0.01


def test_a_large_input_keeps_more_of_its_bits(dense):
    """The power that is chosen errs less, by inputs of this size, than no power at all."""
    moments = np.ones(128, np.float32)
    moments[[7, 70]] = 1e4
    given = {(layer, name): moments for layer in (0, 1) for name in ("q", "up")}
    scheme = SCHEMES["int4_group128"]

    def rounded(w):
        return round_matrix(Matrix("x", w), scheme, "max", 0.0).numbers

    factors = activation_aware.choose_factors(dense, given, rounded)
    assert len(factors) == 4
    after = activation_aware.of_all_readers(dense.cfg, given, factors)
    assert set(after) == {(i, n) for i in (0, 1) for n in ("q", "kv", "up")}
    for (stack, branch, row), s in factors.items():
        name = "q" if branch == "attention" else "up"
        np.testing.assert_allclose(after[row, name], moments / s**2)
        assert s[7] > 2 * np.median(s)
        shape = (1, 128, 4, 64) if name == "q" else (1, 128, 2, 128)
        index = (slice(row, row + 1), *(slice(0, n) for n in shape[1:]))
        w = dense.read((stack, branch, name), index).reshape(128, -1).T.copy()
        plain, aware = (float((np.square(rounded(w * f) / f - w) * moments).sum()) for f in (1, s))
        assert aware < 0.7 * plain
