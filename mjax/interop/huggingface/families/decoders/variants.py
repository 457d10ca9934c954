"""Rows of the table of families (`table.py`): decoders that differ from Llama in a part or two."""

from dataclasses import replace
from typing import Any

from mjax.config.schema.model import ModelConfig
from mjax.errors import UserError
from mjax.interop.huggingface.families import parts
from mjax.interop.huggingface.families.family import Family, blocks_of_heads
from mjax.interop.huggingface.families.parts import Part, take
from mjax.interop.huggingface.families.rope import rope, sizes_with_rope

_ADJACENT = {"rope.rope_interleave": True}
_GATE_UP = {"mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj")}
_BIASED = {key: value for key, value in parts.BIASED.items() if key != "position_embedding"}
_LAYERNORM = {"norm": "layernorm"}


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


def _stretched_base() -> Part:
    """Hunyuan's "dynamic" scaling, whose alpha makes the base of RoPE larger. Reads first."""

    def read(config: dict) -> dict:
        name = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
        said = config.get(name) or {}
        if "dynamic" not in (said.get("rope_type"), said.get("type")) or not said.get("alpha"):
            return {}
        head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        theta = said.get("rope_theta") or config.get("rope_theta") or 10000.0
        config[name] = None
        config["rope_theta"] = theta * said["alpha"] ** (head / (head - 2))
        return {}

    return Part(read, lambda cfg: {})


def _says_rope() -> Part:
    """Ministral 3, whose class takes YaRN where a config.json says nothing. Reads first."""

    def read(config: dict) -> dict:
        if not (config.get("rope_parameters") or config.get("rope_scaling")):
            raise UserError("config.json lacks 'rope_parameters', which its model_type needs")
        return {}

    return Part(read, lambda cfg: {})


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

VARIANTS: dict[str, Family] = {
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
    "ministral3": Family.of(
        "Ministral3ForCausalLM",
        _says_rope(),
        parts.one_window(),
        *sizes_with_rope(1e6, rms_norm_eps=1e-5, head_dim=128),
        left_out={"num_key_value_heads": 8},
    ),
    "olmo": Family.of(
        "OlmoForCausalLM",
        parts.required(rms_norm_eps=1e-5),
        *sizes_with_rope(rms_norm_eps=1e-5),
        parts.biases(),
        fixed=_LAYERNORM | {"norm_bias": False, "norm_gain": False},
    ),
    "hunyuan_v1_dense": Family.of(
        "HunYuanDenseV1ForCausalLM",
        _stretched_base(),
        *sizes_with_rope(rms_norm_eps=1e-5),
        parts.biases(),
        fixed={"attention.qk_norm": True, "attention.qk_norm_after_rope": True},
        rename=((".q_norm", ".query_layernorm"), (".k_norm", ".key_layernorm")),
    ),
}
