"""DeepSeek's part of a Hugging Face config.json: latent attention, its experts, and which layers
have them.

Kimi-K2, Moonlight and others use the same classes; GLM-4.5 has the same experts behind ordinary
attention. Layers of multi-token prediction follow the others, under their numbers.
"""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from mjax.config.languages.layer_pattern import expand, pattern_of
from mjax.config.schema.mixers import MlaConfig
from mjax.config.schema.model import ModelConfig
from mjax.errors import UserError
from mjax.interop.huggingface.families.family import Slot, outputs_first
from mjax.interop.huggingface.families.parts import Part, alike, only, same, take
from mjax.sharding.spec import ParamSpec

# Those of experts that DeepSeek and Nemotron 3 call by the same names.
ROUTED = {"n_routed_experts": "moe.num_experts"} | alike(
    "num_experts_per_tok moe_intermediate_size n_group topk_group routed_scaling_factor", "moe."
)
SHARED_EXPERTS = (("mlp.shared_expert.", "mlp.shared_experts."),)  # their names for one
# What else says nothing where all layers are dense.
_EXPERT_KEYS = """aux_loss_alpha moe_layer_freq n_shared_experts norm_topk_prob scoring_func seq_aux
    topk_method""".split()


def dense_first(kinds: Part, first: int = 0, typed: bool = False) -> Part:
    """The layers of `kinds`, with experts in the place of MLPs behind `first_k_dense_replace`.

    `first`: the family's, where it is left out. `typed`: the family has `mlp_layer_types`, too,
    which count. Reads before `shape`.
    """
    words = {"dense": "+mlp", "sparse": "+experts"}

    def read(config: dict) -> dict:
        layers = config["num_hidden_layers"]
        types = config.pop("mlp_layer_types", None) if typed else None
        dense = min(take(config, "first_k_dense_replace", first), layers)
        types = types or ["dense"] * dense + ["sparse"] * (layers - dense)
        if len(types) != layers or set(types) - words.keys():
            raise UserError(f"config.json: mlp_layer_types={types!r}, num_hidden_layers={layers}")
        config.pop("num_mtp_layers", None)
        for key in (*ROUTED, *_EXPERT_KEYS) if "sparse" not in types else ():
            config.pop(key, None)
        fields = kinds.read(config)
        plain = expand(fields["layer_pattern"], layers)
        made = [kind.replace("+mlp", words[t]) for kind, t in zip(plain, types, strict=True)]
        return fields | {"layer_pattern": pattern_of(made)}

    def write(cfg: ModelConfig) -> dict:
        plain = [kind.replace("+experts", "+mlp") for kind in cfg.layer_kinds]
        out = kinds.write(cfg.model_copy(update={"layer_pattern": ", ".join(plain)}))
        types = ["sparse" if "experts" in kind else "dense" for kind in cfg.layer_kinds]
        out |= {"first_k_dense_replace": types.count("dense")}
        return out | ({"mlp_layer_types": types} if typed else {})

    return Part(read, write)


def prediction_layers() -> Part:
    """Layers of multi-token prediction. transformers drops their weights, and keeps the number."""
    name = "num_nextn_predict_layers"
    return same({name: name}, {name: 0})


def without_missing_predictions(cfg: ModelConfig, names: Collection[str]) -> ModelConfig:
    """`cfg` without the layers of multi-token prediction, if no tensor in `names` is theirs."""
    first = f"model.layers.{cfg.num_hidden_layers}."
    if any(name.startswith(first) for name in names):
        return cfg
    return cfg.model_copy(update={"num_nextn_predict_layers": 0})


# Names within a prediction layer; all else is in its block.
QWEN_PREDICTIONS = (
    ("enorm.", "mtp.pre_fc_norm_embedding."),
    ("hnorm.", "mtp.pre_fc_norm_hidden."),
    ("eh_proj.", "mtp.fc."),
    ("shared_head.norm.", "mtp.norm."),
    ("", "mtp.layers.0."),
)
MIMO_PREDICTIONS = (
    ("enorm.", "model.mtp_layers.0.token_layernorm."),
    ("hnorm.", "model.mtp_layers.0.hidden_layernorm."),
    ("eh_proj.", "model.mtp_layers.0.input_proj."),
    ("shared_head.norm.", "model.mtp_layers.0.final_layernorm."),
    ("", "model.mtp_layers.0."),
)


def one_prediction_layer(key: str) -> Part:
    """The number of prediction layers under `key`: one, as published, or none."""
    keys = same({key: "num_nextn_predict_layers"}, {key: 0})

    def read(config: dict) -> dict:
        if take(dict(config), key, 0) > 1:
            only(config, key, 0, 1)
        return keys.read(config)

    return Part(read, keys.write)


def with_prediction_layer(renames: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    """Fields of a family whose prediction layer has these names instead of DeepSeek's."""
    projection = f"{dict(renames)['eh_proj.']}weight"

    def name_of(cfg: ModelConfig, name: str) -> str:
        start = f"model.layers.{cfg.num_hidden_layers}."
        if not name.startswith(start):
            return name
        rest = name.removeprefix(start)
        old, new = next(pair for pair in renames if rest.startswith(pair[0]))
        return new + rest.removeprefix(old)

    def as_in_file(cfg: ModelConfig, names: Collection[str]) -> ModelConfig:
        found = any(name.endswith(projection) for name in names)
        return cfg.model_copy(update={"num_nextn_predict_layers": int(found)})

    return {"name_of": name_of, "mend": as_in_file, "repeats_in_predictions": False}


def hidden_state_first(spec: ParamSpec, at: dict[str, int]) -> tuple[Slot, ...]:
    """The projection of a prediction layer whose input is hidden state, then embedding."""
    slot, width = outputs_first(spec, at), spec.shape[1]
    return tuple(
        replace(slot, part=(0, part, part + 1), axis=1, start=(1 - part) * width)
        for part in range(2)
    )


def latent_attention_part() -> Part:
    """`model.mla`. Reads before `shape`."""

    def read(config: dict) -> dict:
        own = MlaConfig.model_fields.keys() - {"q_lora_rank", "latent_norm_eps"}
        sizes = {key: take(config, key) for key in sorted(own)}
        sizes["q_lora_rank"] = config.pop("q_lora_rank", None)
        turned = sizes["qk_rope_head_dim"]
        head = sizes["qk_nope_head_dim"] + turned
        only(config, "qk_head_dim", head)
        only(config, "head_dim", turned, head)
        only(config, "num_key_value_heads", config["num_attention_heads"])
        only(config, "rope_interleave", True)
        return {f"mla.{key}": size for key, size in sizes.items()}

    def write(cfg: ModelConfig) -> dict:
        return cfg.mla.model_dump(exclude={"latent_norm_eps"}) | {
            "head_dim": cfg.mla.qk_rope_head_dim,
            "num_key_value_heads": cfg.attention.num_attention_heads,
        }

    return Part(read, write)


def routed_experts_v2() -> Part:
    """DeepSeek-V2's experts: softmax scores, a group as good as its best expert."""

    def read(config: dict) -> dict:
        if config.get("topk_method") in (None, "greedy"):
            config["n_group"] = config["topk_group"] = 1
        only(config, "topk_method", "greedy", "group_limited_greedy")
        only(config, "scoring_func", "softmax")
        only(config, "norm_topk_prob", False)
        return {"moe.norm_topk_prob": False, "moe.group_score_topk": 1}

    def write(cfg: ModelConfig) -> dict:
        grouped = cfg.moe.n_group > 1
        method = "group_limited_greedy" if grouped else "greedy"
        return {"topk_method": method, "norm_topk_prob": False}

    return _routed_experts(Part(read, write), 1.0)


def routed_experts_v3(factor: float = 2.5) -> Part:
    """DeepSeek-V3's experts: sigmoid scores with a bias, a group as good as its two best.

    `factor` is the family's routed_scaling_factor, where it is left out.
    """

    def read(config: dict) -> dict:
        only(config, "topk_method", "noaux_tc")
        only(config, "scoring_func", "sigmoid")
        normalized = take(config, "norm_topk_prob", True)
        scores = {"moe.scoring_func": "sigmoid", "moe.expert_bias": True}
        return scores | {"moe.norm_topk_prob": normalized}

    def write(cfg: ModelConfig) -> dict:
        named = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
        return named | {"norm_topk_prob": cfg.moe.norm_topk_prob}

    return _routed_experts(Part(read, write), factor)


def routed_experts_mistral() -> Part:
    """Mistral 4's experts: softmax scores, a group as good as its two best."""

    def read(config: dict) -> dict:
        return {"moe.norm_topk_prob": take(config, "norm_topk_prob", True)}

    return _routed_experts(Part(read, lambda cfg: {"norm_topk_prob": cfg.moe.norm_topk_prob}), 1.0)


def _routed_experts(routing: Part, factor: float) -> Part:
    """The experts of layers that are not dense, with the `routing` of a version.

    `factor` stands for a routed_scaling_factor left out.
    """
    keys = same(
        ROUTED | {"aux_loss_alpha": "moe.router_aux_loss_coef"},
        {"n_group": 1, "topk_group": 1, "routed_scaling_factor": factor, "aux_loss_alpha": 0.0},
    )

    def read(config: dict) -> dict:
        if "n_routed_experts" not in config:  # dense layers only
            return {}
        only(config, "seq_aux", True)
        shared = take(config, "n_shared_experts")
        fields = routing.read(config) | keys.read(config)
        width = shared * fields["moe.moe_intermediate_size"]
        return fields | {"moe.shared_expert_intermediate_size": width}

    def write(cfg: ModelConfig) -> dict:
        if not cfg.moe.num_experts:
            return {}
        shared = cfg.moe.shared_expert_intermediate_size // cfg.moe.moe_intermediate_size
        return keys.write(cfg) | routing.write(cfg) | {"n_shared_experts": shared}

    return Part(read, write)
