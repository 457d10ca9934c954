"""Saved arguments of latent attention, experts, hybrid patterns, BERT, T5 -> keys of a model.

Source: megatron/core (transformer/transformer_config.py, transformer/moe/moe_utils.py,
ssm/mamba_mixer.py, models/hybrid/hybrid_layer_allocation.py, models/bert).
"""

import math

from mjax.interop.megatron.saved_arguments import Args

_MIXER_EPS = 1e-5  # of the gated norm in a MambaMixer, whatever norm_epsilon


def latent_fields(args: Args) -> dict:
    """Keys of latent attention; what older runs did not save is MLATransformerConfig's default."""
    if not args("qk_layernorm"):
        raise args.refuse("qk_layernorm", "leaves the latents without norms")
    if args("rope_type", "yarn") not in ("rope", "yarn"):
        raise args.refuse("rope_type", "is neither rope nor yarn")
    if args("position_embedding_type") not in ("rope", "yarn"):
        raise args.refuse("position_embedding_type", "with multi_latent_attention")
    turned, fixed = args("qk_pos_emb_head_dim", 64), args("qk_head_dim", 128)
    factor, all_dims = args("rotary_scaling_factor", 40.0), args("mscale_all_dim", 0.0)
    found = {
        "mla.q_lora_rank": args("q_lora_rank"),
        "mla.kv_lora_rank": args("kv_lora_rank", 512),
        "mla.qk_nope_head_dim": fixed,
        "mla.qk_rope_head_dim": turned,
        "mla.v_head_dim": args("v_head_dim", 128),
        "mla.latent_norm_eps": float(args.need("norm_epsilon")),
        "attention.qk_norm": False,
        "attention.num_key_value_heads": args.need("num_attention_heads"),
    }
    if args("rope_type", "yarn") == "rope":
        scale = _yarn_mscale(factor, all_dims) ** 2 * (fixed + turned) ** -0.5
        return found | ({"attention.attention_multiplier": scale} if all_dims else {})
    mscale = args("mscale", 1.0)
    scaling = {
        "rope_type": "yarn",
        "factor": float(factor),
        "original_max_position_embeddings": args("original_max_position_embeddings", 4096),
        "beta_fast": float(args("beta_fast", 32)),
        "beta_slow": float(args("beta_slow", 1)),
        "mscale": float(mscale),
        "mscale_all_dim": float(all_dims),
    }
    if mscale and not all_dims:  # which Hugging Face reads as no mscale at all
        scaling["attention_factor"] = _yarn_mscale(factor, mscale)
    return found | {"rope.rope_scaling": scaling}


def _yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's, of arXiv 2309.00071."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


_BALANCE = {  # load balancing -> tokens over which the loss evens out loads; None: no loss
    "aux_loss": "sequence",
    "seq_aux_loss": "sequence",
    "global_aux_loss": "global_batch",
    "none": None,
    "sinkhorn": None,
}


def expert_fields(args: Args, bias: bool) -> dict:
    """Keys of experts, their router and its losses."""
    if not args("num_experts"):
        return {}
    if bias:
        raise args.refuse("add_bias_linear", "with experts (args.num_experts)")
    topk = args.need("moe_router_topk")
    kind, weight = _balance(args)
    by_sinkhorn = kind == "sinkhorn"
    sigmoid = args("moe_router_score_function") == "sigmoid"
    if by_sinkhorn and args("moe_router_num_groups"):
        raise args.refuse("moe_router_num_groups", "with sinkhorn")
    normed = topk > 1 if sigmoid else not args("moe_router_pre_softmax", False)
    found = {
        "moe.num_experts": args("num_experts"),
        "moe.num_experts_per_tok": topk,
        "moe.moe_intermediate_size": args("moe_ffn_hidden_size") or args.need("ffn_hidden_size"),
        "moe.scoring_func": "sigmoid" if (topk == 1 if by_sinkhorn else sigmoid) else "softmax",
        "moe.norm_topk_prob": normed and not by_sinkhorn,
        "moe.sinkhorn": by_sinkhorn,
        "moe.routed_scaling_factor": float(args("moe_router_topk_scaling_factor", 1.0)),
        "moe.expert_bias": bool(args("moe_router_enable_expert_bias", False)),
        "moe.expert_bias_update_rate": float(args("moe_router_bias_update_rate", 1e-3)),
        "moe.latent_size": args("moe_latent_size"),
        "moe.shared_expert_intermediate_size": args("moe_shared_expert_intermediate_size", 0),
        "moe.shared_expert_gate": bool(args("moe_shared_expert_gate", False)),
        "moe.router_jitter_noise": float(args("moe_input_jitter_eps", 0.0)),
        "moe.router_z_loss_coef": float(args("moe_z_loss_coeff", 0.0)),
        "moe.router_aux_loss_coef": weight,
        "moe.router_aux_loss_over": _BALANCE[kind] or "sequence",
    }
    if args("moe_router_num_groups"):
        groups, chosen = args("moe_router_num_groups"), args.need("moe_router_group_topk")
        found |= {"moe.n_group": groups, "moe.topk_group": chosen}
        found |= {"moe.group_score_topk": topk // chosen}
    return found


def _balance(args: Args) -> tuple[str, float]:
    """The kind of load balancing, and the weight of its loss."""
    name, coefficient = "moe_router_load_balancing_type", args("moe_aux_loss_coeff", 0.0)
    kinds = args(name, "aux_loss")
    kinds = [kinds] if isinstance(kinds, str) else list(kinds)
    if len(kinds) != 1 or kinds[0] not in _BALANCE:
        raise args.refuse(name, f"is none of {', '.join(_BALANCE)}")
    weights = coefficient if isinstance(coefficient, list | tuple) else [coefficient]
    return kinds[0], float(weights[0]) if _BALANCE[kinds[0]] else 0.0


def is_hybrid(args: Args) -> bool:
    """Whether the layers are those of a hybrid pattern."""
    names = "is_hybrid_model", "hybrid_layer_pattern", "hybrid_override_pattern"
    return any(args(name) for name in names)


def hybrid_fields(args: Args) -> dict:
    """Keys of a hybrid pattern and of Mamba."""
    name = "hybrid_layer_pattern" if args("hybrid_layer_pattern") else "hybrid_override_pattern"
    if args("hybrid_attention_ratio") or args("hybrid_mlp_ratio"):
        if not args(name):
            raise args.refuse(
                "hybrid_attention_ratio", "spreads layers; save again with the pattern it printed"
            )
    pattern = str(args(name, "M" * args.need("num_layers"))).replace("|", "")
    if "/" in pattern or args("mtp_num_layers"):
        raise args.refuse(name, "predicts further tokens by layers of a pattern")
    if float(args.need("norm_epsilon")) != _MIXER_EPS and "M" in pattern:
        raise args.refuse("norm_epsilon", f"differs from that of a Mamba mixer, {_MIXER_EPS}")
    size = args("mamba_head_dim", 64)
    heads = args("mamba_num_heads") or 2 * args.need("hidden_size") // size
    return {
        "layer_pattern": f"megatron:{pattern}",
        "num_hidden_layers": len(pattern),
        "mamba.mamba_num_heads": heads,
        "mamba.mamba_head_dim": size,
        "mamba.state_size": args("mamba_state_dim", 128),
        "mamba.n_groups": args("mamba_num_groups", 8),
        "mamba.chunk_size": args("mamba_chunk_size", 128),
    }


def bert_fields(args: Args) -> dict:
    """Keys of BERT."""
    if args("bias_gelu_fusion"):
        raise args.refuse(
            "bias_gelu_fusion", "computes another gelu in MLPs than the head of masked tokens does"
        )
    labels = 2 if args("bert_binary_head", True) else 0
    return {
        "layer_pattern": "bidirectional+mlp",
        "bert.mlm_head": True,
        "bert.num_labels": labels,
        "bert.type_vocab_size": labels,
    }


_NOT_IN_T5 = (
    "num_experts", "multi_latent_attention", "mtp_num_layers", "window_size", "no_rope_freq",
    "qk_layernorm", "hybrid_layer_pattern", "group_query_attention",
)  # fmt: skip


def t5_fields(args: Args) -> dict:
    """Keys of an encoder and a decoder, whose layers are one list here."""
    for name in _NOT_IN_T5:
        if args(name):
            raise args.refuse(name, "with an encoder and a decoder")
    encoder = args("encoder_num_layers") or args.need("num_layers")
    decoder = args("decoder_num_layers") or args.need("num_layers")
    return {
        "layer_pattern": f"bidirectional+mlp*{encoder}, full+cross+mlp*{decoder}",
        "num_hidden_layers": encoder + decoder,
        "lm_head_bias": not args("untie_embeddings_and_output_weights", False),
        "relative.num_buckets": args("relative_attention_num_buckets", 32),
        "relative.max_distance": args("relative_attention_max_distance", 128),
    }
