"""Megatron-core's LLaVA: CLIP's or SigLIP's tower, a projector and a language model, both ways.

Its two scripts say a tower otherwise. `examples/multimodal` names its kind (`vision_model_type`),
`pretrain_vlm.py` copies the language model's sizes. The width and the number of layers are those of
the tensors. Source: megatron/core (models/multimodal, models/vision), both scripts.
"""

import re
from collections.abc import Mapping

from mjax.config.languages.layer_pattern import PROJECTORS, expand, of_tower, pattern_of
from mjax.config.schema.model import ModelConfig
from mjax.config.schema.vision import VisionConfig
from mjax.errors import UserError
from mjax.interop.megatron.saved_arguments import Args

Shapes = Mapping[str, tuple[int, ...]]  # of tensors, by Megatron's names
_OF_CLIP = {"patch_bias": False, "class_token": True, "embedding_norm": True}
_OF_SIGLIP = {"patch_bias": True, "class_token": False, "embedding_norm": False}
_KNOWN_TOWERS = {  # of examples/multimodal: channels of a head, and the keys of a tower
    "clip": (64, _OF_CLIP | {"hidden_act": "quick_gelu"}),
    "siglip": (72, _OF_SIGLIP | {"hidden_act": "gelu_tanh", "layer_norm_eps": 1e-6}),
}
_MOST_LAYERS = 10_000
_PIXELS = "vision_model.conv1.weight"
_UP = re.compile(r"vision_model\.decoder\.layers\.(\d+\.)?mlp\.linear_fc1\.weight")
_OFF = "use_tiling", "use_tile_tags", "dynamic_resolution", "conv_merging"


def llava_fields(args: Args, fields: dict, shapes: Shapes) -> dict:
    """Keys of a model whose language model has the keys `fields`."""
    for name in _OFF:
        if args(name):
            raise args.refuse(name)
    tower = args("vision_model_type", "clip")
    if tower not in _KNOWN_TOWERS:
        raise args.refuse("vision_model_type", f"is none of {', '.join(_KNOWN_TOWERS)}")
    if tower == "clip" and not args("disable_vision_class_token"):
        raise args.refuse("disable_vision_class_token", "leaves the class token among the text's")
    if args("position_embedding_type") == "learned_absolute":
        raise args.refuse("position_embedding_type", "numbers the words without their images")
    if args("decoder_num_layers", args.need("num_layers")) != args.need("num_layers"):
        raise args.refuse("decoder_num_layers", "differs from args.num_layers")
    if args.need("img_h") != args.need("img_w"):
        raise args.refuse("img_h", "differs from args.img_w")
    if _PIXELS not in shapes or not any(map(_UP.fullmatch, shapes)):
        raise UserError(f"{args.where}: tensors of vision_model are missing; copy it again, whole")
    ups = {name: shape for name, shape in shapes.items() if _UP.fullmatch(name)}
    name, up = next(iter(ups.items()))
    layers = len(ups) if _UP.fullmatch(name)[1] else up[0]
    if not 0 < layers <= _MOST_LAYERS:
        raise args.refuse("encoder_num_layers", f"where the tensor {name!r} has {layers} layers")
    width, channels = shapes[_PIXELS][:2]
    kinds = expand(fields["layer_pattern"], fields["num_hidden_layers"])
    projector = "normed_projector" if tower == "siglip" else "projector"
    pattern = pattern_of(["vision+mlp"] * layers + [projector, *kinds])
    found = {"layer_pattern": pattern, "num_hidden_layers": layers + 1 + len(kinds)}
    token = args("image_token_index", -1)  # of a tokenizer that is not saved
    vision = {
        "hidden_size": width, "intermediate_size": up[-2], "num_channels": channels,
        "image_size": args("img_h"), "patch_size": args.need("patch_dim"),
        "layer_norm_eps": fields["norm_eps"], "pixel_shuffle": bool(args("pixel_shuffle")),
        "image_token_id": token if token >= 0 else fields["vocab_size"] - 1,
    }  # fmt: skip
    vision |= _of_kind(args, fields, width)
    return found | {f"vision.{key}": value for key, value in vision.items()}


def _of_kind(args: Args, fields: dict, width: int) -> dict:
    """Heads, activation and norms of a tower: its own, or CLIP's with the language model's."""
    if name := args("vision_model_type"):
        channels, own = _KNOWN_TOWERS[name]
        return own | {"num_attention_heads": width // channels}
    heads = args.need("num_attention_heads")
    if fields["hidden_act"] != "gelu" or fields["mlp_gated"] or not fields["mlp_bias"]:
        raise args.refuse("swiglu", "or another activation than gelu with biases in the projector")
    if fields["attention.num_key_value_heads"] != heads or args("apply_layernorm_1p"):
        raise args.refuse("num_query_groups", "or apply_layernorm_1p in the tower")
    if fields["attention.head_dim"] * heads != width:
        raise args.refuse("kv_channels", "differs from the tower's width by its heads")
    return _OF_CLIP | {"num_attention_heads": heads, "hidden_act": "gelu", "norm": fields["norm"]}


def is_llava(cfg: ModelConfig) -> bool:
    return "vision" in cfg.modalities and bool(PROJECTORS.intersection(cfg.layer_kinds))


def text_config(cfg: ModelConfig) -> ModelConfig:
    """The language model alone."""
    kinds = [kind for kind in cfg.layer_kinds if not of_tower(kind) and kind not in PROJECTORS]
    own = {"layer_pattern": pattern_of(kinds), "num_hidden_layers": len(kinds)}
    return cfg.model_copy(update=own | {"vision": VisionConfig()})


def llava_arguments(cfg: ModelConfig) -> dict:
    """The arguments of a tower and its projector."""
    vision = cfg.vision
    tower = "clip" if vision.hidden_act == "quick_gelu" else None
    tower = "siglip" if "normed_projector" in cfg.layer_kinds else tower
    return {
        "vision_model_type": tower,
        "encoder_num_layers": sum(map(of_tower, cfg.layer_kinds)),
        "img_h": vision.image_size, "img_w": vision.image_size, "patch_dim": vision.patch_size,
        "disable_vision_class_token": vision.class_token, "pixel_shuffle": vision.pixel_shuffle,
        "image_token_index": vision.image_token_id,
    }  # fmt: skip


def llava_shapes(cfg: ModelConfig) -> Shapes:
    """The shapes that say a tower's sizes, as its tensors will have them."""
    vision, layers = cfg.vision, sum(map(of_tower, cfg.layer_kinds))
    square = vision.patch_size, vision.patch_size
    up = layers, vision.intermediate_size, vision.hidden_size
    return {
        _PIXELS: (vision.hidden_size, vision.num_channels, *square),
        "vision_model.decoder.layers.mlp.linear_fc1.weight": up,
    }
