"""FP8 in and out: compressed-tensors and transformers read ours, and we read theirs."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.torch
import torch
import transformers

from mjax import convert, from_pretrained
from mjax.checkpoint.base.safetensors import open_folder
from mjax.errors import UserError
from mjax.interop.huggingface.float8 import quantize_rows
from tests.marks import quick
from tests.oracle import families

pytest.importorskip("compressed_tensors", reason="pip install compressed-tensors to check FP8")
TOKENS = np.random.default_rng(0).integers(0, 251, (2, 24))


def export(monkeypatch, ckpt, out, *options):
    argv = ["convert", "export", "--ckpt", ckpt, "--hf", out, "--dtype", "float8", *options]
    monkeypatch.setattr(sys, "argv", [str(arg) for arg in argv])
    convert.main()


def weights_of(folder) -> dict[str, torch.Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    return {k: v for f in files for k, v in safetensors.torch.load_file(f).items()}


@pytest.mark.parametrize("name", ["llama3", "llama_tied_biased", "phi3", "gemma3", "qwen3"])
def test_transformers_reads_what_we_say_the_weights_are(name, tmp_path, monkeypatch):
    original = families.make(name)
    original.save_pretrained(tmp_path / "hf")
    export(monkeypatch, tmp_path / "hf", tmp_path / "f8", "--max-shard-gb", "3e-5")
    stored = weights_of(tmp_path / "f8")
    assert len(list((tmp_path / "f8").glob("*.safetensors"))) > 1

    plain, scaled = {}, {k for k in stored if k.endswith("_scale")}
    for key, value in stored.items():
        if key + "_scale" in scaled:
            scale = stored[key + "_scale"]
            assert value.dtype == torch.float8_e4m3fn and scale.shape == (len(value), 1)
            assert torch.equal(scale.bfloat16().float(), scale)
            plain[key] = value.float() * scale
        elif key not in scaled:
            assert value.dtype == torch.bfloat16
            plain[key] = value.float()
    linear = {
        f"{path}.weight" for path, m in original.named_modules() if isinstance(m, torch.nn.Linear)
    }
    assert scaled == {f"{path}_scale" for path in linear - {"lm_head.weight"}}

    (tmp_path / "plain").mkdir()
    original.config.save_pretrained(tmp_path / "plain")
    safetensors.torch.save_file(plain, tmp_path / "plain" / "model.safetensors")
    ours = jax.jit(from_pretrained(tmp_path / "plain").model)(jnp.asarray(TOKENS))
    config = transformers.CompressedTensorsConfig(dequantize=True)
    kinds = dict(dtype=torch.float32, attn_implementation="eager")
    read = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "f8", quantization_config=config, **kinds
    )
    with torch.no_grad():
        theirs = read.eval()(torch.tensor(TOKENS)).logits.numpy()
        exact = original(torch.tensor(TOKENS)).logits.numpy()
    assert np.abs(ours - theirs).max() <= 2e-4 * np.abs(theirs).max()
    assert 1e-3 < np.abs(theirs - exact).max() / np.abs(exact).max() < 0.25  # it is FP8, no more


def test_as_served_with_activations_quantized_per_token(tmp_path, monkeypatch):
    """The way without `dequantize`: compressed-tensors' own forward pass of an FP8 model."""
    original = families.make("llama2")
    original.save_pretrained(tmp_path / "hf")
    export(monkeypatch, tmp_path / "hf", tmp_path / "f8")
    said = json.loads((tmp_path / "f8" / "config.json").read_text())["quantization_config"]
    assert said["quant_method"] == "compressed-tensors" and said["ignore"] == ["lm_head"]
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "f8", dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    scheme = model.model.layers[0].mlp.up_proj.quantization_scheme
    assert scheme.weights.strategy == "channel" and scheme.input_activations.dynamic
    with torch.no_grad():
        served, exact = (m.eval()(torch.tensor(TOKENS)).logits for m in (model, original))
    assert 1e-3 < (served - exact).abs().max() / exact.abs().max() < 0.25


def test_every_value_is_as_near_as_eight_bits_allow():
    rng = np.random.default_rng(0)
    w = (rng.normal(size=(64, 200)) * np.exp(rng.normal(size=(64, 1)) * 5)).astype(np.float32)
    w[3] = 0
    codes, scale = quantize_rows(w.copy(), "w")
    error = np.abs(codes.astype(np.float32) * scale - w)
    assert (error <= np.maximum(np.abs(w) / 16, scale * 2.0**-10) * 1.0001).all()
    largest = np.abs(codes.astype(np.float32)).max(1)
    assert ((largest >= 416) | (np.arange(64) == 3)).all() and largest[3] == 0  # of 448
    w[5, 7] = np.inf
    with pytest.raises(UserError, match="tensor w holds values that are not finite"):
        quantize_rows(w, "w")


def decompressed(folder) -> dict[str, torch.Tensor]:
    """Weights by compressed-tensors' own program, channel by channel."""
    from compressed_tensors.compressors import FloatQuantizationCompressor
    from compressed_tensors.quantization import QuantizationScheme

    said = json.loads((folder / "config.json").read_text())["quantization_config"]
    scheme = QuantizationScheme.model_validate(said["config_groups"]["group_0"])
    stored = weights_of(folder)
    out = {}
    for name, value in stored.items():
        scale = stored.get(name + "_scale")
        if scale is not None:
            parts = dict(weight=value, weight_scale=scale)
            value = FloatQuantizationCompressor.decompress(parts, scheme)["weight"]
        if not name.endswith("_scale"):
            out[name] = value.float()
    return out


def test_our_import_of_our_export_is_compressed_tensors_own(tmp_path, monkeypatch):
    original = families.make("qwen3")
    original.save_pretrained(tmp_path / "hf")
    export(monkeypatch, tmp_path / "hf", tmp_path / "f8")
    (tmp_path / "plain").mkdir()
    original.config.save_pretrained(tmp_path / "plain")
    theirs = {name: value.contiguous() for name, value in decompressed(tmp_path / "f8").items()}
    safetensors.torch.save_file(theirs, tmp_path / "plain" / "model.safetensors")
    found, wanted = (from_pretrained(tmp_path / name).params for name in ("f8", "plain"))
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


@pytest.mark.parametrize("strategy", ["tensor", "channel", "block"])
def test_what_compressed_tensors_writes_is_read_with_its_numbers(strategy, tmp_path):
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )

    model = families.make("qwen3")
    (tmp_path / "plain").mkdir()
    kinds = dict(num_bits=8, type="float", strategy=strategy, dynamic=False)
    kinds |= dict(block_structure=[16, 24]) if strategy == "block" else {}
    scheme = QuantizationScheme.model_validate(dict(targets=["Linear"], weights=kinds))
    config = QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"])
    apply_quantization_config(model, config)
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            at = module.weight_scale.shape
            sizes = [-(-n // k) for n, k in zip(module.weight.shape, at, strict=False)]
            sizes = sizes if len(at) == 2 else module.weight.shape
            if strategy == "block":
                sizes = 16, 24
            blocks = module.weight.abs().split(sizes[0], 0)
            largest = [[b.max() for b in rows.split(sizes[1], 1)] for rows in blocks]
            scale = torch.tensor(largest).reshape(at) / 448
            module.weight_scale.data.copy_(scale)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(tmp_path / "coded")
    compressor.update_config(tmp_path / "coded")
    compressor.decompress_model(model)
    tensors = {
        name: value.contiguous()
        for name, value in model.state_dict().items()
        if not name.endswith(("_scale", "_zero_point"))
    }
    safetensors.torch.save_file(tensors, tmp_path / "plain" / "model.safetensors")
    said = json.loads((tmp_path / "coded" / "config.json").read_text())
    assert said.pop("quantization_config")["quant_method"] == "compressed-tensors"
    (tmp_path / "plain" / "config.json").write_text(json.dumps(said))
    stored = weights_of(tmp_path / "coded")
    assert stored["model.layers.0.mlp.up_proj.weight"].dtype == torch.float8_e4m3fn
    found, wanted = (from_pretrained(tmp_path / name).params for name in ("coded", "plain"))
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


_WIDE = dict(hidden_size=256, intermediate_size=384, moe_intermediate_size=256, head_dim=64)


@pytest.mark.parametrize("name", quick(["mixtral", "qwen3_moe", "deepseek_v3_moe"], 2))
def test_transformers_reads_experts_in_blocks(name, tmp_path, monkeypatch):
    """Its own dequantization of 128-blocks gives the logits of what we read; of several blocks."""
    if name == "qwen3_moe":
        prefix, options = families.MODELS[name]
        monkeypatch.setitem(families.MODELS, name, (prefix, options | _WIDE))
    families.make(name).save_pretrained(tmp_path / "hf")
    export(monkeypatch, tmp_path / "hf", tmp_path / "f8", "--dtype", "float8_block")
    said = json.loads((tmp_path / "f8" / "config.json").read_text())["quantization_config"]
    assert said["weight_block_size"] == [128, 128] and "lm_head" in said["modules_to_not_convert"]
    stored = weights_of(tmp_path / "f8")
    coded = {name for name, value in stored.items() if value.dtype == torch.float8_e4m3fn}
    assert any(".experts.3." in name for name in coded)
    assert {f"{name}_scale_inv" for name in coded} == {n for n in stored if n.endswith("_inv")}
    shapes = {tuple(value.shape) for key, value in stored.items() if key.endswith("_inv")}
    assert ((2, 2) in shapes) == (name == "qwen3_moe")
    config = transformers.FineGrainedFP8Config(dequantize=True)
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "f8",
        quantization_config=config,
        dtype=torch.float32,
        attn_implementation="eager",
        output_loading_info=True,
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    ours = jax.jit(from_pretrained(tmp_path / "f8").model)(jnp.asarray(TOKENS))
    with torch.no_grad():
        wanted = theirs.eval()(torch.tensor(TOKENS)).logits.float().numpy()
    assert np.abs(ours - wanted).max() <= 2e-4 * np.abs(wanted).max()


@pytest.mark.parametrize("name,message", [("gpt2", "Conv1D"), ("mixtral", "experts")])
def test_families_without_the_layout_are_refused(name, message, tmp_path, monkeypatch):
    families.make(name).save_pretrained(tmp_path / "hf")
    with pytest.raises(UserError, match=message):
        export(monkeypatch, tmp_path / "hf", tmp_path / "f8")
    assert not (tmp_path / "f8").exists()
    assert open_folder(tmp_path / "hf")
