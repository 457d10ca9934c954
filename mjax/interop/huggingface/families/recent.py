"""Families with parts of their own: gpt-oss, Granite with windows, Hunyuan, Mistral, nanochat.

gpt-oss' windows are read by `layer_types`. The published weights of its experts are in MXFP4
(`interop/coded/mxfp4.py`); an export has them in bfloat16. The others are rows of the table.
"""

from dataclasses import replace

from mjax.config.languages.layer_pattern import expand, pattern_of
from mjax.config.schema.model import ModelConfig
from mjax.errors import UserError
from mjax.interop.huggingface.families import deepseek, parts
from mjax.interop.huggingface.families.family import Family
from mjax.interop.huggingface.families.hybrids import MULTIPLIERS, STACKED
from mjax.interop.huggingface.families.parts import Part, alike, only, take
from mjax.interop.huggingface.families.rope import rope, sizes_with_rope
from mjax.models.moe.expert import GPT_OSS_SHARPNESS

# Replacements on declared names, which have no number of an expert here.
GPT_OSS_RENAMES = (
    ("mlp.gate.", "mlp.router."),
    ("experts.gate_proj.weight", "experts.gate_up_proj"),
    ("experts.gate_proj.bias", "experts.gate_up_proj_bias"),
    ("experts.down_proj.weight", "experts.down_proj"),
    ("experts.down_proj.bias", "experts.down_proj_bias"),
)
_KEYS = (
    {"num_local_experts": "moe.num_experts"}
    | alike("num_experts_per_tok router_aux_loss_coef", "moe.")
    | alike("swiglu_limit")
)
_DEFAULTS = {"num_experts_per_tok": 4, "router_aux_loss_coef": 0.001, "swiglu_limit": 7.0}
_ROPE = {  # where a config.json has none
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def gpt_oss() -> Part:
    """Experts, whose width stands as intermediate_size, and biases. Reads before `shape`."""
    keys = parts.same(_KEYS, _DEFAULTS)

    def read(config: dict) -> dict:
        only(config, "swiglu_alpha", GPT_OSS_SHARPNESS)
        config.pop("initial_context_length", None)  # rope_scaling has it
        only(config, "experts_per_token", config.get("num_experts_per_tok"))
        if not (config.get("rope_parameters") or config.get("rope_scaling")):
            config["rope_scaling"] = dict(_ROPE)
        has_bias = take(config, "attention_bias", True)
        return keys.read(config) | {
            **parts.BALANCE,
            "moe.moe_intermediate_size": config["intermediate_size"],
            "attention.attention_bias": has_bias,
            "attention.attention_out_bias": has_bias,
        }

    def write(cfg: ModelConfig) -> dict:
        return keys.write(cfg) | {
            "intermediate_size": cfg.moe.moe_intermediate_size,
            "attention_bias": cfg.attention.attention_bias,
        }

    return Part(read, write)


# ---- Granite -----------------------------------------------------------------------------------


def _thetas_of_layers() -> Part:
    """Granite's `layer_rope_theta`: a base for full and one for windowed layers, or 0, for none."""
    kinds = parts.layer_types(lambda config, layers: [i % 4 != 0 for i in range(layers)])
    positions, unturned = rope(), {"full+mlp": "nope+mlp", "window+mlp": "nope_window+mlp"}

    def read(config: dict) -> dict:
        fields = kinds.read(config) | positions.read(config)
        thetas = config.pop("layer_rope_theta", None)
        if thetas is None:
            return fields
        plain = expand(fields["layer_pattern"], len(thetas))
        made = [k if theta else unturned[k] for k, theta in zip(plain, thetas, strict=True)]
        of = {kind: {t for k, t in zip(made, thetas, strict=True) if k == kind} for kind in made}
        full, local = (of.get(kind, set()) for kind in ("full+mlp", "window+mlp"))
        scaled = fields["rope.rope_scaling"] is not None and local - full
        if len(full) > 1 or len(local) > 1 or scaled:
            raise UserError(
                f"config.json: layer_rope_theta={thetas!r} is not supported (only one base, or 0, "
                "for full and one for windowed layers, the same if RoPE is scaled)"
            )
        base = next(iter(full or local), fields["rope.rope_theta"])
        own = next(iter(local), base)
        fields |= {"rope.rope_theta": base, "rope.rope_local_theta": None if own == base else own}
        return fields | {"layer_pattern": pattern_of(made)}

    def write(cfg: ModelConfig) -> dict:
        base = cfg.rope.rope_theta
        local = cfg.rope.rope_local_theta or base
        bases = {"full+mlp": base, "window+mlp": local}
        windowed = [kind.replace("nope_window", "window") for kind in cfg.layer_kinds]
        plain = cfg.model_copy(update={"layer_pattern": ", ".join(windowed)})
        thetas = [bases.get(kind, 0) for kind in cfg.layer_kinds]
        return kinds.write(plain) | positions.write(cfg) | {"layer_rope_theta": thetas}

    return Part(read, write)


# ---- Hunyuan -----------------------------------------------------------------------------------

_MARKS = ("im_start", "im_end", "im_newline", "text_start", "text_end")  # tokens


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


def _hunyuan_experts() -> Part:
    """Hunyuan's experts, and one MLP of their width beside them. Reads before `shape`.

    Lists, with an entry a layer, must have one value.
    """

    def read(config: dict) -> dict:
        width = config["intermediate_size"]
        for key in ("num_experts", "moe_topk", "moe_intermediate_size", "num_shared_expert"):
            if isinstance(config.get(key), list) and len(set(config[key])) == 1:
                config[key] = config[key][0]
        only(config, "moe_intermediate_size", width)
        only(config, "num_shared_expert", 1)
        return {
            "layer_pattern": "full+experts",
            "moe.num_experts": take(config, "num_experts"),
            "moe.num_experts_per_tok": take(config, "moe_topk", 1),
            "moe.moe_intermediate_size": width,
            "moe.shared_expert_intermediate_size": width,
        }

    def write(cfg: ModelConfig) -> dict:
        counts = {"num_experts": cfg.moe.num_experts, "moe_topk": cfg.moe.num_experts_per_tok}
        return counts | {"intermediate_size": cfg.moe.moe_intermediate_size}

    return Part(read, write)


# ---- Mistral -----------------------------------------------------------------------------------


def _says_rope() -> Part:
    """Mistral 3 and 4, whose classes take YaRN where a config.json says nothing. Reads first."""

    def read(config: dict) -> dict:
        if not (config.get("rope_parameters") or config.get("rope_scaling")):
            raise UserError("config.json lacks 'rope_parameters', which its model_type needs")
        return {}

    return Part(read, lambda cfg: {})


def _turned_share() -> Part:
    """Mistral 4's RoPE, of the part of a head that latent attention turns. Reads first.

    transformers reads `rope_parameters` alone, and a temperature of queries always.
    """
    says, positions = _says_rope(), rope()

    def read(config: dict) -> dict:
        turned = config["qk_rope_head_dim"]
        share = turned / (turned + config["qk_nope_head_dim"])
        for name in ("rope_parameters", "rope_scaling"):
            if config.get(name):
                config[name] = dict(config[name])
                only(config[name], "partial_rotary_factor", share)
        return says.read(config) | positions.read(config)

    def write(cfg: ModelConfig) -> dict:
        made = positions.write(cfg)
        plain = {"rope_type": "default", "llama_4_scaling_beta": 0.0}
        plain |= {"original_max_position_embeddings": cfg.max_position_embeddings}
        said = (made["rope_scaling"] or plain) | {"rope_theta": made["rope_theta"]}
        share = cfg.mla.qk_rope_head_dim / (cfg.mla.qk_head_dim or 1)
        return {"rope_parameters": said | {"partial_rotary_factor": share}}

    return Part(read, write)


# ---- rows --------------------------------------------------------------------------------------

_AFTER_ROPE = {"attention.qk_norm": True, "attention.qk_norm_after_rope": True}
_HUNYUAN = Family.of(
    "HunYuanDenseV1ForCausalLM",
    _stretched_base(),
    *sizes_with_rope(rms_norm_eps=1e-5),
    parts.biases(),
    parts.required(norm_type="rms", use_cla=False, use_qk_norm=True, use_rotary_pos_emb=True),
    parts.required(add_classification_head=False),
    parts.ignored("attention_head_dim", "cla_share_factor", "class_num", "dense_list"),
    parts.ignored("mask_init_id", "org_vocab_size", "pad_id", "pool_type"),
    parts.ignored(*(f"{of}_id" for of in _MARKS)),
    fixed=_AFTER_ROPE,
    rename=((".q_norm", ".query_layernorm"), (".k_norm", ".key_layernorm")),
)

RECENT: dict[str, Family] = {
    "granite_swa": Family.of(
        "GraniteSWAForCausalLM",
        _thetas_of_layers(),
        parts.shape(rms_norm_eps=1e-5, tie_word_embeddings=True),
        parts.biases(mlp=True),
        parts.same(MULTIPLIERS, dict.fromkeys(MULTIPLIERS, 1.0)),
        fixed={"attention.attention_sinks": True},
        left_out={"num_key_value_heads": 4, "sliding_window": 128},
    ),
    "hunyuan_v1_dense": _HUNYUAN,
    "hunyuan_v1_moe": replace(
        _HUNYUAN,
        architecture="HunYuanMoEV1ForCausalLM",
        parts=(
            _hunyuan_experts(),
            parts.required(use_mixed_mlp_moe=True, moe_layer_num_skipped=0, use_mla=False),
            parts.required(moe_drop_tokens=False, moe_random_routing_dropped_token=False),
            parts.required(norm_topk_prob=True, routed_scaling_factor=1.0),
            *_HUNYUAN.parts,
        ),
        rename=(
            ("mlp.gate.weight", "mlp.gate.wg.weight"),
            ("mlp.shared_expert.", "mlp.shared_mlp."),
            *_HUNYUAN.rename,
        ),
    ),
    "ministral3": Family.of(
        "Ministral3ForCausalLM",
        _says_rope(),
        parts.one_window(),
        *sizes_with_rope(1e6, rms_norm_eps=1e-5, head_dim=128),
        left_out={"num_key_value_heads": 8},
    ),
    "mistral4": Family.of(
        "Mistral4ForCausalLM",
        deepseek.dense_first(parts.of_kind("mla+mlp")),
        _turned_share(),
        deepseek.latent_attention_part(),
        deepseek.routed_experts_mistral(),
        parts.shape(),
        parts.biases(False),
        rename=(
            ("experts.gate_up_proj.weight", "experts.gate_up_proj"),
            ("experts.down_proj.weight", "experts.down_proj"),
            *deepseek.SHARED_EXPERTS,
        ),
        fused={"mlp.experts.gate_up_proj": ("mlp.experts.gate_proj", "mlp.experts.up_proj")},
        layouts=STACKED,
        left_out={"q_lora_rank": 1024},
    ),
    "nanochat": Family.of(
        "NanoChatForCausalLM",
        parts.shape(parts.activation("hidden_act", default="relu2")),
        rope(),
        parts.biases(),
        parts.same(alike("final_logit_softcapping"), {"final_logit_softcapping": 15.0}),
        fixed=_AFTER_ROPE
        | {"norm_gain": False, "bert.embedding_norm": True, "mlp_gated": False}
        | {"rope.rope_reversed": True},
        rename=(("mlp.up_proj", "mlp.fc1"), ("mlp.down_proj", "mlp.fc2")),
    ),
}
