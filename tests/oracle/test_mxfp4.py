"""gpt-oss as published: MXFP4 experts, read with the bits that transformers makes of them."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from mjax.config.schema.run import MeshConfig
from mjax.convert import main as convert
from mjax.errors import UserError
from mjax.interop.coded.mxfp4 import pairs_of_codes
from mjax.interop.pretrained import from_pretrained
from mjax.sharding.mesh import make_mesh

EXPERTS, HIDDEN, WIDTH = 4, 64, 96
TOKENS = np.random.default_rng(0).integers(3, 251, (2, 24))


@pytest.fixture
def packed(tmp_path):
    """(folder in MXFP4, {tensor: dequantized by transformers}); its scales lie in another file."""
    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        vocab_size=251,
        hidden_size=HIDDEN,
        intermediate_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=EXPERTS,
        num_experts_per_tok=2,
        sliding_window=9,
        max_position_embeddings=128,
        initializer_range=0.15,
        pad_token_id=0,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    tensors, scales, wanted = {}, {}, {}
    for name, value in model.state_dict().items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = value.contiguous()
            continue
        _, inputs, outputs = value.shape
        shape = EXPERTS, outputs, inputs // 32
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
        scales[f"{name}_scales"] = torch.randint(121, 126, shape, dtype=torch.uint8)
        wanted[name] = convert_moe_packed_tensors(
            tensors[f"{name}_blocks"], scales[f"{name}_scales"]
        )
        assert wanted[name].shape == value.shape
    folder = tmp_path / "mxfp4"
    folder.mkdir()
    said = json.loads(config.to_json_string(use_diff=False))
    said |= {"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"]}
    said |= {
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    }
    (folder / "config.json").write_text(json.dumps(said))
    files = {"a.safetensors": tensors, "b.safetensors": scales}
    for file, part in files.items():
        save_file(part, folder / file, metadata={"format": "pt"})
    where = {name: file for file, part in files.items() for name in part}
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder, wanted


def test_every_code_under_every_scale_has_transformers_bits():
    codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1)  # [scales, codes]
    scales = torch.arange(256, dtype=torch.uint8)
    blocks = codes.reshape(1, 256, 16, 16)
    found = convert_moe_packed_tensors(blocks, scales[None, :, None].repeat(1, 1, 16))
    theirs = found[0].T.contiguous().view(torch.int16).numpy().view(np.uint16)
    ours = pairs_of_codes().view(np.uint16).reshape(256, 512)
    np.testing.assert_array_equal(ours, theirs)


def test_a_packed_checkpoint_is_read_bit_for_bit(packed, tmp_path, monkeypatch):
    """Whole, in shards whose cuts are no multiples of 32, and out again in bfloat16."""
    folder, wanted = packed
    ours = from_pretrained(folder, dtype="bfloat16")
    mesh = make_mesh(MeshConfig(tp=2, ep=2), jax.devices()[:4])
    split = from_pretrained(folder, mesh, dtype="bfloat16").params
    jax.tree.map(np.testing.assert_array_equal, split, ours.params)
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts"
        both = wanted[f"{prefix}.gate_up_proj"].view(torch.int16).numpy()
        up = np.asarray(ours.params["moe"]["mlp"]["up"][layer]).view(np.int16)
        np.testing.assert_array_equal(up, np.stack([both[..., ::2], both[..., 1::2]], 2))
        down = np.asarray(ours.params["moe"]["mlp"]["down"][layer]).view(np.int16)
        theirs = wanted[f"{prefix}.down_proj"].view(torch.int16).numpy()
        np.testing.assert_array_equal(down, theirs)

    argv = ["convert", "export", "--ckpt", str(folder), "--hf", str(tmp_path / "bf16")]
    monkeypatch.setattr("sys.argv", argv)
    assert convert() == 0
    after = load_file(tmp_path / "bf16" / "model.safetensors")
    for name, tensor in wanted.items():
        assert torch.equal(after[name].view(torch.int16), tensor.view(torch.int16)), name
    assert "quantization_config" not in json.loads((tmp_path / "bf16/config.json").read_text())


def test_logits_equal_those_of_transformers_from_the_same_files(packed):
    folder, _ = packed
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        quantization_config=transformers.Mxfp4Config(dequantize=True),
        dtype=torch.float32,
        attn_implementation="eager",
    )
    with torch.no_grad():
        wanted = theirs.eval()(torch.tensor(TOKENS)).logits.float().numpy()
    ours = from_pretrained(folder)
    logits = jax.jit(ours.model)(jnp.asarray(TOKENS, jnp.int32))
    np.testing.assert_allclose(logits, wanted, rtol=0, atol=2e-4 * np.abs(wanted).max())


@pytest.mark.parametrize("change", ["missing", "shape"])
def test_half_a_tensor_is_named(packed, change):
    folder, _ = packed
    scales = load_file(folder / "b.safetensors")
    name = "model.layers.0.mlp.experts.down_proj_scales"
    if change == "missing":
        del scales[name]
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        del index["weight_map"][name]
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        scales[name] = scales[name][..., :-1].contiguous()
    save_file(scales, folder / "b.safetensors")
    message = "lacks its .*down_proj_scales" if change == "missing" else "is not MXFP4"
    with pytest.raises(UserError, match=message):
        from_pretrained(folder)
