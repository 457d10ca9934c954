"""The parts of a config.json of families with state-space mixers: sizes, and which layers have one.

Sizes go by three spellings: Mamba-2's, Nemotron-H's, and that of Bamba, Granite 4 and Falcon-H1.
A step that is bounded by [0, infinity], as all published models have it, is one without a limit.
Biases of the projections are refused: no published model has them.
"""

import math
from collections.abc import Callable

from mjax.config.languages.layer_pattern import branches_of, pattern_of
from mjax.config.schema.model import ModelConfig
from mjax.errors import UserError
from mjax.interop.huggingface.families.deepseek import ROUTED
from mjax.interop.huggingface.families.parts import (
    BALANCE,
    HEAD_KEYS,
    Part,
    alike,
    ignored,
    only,
    same,
    take,
)

_STEPS = alike("time_step_min time_step_max time_step_floor", "mamba.")
_STEPS_LEFT_OUT = {"time_step_min": 1e-3, "time_step_max": 0.1, "time_step_floor": 1e-4}


def mixer(spelling: str, **defaults: object) -> Part:
    """`model.mamba` in one of the `_SPELLINGS`; `defaults` are the family's for keys left out.

    Reads before `shape`.
    """
    names = _SPELLINGS[spelling]
    keys = same(names | _STEPS, _STEPS_LEFT_OUT | defaults)
    expand = "mamba_expand" if spelling == "bamba" else "expand"

    def read(config: dict) -> dict:
        config.pop("time_step_rank", None)
        config.pop(expand, None)  # heads times their size say it
        fields = keys.read(config) | {"mamba.time_step_limit": _limit(config)}
        if fields.get("mamba.mamba_head_dim") == "auto":
            wide = defaults.get(expand, 2) * config["hidden_size"]
            fields["mamba.mamba_head_dim"] = wide // fields["mamba.mamba_num_heads"]
        return fields

    def write(cfg: ModelConfig) -> dict:
        values = keys.write(cfg)
        if cfg.mamba.time_step_limit is not None:
            values["time_step_limit"] = cfg.mamba.time_step_limit
        if cfg.mamba.channels % cfg.hidden_size == 0:
            values[expand] = cfg.mamba.channels // cfg.hidden_size
        return values

    return Part(read, write)


_COMMON = alike("n_groups conv_kernel chunk_size use_conv_bias", "mamba.")
_SPELLINGS = {
    "mamba2": {
        "num_heads": "mamba.mamba_num_heads",
        "head_dim": "mamba.mamba_head_dim",
        "state_size": "mamba.state_size",
        **_COMMON,
    },
    "nemotron_h": {
        **alike("mamba_num_heads mamba_head_dim", "mamba."),
        "ssm_state_size": "mamba.state_size",
        **_COMMON,
    },
    "bamba": {
        "mamba_n_heads": "mamba.mamba_num_heads",
        "mamba_d_head": "mamba.mamba_head_dim",
        "mamba_d_state": "mamba.state_size",
        "mamba_n_groups": "mamba.n_groups",
        "mamba_d_conv": "mamba.conv_kernel",
        "mamba_chunk_size": "mamba.chunk_size",
        "mamba_conv_bias": "mamba.use_conv_bias",
    },
}


def _limit(config: dict) -> list[float] | None:
    """`time_step_limit`, in whose JSON infinity is a number or transformers' word for it."""
    found = config.pop("time_step_limit", None)
    if found is None:
        return None
    low, high = (math.inf if isinstance(v, dict) else float(v) for v in found)
    if low <= 0 and high == math.inf:
        return None
    if high == math.inf:
        raise UserError(f"config.json: time_step_limit={found!r} is bounded on one side only")
    return [low, high]


# Mamba-2's own keys. A length is not among them: ours is.
MAMBA2_SHAPE = same(
    alike("vocab_size hidden_size num_hidden_layers max_position_embeddings")
    | alike("tie_word_embeddings initializer_range")
    | {"layer_norm_epsilon": "norm_eps"},
    {"tie_word_embeddings": False, "initializer_range": 0.1}
    | {"layer_norm_epsilon": 1e-5, "max_position_embeddings": 2048},
)


# ---- which layers have what ----------------------------------------------------------------------

# Nemotron-H's layers: kind -> (its word, Megatron-LM's letter).
_BRANCHES = {
    "mamba": ("linear_attention", "M"),
    "full": ("full_attention", "*"),
    "mlp": ("mlp", "-"),
    "experts": ("moe", "E"),
}
_OLDER = {"mamba": "linear_attention", "attention": "full_attention"}
_LAYER_WORDS = {True: "full_attention", False: "linear_attention"}
_NEMOTRON_EXPERT_KEYS = (
    *ROUTED,
    "n_shared_experts",
    "moe_shared_expert_intermediate_size",
    "norm_topk_prob",
)


def one_branch_a_layer() -> Part:
    """Nemotron-H: `layers_block_type`, or Megatron-LM's letters. Reads first."""
    of_word = {word: letter for word, letter in _BRANCHES.values()}

    def read(config: dict) -> dict:
        letters = config.pop("hybrid_override_pattern", None)
        words = config.pop("layers_block_type", None)
        if words is not None:
            words = [_OLDER.get(word, word) for word in words]
            unknown = [word for word in words if word not in of_word]
            if unknown:
                raise UserError(f"config.json: layers_block_type has {unknown[0]!r}")
            letters = "".join(of_word[word] for word in words)
        if not letters:
            raise UserError("config.json lacks 'layers_block_type', which its model_type needs")
        if _BRANCHES["experts"][1] not in letters:
            for key in _NEMOTRON_EXPERT_KEYS:
                config.pop(key, None)
        only(config, "num_hidden_layers", len(letters))
        return {"layer_pattern": f"megatron:{letters}", "num_hidden_layers": len(letters)}

    def write(cfg: ModelConfig) -> dict:
        if not all(kind in _BRANCHES for kind in cfg.layer_kinds):
            return {}  # nothing reads that
        found = [_BRANCHES[kind] for kind in cfg.layer_kinds]
        return {
            "layers_block_type": [word for word, _ in found],
            "hybrid_override_pattern": "".join(letter for _, letter in found),
        }

    return Part(read, write)


def nemotron_shape() -> Part:
    """Nemotron-H's keys besides its mixers'."""
    keys = same(
        alike("vocab_size hidden_size intermediate_size max_position_embeddings")
        | alike("tie_word_embeddings initializer_range")
        | alike(HEAD_KEYS, "attention.")
        | {"layer_norm_epsilon": "norm_eps"},
        {"tie_word_embeddings": False, "initializer_range": 0.02}
        | {"attention_dropout": 0.0, "layer_norm_epsilon": 1e-5},
    )

    def read(config: dict) -> dict:
        only(config, "norm_eps", config.get("layer_norm_epsilon"))  # Nemotron 3 says it twice
        return keys.read(config)

    return Part(read, keys.write)


# Multi-token prediction is left out, and nothing is turned.
NEMOTRON_IGNORED = ignored(
    "mtp_layers_block_type",
    "num_nextn_predict_layers",
    "mtp_hybrid_override_pattern",
    "moe_shared_expert_overlap",
    "partial_rotary_factor",
    "rope_theta",
)


def nemotron_experts() -> Part:
    """Nemotron 3's experts: DeepSeek-V3's router, experts without a gate. Reads before shapes."""
    defaults = {"n_group": 1, "topk_group": 1, "norm_topk_prob": True}
    defaults |= {"routed_scaling_factor": 1.0, "moe_latent_size": None}
    keys = same(
        ROUTED
        | {
            "moe_shared_expert_intermediate_size": "moe.shared_expert_intermediate_size",
            "moe_latent_size": "moe.latent_size",
        }
        | alike("norm_topk_prob", "moe."),
        defaults,
    )

    def read(config: dict) -> dict:
        if "n_routed_experts" not in config:
            return {}
        only(config, "n_shared_experts", 1)
        return keys.read(config) | {"moe.scoring_func": "sigmoid", "moe.expert_bias": True}

    def write(cfg: ModelConfig) -> dict:
        return keys.write(cfg) | {"n_shared_experts": 1} if cfg.moe.num_experts else {}

    return Part(read, write)


def attention_among(indices: bool, mixed: Callable[[dict], tuple[str, str]]) -> Part:
    """Layers of two kinds, (with a mixer, with attention), which `mixed` tells of a config.json.

    `indices`: Bamba lists those with attention; otherwise `layer_types` names all. Reads first.
    """

    def read(config: dict) -> dict:
        layers = config["num_hidden_layers"]
        if indices:
            at = take(config, "attn_layer_indices", [])
            attends = [i in at for i in range(layers)]
        else:
            types = take(config, "layer_types", None) or config.pop("layers_block_type", None)
            types = [_OLDER.get(t, t) for t in types or ["linear_attention"] * layers]
            if len(types) != layers or set(types) - set(_OLDER.values()):
                raise UserError(f"config.json: layer_types={types!r}, num_hidden_layers={layers}")
            attends = [t == "full_attention" for t in types]
        kinds = mixed(config)
        return {"layer_pattern": pattern_of([kinds[a] for a in attends])}

    def write(cfg: ModelConfig) -> dict:
        attends = ["full" in branches_of(kind) for kind in cfg.layer_kinds]
        if all(attends):  # no hybrid: what is read back differs
            return {}
        if indices:
            return {"attn_layer_indices": [i for i, attend in enumerate(attends) if attend]}
        return {"layer_types": [_LAYER_WORDS[attend] for attend in attends]}

    return Part(read, write)


def every_nth_attends() -> Part:
    """Qwen3-Next: `full_attention_interval`, where `layer_types` are not given. Reads before
    `attention_among`."""

    def read(config: dict) -> dict:
        every = take(config, "full_attention_interval", 4)
        if not config.get("layer_types"):
            attends = [(i + 1) % every == 0 for i in range(config["num_hidden_layers"])]
            config["layer_types"] = [_LAYER_WORDS[a] for a in attends]
        return {}

    return Part(read, lambda cfg: {})


def granite_positions() -> Part:
    """Granite 4: rotary or no positions. Reads before `rope`."""

    def read(config: dict) -> dict:
        kind = config.pop("position_embedding_type", None)
        if kind not in (None, "rope", "nope"):
            raise UserError(f"config.json: position_embedding_type={kind!r} is not supported")
        return {"position_embedding": "rope" if kind == "rope" else "none"}

    def write(cfg: ModelConfig) -> dict:
        return {"position_embedding_type": "rope" if cfg.position_embedding == "rope" else None}

    return Part(read, write)


_FALCON_LAYER = "mamba|full+mlp"


def falcon_layers() -> Part:
    """Falcon-H1: a mixer and attention side by side, then an MLP; a width and multipliers of its
    own. Reads first."""
    keys = same(
        _FALCON_FACTORS
        | alike("mamba_rms_norm ssm_multipliers", "mamba.")
        | alike("mlp_multipliers"),
        dict.fromkeys(_FALCON_FACTORS, 1.0)
        | {"mamba_rms_norm": False, "ssm_multipliers": [1.0] * 5, "mlp_multipliers": [1.0] * 2},
    )

    def read(config: dict) -> dict:
        fields = keys.read(config)
        before_gate = take(config, "mamba_norm_before_gate", True)
        if fields["mamba.mamba_rms_norm"] and before_gate:
            raise UserError("config.json: mamba_norm_before_gate=True is not supported with a norm")
        wide = config["mamba_n_heads"] * config.get("mamba_d_head", 0)
        only(config, "mamba_d_ssm", wide)
        only(config, "layers_block_type", ["hybrid"] * config["num_hidden_layers"])
        factor = take(config, "lm_head_multiplier", 1.0)
        return fields | {"layer_pattern": _FALCON_LAYER, "logits_scaling": 1 / factor}

    def write(cfg: ModelConfig) -> dict:
        if set(cfg.layer_kinds) != {_FALCON_LAYER}:
            return {}
        width = {"mamba_d_ssm": cfg.mamba.channels, "mamba_norm_before_gate": False}
        factor = 1 / (cfg.logits_scaling or 1.0)
        return keys.write(cfg) | width | {"lm_head_multiplier": factor}

    return Part(read, write)


_FALCON_FACTORS = (
    alike("key_multiplier attention_in_multiplier attention_out_multiplier", "attention.")
    | alike("ssm_in_multiplier ssm_out_multiplier", "mamba.")
    | alike("embedding_multiplier")
)


def granite_kinds(config: dict) -> tuple[str, str]:
    has_experts = config.get("num_local_experts", 8)
    return ("mamba+experts", "full+experts") if has_experts else ("mamba+mlp", "full+mlp")


def granite_experts() -> Part:
    """Granite 4's experts and shared MLP; without experts the latter is the MLP. Reads before
    `shape`."""
    keys = same(
        {
            "num_local_experts": "moe.num_experts",
            "shared_intermediate_size": "moe.shared_expert_intermediate_size",
        }
        | alike("num_experts_per_tok router_aux_loss_coef", "moe."),
        {"num_experts_per_tok": 2, "router_aux_loss_coef": 0.001, "num_local_experts": 8},
    )

    def write(cfg: ModelConfig) -> dict:
        if not cfg.moe.num_experts:
            width = cfg.intermediate_size
            return {"num_local_experts": 0, "shared_intermediate_size": width}
        return keys.write(cfg) | {"intermediate_size": cfg.moe.moe_intermediate_size}

    def read(config: dict) -> dict:
        if config.get("num_local_experts", 8):
            width = config["intermediate_size"]
            return keys.read(config) | BALANCE | {"moe.moe_intermediate_size": width}
        for key in ("num_local_experts", "num_experts_per_tok", "router_aux_loss_coef"):
            config.pop(key, None)
        config["intermediate_size"] = take(config, "shared_intermediate_size")
        return {}

    return Part(read, write)
