"""`mjax quantize`: compressed-tensors and transformers read what was written, bit for bit."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.torch
import torch
import transformers

from mjax import from_pretrained
from mjax.interop.coded.scaled import open_weights
from mjax.interop.quantized.folder import Options, write_quantized
from mjax.interop.quantized.schemes import SCHEMES
from mjax.interop.sources import source_of
from tests.marks import quick
from tests.oracle import families

pytest.importorskip("compressed_tensors", reason="pip install compressed-tensors to check it")
TOKENS = np.random.default_rng(0).integers(0, 251, (2, 24))
_WIDE = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=2, head_dim=64)
MODELS = {
    "llama3": _WIDE | dict(num_key_value_heads=2),
    "mixtral": _WIDE,
    "qwen3_moe": _WIDE | dict(moe_intermediate_size=128, num_experts=4, num_experts_per_tok=2),
}
PRESETS = {
    "fp8_channel": "FP8_DYNAMIC",
    "fp8_block128": "FP8_BLOCK",
    "nvfp4": "NVFP4A16",
    "mxfp4": "MXFP4A16",
    "int4_group128": "W4A16",
}
_UNSAID = ("observer", "zp_dtype")  # of what makes scales, and of zero points, which there are none
CASES = [(name, scheme) for name in MODELS for scheme in SCHEMES]


@pytest.fixture
def original(request, tmp_path, monkeypatch):
    """The folder of a model of Hugging Face, wide enough for every block."""
    name = request.param
    prefix, options = families.MODELS[name]
    monkeypatch.setitem(families.MODELS, name, (prefix, options | MODELS[name]))
    families.make(name).save_pretrained(tmp_path / "hf")
    return tmp_path / "hf"


def stored_in(folder) -> dict[str, torch.Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    return {k: v for f in files for k, v in safetensors.torch.load_file(f).items()}


def decompressed(folder) -> dict[str, torch.Tensor]:
    """The matrices by compressed-tensors' own program, one after the other."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    said = json.loads((folder / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(said)
    scheme = config.config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry(config.format)
    stored = stored_in(folder)
    modules = {name.removesuffix("_scale") for name in stored if name.endswith(".weight_scale")}
    found = {}
    for weight in modules:
        prefix = weight.removesuffix("weight")
        parts = {k.removeprefix(prefix): v for k, v in stored.items() if k.startswith(prefix)}
        assert set(parts) == set(compressor.compression_param_names(scheme))
        found[weight] = compressor.decompress(parts, scheme)["weight"]
    return found


@pytest.mark.parametrize(
    ("original", "scheme"), quick(CASES, *range(7), 9, 11, 13, 15), indirect=["original"]
)
def test_compressed_tensors_reads_the_numbers_that_mjax_reads(original, scheme, tmp_path):
    out = tmp_path / "out"
    options = Options(max_shard_bytes=200_000)
    write_quantized(source_of(original), original, out, SCHEMES[scheme], options)
    assert len(list(out.glob("*.safetensors"))) > 1
    ours, theirs = open_weights(out), decompressed(out)
    linear = {
        name
        for name, value in stored_in(original).items()
        if value.ndim == 2 and not any(part in name for part in ("embed", "lm_head", "gate.weight"))
    }
    assert set(theirs) == linear and len(theirs) > 10
    for name, value in theirs.items():
        height, width = ours[name].shape
        with open(ours[name].file, "rb") as file:
            place = file.fileno(), 0, width, slice(0, height), slice(0, width)
            found = ours[name].read(*place)
        kind = np.dtype(ml_dtypes.bfloat16) if value.dtype == torch.bfloat16 else np.float32
        assert found.dtype == kind and value.shape == found.shape
        np.testing.assert_array_equal(found.astype(np.float32), value.float().numpy(), name)


@pytest.mark.parametrize("scheme", quick(SCHEMES, 0, 3))
@pytest.mark.parametrize("original", ["llama3"], indirect=True)
def test_transformers_loads_it_and_has_our_logits(original, scheme, tmp_path):
    out = tmp_path / "out"
    write_quantized(source_of(original), original, out, SCHEMES[scheme], Options())
    config = transformers.CompressedTensorsConfig(dequantize=True)
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
        out,
        quantization_config=config,
        dtype=torch.float32,
        attn_implementation="eager",
        output_loading_info=True,
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    ours = jax.jit(from_pretrained(out).model)(jnp.asarray(TOKENS))
    with torch.no_grad():
        wanted = theirs.eval()(torch.tensor(TOKENS)).logits.numpy()
    assert np.abs(ours - wanted).max() <= 2e-4 * np.abs(wanted).max()


@pytest.mark.parametrize("scheme", PRESETS)
def test_the_config_is_a_preset_of_compressed_tensors(scheme):
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme

    read = QuantizationConfig.model_validate(SCHEMES[scheme].config(["lm_head"]))
    preset = preset_name_to_scheme(PRESETS[scheme], ["Linear"])
    for part in ("weights", "input_activations"):
        found, wanted = (
            {k: v for k, v in vars(getattr(of, part)).items() if k not in _UNSAID}
            if getattr(of, part)
            else {}
            for of in (read.config_groups["group_0"], preset)
        )
        assert found == wanted
