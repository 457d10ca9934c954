"""gpt-oss in Hugging Face's words: its part of a config.json, and what its tensors are called.

Its windows are read by `layer_types`. The published weights of its experts are in MXFP4
(`interop/coded/mxfp4.py`); an export has them in bfloat16.
"""

from mjax.config.schema.model import ModelConfig
from mjax.interop.huggingface.families.parts import BALANCE, Part, alike, only, same, take
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
    keys = same(_KEYS, _DEFAULTS)

    def read(config: dict) -> dict:
        only(config, "swiglu_alpha", GPT_OSS_SHARPNESS)
        config.pop("initial_context_length", None)  # rope_scaling has it
        only(config, "experts_per_token", config.get("num_experts_per_tok"))
        if not (config.get("rope_parameters") or config.get("rope_scaling")):
            config["rope_scaling"] = dict(_ROPE)
        has_bias = take(config, "attention_bias", True)
        return keys.read(config) | {
            **BALANCE,
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
