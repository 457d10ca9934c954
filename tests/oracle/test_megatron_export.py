"""Oracle: what mjax writes as torch_dist, torch's own loader reads, and so does mjax."""

import jax
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from flax import nnx

from mjax.checkpoint.base.source import array_source, flat
from mjax.config.schema.model import ModelConfig
from mjax.errors import UserError
from mjax.interop.megatron.parameters import megatron_source
from mjax.interop.megatron.writing import export_torch_dist
from mjax.models import build, definition_of, split

SIZES = {"vocab_size": 100, "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 24}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
MLA = {"q_lora_rank": 8, "kv_lora_rank": 6, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2}
MODELS = {
    "gqa": {"attention": HEADS | {"qk_norm": True}},
    "experts": {
        "layer_pattern": "full+mlp, full+experts",
        "attention": HEADS,
        "moe": {"num_experts": 4, "moe_intermediate_size": 8, "latent_size": 12},
    },
    "latent": {
        "layer_pattern": "mla+mlp, mla+experts",
        "num_nextn_predict_layers": 1,
        "attention": {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 4},
        "mla": MLA | {"v_head_dim": 4, "latent_norm_eps": 1e-5},
        "moe": {
            "num_experts": 4, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8,
            "scoring_func": "sigmoid", "expert_bias": True, "shared_expert_gate": True,
        },
    },
    "t5": {
        "layer_pattern": "bidirectional+mlp, full+cross+mlp", "position_embedding": "relative",
        "attention": HEADS | {"num_key_value_heads": 4},
    },
    "hybrid": {
        "layer_pattern": "megatron:M*-E", "num_hidden_layers": 4, "attention": HEADS,
        "mamba": {"mamba_num_heads": 4, "mamba_head_dim": 8, "state_size": 8, "n_groups": 2},
        "moe": {"num_experts": 4, "moe_intermediate_size": 8},
    },
}  # fmt: skip


def source_of_model(name: str):
    cfg = ModelConfig(**(SIZES | MODELS[name]))
    _, params = split(build(cfg, nnx.Rngs(0)))
    leaves, tree = jax.tree.flatten(params)
    rng = np.random.default_rng(0)
    noisy = [np.asarray(x + 0.1 * rng.normal(size=x.shape), np.float32) for x in leaves]
    return array_source(cfg, jax.tree.unflatten(tree, noisy))


@pytest.mark.parametrize("impl", ["transformer_engine", "local"])
@pytest.mark.parametrize("name", MODELS)
def test_what_is_written_reads_back(tmp_path, name, impl):
    source = source_of_model(name)
    export_torch_dist(source, tmp_path / "out", "float32", impl)
    back = megatron_source(tmp_path / "out")
    back.check()
    assert back.cfg.layer_kinds == source.cfg.layer_kinds
    for path, spec in flat(definition_of(source.cfg).specs).items():
        box = tuple(map(slice, spec.shape))
        want = source.read(path, box)
        if spec.axes[:1] == ("vocab",):
            want = np.where(np.arange(len(want))[:, None] < source.cfg.vocab_size, want, 0)
        np.testing.assert_array_equal(back.read(path, box), want, str(path))


def test_torch_itself_loads_it(tmp_path):
    source = source_of_model("gqa")
    export_torch_dist(source, tmp_path / "out", "bfloat16", "transformer_engine")
    folder = tmp_path / "out" / "release"
    name = "decoder.layers.mlp.linear_fc2.weight"
    state = {name: torch.zeros(2, 16, 24, dtype=torch.bfloat16)}
    dcp.load(state, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    want = source.read(("dense", "mlp", "down"), (slice(None),) * 3).swapaxes(1, 2)
    np.testing.assert_array_equal(state[name].float(), torch.tensor(want).bfloat16().float())
    common = torch.load(folder / "common.pt", weights_only=False)
    assert common["args"].num_layers == 2 and common["checkpoint_version"] == 3.0


def test_a_model_without_arguments_is_named_and_nothing_is_written(tmp_path):
    sizes = SIZES | {"attention": HEADS, "final_logit_softcapping": 30.0}
    _, params = split(build(ModelConfig(**sizes), nnx.Rngs(0)))
    source = array_source(ModelConfig(**sizes), params)
    with pytest.raises(UserError, match="no arguments for model.final_logit_softcapping"):
        export_torch_dist(source, tmp_path / "out", "float32", "local")
    assert not (tmp_path / "out").exists()
