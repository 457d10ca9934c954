"""`ModelConfig` -> the arguments that Megatron-LM would have saved.

Invariant: read again, they give the same model; a key that they cannot say is refused by name.
"""

from mjax.checkpoint.base.continuation import NOT_ARCHITECTURE
from mjax.config.schema.keys import leaf_keys, value_of
from mjax.config.schema.model import ModelConfig
from mjax.errors import UserError
from mjax.interop.megatron.arguments import model_config
from mjax.interop.megatron.heterogeneous import has_differing_layers, heterogeneous_arguments
from mjax.interop.megatron.llava import is_llava, llava_arguments, llava_shapes, text_config

_HYBRID_LETTERS = {"mamba": "M", "full": "*", "nope": "*", "mlp": "-", "experts": "E"}
_NOT_SAID = NOT_ARCHITECTURE | {"layer_pattern", "intermediate_size", "moe.moe_intermediate_size"}


def megatron_arguments(cfg: ModelConfig, impl: str) -> dict:
    """The saved arguments; `UserError` names the key that Megatron-LM has no argument for."""
    kind, shapes, text = megatron_kind(cfg), {}, cfg
    if kind == "llava":
        shapes, text = llava_shapes(cfg), text_config(cfg)
    args = (
        _sizes_arguments(text)
        | _positions_arguments(text)
        | _layers_arguments(text)
        | _experts_arguments(text)
        | _latent_arguments(text)
    )
    args |= {"transformer_impl": impl, "ckpt_format": "torch_dist", "use_dist_ckpt": True}
    if kind == "bert":
        args |= {"bert_binary_head": bool(cfg.bert.num_labels)}
    if kind == "t5":
        args |= _t5_arguments(cfg)
    if kind == "llava":
        args |= llava_arguments(cfg)
    try:
        back = model_config(args, "export", kind, shapes)
    except UserError as e:
        raise UserError(f"Megatron-LM has no arguments for this model ({e})") from e
    for key in leaf_keys(ModelConfig):
        ours, theirs = value_of(cfg, key), value_of(back, key)
        if key not in _NOT_SAID and ours != theirs and _is_said(cfg, key):
            raise UserError(
                f"Megatron-LM has no arguments for model.{key}={ours!r} of this model; such a "
                "model cannot be exported to torch_dist"
            )
    if back.layer_kinds != cfg.layer_kinds:
        raise UserError(f"Megatron-LM has no such layers: model.layer_pattern={cfg.layer_pattern}")
    return args


def megatron_kind(cfg: ModelConfig) -> str:
    """gpt, bert, t5 or llava."""
    if is_llava(cfg):
        return "llava"
    kinds = {"bidirectional+mlp": "bert", "bidirectional+mlp full+cross+mlp": "t5"}
    return kinds.get(" ".join(sorted(set(cfg.layer_kinds))), "gpt")


def _is_said(cfg: ModelConfig, key: str) -> bool:
    """Whether a key says something in this model."""
    group, _, _ = key.partition(".")
    if group == "moe" and not cfg.moe.num_experts:
        return False
    if group in ("mla", "mamba", "relative", "deltanet", "retro", "vision", "audio"):
        return cfg.reads_group(group)
    if group == "rope":
        return cfg.position_embedding == "rope"
    if key == "attention.num_key_value_heads":
        return not cfg.reads_group("mla")
    return True


def _sizes_arguments(cfg: ModelConfig) -> dict:
    attention = cfg.attention
    heads, groups = attention.num_attention_heads, attention.num_key_value_heads
    bias = cfg.mlp_bias
    act = cfg.hidden_act
    return {
        "num_layers": cfg.num_hidden_layers,
        "hidden_size": cfg.hidden_size,
        "ffn_hidden_size": cfg.intermediate_size,
        "num_attention_heads": heads,
        "group_query_attention": groups != heads,
        "num_query_groups": groups if groups != heads else 1,
        "kv_channels": attention.head_dim,
        "max_position_embeddings": cfg.max_position_embeddings,
        "seq_length": cfg.max_position_embeddings,
        "vocab_size": cfg.vocab_size,
        "padded_vocab_size": cfg.padded_vocab_size,
        "make_vocab_size_divisible_by": cfg.vocab_multiple,
        "normalization": {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}[cfg.norm],
        "norm_epsilon": cfg.norm_eps,
        "apply_layernorm_1p": cfg.norm_zero_centered,
        "swiglu": act == "silu" and cfg.mlp_gated,
        "gated_linear_unit": cfg.mlp_gated,
        "squared_relu": act == "relu2",
        "bias_gelu_fusion": act == "gelu_tanh",
        "add_bias_linear": bias,
        "add_qkv_bias": attention.attention_bias and not bias,
        "qk_layernorm": attention.qk_norm,
        "untie_embeddings_and_output_weights": not cfg.tie_word_embeddings,
        "softmax_type": "learnable" if attention.attention_sinks else "vanilla",
        "softmax_scale": attention.attention_multiplier,
        "attention_dropout": attention.attention_dropout,
        "hidden_dropout": cfg.hidden_dropout,
        "init_method_std": cfg.initializer_range,
        "mtp_num_layers": cfg.num_nextn_predict_layers or None,
        "tokenizer_type": None,
    }


def _positions_arguments(cfg: ModelConfig) -> dict:
    words = {"rope": "rope", "learned": "learned_absolute"}
    found = {
        "position_embedding_type": words.get(cfg.position_embedding, cfg.position_embedding),
        "add_position_embedding": True,
        "rotary_base": cfg.rope.rope_theta,
        "rotary_percent": cfg.rope.partial_rotary_factor,
        "rotary_interleaved": False,
        "use_rope_scaling": False,
    }
    scaling = cfg.rope.rope_scaling
    if scaling is not None and scaling.rope_type == "llama3":
        found |= {"use_rope_scaling": True, "rope_scaling_factor": scaling.factor}
    return found


def _layers_arguments(cfg: ModelConfig) -> dict:
    kinds = cfg.layer_kinds
    found = {"hybrid_layer_pattern": None, "is_hybrid_model": False, "moe_layer_freq": 1}
    if all(kind in _HYBRID_LETTERS for kind in kinds):
        found["hybrid_layer_pattern"] = "".join(_HYBRID_LETTERS[kind] for kind in kinds)
        mamba = cfg.mamba
        return found | {
            "is_hybrid_model": True,
            "mamba_state_dim": mamba.state_size,
            "mamba_head_dim": mamba.mamba_head_dim,
            "mamba_num_groups": mamba.n_groups,
            "mamba_num_heads": mamba.mamba_num_heads,
        }
    if has_differing_layers(cfg):
        return found | heterogeneous_arguments(cfg)
    windowed = [int(kind.startswith("window")) for kind in kinds]
    if any(windowed):
        found |= {"window_size": ((cfg.attention.sliding_window or 1) - 1, 0)}
        found |= {"window_attn_skip_freq": windowed}
    rotated = [int(kind.startswith("nope")) for kind in kinds]
    if any(rotated):
        found |= {"no_rope_freq": rotated}
    sparse = [int(kind.endswith("experts")) for kind in kinds]
    return found | ({"moe_layer_freq": sparse} if 0 < sum(sparse) < len(kinds) else {})


def _t5_arguments(cfg: ModelConfig) -> dict:
    encoder = cfg.layer_kinds.count("bidirectional+mlp")
    found = {"num_layers": encoder, "encoder_num_layers": encoder}
    found["decoder_num_layers"] = cfg.num_hidden_layers - encoder
    found["relative_attention_num_buckets"] = cfg.relative.num_buckets
    return found | {"relative_attention_max_distance": cfg.relative.max_distance}


def _experts_arguments(cfg: ModelConfig) -> dict:
    moe = cfg.moe
    if not moe.num_experts:
        return {"num_experts": None}
    over = {"sequence": "seq_aux_loss", "global_batch": "global_aux_loss"}
    balance = over[moe.router_aux_loss_over] if moe.router_aux_loss_coef else "none"
    found = {
        "num_experts": moe.num_experts,
        "moe_router_topk": moe.num_experts_per_tok,
        "moe_ffn_hidden_size": moe.moe_intermediate_size,
        "moe_router_score_function": moe.scoring_func,
        "moe_router_pre_softmax": moe.scoring_func == "softmax" and not moe.norm_topk_prob,
        "moe_router_topk_scaling_factor": moe.routed_scaling_factor,
        "moe_router_enable_expert_bias": moe.expert_bias,
        "moe_router_bias_update_rate": moe.expert_bias_update_rate,
        "moe_router_load_balancing_type": "sinkhorn" if moe.sinkhorn else balance,
        "moe_aux_loss_coeff": moe.router_aux_loss_coef,
        "moe_z_loss_coeff": moe.router_z_loss_coef or None,
        "moe_input_jitter_eps": moe.router_jitter_noise or None,
        "moe_latent_size": moe.latent_size,
        "moe_shared_expert_intermediate_size": moe.shared_expert_intermediate_size or None,
        "moe_shared_expert_gate": moe.shared_expert_gate,
        "moe_grouped_gemm": True,
    }
    if moe.n_group > 1:
        found |= {"moe_router_num_groups": moe.n_group, "moe_router_group_topk": moe.topk_group}
    return found


def _latent_arguments(cfg: ModelConfig) -> dict:
    if not cfg.reads_group("mla"):
        return {"multi_latent_attention": False}
    mla, scaling = cfg.mla, cfg.rope.rope_scaling
    found = {
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_head_dim": mla.qk_nope_head_dim,
        "qk_pos_emb_head_dim": mla.qk_rope_head_dim,
        "v_head_dim": mla.v_head_dim,
        "rope_type": "rope" if scaling is None else "yarn",
        "mscale_all_dim": 0.0,
    }
    if scaling is not None and scaling.rope_type == "yarn":
        found |= {
            "rotary_scaling_factor": scaling.factor,
            "original_max_position_embeddings": scaling.original_max_position_embeddings,
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "mscale": 1.0 if scaling.mscale is None else scaling.mscale,
            "mscale_all_dim": scaling.mscale_all_dim or 0.0,
        }
    return found
