"""Layers that differ (Nemotron-NAS): Megatron-LM's `block_configs` <-> layers of ours.

Each entry says of a layer's attention and of its MLP that it is missing, that one matrix replaces
it, or how large it is. The first of each are the model's; a layer with others takes them from an
entry of `model.layer_sizes`. Source: megatron/core (transformer/heterogeneous, models/gpt).
"""

import json
import re
from dataclasses import replace

from mjax.config.languages.layer_pattern import branches_of, pattern_of
from mjax.config.schema.model import ModelConfig
from mjax.errors import or_user_error
from mjax.interop.huggingface.families.nas import LayerEntry, mark_of_sizes
from mjax.interop.megatron.saved_arguments import Args
from mjax.interop.megatron.stored.torch_dist import TorchDist
from mjax.json_file import parse_json

_SAVED_JSON = "heterogeneous_layers_config_encoded_json"
_SAVED_PATH = "heterogeneous_layers_config_path"
_MATRICES = {"full": "linear", "mlp": "linear_mlp"}  # what may stand in the place of a branch
_WORDS_SAID = {*_MATRICES, *_MATRICES.values()}
_NOT_OF_TOWER = r"(?<!vision_model\.decoder\.layers\.)"
_NUMBER = re.compile(_NOT_OF_TOWER + r"(?<=decoder\.layers\.)\d+(?=\.)")
_ALONE = "num_experts", "window_size", "no_rope_freq", "multi_latent_attention", "mtp_num_layers"


def is_heterogeneous(args: Args) -> bool:
    return bool(args(_SAVED_JSON) or args(_SAVED_PATH))


def heterogeneous_fields(args: Args) -> dict:
    """Keys of layers that differ; `UserError` for what mjax has no branch for."""
    for name in _ALONE:
        if args(name):
            raise args.refuse(name, "meets layers that differ")
    every = _layers_said(args)
    found = [layer for layer in every if layer.words]
    if not found:
        raise args.refuse(_SAVED_JSON, "has no layer with attention or ffn")
    of_matrices = {*_MATRICES.values()} & {word for layer in found for word in layer.words}
    if args("add_bias_linear", True) and of_matrices:
        raise args.refuse("add_bias_linear", "meets layers of one matrix, which has no bias")
    groups = args("num_query_groups") or args.need("num_attention_heads")
    kv_heads = next((each.kv_heads for each in found if each.kv_heads), groups)
    width = next((each.width for each in found if each.width), args.need("ffn_hidden_size"))
    sizes: list[dict] = []
    kinds = ["+".join(e.words) + mark_of_sizes(e, kv_heads, width, sizes) for e in found]
    fields = {"layer_pattern": pattern_of(kinds), "layer_sizes": sizes}
    fields |= {"num_hidden_layers": len(kinds), "intermediate_size": width}
    return fields | {"attention.num_key_value_heads": kv_heads}


def without_empty_layers(store: TorchDist) -> TorchDist:
    """`store` with its layers numbered anew where some have neither attention nor MLP.

    Such a layer passes its input on and has no tensors, so the model here does without it.
    """
    args = Args(vars(store.arguments()), store.where_common)
    layers = _layers_said(args) if is_heterogeneous(args) else []
    kept = [number for number, layer in enumerate(layers) if layer.words]
    if len(kept) == len(layers):
        return store
    if store.weights_alone and args("pipeline_model_parallel_size", 1) != 1:
        raise args.refuse("pipeline_model_parallel_size", "numbers layers by rank, empty ones, too")
    numbers = {str(old): str(new) for new, old in enumerate(kept)}

    def own(name: str) -> str:
        return _NUMBER.sub(lambda found: numbers.get(found[0], f"{found[0]} (empty)"), name)

    return replace(store, tensors={own(name): x for name, x in store.tensors.items()})


def _layers_said(args: Args) -> list[LayerEntry]:
    if not args(_SAVED_JSON):
        raise args.refuse(_SAVED_PATH, "names a file that is not in the checkpoint")
    wrong = f"{args.where}: args.{_SAVED_JSON} has no list block_configs: {{reason}}"
    with or_user_error(wrong, (ValueError, KeyError, TypeError)):
        blocks = list(parse_json(args(_SAVED_JSON))["block_configs"])
    if len(blocks) != args.need("num_layers"):
        raise args.refuse("num_layers", f"differs from the {len(blocks)} entries of block_configs")
    return [_layer_said(args, number, block) for number, block in enumerate(blocks)]


def _layer_said(args: Args, number: int, block: object) -> LayerEntry:
    """One layer, without words if it is empty; sizes that it does not give are the model's."""
    where = f"{args.where}: args.{_SAVED_JSON}: block_configs[{number}]"
    with or_user_error(f"{where} lacks attention or ffn: {{reason}}", (KeyError, TypeError)):
        attention, mlp = dict(block["attention"]), dict(block.get("ffn") or block["mlp"])
    words = []
    for (word, matrix), part in zip(_MATRICES.items(), (attention, mlp), strict=True):
        if not part.get("no_op"):
            words.append(matrix if part.get("replace_with_linear") else word)
    heads, hidden = args.need("num_attention_heads"), args.need("hidden_size")
    kv_heads, width = attention.get("num_query_groups"), mlp.get("ffn_hidden_size")
    with or_user_error(f"{where} has a size that is none: {{reason}}", (TypeError, ValueError)):
        if kv_heads is None and attention.get("n_heads_in_group"):
            kv_heads = heads // int(attention["n_heads_in_group"])
        if width is None and mlp.get("ffn_mult"):
            width = -(-int(2 * mlp["ffn_mult"] * hidden / 3) // 256) * 256
    grouped = args("num_query_groups") if args("group_query_attention") else heads
    own = kv_heads or grouped, width or args.need("ffn_hidden_size")
    kept = [size if word in words else None for word, size in zip(_MATRICES, own, strict=True)]
    return LayerEntry(tuple(words), *kept)


def has_differing_layers(cfg: ModelConfig) -> bool:
    """Whether only an entry for each layer says what the layers of `cfg` are."""
    return cfg.branches <= _WORDS_SAID and {*cfg.layer_kinds} != {"full+mlp"}


def heterogeneous_arguments(cfg: ModelConfig) -> dict:
    """The argument, with what Megatron-LM's script compares with others."""
    blocks = [_entry_of_layer(cfg.of_layer(kind), branches_of(kind)) for kind in cfg.layer_kinds]
    scaling = cfg.rope.rope_scaling
    said = {
        "block_configs": blocks, "hidden_act": cfg.hidden_act, "hidden_size": cfg.hidden_size,
        "num_attention_heads": cfg.attention.num_attention_heads,
        "num_hidden_layers": cfg.num_hidden_layers, "rope_theta": cfg.rope.rope_theta,
        "rope_scaling": None if scaling is None else scaling.model_dump(exclude_none=True),
        "tie_word_embeddings": cfg.tie_word_embeddings,
    }  # fmt: skip
    return {_SAVED_JSON: json.dumps(said, sort_keys=True), "heterogeneous_block_specs": True}


def _entry_of_layer(cfg: ModelConfig, words: tuple[str, ...]) -> dict:
    entry: dict[str, dict] = {}
    for name, (word, matrix) in zip(("attention", "ffn"), _MATRICES.items(), strict=True):
        missing = not {word, matrix} & {*words}
        entry[name] = {"no_op": missing, "replace_with_linear": matrix in words}
    heads = cfg.attention
    group = heads.num_attention_heads // heads.num_key_value_heads
    entry["attention"]["n_heads_in_group"] = group if "full" in words else None
    entry["ffn"]["ffn_hidden_size"] = cfg.intermediate_size if "mlp" in words else None
    return entry
