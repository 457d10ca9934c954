"""Tiny random Hugging Face models of every family, with odd sizes."""

from pathlib import Path

import jax
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file

from mjax.convert import main as convert
from mjax.interop.huggingface.families.decoders import DECODERS
from mjax.interop.huggingface.families.recent import RECENT
from tests.oracle import nas

# It has no class for text alone there: published files have images, too.
transformers.AutoModelForCausalLM._model_mapping._model_mapping["mistral4"] = "Mistral4ForCausalLM"

# heads * head_dim differs from hidden_size, one kv head where legal, an odd vocabulary.
_BASE = dict(
    vocab_size=251,
    hidden_size=48,
    intermediate_size=56,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=128,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
    initializer_range=0.15,
)
_NO_HEAD_DIM = {k: v for k, v in _BASE.items() if k != "head_dim"}
_LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=5000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)
_LONGROPE = dict(
    rope_type="longrope",
    rope_theta=10000.0,
    partial_rotary_factor=0.5,
    short_factor=[1.0, 1.1, 1.2],
    long_factor=[1.0, 2.0, 4.0],
    original_max_position_embeddings=32,
)
_LATENT = {k: v for k, v in _NO_HEAD_DIM.items() if k != "num_key_value_heads"} | dict(
    num_key_value_heads=4,
    kv_lora_rank=12,
    qk_nope_head_dim=10,
    qk_rope_head_dim=6,
    v_head_dim=14,
    first_k_dense_replace=3,
)
_ROUTED = dict(
    first_k_dense_replace=1,
    n_routed_experts=8,
    n_shared_experts=2,
    num_experts_per_tok=3,
    moe_intermediate_size=20,
)
_YARN = dict(
    rope_type="yarn",
    rope_theta=500.0,
    factor=8.0,
    mscale=1.0,
    mscale_all_dim=0.707,
    beta_fast=32.0,
    beta_slow=1.0,
    original_max_position_embeddings=16,
)
_NO_ATTENTION = dict(
    vocab_size=251,
    hidden_size=48,
    num_hidden_layers=3,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
    initializer_range=0.15,
)
_HYBRID = (
    {k: v for k, v in _BASE.items() if k != "num_hidden_layers"}
    | dict(mamba_num_heads=12, mamba_head_dim=8, ssm_state_size=10, n_groups=3, chunk_size=8)
    | dict(time_step_min=1e-6)
)  # transformers raises a prompt's steps to it, Megatron-LM does not
_BAMBA = dict(
    mamba_n_heads=12, mamba_d_head=8, mamba_d_state=10, mamba_n_groups=3, mamba_chunk_size=8
)
_SHARED = "shared_expert_intermediate_size"
_QWEN3_NEXT = (
    _BASE
    | dict(num_hidden_layers=4, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=20)
    | dict(shared_expert_intermediate_size=28, linear_num_key_heads=2, linear_num_value_heads=6)
    | dict(linear_key_head_dim=10, linear_value_head_dim=8, initializer_range=0.09)
)
_MROPE = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
_MROPE |= {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
_EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
_QWEN35_MOE = {k: v for k, v in _QWEN3_NEXT.items() if k != "intermediate_size"} | dict(
    layer_types=["linear_attention", "full_attention"] * 2, rope_parameters=_MROPE
)
_QWEN35 = {k: v for k, v in _QWEN35_MOE.items() if k not in (*_EXPERTS, _SHARED)} | dict(
    intermediate_size=56, num_hidden_layers=3, linear_conv_kernel_dim=3
)
_QWEN35 |= dict(layer_types=["full_attention", "linear_attention", "linear_attention"])
_LATENT_ROUTED = {k: v for k, v in (_LATENT | _ROUTED).items() if k != "first_k_dense_replace"}
_NO_KV_HEADS = {k: v for k, v in _NO_HEAD_DIM.items() if k != "num_key_value_heads"}
_HALF = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
_QUARTER = _HALF | {"partial_rotary_factor": 0.25}
_ALPHA = {"rope_type": "dynamic", "rope_theta": 100.0, "alpha": 50.0, "factor": 1.0}
_FULL = ["full_attention"] * 3
_TWO_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": _YARN | dict(rope_theta=5000.0),
}
# name -> (transformers class prefix, options)
MODELS: dict[str, tuple[str, dict]] = {
    "gpt2": (
        "GPT2",
        dict(vocab_size=251, n_positions=128, n_embd=48, n_layer=3, n_head=4, n_inner=56)
        | dict(initializer_range=0.15, bos_token_id=1, eos_token_id=2)
        | dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
    ),
    "llama2": ("Llama", _BASE),
    "llama3": ("Llama", _BASE | dict(num_key_value_heads=1, rope_parameters=_LLAMA3)),
    "llama_tied_biased": (
        "Llama",
        _BASE | dict(tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    ),
    "mistral": ("Mistral", _BASE | dict(sliding_window=9, num_key_value_heads=1)),
    "qwen2": ("Qwen2", _NO_HEAD_DIM | dict(tie_word_embeddings=True)),
    "qwen2_window": (
        "Qwen2",
        _NO_HEAD_DIM | dict(use_sliding_window=True, sliding_window=9, max_window_layers=1),
    ),
    "qwen3": ("Qwen3", _BASE),
    "gemma": ("Gemma", _BASE | dict(num_key_value_heads=1)),
    "gemma2": ("Gemma2", _BASE | dict(sliding_window=9, query_pre_attn_scalar=24)),
    "gemma3": (
        "Gemma3Text",
        _BASE
        | dict(num_hidden_layers=7, sliding_window=9, query_pre_attn_scalar=24)
        | dict(
            rope_parameters={
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0},
            }
        ),
    ),
    "phi3": ("Phi3", _NO_HEAD_DIM | dict(sliding_window=9)),
    "phi3_long": ("Phi3", _NO_HEAD_DIM | dict(rope_parameters=_LONGROPE)),
    "olmo2": ("Olmo2", _NO_HEAD_DIM),
    "smollm3": ("SmolLM3", _NO_HEAD_DIM | dict(num_hidden_layers=5)),
    "granite": (
        "Granite",
        _NO_HEAD_DIM
        | dict(embedding_multiplier=3.0, attention_multiplier=0.2, residual_multiplier=0.5)
        | dict(logits_scaling=4.0),
    ),
    "deepseek_v2": (
        "DeepseekV2",
        _LATENT
        | dict(q_lora_rank=20, rope_parameters={"rope_type": "default", "rope_theta": 50.0}),
    ),
    "deepseek_v2_lite": (
        "DeepseekV2",
        _LATENT | dict(q_lora_rank=None, rope_parameters=_YARN | dict(mscale=0.707)),
    ),
    "deepseek_v3": ("DeepseekV3", _LATENT | dict(q_lora_rank=20, rope_parameters=_YARN)),
    "deepseek_v2_moe": (
        "DeepseekV2",
        _LATENT
        | _ROUTED
        | dict(q_lora_rank=20, topk_method="group_limited_greedy", n_group=4, topk_group=2)
        | dict(rope_parameters=_YARN, routed_scaling_factor=1.5),
    ),
    "deepseek_v2_lite_moe": (
        "DeepseekV2",
        _LATENT | _ROUTED | dict(q_lora_rank=None, topk_method="greedy", rope_parameters=_YARN),
    ),
    "deepseek_v3_moe": (
        "DeepseekV3",
        _LATENT | _ROUTED | dict(q_lora_rank=20, n_group=2, topk_group=1, rope_parameters=_YARN),
    ),
    "glm4_moe": (
        "Glm4Moe",
        _BASE | _ROUTED | dict(attention_bias=True, use_qk_norm=True, routed_scaling_factor=1.5),
    ),
    "glm4_moe_plain": ("Glm4Moe", _BASE | _ROUTED | dict(n_group=2, topk_group=1)),
    "olmoe": ("Olmoe", _NO_HEAD_DIM | dict(num_experts=8, num_experts_per_tok=3)),
    "qwen2_moe": (
        "Qwen2Moe",
        _NO_HEAD_DIM
        | dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=20)
        | dict(shared_expert_intermediate_size=28, mlp_only_layers=[1]),
    ),
    "qwen2_moe_window": (
        "Qwen2Moe",
        _NO_HEAD_DIM
        | dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=20)
        | dict(shared_expert_intermediate_size=28, norm_topk_prob=True, decoder_sparse_step=2)
        | dict(num_hidden_layers=4, use_sliding_window=True, sliding_window=9)
        | dict(max_window_layers=3),
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        _BASE
        | dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=20)
        | dict(norm_topk_prob=True),
    ),
    "gpt_oss": (
        "GptOss",
        _BASE
        | dict(intermediate_size=20, num_local_experts=4, num_experts_per_tok=3, sliding_window=9)
        | dict(
            rope_parameters=dict(rope_type="yarn", rope_theta=500.0, factor=8.0, truncate=False)
            | dict(beta_fast=32.0, beta_slow=1.0, original_max_position_embeddings=16)
        ),
    ),
    "mamba2": (
        "Mamba2",
        _NO_ATTENTION | dict(num_heads=12, head_dim=8, state_size=10, n_groups=3, chunk_size=8),
    ),
    "mamba2_tied": (
        "Mamba2",
        _NO_ATTENTION
        | dict(num_heads=4, head_dim=24, state_size=6, n_groups=1, tie_word_embeddings=True)
        | dict(use_conv_bias=False, conv_kernel=3),
    ),
    "nemotron_h": (
        "NemotronH",
        _HYBRID | dict(layers_block_type=["linear_attention", "mlp", "full_attention"] * 2),
    ),
    "nemotron_h_moe": (
        "NemotronH",
        _HYBRID
        | dict(layers_block_type=["linear_attention", "moe", "full_attention", "moe"])
        | dict(n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=20)
        | dict(moe_shared_expert_intermediate_size=28, routed_scaling_factor=1.5),
    ),
    "nemotron_h_latent": (
        "NemotronH",
        _HYBRID
        | dict(layers_block_type=["linear_attention", "moe", "full_attention", "moe"])
        | dict(n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=20)
        | dict(moe_shared_expert_intermediate_size=28, moe_latent_size=16),
    ),
    "bamba": (
        "Bamba",
        _NO_HEAD_DIM | _BAMBA | dict(attn_layer_indices=[1]),
    ),
    "falcon_h1": (
        "FalconH1",
        _BASE
        | _BAMBA
        | dict(mamba_d_ssm=96, mamba_n_heads=6, mamba_d_head=16, embedding_multiplier=3.0)
        | dict(ssm_in_multiplier=0.7, ssm_out_multiplier=0.4, key_multiplier=0.3)
        | dict(attention_in_multiplier=1.2, attention_out_multiplier=0.8, lm_head_multiplier=0.25)
        | dict(ssm_multipliers=[0.5, 1.5, 0.8, 1.1, 0.6], mlp_multipliers=[0.7, 0.3]),
    ),
    "falcon_h1_norm": (
        "FalconH1",
        _NO_HEAD_DIM
        | _BAMBA
        | dict(mamba_d_ssm=96, mamba_rms_norm=True, mamba_norm_before_gate=False),
    ),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        _NO_HEAD_DIM
        | _BAMBA
        | dict(layer_types=["linear_attention", "full_attention", "linear_attention"])
        | dict(num_local_experts=6, num_experts_per_tok=2, shared_intermediate_size=28)
        | dict(embedding_multiplier=3.0, attention_multiplier=0.2, residual_multiplier=0.5)
        | dict(logits_scaling=4.0),
    ),
    "granitemoehybrid_dense": (
        "GraniteMoeHybrid",
        _NO_HEAD_DIM
        | _BAMBA
        | dict(layer_types=["linear_attention", "full_attention", "linear_attention"])
        | dict(num_local_experts=0, shared_intermediate_size=28, position_embedding_type="rope"),
    ),
    "qwen3_next": ("Qwen3Next", _QWEN3_NEXT),
    "qwen3_next_biased": (
        "Qwen3Next",
        _QWEN3_NEXT
        | dict(layer_types=["full_attention", "linear_attention"] * 2)
        | dict(linear_conv_kernel_dim=3, attention_bias=True, tie_word_embeddings=True)
        | dict(rope_parameters=dict(rope_theta=500.0, partial_rotary_factor=0.5)),
    ),
    "qwen3_5": ("Qwen3_5Text", _QWEN35),
    "qwen3_5_moe": ("Qwen3_5MoeText", _QWEN35_MOE),
    "mixtral": ("Mixtral", _BASE | dict(num_local_experts=4, num_experts_per_tok=2)),
    "olmo3": ("Olmo3", _NO_HEAD_DIM | dict(num_hidden_layers=5, rope_parameters=_TWO_ROPES)),
    "seed_oss": ("SeedOss", _BASE | dict(residual_dropout=0.0, attention_dropout=0.0)),
    "arcee": ("Arcee", _NO_HEAD_DIM | dict(attention_bias=True, mlp_bias=True)),
    "minimax_m2": (
        "MiniMaxM2",
        _BASE
        | dict(intermediate_size=20, num_local_experts=8, num_experts_per_tok=3, rotary_dim=8),
    ),
    "dots1": (
        "Dots1",
        _BASE | _ROUTED | dict(sliding_window=9, max_window_layers=2, norm_topk_prob=True),
    ),
    "exaone4": ("Exaone4", _NO_HEAD_DIM | dict(num_hidden_layers=5, sliding_window=9)),
    "exaone4_full": ("Exaone4", _NO_HEAD_DIM | dict(sliding_window=None, layer_types=_FULL)),
    "exaone_moe": (
        "ExaoneMoe",
        _BASE
        | dict(num_hidden_layers=5, sliding_window=9, num_experts=8, num_experts_per_tok=3)
        | dict(moe_intermediate_size=20, n_group=2, topk_group=1)
        | dict(mlp_layer_types=["dense", "sparse", "sparse", "dense", "sparse"]),
    ),
    "hy_v3": (
        "HYV3",
        _BASE
        | dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=20)
        | dict(num_shared_experts=2),
    ),
    "solar_open": (
        "SolarOpen",
        {k: v for k, v in (_BASE | _ROUTED).items() if k != "first_k_dense_replace"}
        | dict(attention_bias=True),
    ),
    "glm4_moe_lite": (
        "Glm4MoeLite",
        _LATENT_ROUTED
        | dict(q_lora_rank=20, n_group=2, topk_group=1)
        | dict(mlp_layer_types=["sparse", "dense", "sparse"]),
    ),
    "youtu": (
        "Youtu",
        {k: v for k, v in _LATENT.items() if k != "first_k_dense_replace"}
        | dict(q_lora_rank=None, rope_parameters=_YARN),
    ),
    "granitemoe": (
        "GraniteMoe",
        _NO_HEAD_DIM
        | dict(num_local_experts=6, num_experts_per_tok=2, embedding_multiplier=3.0)
        | dict(attention_multiplier=0.2, residual_multiplier=0.5, logits_scaling=4.0),
    ),
    "starcoder2": ("Starcoder2", _NO_HEAD_DIM | dict(sliding_window=9)),
    "glm": ("Glm", _BASE),
    "glm4": ("Glm4", _BASE | dict(rope_parameters=_QUARTER)),
    "cohere2": (
        "Cohere2",
        _NO_HEAD_DIM | dict(num_hidden_layers=5, sliding_window=9, logit_scale=0.25),
    ),
    "ernie4_5": ("Ernie4_5", _BASE | dict(use_bias=True)),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        _NO_HEAD_DIM
        | dict(num_hidden_layers=4, moe_layer_end_index=2, moe_num_experts=8, moe_k=3)
        | dict(moe_intermediate_size=20),
    ),
    "helium": ("Helium", _BASE | dict(head_dim=12, attention_bias=True, mlp_bias=True)),
    "phi": ("Phi", _NO_HEAD_DIM),
    "phi_qk_norm": ("Phi", _NO_HEAD_DIM | dict(qk_layernorm=True)),
    "gpt_neox": ("GPTNeoX", _NO_KV_HEADS | dict(rope_parameters=_HALF)),
    "gpt_neox_sequential": (
        "GPTNeoX",
        _NO_KV_HEADS
        | dict(use_parallel_residual=False, attention_bias=False, rope_parameters=_HALF),
    ),
    "stablelm": ("StableLm", _NO_HEAD_DIM | dict(rope_parameters=_HALF)),
    "stablelm_parallel": (
        "StableLm",
        _NO_HEAD_DIM | dict(use_parallel_residual=True, use_qkv_bias=True, rope_parameters=_HALF),
    ),
    "ministral3": (
        "Ministral3",
        _BASE | dict(rope_parameters=_YARN | dict(llama_4_scaling_beta=0.3)),
    ),
    "olmo": ("Olmo", _NO_HEAD_DIM),
    "hunyuan_v1_dense": ("HunYuanDenseV1", _BASE | dict(rope_parameters=_ALPHA)),
    "hunyuan_v1_moe": (
        "HunYuanMoEV1",
        _BASE | dict(rope_parameters=_ALPHA, num_experts=8, moe_topk=3, hidden_size=40),
    ),
    "granite_swa": (
        "GraniteSWA",
        _NO_HEAD_DIM
        | dict(num_hidden_layers=6, sliding_window=9, embedding_multiplier=3.0)
        | dict(attention_multiplier=0.2, residual_multiplier=0.5, logits_scaling=4.0)
        | dict(layer_rope_theta=[0, 100.0, 0, 100.0, 5000.0, 100.0]),
    ),
    "mistral4": (
        "Mistral4",
        _LATENT
        | _ROUTED
        | dict(q_lora_rank=18, n_group=4, topk_group=2, n_shared_experts=1)
        | dict(rope_parameters=_YARN | dict(llama_4_scaling_beta=0.3)),
    ),
    "nanochat": ("NanoChat", _NO_HEAD_DIM),
    "nemotron_nas": (
        "DeciLM",
        _NO_HEAD_DIM | dict(num_hidden_layers=len(nas.BLOCKS), block_configs=nas.BLOCKS),
    ),
}

# Of the rows in `decoders.py` and `recent.py`, those that run by default: one a part of models.
_BY_DEFAULT = ("glm4", "gpt_neox", "phi", "ministral3", "nanochat")
_OF_DECODERS = [name for name in MODELS if name.partition("_full")[0] in DECODERS | RECENT]
_OF_DECODERS += [
    "qwen3_5",
    "qwen3_next_biased",
    "phi_qk_norm",
    "gpt_neox_sequential",
    "stablelm_parallel",
]
# Others of whose kind a sister runs by default.
_OF_A_KIND = {
    "deepseek_v2_lite",
    "falcon_h1_norm",
    "glm4_moe_plain",
    "granitemoehybrid_dense",
    "mamba2_tied",
    "nemotron_h_moe",
    "phi3_long",
    "qwen2_moe_window",
    "qwen2_window",
}
LATER = frozenset(_OF_DECODERS) - set(_BY_DEFAULT) | _OF_A_KIND


def add_to_vectors(model: torch.nn.Module) -> torch.nn.Module:
    """Make biases and norms random too."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def save_gradients(
    model: torch.nn.Module, like: torch.nn.Module, folder: Path, may_lack: bool = False
) -> Path:
    """Save the gradients of `model` as the weights of `like`, a model of its kind.

    So they go through the import that weights go through. With `may_lack`, what has no gradient is
    saved as zeros.
    """
    with torch.no_grad():
        for p, q in zip(like.parameters(), model.parameters(), strict=True):
            p.copy_(torch.zeros_like(p) if may_lack and q.grad is None else q.grad)
    like.save_pretrained(folder)
    return folder


def there_and_back(
    folder: Path, checkpoint: Path, out: Path, monkeypatch: pytest.MonkeyPatch, *more: str
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The tensors of a model in `folder`, and those of its export to `out`, by mjax.convert.

    more: options of the import.
    """
    for argv in (
        ["import", "--hf", folder, "--out", checkpoint, *more],
        ["export", "--ckpt", checkpoint, "--hf", out, "--dtype", "float32"],
    ):
        monkeypatch.setattr("sys.argv", ["convert", *map(str, argv)])
        assert convert() == 0
    return tuple(load_file(path / "model.safetensors") for path in (folder, out))


def assert_gradients_near(found: dict, wanted: dict, least: float = 0.0) -> None:
    """Each leaf within 2e-4 of the largest entry that is wanted, or of `least` if that is more."""
    leaves = jax.tree_util.tree_leaves_with_path(found)
    for (path, got), want in zip(leaves, jax.tree.leaves(wanted), strict=True):
        bound = 2e-4 * max(np.abs(want).max(), least)
        np.testing.assert_allclose(got, want, rtol=0, atol=bound, err_msg=str(path))


def make(name: str) -> torch.nn.Module:
    """An fp32 model whose biases and norms are random too."""
    prefix, options = MODELS[name]
    torch.manual_seed(0)
    home = nas if prefix == "DeciLM" else transformers
    config = getattr(home, f"{prefix}Config")(**options, attn_implementation="eager")
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for path, p in model.named_parameters():
            if path.endswith("bias") or p.ndim == 1:
                p.add_(0.1 * torch.randn_like(p))
            if path.endswith("linear_attn.A_log"):
                p.sub_(4.0)  # so that states outlive some tokens
        for path, buffer in model.named_buffers():
            if path.endswith("e_score_correction_bias"):
                buffer.add_(0.1 * torch.randn_like(buffer))
    return model
