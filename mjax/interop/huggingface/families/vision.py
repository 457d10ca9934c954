"""Families of models that read images: rows of the table of families (`families.py`).

LLaVA's files hold all layers of CLIP's tower, of which the model reads the output of one before the
last. The layers behind it are kept aside, and so is the norm of what nobody reads. CLIP and SigLIP
have a tower of images and one of texts, whose sizes and names are alike.
"""

import re
from collections.abc import Collection
from dataclasses import replace
from typing import NamedTuple

from mjax.config.languages.layer_pattern import of_tower
from mjax.config.schema.model import ModelConfig
from mjax.errors import UserError
from mjax.interop.huggingface.families.family import (
    Family,
    SlotsByPath,
    after_ones,
    changed,
    number,
    table,
)
from mjax.interop.huggingface.families.parts import (
    ACTIVATIONS,
    BIASED,
    Part,
    activation,
    alike,
    biases,
    ignored,
    only,
    required,
    same,
    shape,
    take,
)
from mjax.interop.huggingface.families.rope import rope

_VIT_SHAPE = same(
    alike("hidden_size intermediate_size num_hidden_layers initializer_range")
    | alike("num_attention_heads", "attention.")
    | alike("num_channels", "vision.")
    | {
        "layer_norm_eps": "norm_eps",
        "hidden_dropout_prob": "hidden_dropout",
        "attention_probs_dropout_prob": "attention.attention_dropout",
        "qkv_bias": "attention.attention_bias",
    },
    {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_channels": 3}
    | {"num_attention_heads": 12, "initializer_range": 0.02, "layer_norm_eps": 1e-12}
    | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "qkv_bias": True},
)


def _square_images() -> Part:
    """The sizes of images and patches, which may be written as [height, width]."""
    defaults = {"image_size": 224, "patch_size": 16}

    def read(config: dict) -> dict:
        fields = {}
        for key, default in defaults.items():
            size = take(config, key, default)
            sides = size if isinstance(size, list) else [size]
            if len(set(sides)) > 1:
                raise UserError(f"config.json: {key}={size!r} is not supported (only squares)")
            fields[f"vision.{key}"] = sides[0]
        return fields

    return Part(read, lambda cfg: {key: getattr(cfg.vision, key) for key in defaults})


def _classes() -> Part:
    """The number of classes of ViTForImageClassification, the only class that is built."""
    architecture = "ViTForImageClassification"

    def read(config: dict) -> dict:
        (kind, *_) = config.get("architectures") or [architecture]
        if kind != architecture:
            raise UserError(
                f"config.json: architectures={kind!r} is not supported (only {architecture})"
            )
        labels = take(config, "num_labels", len(config.get("id2label") or "01"))
        return {"vision.num_labels": labels}

    return Part(read, lambda cfg: {"num_labels": cfg.vision.num_labels})


# ---- LLaVA ---------------------------------------------------------------------------------------

LLAMA = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32}
LLAMA |= {"num_attention_heads": 32, "vocab_size": 32000, "max_position_embeddings": 2048}
_TEXT = (shape(activation("hidden_act", default="silu"), **LLAMA), rope(), biases(mlp=True))
_TOWER_KEYS = "hidden_size intermediate_size num_attention_heads layer_norm_eps"
_TOWER_KEYS += " image_size patch_size num_channels"
_CLIP_TOWER = {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12}
_CLIP_TOWER |= {"layer_norm_eps": 1e-5, "image_size": 224, "patch_size": 32, "num_channels": 3}
_TOWER = same(alike(_TOWER_KEYS, "vision."), _CLIP_TOWER)
_SIGLIP_SIZES = _CLIP_TOWER | {"layer_norm_eps": 1e-6, "patch_size": 16}
_SIGLIP_TOWER = same(alike(_TOWER_KEYS, "vision."), _SIGLIP_SIZES)
QWEN2 = {"hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32}
QWEN2 |= {"num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 151936}
QWEN2 |= {"max_position_embeddings": 32768}
_BIAS_KEYS = biases(True, out=False)
_NO_WINDOW = ignored("layer_types", "max_window_layers", "sliding_window")
_SAYS_NOTHING = (
    "projection_dim initializer_factor initializer_range vocab_size attention_dropout".split()
)
_ACTS = {"quick_gelu": "quick_gelu"} | ACTIVATIONS
_PUBLISHED, _NEW = "vision_tower.vision_model.", "vision_tower."


def _tower_sizes(keys: Part, vision: dict) -> dict:
    """The sizes of a tower. Raises `UserError` where it cuts no image."""
    fields = keys.read(vision)
    if fields["vision.patch_size"] == 0:
        raise UserError("config.json: vision_config.patch_size=0 cuts no image into tokens")
    return fields


class _Kind(NamedTuple):
    """A family of LLaVA's kind: the `model_type` of its text and tower, and what they leave out.

    layer: of the tower, that is read. fixed: what all its towers have.
    """

    text: str
    parts: tuple[Part, ...]
    tower: str
    sizes: Part
    act: str
    layer: int
    image_token_id: int
    fixed: dict[str, bool]


def _text_part(kind: _Kind) -> Part:
    """The language model, in `text_config`: one of Llama's kind."""

    def read(config: dict) -> dict:
        text = dict(take(config, "text_config"))
        only(text, "model_type", kind.text)
        text.setdefault("tie_word_embeddings", config.pop("tie_word_embeddings", False))
        fields: dict = {}
        for part in kind.parts:
            fields |= part.read(text)
        del fields["num_hidden_layers"]  # `_tower` counts both
        config |= text  # what is left is judged with the rest
        return fields

    def write(cfg: ModelConfig) -> dict:
        text = {"model_type": kind.text}
        for part in kind.parts:
            text |= part.write(cfg)
        text["num_hidden_layers"] = cfg.num_hidden_layers - _towers(cfg) - 1
        return {"text_config": text}

    return Part(read, write)


def _tower(kind: _Kind) -> Part:
    """The tower, in `vision_config`, up to the layer that is read; the layers of both."""

    def read(config: dict) -> dict:
        vision = dict(take(config, "vision_config"))
        only(vision, "model_type", kind.tower)
        act = take(vision, "hidden_act", kind.act)
        layers = take(vision, "num_hidden_layers", 12)
        layer = take(config, "vision_feature_layer", kind.layer)
        used = layers + 1 + layer if isinstance(layer, int) and layer < 0 else layer
        if act not in _ACTS or type(used) is not int or not 0 < used <= layers:
            raise UserError(
                f"config.json: hidden_act={act!r} or vision_feature_layer={layer!r} of a tower of "
                f"{layers} layers is not supported"
            )
        fields = _tower_sizes(kind.sizes, vision)
        for key in (*_SAYS_NOTHING, "vision_use_head"):
            vision.pop(key, None)
        config |= vision
        fixed: dict = {"hidden_act": _ACTS[act]} | kind.fixed
        image_token = config.pop("image_token_id", kind.image_token_id)
        fixed["image_token_id"] = take(config, "image_token_index", image_token)
        fields |= {f"vision.{key}": value for key, value in fixed.items()}
        text = dict(config["text_config"]).get("num_hidden_layers") or LLAMA["num_hidden_layers"]
        pattern = f"vision+mlp*{used}, projector, full+mlp*{text}"
        count = used + 1 + text
        return fields | {"layer_pattern": pattern, "num_hidden_layers": count}

    def write(cfg: ModelConfig) -> dict:
        names = {ours: theirs for theirs, ours in reversed(_ACTS.items())}
        vision = {"model_type": kind.tower, "num_hidden_layers": _towers(cfg)}
        vision |= kind.sizes.write(cfg) | {"hidden_act": names[cfg.vision.hidden_act]}
        if not cfg.vision.class_token:
            vision["vision_use_head"] = False
        ids: dict = {"image_token_index": cfg.vision.image_token_id}
        return {"vision_config": vision, "vision_feature_layer": -1} | ids

    return Part(read, write)


def _seq_length() -> Part:
    """The tokens of an image, which follow from its size."""
    key = "image_seq_length"
    read = ignored(key).read
    return Part(read, lambda cfg: {key: cfg.vision.patch_size and cfg.vision.text_tokens()})


_LLAVA_DEFAULTS = _Kind(
    text="llama",
    parts=_TEXT,
    tower="clip_vision_model",
    sizes=_TOWER,
    act="quick_gelu",
    layer=-2,
    image_token_id=32000,
    fixed={"patch_bias": False, "embedding_norm": True},
)
_ONEVISION = _Kind(
    text="qwen2",
    parts=(_NO_WINDOW, required(use_sliding_window=False), shape(**QWEN2), rope(), _BIAS_KEYS),
    tower="siglip_vision_model",
    sizes=_SIGLIP_TOWER,
    act="gelu_pytorch_tanh",
    layer=-1,
    image_token_id=151646,
    fixed={"class_token": False},
)
_GRIDS = [[384 * rows, 384 * columns] for rows in range(1, 7) for columns in range(1, 7)]
_TILES = same(
    alike("image_grid_pinpoints vision_aspect_ratio", "vision."),
    {"image_grid_pinpoints": _GRIDS, "vision_aspect_ratio": "anyres_max_9"},
)


def _towers(cfg: ModelConfig) -> int:
    """The layers of the tower."""
    return sum(map(of_tower, cfg.layer_kinds))


_OF_TOWER = (
    ("input_layernorm", "layer_norm1"),
    ("post_attention_layernorm", "layer_norm2"),
    ("self_attn.o_proj", "self_attn.out_proj"),
    ("up_proj", "fc1"),
    ("down_proj", "fc2"),
)
_TOWER_EDGES = {
    "model.embed_patches.weight": "embeddings.patch_embedding.weight",
    "model.embed_patches.bias": "embeddings.patch_embedding.bias",
    "model.embed_class": "embeddings.class_embedding",
    "model.embed_image_positions": "embeddings.position_embedding.weight",
    "model.embed_images_norm.weight": "pre_layrnorm.weight",
    "model.embed_images_norm.bias": "pre_layrnorm.bias",
}
_TEXT_EDGES = {
    "model.embed_tokens.weight": "embeddings.token_embedding.weight",
    "model.embed_positions.weight": "embeddings.position_embedding.weight",
    "model.norm.weight": "final_layer_norm.weight",
    "model.norm.bias": "final_layer_norm.bias",
}


def _in_layer(rest: str) -> str:
    """The name of a parameter within a layer of a tower."""
    for ours, theirs in _OF_TOWER:
        rest = rest.replace(ours, theirs)
    return rest


def _llava_name(cfg: ModelConfig, name: str) -> str:
    """The name of a tensor in a file of LLaVA, from that which its parameter declares."""
    if name in _TOWER_EDGES:
        return _PUBLISHED + _TOWER_EDGES[name]
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name)
    if layer is None:
        return f"language_model.{name}"
    number, rest, towers = int(layer[1]), layer[2], _towers(cfg)
    if number == towers:
        return rest if rest == "image_newline" else f"multi_modal_projector.{rest}"
    if number > towers:
        return f"language_model.model.layers.{number - towers - 1}.{rest}"
    return f"{_PUBLISHED}encoder.layers.{number}.{_in_layer(rest)}"


def _with_new_towers(slots: SlotsByPath, names: Collection[str]) -> SlotsByPath:
    """The slots in a file of transformers 5, whose names of towers are shorter, if it is one."""
    if any(name.startswith(_PUBLISHED) for name in names):
        return slots
    return changed(slots, lambda slot: replace(slot, tensor=slot.tensor.replace(_PUBLISHED, _NEW)))


# ---- CLIP and SigLIP -----------------------------------------------------------------------------

_TEXT_TOWER = same(
    alike("vocab_size hidden_size intermediate_size max_position_embeddings")
    | alike("num_attention_heads", "attention.")
    | {"layer_norm_eps": "norm_eps"},
    {"intermediate_size": 2048, "max_position_embeddings": 77, "layer_norm_eps": 1e-5}
    | {"hidden_size": 512, "num_attention_heads": 8, "vocab_size": 49408},
)
# What says nothing about a tower.
_NO_SIZES = """projection_dim projection_size dropout tie_word_embeddings tie_encoder_decoder
    pruned_heads""".split()


def _both_towers(kind: str, layer: str, of_images: dict, of_texts: dict) -> Part:
    """The sizes of both towers, in `vision_config` and `text_config`, and the layers of both.

    `layer`: of texts. `of_images` and `of_texts` are the family's for what a tower leaves out.
    """
    names = {ours: theirs for theirs, ours in reversed(_ACTS.items())}

    def act_of(tower: dict) -> str:
        act = take(tower, "hidden_act")
        if act not in _ACTS:
            raise UserError(f"config.json: hidden_act={act!r} of a tower is not supported")
        return _ACTS[act]

    def sizes(config: dict, tower: str) -> dict:
        """Sizes of a tower. CLIP's files of 2022 say them twice; transformers reads the second."""
        first = take(config, f"{tower}_config", {})
        second = config.pop(f"{tower}_config_dict", None)
        return dict(first if second is None or kind != "clip" else second)

    def read(config: dict) -> dict:
        vision = of_images | sizes(config, "vision")
        text = of_texts | sizes(config, "text")
        only(vision, "model_type", f"{kind}_vision_model")
        only(vision, "vision_use_head", True)
        only(text, "model_type", f"{kind}_text_model")
        fields = {"vision.hidden_act": act_of(vision), "hidden_act": act_of(text)}
        layers = take(vision, "num_hidden_layers"), take(text, "num_hidden_layers")
        width = text.get("projection_size") or text.get("hidden_size")
        fields |= _tower_sizes(_TOWER, vision) | _TEXT_TOWER.read(text)
        eos = text.get("eos_token_id") or 49407
        if kind == "clip":
            fields["contrastive.eos_token_id"] = eos
        else:
            fields["contrastive.projection_dim"] = width
        for key in (*_SAYS_NOTHING, *_NO_SIZES):
            vision.pop(key, None)
            text.pop(key, None)
        config |= text | vision  # what is left is judged with the rest
        fields["layer_pattern"] = f"vision+mlp*{layers[0]}, {layer}*{layers[1]}"
        return fields | {"num_hidden_layers": sum(layers)}

    def write(cfg: ModelConfig) -> dict:
        vision = {"model_type": f"{kind}_vision_model", "num_hidden_layers": _towers(cfg)}
        vision |= _TOWER.write(cfg) | {"hidden_act": names[cfg.vision.hidden_act]}
        text = {"model_type": f"{kind}_text_model"} | _TEXT_TOWER.write(cfg)
        text["num_hidden_layers"] = cfg.num_hidden_layers - _towers(cfg)
        text["hidden_act"] = names[cfg.hidden_act]
        width = cfg.contrastive.projection_dim
        if kind == "clip":
            text |= {"eos_token_id": cfg.contrastive.eos_token_id, "projection_dim": width}
            vision["projection_dim"] = width
        else:
            text["projection_size"] = width
        return {"vision_config": vision, "text_config": text}

    return Part(read, write)


def _dual_names(cfg: ModelConfig, name: str) -> str:
    """The name of a tensor in a file of CLIP or SigLIP, from that which its parameter declares."""
    for side, edges in (("vision_model", _TOWER_EDGES), ("text_model", _TEXT_EDGES)):
        if name in edges:
            return f"{side}.{edges[name]}"
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name)
    if layer is None:
        return name
    number, towers = int(layer[1]), _towers(cfg)
    side, number = ("vision", number) if number < towers else ("text", number - towers)
    return f"{side}_model.encoder.layers.{number}.{_in_layer(layer[2])}"


_CLIP = {"hidden_act": "quick_gelu", "num_hidden_layers": 12}
_SIGLIP = {"hidden_act": "gelu_pytorch_tanh", "num_hidden_layers": 12, "layer_norm_eps": 1e-6}
_SIGLIP_TEXT = {"vocab_size": 32000, "max_position_embeddings": 64, "num_attention_heads": 12}
_SIGLIP_TEXT |= {"hidden_size": 768, "intermediate_size": 3072}
_INITIAL = ("initializer_factor", "logit_scale_init_value")

VISION: dict[str, Family] = {
    "clip": Family.of(
        "CLIPModel",
        ignored(*_INITIAL),
        _both_towers("clip", "full+mlp", _CLIP, _CLIP),
        same({"projection_dim": "contrastive.projection_dim"}, {"projection_dim": 512}),
        fixed=BIASED | {"vision.patch_bias": False, "vision.embedding_norm": True},
        name_of=_dual_names,
        layouts={"logit_scale": number},
    ),
    "siglip": Family.of(
        "SiglipModel",
        ignored(*_INITIAL),
        _both_towers("siglip", "text+mlp", _SIGLIP | {"patch_size": 16}, _SIGLIP | _SIGLIP_TEXT),
        fixed=BIASED | {"vision.class_token": False, "contrastive.loss": "sigmoid"},
        name_of=_dual_names,
        layouts={"vision_model.head.probe": after_ones(2, table)},
    ),
    "vit": Family.of(
        "ViTForImageClassification",
        ignored("encoder_stride", "pooler_output_size", "pooler_act"),
        _classes(),
        _square_images(),
        _VIT_SHAPE,
        activation("hidden_act", default="gelu"),
        fixed=BIASED | {"layer_pattern": "bidirectional+mlp"},
        rename=(
            ("model.layers.", "vit.encoder.layer."),
            ("model.embed_patches.", "vit.embeddings.patch_embeddings.projection."),
            ("model.embed_class", "vit.embeddings.cls_token"),
            ("model.embed_image_positions", "vit.embeddings.position_embeddings"),
            ("model.norm.", "vit.layernorm."),
            ("self_attn.q_proj", "attention.attention.query"),
            ("self_attn.k_proj", "attention.attention.key"),
            ("self_attn.v_proj", "attention.attention.value"),
            ("self_attn.o_proj", "attention.output.dense"),
            ("post_attention_layernorm", "layernorm_after"),
            ("input_layernorm", "layernorm_before"),
            ("mlp.up_proj", "intermediate.dense"),
            ("mlp.down_proj", "output.dense"),
        ),
        layouts={
            "model.embed_class": after_ones(2, table),
            "model.embed_image_positions": after_ones(1, table),
        },
    ),
    "llava": Family.of(
        "LlavaForConditionalGeneration",
        ignored("ignore_index"),
        _seq_length(),
        required(projector_hidden_act="gelu", vision_feature_select_strategy="default"),
        required(multimodal_projector_bias=True),
        _tower(_LLAVA_DEFAULTS),
        _text_part(_LLAVA_DEFAULTS),
        name_of=_llava_name,
        renamed_in=_with_new_towers,
    ),
    "llava_onevision": Family.of(
        "LlavaOnevisionForConditionalGeneration",
        ignored("ignore_index", "video_token_index", "video_token_id"),
        required(projector_hidden_act="gelu", vision_feature_select_strategy="full"),
        required(multimodal_projector_bias=True, use_image_newline_parameter=True),
        _TILES,
        _tower(_ONEVISION),
        _text_part(_ONEVISION),
        name_of=_llava_name,
        renamed_in=_with_new_towers,
    ),
}
