"""Rows of the table of families (`table.py`): Llama's and DeepSeek's kin."""

from dataclasses import replace
from typing import Any

from mjax.config.languages.layer_pattern import pattern_of
from mjax.config.schema.model import ModelConfig
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
from mjax.interop.huggingface.families.family import Family, after_ones, blocks_of_heads, vector
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
_ADJACENT = {"rope.rope_interleave": True}
_GATE_UP = {"mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj")}
_BIASED = {key: value for key, value in parts.BIASED.items() if key != "position_embedding"}
_LAYERNORM = {"norm": "layernorm"}


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


def _layernorm_shape(hidden_act: Part | None = None, **defaults: Any) -> Part:
    sizes = parts.shape(hidden_act, **{"rms_norm_eps": 1e-5} | defaults)
    return parts.called(sizes, rms_norm_eps="layer_norm_eps")


def _parallel_residual(usual: bool, two_norms: bool) -> Part:
    """`use_parallel_residual`: attention and MLP side by side; `two_norms`: each with its own."""

    def read(config: dict) -> dict:
        beside = take(config, "use_parallel_residual", usual)
        kind = "full|mlp" if beside else "full+mlp"
        return {"layer_pattern": kind, "parallel_norms": beside and two_norms}

    return Part(read, lambda cfg: {"use_parallel_residual": "|" in cfg.layer_kinds[0]})


def _logit_scale(usual: float) -> Part:
    def read(config: dict) -> dict:
        return {"logits_scaling": 1 / take(config, "logit_scale", usual)}

    return Part(read, lambda cfg: {"logit_scale": 1 / (cfg.logits_scaling or 1.0)})


def _ernie_experts() -> Part:
    """ERNIE's experts, and the layers that have them. Reads before `shape`."""
    names = {"moe_k": "num_experts_per_tok", "moe_num_experts": "num_experts"}
    names |= parts.alike("moe_intermediate_size router_aux_loss_coef")
    usual = {"moe_k": 6, "moe_num_experts": 64, "moe_intermediate_size": 1536}
    usual |= {"router_aux_loss_coef": 0.001}
    keys = parts.same({theirs: f"moe.{ours}" for theirs, ours in names.items()}, usual)

    def read(config: dict) -> dict:
        fields, layers = keys.read(config) | parts.BALANCE, config["num_hidden_layers"]
        parts.only(config, "moe_norm_min", 1e-12)
        first, every = (take(config, f"moe_layer_{of}", 1) for of in ("start_index", "interval"))
        last = take(config, "moe_layer_end_index", -1) % layers
        routed = [first <= i <= last and (i + 1) % every == 0 for i in range(layers)]
        kinds = ["full+experts" if is_routed else "full+mlp" for is_routed in routed]
        width = take(config, "moe_num_shared_experts", 2) * fields["moe.moe_intermediate_size"]
        fields |= {"moe.shared_expert_intermediate_size": width}
        return fields | {"layer_pattern": pattern_of(kinds)}

    def write(cfg: ModelConfig) -> dict:
        routed = [i for i, kind in enumerate(cfg.layer_kinds) if "experts" in kind] or [0]
        shared = cfg.moe.shared_expert_intermediate_size // (cfg.moe.moe_intermediate_size or 1)
        bounds = {"moe_layer_start_index": routed[0], "moe_layer_end_index": routed[-1]}
        return keys.write(cfg) | bounds | {"moe_num_shared_experts": shared}

    return Part(read, write)


def _qkv_of_heads(cfg: ModelConfig, name: str) -> str:
    for letter in "qkv":
        name = name.replace(f"attention.{letter}_proj", "attention.query_key_value")
    return name


_GLM = Family.of(
    "GlmForCausalLM",
    *sizes_with_rope(fraction=0.5, rms_norm_eps=1.5625e-7, head_dim=128),
    parts.biases(out=False),
    fixed=_ADJACENT,
    fused=_GATE_UP,
    left_out={"num_key_value_heads": 2, "attention_bias": True},
)

DECODERS: dict[str, Family] = {
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
        left_out={"num_key_value_heads": 32, "norm_topk_prob": False, "sliding_window": 4096},
    ),
    "exaone4": Family.of(
        "Exaone4ForCausalLM",
        _one_rope_or_none(),
        *sizes_with_rope(rms_norm_eps=1e-5),
        fixed=_QK_NORM | {"norm_placement": "post"},
        left_out={"sliding_window": 4096, "num_key_value_heads": 32},
    ),
    "exaone_moe": Family.of(
        "ExaoneMoeForCausalLM",
        dense_first(_one_rope_or_none(), first=1, typed=True),
        parts.called(routed_experts_v3(), **_EXPERTS),
        *sizes_with_rope(rms_norm_eps=1e-5),
        fixed=_QK_NORM,
        rename=(("mlp.gate.e_score", "mlp.e_score"), *SHARED_EXPERTS),
        left_out={"sliding_window": 4096, "num_key_value_heads": 32},
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
        *sizes_with_rope(11158840.0, rms_norm_eps=1e-5, head_dim=128, initializer_range=0.006),
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
        parts.required(mlp_type="default", norm_type="layer_norm"),
        fixed={"norm": "layernorm", "mlp_gated": False},
        rename=(("mlp.up_proj", "mlp.c_fc"), ("mlp.down_proj", "mlp.c_proj")),
        left_out={"num_key_value_heads": 2},
    ),
    "glm": _GLM,
    "glm4": replace(
        _GLM,
        architecture="Glm4ForCausalLM",
        fixed=_ADJACENT | {"norm_placement": "sandwich"},
        rename=(
            ("post_attention_layernorm", "post_self_attn_layernorm"),
            ("pre_feedforward_layernorm", "post_attention_layernorm"),
            ("post_feedforward_layernorm", "post_mlp_layernorm"),
        ),
    ),
    "cohere2": Family.of(
        "Cohere2ForCausalLM",
        parts.layer_types(parts.all_but_every(4), kinds=("nope|mlp", "window|mlp")),
        _layernorm_shape(tie_word_embeddings=True),
        rope(),
        parts.biases(),
        _logit_scale(0.0625),
        parts.required(position_embedding_type="rope_gptj", rotary_pct=1.0),
        parts.required(use_parallel_block=True, use_gated_activation=True),
        parts.ignored("layer_switch", "order_of_interleaved_layers", "use_embedding_sharing"),
        fixed=_ADJACENT | _LAYERNORM | {"norm_bias": False},
        left_out={"sliding_window": 4096},
    ),
    "ernie4_5": Family.of(
        "Ernie4_5ForCausalLM",
        *sizes_with_rope(500000.0, rms_norm_eps=1e-5, head_dim=128, tie_word_embeddings=True),
        parts.one_bias_key(False),
        fixed=_ADJACENT,
        left_out={"num_key_value_heads": 2},
    ),
    "ernie4_5_moe": Family.of(
        "Ernie4_5_MoeForCausalLM",
        _ernie_experts(),
        *sizes_with_rope(500000.0, rms_norm_eps=1e-5, tie_word_embeddings=True),
        parts.one_bias_key(False),
        fixed=_ADJACENT | {"moe.expert_bias": True},
        rename=(("mlp.gate.e_score", "mlp.moe_statics.e_score"), *SHARED_EXPERTS),
        layouts={"mlp.gate.e_score_correction_bias": after_ones(1, vector)},
        left_out={"num_key_value_heads": 4},
    ),
    "helium": Family.of(
        "HeliumForCausalLM",
        *sizes_with_rope(100000.0, rms_norm_eps=1e-8, head_dim=128),
        parts.biases(out=False, mlp=True),
        fixed=_ADJACENT,
        left_out={"num_key_value_heads": 20},
    ),
    "phi": Family.of(
        "PhiForCausalLM",
        parts.of_kind("full|mlp"),
        _layernorm_shape(parts.activation("hidden_act", default="gelu_new")),
        rope(fraction=0.5),
        parts.residual_dropout("resid_pdrop"),
        parts.same({"qk_layernorm": "attention.qk_norm"}, {"qk_layernorm": False}),
        fixed=_BIASED | {"lm_head_bias": True},
        rename=(
            ("model.norm.", "model.final_layernorm."),
            ("self_attn.o_proj", "self_attn.dense"),
            ("_norm.", "_layernorm."),
            ("mlp.up_proj", "mlp.fc1"),
            ("mlp.down_proj", "mlp.fc2"),
        ),
    ),
    "gpt_neox": Family.of(
        "GPTNeoXForCausalLM",
        _parallel_residual(True, two_norms=True),
        parts.ignored("num_key_value_heads", "head_dim"),
        _layernorm_shape(parts.activation("hidden_act", default="gelu")),
        parts.called(
            rope(fraction=0.25), rope_theta="rotary_emb_base", partial_rotary_factor="rotary_pct"
        ),
        parts.biases(),
        parts.same({"hidden_dropout": "hidden_dropout"}, {"hidden_dropout": 0.0}),
        fixed=_LAYERNORM | {"mlp_gated": False, "mlp_bias": True},
        rename=(
            ("model.embed_tokens", "gpt_neox.embed_in"),
            ("model.norm.", "gpt_neox.final_layer_norm."),
            ("lm_head.", "embed_out."),
            ("model.layers.", "gpt_neox.layers."),
            ("self_attn.o_proj", "attention.dense"),
            ("self_attn.", "attention."),
            ("mlp.up_proj", "mlp.dense_h_to_4h"),
            ("mlp.down_proj", "mlp.dense_4h_to_h"),
        ),
        name_of=_qkv_of_heads,
        layouts={
            f"self_attn.{letter}_proj.{kind}": blocks_of_heads(first)
            for first, letter in enumerate("qk")
            for kind in ("weight", "bias")
        },
        left_out={"attention_bias": True},
    ),
    "stablelm": Family.of(
        "StableLmForCausalLM",
        _parallel_residual(False, two_norms=False),
        _layernorm_shape(),
        rope(fraction=0.25),
        parts.same({"use_qkv_bias": "attention.attention_bias"}, {"use_qkv_bias": False}),
        parts.required(qk_layernorm=False, hidden_dropout=0.0),
        fixed=_LAYERNORM,
        left_out={"num_key_value_heads": 32},
    ),
    "olmo": Family.of(
        "OlmoForCausalLM",
        parts.required(rms_norm_eps=1e-5),
        *sizes_with_rope(rms_norm_eps=1e-5),
        parts.biases(),
        fixed=_LAYERNORM | {"norm_bias": False, "norm_gain": False},
    ),
}
