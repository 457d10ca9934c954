"""The parts of a config.json of Qwen3-Next: its layers and its linear attention."""

from mjax.checkpoint.hf_config import Part, alike, same, take
from mjax.config.model_schema import ModelConfig
from mjax.config.pattern import shortest
from mjax.errors import UserError

# A layer, by whether it has linear attention and whether it has experts.
_KINDS = {(True, True): "[TE]", (True, False): "[TD]", (False, True): "E", (False, False): "G"}
_WORDS = {True: "linear_attention", False: "full_attention"}

_SIZES = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
DELTANET = same(alike(" ".join(_SIZES), "deltanet."), _SIZES)


def linear_and_full_layers() -> Part:
    """`layer_types`, or full attention in each `full_attention_interval`-th layer; experts in each
    `decoder_sparse_step`-th but `mlp_only_layers`. Reads before `shape`."""

    def read(config: dict) -> dict:
        layers = config["num_hidden_layers"]
        every = take(config, "full_attention_interval", 4)
        types = [_WORDS[bool((i + 1) % every)] for i in range(layers)]
        types = take(config, "layer_types", types)
        if len(types) != layers or set(types) - set(_WORDS.values()):
            raise UserError(f"config.json: layer_types={types!r}, num_hidden_layers={layers}")
        step = take(config, "decoder_sparse_step", 1)
        dense = take(config, "mlp_only_layers", [])
        kinds = []
        for i, word in enumerate(types):
            has_experts = i not in dense and (i + 1) % step == 0
            kinds.append(_KINDS[word == _WORDS[True], has_experts])
        return {"layer_pattern": "".join(shortest(kinds))}

    def write(cfg: ModelConfig) -> dict:
        of_kind = {kind: facts for facts, kind in _KINDS.items()}
        if not set(cfg.layer_kinds) <= set(of_kind):
            return {}  # what is read back differs
        found = [of_kind[kind] for kind in cfg.layer_kinds]
        return {
            "layer_types": [_WORDS[is_linear] for is_linear, _ in found],
            "decoder_sparse_step": 1,
            "mlp_only_layers": [i for i, (_, has_experts) in enumerate(found) if not has_experts],
        }

    return Part(read, write)
