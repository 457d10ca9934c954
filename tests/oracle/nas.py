"""Nemotron-NAS in torch: Llama whose layers differ, under the names of published DeciLMForCausalLM.

transformers has no such class (the files bring their own code). This one is written for our tests,
from transformers' own layers of Llama.
"""

import torch
import transformers
from transformers.models.llama import modeling_llama as llama


class DeciLMConfig(transformers.LlamaConfig):
    model_type = "nemotron-nas"

    def __init__(self, block_configs=(), **options):
        given = {key: value for key, value in options.items() if value is not None}
        super().__init__(**given)  # published files leave out what the blocks say, as null
        self.block_configs = list(block_configs)


class Linear(torch.nn.Module):
    def __init__(self, name: str, width: int):
        super().__init__()
        self.name = name
        setattr(self, name, torch.nn.Linear(width, width, bias=False))

    def forward(self, x=None, hidden_states=None, **_):
        y = getattr(self, self.name)(x if hidden_states is None else hidden_states)
        return y if hidden_states is None else (y, None)


class Nothing(torch.nn.Module):
    def forward(self, x=None, hidden_states=None, **_):
        return x.new_zeros(()) if hidden_states is None else (hidden_states * 0, None)


def replace_parts(layer: torch.nn.Module, config: DeciLMConfig, i: int) -> None:
    attention, ffn = config.block_configs[i]["attention"], config.block_configs[i]["ffn"]
    sizes = transformers.LlamaConfig(**{k: v for k, v in config.to_dict().items() if v is not None})
    sizes._attn_implementation = config._attn_implementation
    if attention["no_op"]:
        layer.self_attn, layer.input_layernorm = Nothing(), torch.nn.Identity()
    elif attention["replace_with_linear"]:
        layer.self_attn = Linear("linear_attn", config.hidden_size)
    else:
        sizes.num_key_value_heads = config.num_attention_heads // attention["n_heads_in_group"]
        layer.self_attn = llama.LlamaAttention(sizes, i)
    if ffn["no_op"]:
        layer.mlp, layer.post_attention_layernorm = Nothing(), torch.nn.Identity()
    elif ffn["replace_with_linear"]:
        layer.mlp = Linear("linear_mlp", config.hidden_size)
    else:
        sizes.intermediate_size = 256 * -(-int(2 * ffn["ffn_mult"] * config.hidden_size / 3) // 256)
        layer.mlp = llama.LlamaMLP(sizes)


class DeciLMForCausalLM(transformers.LlamaForCausalLM):
    config_class = DeciLMConfig

    def __init__(self, config: DeciLMConfig):
        super().__init__(config)
        for i, layer in enumerate(self.model.layers):
            replace_parts(layer, config, i)
        self.post_init()


transformers.AutoConfig.register("nemotron-nas", DeciLMConfig)
transformers.AutoModelForCausalLM.register(DeciLMConfig, DeciLMForCausalLM)


def block(attention: dict, ffn: dict) -> dict:
    absent = {"no_op": False, "replace_with_linear": False}
    return {"attention": absent | attention, "ffn": absent | ffn}


NO_OP, MATRIX = {"no_op": True}, {"replace_with_linear": True}
# Two sizes of attention and of MLPs, each part missing once and replaced once.
BLOCKS = [
    block({"n_heads_in_group": 2}, {"ffn_mult": 8.0}),
    block(NO_OP, {"ffn_mult": 16.0}),
    block({"n_heads_in_group": 4}, MATRIX),
    block(MATRIX, {"ffn_mult": 16.0}),
    block({"n_heads_in_group": 4}, {"ffn_mult": 8.0}),
    block({"n_heads_in_group": 2}, NO_OP),
    block(MATRIX, MATRIX),
]
