"""Rows of the table of families (`table.py`): decoders of 2025 and 2026, and Granite's kin."""

from mjax.errors import UserError
from mjax.interop.huggingface.families import parts
from mjax.interop.huggingface.families.deepseek import (
    SHARED_EXPERTS,
    dense_first,
    latent_attention_part,
    prediction_layers,
    routed_experts_v3,
    without_missing_predictions,
)
from mjax.interop.huggingface.families.family import Family
from mjax.interop.huggingface.families.hybrids import (
    GRANITE_FUSED,
    GRANITE_RENAMES,
    MULTIPLIERS,
    STACKED,
)
from mjax.interop.huggingface.families.parts import Part, take
from mjax.interop.huggingface.families.rope import rope, sizes_with_rope, typed_rope

MIXTRAL_RENAMES = (
    ("mlp.gate.", "block_sparse_moe.gate."),
    ("mlp.experts.", "block_sparse_moe.experts."),
    (".gate_proj.", ".w1."),
    (".up_proj.", ".w3."),
    (".down_proj.", ".w2."),
)
_MINIMAX_BETAS = ("full_attention", "linear_attention", "mlp")
_QK_NORM = {"attention.qk_norm": True}
_QK_NORM_ALL = _QK_NORM | {"attention.qk_norm_all_heads": True}
_EXPERTS = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}


def _one_rope_or_none() -> Part:
    """EXAONE 4: RoPE in windowed layers alone; in all layers of a model without windows."""
    kinds = parts.layer_types(parts.all_but_every(4), kinds=("nope+mlp", "window+mlp"))

    def read(config: dict) -> dict:
        has_windows = config.get("sliding_window") is not None
        fields = kinds.read(config)
        return fields if has_windows else fields | {"layer_pattern": "full+mlp"}

    return Part(read, kinds.write)


def _rotary_dim() -> Part:
    """MiniMax: channels of a head that RoPE turns. Reads before `rope` and `shape`."""

    def read(config: dict) -> dict:
        turned = config.pop("rotary_dim", None)
        if turned is not None:
            config.setdefault("partial_rotary_factor", turned / config["head_dim"])
        kinds = config.pop("attn_type_list", None) or [1]
        if set(kinds) != {1}:
            raise UserError(f"config.json: attn_type_list={kinds!r} is not supported (only ones)")
        return {}

    return Part(read, lambda cfg: {"rotary_dim": cfg.rotary_dim("full")})


def _from_layer_62(config: dict, layers: int) -> list[bool]:
    """dots.llm1, whose window is null in published files."""
    first = take(config, "max_window_layers", 62)
    return [i >= first for i in range(layers)]


def _youtu_range() -> Part:
    """The standard deviation of Youtu's weights, which follows from the width if left out."""

    def read(config: dict) -> dict:
        usual = 2.0 / (5.0 * config["hidden_size"]) ** 0.5
        config["initializer_range"] = take(config, "initializer_range", usual)
        return {}

    return Part(read, lambda cfg: {})


RECENT: dict[str, Family] = {
    "olmo3": Family.of(
        "Olmo3ForCausalLM",
        parts.layer_types(parts.all_but_every(4)),
        parts.shape(rms_norm_eps=1e-5),
        typed_rope(5e5, 5e5, local_key=None),
        parts.biases(),
        fixed=_QK_NORM_ALL | {"norm_placement": "post"},
        left_out={"sliding_window": 4096},
    ),
    "seed_oss": Family.of(
        "SeedOssForCausalLM",
        *sizes_with_rope(head_dim=128, attention_dropout=0.1),
        parts.same(
            parts.alike("attention_bias attention_out_bias", "attention.")
            | {"mlp_bias": "mlp_bias"},
            {"attention_bias": True, "attention_out_bias": False, "mlp_bias": False},
        ),
        parts.residual_dropout("residual_dropout"),
        left_out={"num_key_value_heads": 8},
    ),
    "arcee": Family.of(
        "ArceeForCausalLM",
        parts.shape(parts.activation("hidden_act", default="relu2"), rms_norm_eps=1e-5),
        rope(),
        parts.biases(mlp=True),
        fixed={"mlp_gated": False},
    ),
    "minimax_m2": Family.of(
        "MiniMaxM2ForCausalLM",
        parts.experts(
            "num_local_experts",
            num_experts=256,
            num_experts_per_tok=8,
            router_aux_loss_coef=0.001,
        ),
        _rotary_dim(),
        parts.required(scoring_func="sigmoid", use_routing_bias=True, use_qk_norm=True),
        parts.required(qk_norm_type="per_layer", shared_intermediate_size=0),
        parts.ignored("mlp_intermediate_size", "shared_moe_mode"),
        parts.ignored("use_mtp", "num_mtp_modules", "mtp_transformer_layers"),
        *(parts.required(**{f"layernorm_{of}_beta": 1.0}) for of in _MINIMAX_BETAS),
        *sizes_with_rope(5e6, fraction=1.0),
        fixed=_QK_NORM_ALL | {"moe.scoring_func": "sigmoid", "moe.expert_bias": True},
        rename=(("mlp.gate.e_score", "block_sparse_moe.e_score"), *MIXTRAL_RENAMES),
        left_out={"num_key_value_heads": 8, "head_dim": 128},
    ),
    "dots1": Family.of(
        "Dots1ForCausalLM",
        dense_first(parts.layer_types(_from_layer_62)),
        parts.ignored("scoring_func"),  # sigmoid, whatever it says
        routed_experts_v3(factor=1.0),
        *sizes_with_rope(),
        parts.biases(),
        fixed=_QK_NORM,
        rename=SHARED_EXPERTS,
        left_out={"num_key_value_heads": 32, "norm_topk_prob": False},
    ),
    "exaone4": Family.of(
        "Exaone4ForCausalLM",
        _one_rope_or_none(),
        *sizes_with_rope(rms_norm_eps=1e-5),
        fixed=_QK_NORM | {"norm_placement": "post"},
        left_out={"sliding_window": 4096},
    ),
    "exaone_moe": Family.of(
        "ExaoneMoeForCausalLM",
        dense_first(_one_rope_or_none(), first=1, typed=True),
        parts.called(routed_experts_v3(), **_EXPERTS),
        *sizes_with_rope(rms_norm_eps=1e-5),
        fixed=_QK_NORM,
        rename=(("mlp.gate.e_score", "mlp.e_score"), *SHARED_EXPERTS),
        left_out={"sliding_window": 4096},
    ),
    "hy_v3": Family.of(
        "HYV3ForCausalLM",
        dense_first(parts.of_kind("full+mlp"), first=1, typed=True),
        parts.called(
            routed_experts_v3(factor=2.826),
            **_EXPERTS,
            routed_scaling_factor="router_scaling_factor",
        ),
        parts.ignored("enable_moe_fp32_combine"),  # how a sum is rounded
        *sizes_with_rope(11158840.0, rms_norm_eps=1e-5, head_dim=128),
        parts.biases(),
        fixed=_QK_NORM,
        rename=(
            ("mlp.gate.weight", "mlp.router.gate.weight"),
            ("mlp.gate.e_score_correction_bias", "mlp.expert_bias"),
            ("mlp.shared_expert.", "mlp.shared_mlp."),
        ),
        left_out={"num_key_value_heads": 8},
    ),
    "solar_open": Family.of(
        "SolarOpenForCausalLM",
        parts.of_kind("full+experts"),
        parts.required(first_k_dense_replace=0, use_qk_norm=False),
        routed_experts_v3(factor=1.0),
        *sizes_with_rope(1e6, rms_norm_eps=1e-5, head_dim=128, intermediate_size=0),
        parts.biases(out=False),
        rename=SHARED_EXPERTS,
        left_out={"num_key_value_heads": 8},
    ),
    "glm4_moe_lite": Family.of(
        "Glm4MoeLiteForCausalLM",
        dense_first(parts.of_kind("mla+mlp"), first=1, typed=True),
        prediction_layers(),
        latent_attention_part(),
        routed_experts_v3(factor=1.8),
        *sizes_with_rope(rms_norm_eps=1e-5),
        parts.biases(False),
        rename=SHARED_EXPERTS,
        left_out={"q_lora_rank": 768},
        mend=without_missing_predictions,
    ),
    "youtu": Family.of(
        "YoutuForCausalLM",
        parts.of_kind("mla+mlp"),
        latent_attention_part(),
        parts.ignored("embedding_initializer_range"),
        _youtu_range(),
        *sizes_with_rope(tie_word_embeddings=True),
        parts.biases(False),
        left_out={"q_lora_rank": 1536},
    ),
    "granitemoe": Family.of(
        "GraniteMoeForCausalLM",
        parts.experts(
            "num_local_experts", num_experts=8, num_experts_per_tok=2, router_aux_loss_coef=0.001
        ),
        *sizes_with_rope(),
        parts.biases(),
        parts.same(MULTIPLIERS, dict.fromkeys(MULTIPLIERS, 1.0)),
        rename=GRANITE_RENAMES,
        fused=GRANITE_FUSED,
        layouts=STACKED,
    ),
    "starcoder2": Family.of(
        "Starcoder2ForCausalLM",
        parts.one_window(),
        parts.called(
            parts.shape(
                parts.activation("hidden_act", default="gelu_pytorch_tanh"),
                rms_norm_eps=1e-5,
                initializer_range=0.018042,
                tie_word_embeddings=True,
            ),
            rms_norm_eps="norm_epsilon",
        ),
        rope(),
        parts.called(
            parts.two_dropouts(0.0), resid_pdrop="residual_dropout", embd_pdrop="embedding_dropout"
        ),
        parts.one_bias_key(True),
        fixed={"norm": "layernorm", "mlp_gated": False},
        rename=(("mlp.up_proj", "mlp.c_fc"), ("mlp.down_proj", "mlp.c_proj")),
        left_out={"num_key_value_heads": 2},
    ),
}
