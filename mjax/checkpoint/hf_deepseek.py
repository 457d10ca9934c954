"""DeepSeek's part of a Hugging Face config.json: latent attention, and which layers are dense.

Kimi-K2, Moonlight and others use the same classes. Layers of experts are not read yet.
"""

from mjax.checkpoint.hf_config import Part, only, take
from mjax.config.model_schema import MlaConfig, ModelConfig
from mjax.errors import UserError

# Keys about experts, which say nothing where all layers are dense; and about prediction layers,
# which are no part of the model's own function.
_OF_EXPERTS = """aux_loss_alpha ep_size moe_intermediate_size moe_layer_freq n_group
    n_routed_experts n_shared_experts norm_topk_prob num_experts_per_tok num_mtp_layers
    num_nextn_predict_layers output_router_logits routed_scaling_factor scoring_func seq_aux
    topk_group topk_method""".split()


def latent_layers() -> Part:
    """`model.mla` and the layer pattern. Reads before `shape`."""

    def read(config: dict) -> dict:
        layers, dense = config["num_hidden_layers"], take(config, "first_k_dense_replace", 0)
        if dense < layers:
            raise UserError(
                f"config.json: first_k_dense_replace={dense} of num_hidden_layers={layers}: layers "
                "with DeepSeek's experts are not built yet; only dense ones are"
            )
        for key in _OF_EXPERTS:
            config.pop(key, None)
        sizes = {key: take(config, key) for key in MlaConfig.model_fields if key != "q_lora_rank"}
        sizes["q_lora_rank"] = config.pop("q_lora_rank", None)
        turned = sizes["qk_rope_head_dim"]
        only(config, "qk_head_dim", sizes["qk_nope_head_dim"] + turned)
        only(config, "head_dim", turned)
        only(config, "num_key_value_heads", config["num_attention_heads"])
        only(config, "rope_interleave", True)
        return {"layer_pattern": "A"} | {f"mla.{key}": size for key, size in sizes.items()}

    def write(cfg: ModelConfig) -> dict:
        return cfg.mla.model_dump() | {
            "first_k_dense_replace": cfg.num_hidden_layers,
            "head_dim": cfg.mla.qk_rope_head_dim,
            "num_key_value_heads": cfg.attention.num_attention_heads,
        }

    return Part(read, write)
