"""Nemotron-NAS (Llama-Nemotron, arXiv 2411.19146): layers that differ, from `block_configs`.

Each entry says of a layer's attention and of its MLP that it is missing, that one matrix replaces
it, or how large it is. The sizes of the first of each are the model's; a layer with others takes
them from an entry of `model.layer_sizes`. Source: the config.json and tensors of published
DeciLMForCausalLM.
"""

from typing import NamedTuple

from mjax.config.languages.layer_pattern import branches_of, pattern_of
from mjax.config.schema.model import ModelConfig
from mjax.errors import UserError
from mjax.interop.huggingface.families.parts import Part, only, take

_WIDTH_MULTIPLE = 256  # of the widths of MLPs
# The parts of an entry: the branch, and the matrix in its place.
_BRANCHES = {"attention": ("full", "linear"), "ffn": ("mlp", "linear_mlp")}
_SIZE_KEYS = {"attention": "n_heads_in_group", "ffn": "ffn_mult"}
_ABSENT = """sparsify window_length num_sink_tokens unshifted_sink moe mamba is_mamba llama4
    is_llama4 use_prefill_window_in_sink_attention""".split()


class LayerEntry(NamedTuple):
    """The words of a layer's branches, and their sizes if they have such."""

    words: tuple[str, ...]
    kv_heads: int | None
    width: int | None


def block_configs() -> Part:
    """`block_configs` <-> `layer_pattern` and `layer_sizes`. Reads first."""

    def read(config: dict) -> dict:
        blocks, layers = take(config, "block_configs"), config.get("num_hidden_layers")
        if not isinstance(blocks, list) or len(blocks) != layers:
            raise UserError(f"config.json: block_configs must be a list of {layers} layers")
        found = [
            _read_block(f"block_configs[{i}]", block, config) for i, block in enumerate(blocks)
        ]
        heads = config.get("num_attention_heads")
        kv_heads = next((layer.kv_heads for layer in found if layer.kv_heads), heads)
        width = next((layer.width for layer in found if layer.width), _WIDTH_MULTIPLE)
        config |= {"num_key_value_heads": kv_heads, "intermediate_size": width}
        sizes: list[dict] = []
        kinds = [
            "+".join(layer.words) + mark_of_sizes(layer, kv_heads, width, sizes) for layer in found
        ]
        return {"layer_pattern": pattern_of(kinds), "layer_sizes": sizes}

    def write(cfg: ModelConfig) -> dict:
        blocks = [_layer_entry(cfg.of_layer(kind), branches_of(kind)) for kind in cfg.layer_kinds]
        sizes = {"num_key_value_heads": None, "intermediate_size": None}
        return sizes | {"block_configs": blocks}

    return Part(read, write)


def _read_block(where: str, block: object, config: dict) -> LayerEntry:
    """One entry. Raises `UserError` for what mjax has no branch for."""
    words, sizes = [], {}
    for name, (word, matrix) in _BRANCHES.items():
        part = block.get(name) if isinstance(block, dict) else None
        if not isinstance(part, dict):
            raise UserError(f"config.json: {where} must have attention and ffn")
        part, size = dict(part), part.get(_SIZE_KEYS[name])
        part.pop(_SIZE_KEYS[name], None)
        if not take(part, "no_op", False):
            replaced = take(part, "replace_with_linear", False)
            words.append(matrix if replaced else word)
        if word in words and not (isinstance(size, int | float) and size > 0):
            raise UserError(f"config.json: {where} has {_SIZE_KEYS[name]}={size!r}; give a number")
        sizes[word] = size if word in words else None
        for key in _ABSENT:
            only(part, key, False)
        only(part, "hidden_act", "silu")
        only(part, "replace_with_linear", False)
        if part:
            raise UserError(f"config.json: {where} has {min(part)!r}, which is not known to mjax")
    if not words:
        raise UserError(
            f"config.json: {where} has neither attention nor ffn, and mjax no layers without "
            "branches; remove it and number the layers behind it anew"
        )
    kv_heads = width = None
    if sizes["full"]:
        kv_heads = int(config["num_attention_heads"] // sizes["full"])
    if sizes["mlp"]:
        wanted = int(2 * sizes["mlp"] * config["hidden_size"] / 3)
        width = -(-wanted // _WIDTH_MULTIPLE) * _WIDTH_MULTIPLE
    return LayerEntry(tuple(words), kv_heads, width)


def mark_of_sizes(layer: LayerEntry, kv_heads: int, width: int, sizes: list[dict]) -> str:
    """The mark of a layer's entry in `sizes`, which may gain it; none for the sizes given."""
    entry: dict = {}
    if layer.kv_heads not in (None, kv_heads):
        entry["attention"] = {"num_key_value_heads": layer.kv_heads}
    if layer.width not in (None, width):
        entry["intermediate_size"] = layer.width
    if entry and entry not in sizes:
        sizes.append(entry)
    return f"@{sizes.index(entry) + 1}" if entry else ""


def _layer_entry(cfg: ModelConfig, words: tuple[str, ...]) -> dict:
    """The entry of a layer with these sizes."""
    entry: dict[str, dict] = {}
    for name, (word, matrix) in _BRANCHES.items():
        missing = word not in words and matrix not in words
        entry[name] = {"no_op": missing, "replace_with_linear": matrix in words}
    heads = cfg.attention
    if "full" in words:
        of_group = heads.num_attention_heads // heads.num_key_value_heads
        entry["attention"]["n_heads_in_group"] = of_group
    if "mlp" in words:
        entry["ffn"]["ffn_mult"] = 3 * cfg.intermediate_size / (2 * cfg.hidden_size)
    return entry


def norm_names(cfg: ModelConfig, name: str) -> str:
    """A tensor's name: the norm before an MLP is called so even where it is a layer's only one."""
    parts = name.split(".")
    mixers = set(_BRANCHES["attention"])
    if parts[1] == "layers" and mixers.isdisjoint(branches_of(cfg.layer_kinds[int(parts[2])])):
        return name.replace("input_layernorm", "post_attention_layernorm")
    return name
