"""Qwen2.5-VL, Qwen3-VL and Qwen3.5: rows of the table of families, with their towers.

A config.json has the sizes of the text in `text_config`, or beside `vision_config` in older files.
Files hold the tower under `visual.` and number the text's layers apart. Ours are one list: the
tower, a merger, and the text with a merger after each of its first layers.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from mjax.config.languages.layer_pattern import expand, of_tower, pattern_of
from mjax.config.schema.model import ModelConfig
from mjax.errors import UserError
from mjax.interop.huggingface.families.family import Family, experts_stacked, inputs_first
from mjax.interop.huggingface.families.hybrids import HYBRIDS
from mjax.interop.huggingface.families.parts import (
    ACTIVATIONS,
    Part,
    activation,
    alike,
    biases,
    expert_layers,
    experts,
    ignored,
    only,
    required,
    same,
    shape,
    take,
    window_of_all,
)
from mjax.interop.huggingface.families.rope import rope

_PLAIN = "full+mlp"
_MERGER, _DEEP = "patch_merger", "deep_merger"
_DICTIONARIES = "rope_scaling", "rope_parameters"
_AXIAL = {"rope_type": "axial", "rope_theta": 10000.0}
_OF_TEXT = ("vision_start_token_id", "vision_end_token_id")
# What the tower's config says of nothing that is computed.
_SAYS_NO_SIZE = "initializer_range in_chans spatial_patch_size model_type dtype torch_dtype".split()
_SIZES = alike("hidden_size intermediate_size patch_size", "vision.")
_SIZES |= {"num_heads": "vision.num_attention_heads", "in_channels": "vision.num_channels"}
_MOST_PATCHES = 16384  # of a text's images, unless the config of a run says so


def mrope(section: Sequence[int], interleaved: bool) -> Part:
    """The sections of rotary positions. `section`: where a config.json has none. Reads before
    `rope`."""

    def read(config: dict) -> dict:
        sections, turns = None, None
        for name in _DICTIONARIES:
            found = config.get(name)
            if isinstance(found, dict):
                config[name] = found = dict(found)
                sections = found.pop("mrope_section", None) or sections
                turns = found.pop("mrope_interleaved", None) or turns
                for key in ("rope_type", "type"):
                    if found.get(key) == "mrope":
                        found[key] = "default"
        if bool(turns if turns is not None else interleaved) != interleaved:
            raise UserError(f"config.json: mrope_interleaved={turns!r} is not supported")
        sections = list(sections or section)
        return {"rope.mrope_section": sections, "rope.mrope_interleaved": interleaved}

    def write(cfg: ModelConfig) -> dict:
        scaling = rope().write(cfg)["rope_scaling"] or {"rope_type": "default"}
        scaling = scaling | {"mrope_section": cfg.rope.mrope_section}
        return {"rope_scaling": scaling | ({"mrope_interleaved": True} if interleaved else {})}

    return Part(read, write)


@dataclass(frozen=True)
class _TextAndTower:
    """A family: the parts of its text's config, and what a config of its tower leaves out.

    act: of the tower. own: keys of the tower besides those of all, by ours. ids: those that stand
    for images and videos, where a config.json has none.
    """

    name: str
    text: tuple[Part, ...]
    defaults: dict[str, object]
    act: str
    own: dict[str, str] = field(default_factory=dict)
    ids: tuple[int, int] = (151655, 151656)

    @property
    def sizes(self) -> Part:
        return same(_SIZES | self.own, self.defaults)


def _both(kind: _TextAndTower) -> Part:
    """The tower and the text, and the layers of both."""

    def read(config: dict) -> dict:
        vision = dict(take(config, "vision_config", {}))
        text = dict(take(config, "text_config", {}))
        tied = config.pop("tie_word_embeddings", None), text.pop("tie_word_embeddings", None)
        ids = {
            "vision.image_token_id": take(config, "image_token_id", kind.ids[0]),
            "vision.video_token_id": take(config, "video_token_id", kind.ids[1]),
        }
        only(text, "model_type", f"{kind.name}_text", kind.name)
        config |= text
        fields: dict = {"layer_pattern": _PLAIN}
        config["tie_word_embeddings"] = any(tied)
        for part in kind.text:
            fields |= part.read(config)
        of_text = expand(fields["layer_pattern"], fields["num_hidden_layers"])
        only(vision, "out_hidden_size", fields["hidden_size"])
        fields |= ids | {"num_nextn_predict_layers": 0}  # those of a file are kept aside
        tower = _layers_of_tower(kind, vision, fields)
        config |= vision  # what is left is judged with the rest
        deep = fields.get("vision.deepstack_visual_indexes", [])
        _require_sizes(fields, deep, len(tower), len(of_text))
        layers = [*tower, _MERGER, *_with_mergers(of_text, len(deep))]
        fields |= {"layer_pattern": pattern_of(layers), "num_hidden_layers": len(layers)}
        return fields

    def write(cfg: ModelConfig) -> dict:
        layers = [layer for layer in _layers_of_text(cfg)]
        of_text = {"layer_pattern": pattern_of(layers), "num_hidden_layers": len(layers)}
        text, plain = {"model_type": f"{kind.name}_text"}, cfg.model_copy(update=of_text)
        for part in reversed(kind.text):
            text |= part.write(plain)
        vision = _tower_written(kind, cfg)
        tied = text.pop("tie_word_embeddings")
        ids = {key: getattr(cfg.vision, key) for key in ("image_token_id", "video_token_id")}
        return {"text_config": text, "vision_config": vision, "tie_word_embeddings": tied} | ids

    return Part(read, write)


def _layers_of_tower(kind: _TextAndTower, vision: dict, fields: dict) -> list[str]:
    """The layers of the tower of a `vision_config`; its sizes are added to `fields`."""
    for key in _SAYS_NO_SIZE:
        vision.pop(key, None)
    turned = vision.pop("rope_parameters", None)
    if turned not in (None, _AXIAL):
        raise UserError(f"config.json: vision_config.rope_parameters={turned!r} is not supported")
    only(vision, "spatial_merge_size", 2)
    only(vision, "temporal_patch_size", 2)
    only(vision, "hidden_act", kind.act)
    if "deepstack_visual_indexes" not in kind.defaults:
        only(vision, "deepstack_visual_indexes", [])
    depth = take(vision, "depth", kind.defaults["depth"])
    fields |= kind.sizes.read(vision)
    full = vision.pop("fullatt_block_indexes", None)
    if "vision.window_size" in fields:
        full = kind.defaults["fullatt_block_indexes"] if full is None else full
    positions = vision.pop("num_position_embeddings", None)
    if "num_position_embeddings" in kind.defaults:
        positions = positions or kind.defaults["num_position_embeddings"]
        fields["vision.image_size"] = math.isqrt(positions) * fields["vision.patch_size"]
        if math.isqrt(positions) ** 2 != positions:
            raise UserError(f"config.json: num_position_embeddings={positions} is no square")
    fields["vision.max_pixels"] = _MOST_PATCHES * fields["vision.patch_size"] ** 2
    windowed = [full is not None and n not in full for n in range(depth)]
    return ["vision_window+mlp" if has_window else "vision_2d+mlp" for has_window in windowed]


def _tower_written(kind: _TextAndTower, cfg: ModelConfig) -> dict:
    """`vision_config` of a model."""
    tower = [layer for layer in cfg.layer_kinds if of_tower(layer)]
    out = {"model_type": f"{kind.name}_vision", "depth": len(tower), "hidden_act": kind.act}
    out |= kind.sizes.write(cfg) | {"out_hidden_size": cfg.hidden_size}
    out |= {"spatial_merge_size": 2, "temporal_patch_size": 2}
    if "fullatt_block_indexes" in kind.defaults:
        out["fullatt_block_indexes"] = [n for n, k in enumerate(tower) if k == "vision_2d+mlp"]
    if "num_position_embeddings" in kind.defaults:
        out["num_position_embeddings"] = (cfg.vision.patch_size and cfg.vision.grid()) ** 2
    return out


def _require_sizes(fields: dict, deep: list[int], depth: int, layers: int) -> None:
    """Raise `UserError` for numbers of a config.json that make no model."""
    heads = fields["vision.num_attention_heads"]
    if fields["vision.patch_size"] == 0 or heads == 0 or fields["vision.hidden_size"] % (4 * heads):
        raise UserError(
            "config.json: vision_config: patch_size, num_heads or hidden_size make no patches of "
            "heads whose channels are a multiple of 4"
        )
    own = fields.get("attention.head_dim")
    head = own or fields["hidden_size"] // fields["attention.num_attention_heads"]
    pairs = int(head * fields.get("rope.partial_rotary_factor", 1)) // 2
    sections = fields["rope.mrope_section"]
    if len(sections) != 3 or sum(sections) != pairs:
        raise UserError(f"config.json: mrope_section={sections} is not three of {pairs} pairs")
    if deep != sorted({*deep} & {*range(depth)}) or len(deep) > layers:
        raise UserError(
            f"config.json: deepstack_visual_indexes={deep} of a tower of {depth} layers and a text "
            f"of {layers} is not supported"
        )


def _with_mergers(layers: Sequence[str], count: int) -> list[str]:
    """The layers of a text, of which each of the first `count` has a merger after it."""
    found = []
    for number, layer in enumerate(layers):
        found += [layer, _DEEP] if number < count else [layer]
    return found


def _layers_of_text(cfg: ModelConfig) -> list[str]:
    mergers = _MERGER, _DEEP
    return [kind for kind in cfg.layer_kinds if not of_tower(kind) and kind not in mergers]


# ---- names ---------------------------------------------------------------------------------------

_EDGES = {
    "model.embed_patches.": "patch_embed.proj.",
    "model.embed_image_positions": "pos_embed.weight",
}
_IN_TOWER = (
    ("input_layernorm", "norm1"),
    ("post_attention_layernorm", "norm2"),
    ("attn.o_proj", "attn.proj"),
)


@dataclass(frozen=True)
class _Names:
    """The words of a family's files.

    tower, text: where both begin. merger: of a merger, by ours. in_tower: of the tower's layers.
    """

    tower: str
    text: str
    merger: dict[str, str]
    in_tower: tuple[tuple[str, str], ...] = ()

    def name_of(self, cfg: ModelConfig, name: str) -> str:
        """The name of a tensor, from that which its parameter declares."""
        for ours, theirs in _EDGES.items():
            if name.startswith(ours):
                return self.tower + theirs + name.removeprefix(ours)
        layer = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name)
        if layer is None:
            return name.replace("model.", self.text, 1) if name.startswith("model.") else name
        number, rest = int(layer[1]), layer[2]
        kinds = cfg.layer_kinds
        if of_tower(kinds[number]):
            for ours, theirs in (*_IN_TOWER, *self.in_tower):
                rest = rest.replace(ours, theirs)
            return f"{self.tower}blocks.{number}.{rest}"
        if kinds[number] in (_MERGER, _DEEP):
            for ours, theirs in self.merger.items():
                rest = rest.replace(ours, theirs)
            deep = f"deepstack_merger_list.{kinds[:number].count(_DEEP)}"
            return f"{self.tower}{deep if kinds[number] == _DEEP else 'merger'}.{rest}"
        before = [kind for kind in kinds[:number] if not of_tower(kind)]
        own = sum(kind not in (_MERGER, _DEEP) for kind in before)
        return f"{self.text}layers.{own}.{rest}"


_FUSED = {"attn.qkv": ("attn.q_proj", "attn.k_proj", "attn.v_proj")}
_OF_ALL = {"vision.max_patches": _MOST_PATCHES, "vision.layer_norm_eps": 1e-6}
_OF_ALL |= {"vision.length_multiple": 16}

_ACT = activation("hidden_act", default="silu")
_QWEN2_5_TEXT = {"hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80}
_QWEN2_5_TEXT |= {"num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 152064}
_QWEN2_5_TEXT |= {"max_position_embeddings": 32768, "rms_norm_eps": 1e-5}
_QWEN2_5 = _TextAndTower(
    name="qwen2_5_vl",
    text=(
        ignored("layer_types", "max_window_layers", "sliding_window"),
        required(use_sliding_window=False),
        shape(_ACT, **_QWEN2_5_TEXT),
        mrope((16, 24, 24), interleaved=False),
        rope(1e6),
        biases(True, out=False),
    ),
    defaults={"depth": 32, "hidden_size": 3584, "intermediate_size": 3420, "num_heads": 16}
    | {"in_channels": 3, "patch_size": 14, "window_size": 112, "tokens_per_second": 4}
    | {"fullatt_block_indexes": [7, 15, 23, 31]},
    act="silu",
    own=alike("window_size tokens_per_second", "vision."),
)
_QWEN3_TEXT = {"hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32}
_QWEN3_TEXT |= {"num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 151936}
_QWEN3_TEXT |= {"max_position_embeddings": 128000, "head_dim": 128}
_QWEN3_TOWER = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16}
_QWEN3_TOWER |= {"in_channels": 3, "patch_size": 16, "num_position_embeddings": 2304}
_QWEN3_TOWER |= {"deepstack_visual_indexes": [8, 16, 24]}
_QWEN3_SECTIONS = mrope((24, 20, 20), interleaved=True)
_QWEN3 = _TextAndTower(
    name="qwen3_vl",
    text=(_QWEN3_SECTIONS, shape(_ACT, **_QWEN3_TEXT), rope(5e5), biases()),
    defaults=_QWEN3_TOWER,
    act="gelu_pytorch_tanh",
    own=alike("deepstack_visual_indexes", "vision."),
)
_QWEN3_SPARSE_TEXT = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24}
_QWEN3_SPARSE_TEXT |= {"num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 151936}
_QWEN3_SPARSE_TEXT |= {"max_position_embeddings": 128000}
_MOE_KEYS = {"num_experts": 60, "num_experts_per_tok": 4, "router_aux_loss_coef": 0.001}
_MOE_KEYS |= {"moe_intermediate_size": 1408}
_QWEN3_SPARSE = replace(
    _QWEN3,
    name="qwen3_vl_moe",
    text=(
        required(norm_topk_prob=True),
        expert_layers(window_of_all, typed=False),
        experts("num_experts", **_MOE_KEYS),
        _QWEN3_SECTIONS,
        shape(_ACT, **_QWEN3_SPARSE_TEXT),
        rope(5e5),
        biases(),
    ),
)
_IN_ONE = ("experts.gate_proj.weight", "experts.up_proj.weight")
_FC = (("mlp.up_proj", "mlp.linear_fc1"), ("mlp.down_proj", "mlp.linear_fc2"))
_QWEN3_NAMES = _Names(
    tower="model.visual.",
    text="model.language_model.",
    merger={"tower_norm": "norm", "linear_1": "linear_fc1", "linear_2": "linear_fc2"},
    in_tower=_FC,
)
_QWEN3_FIXED = _OF_ALL | {
    "attention.qk_norm": True,
    "vision.hidden_act": ACTIVATIONS["gelu_pytorch_tanh"],
    "vision.min_pixels": 65536,
}


def _around(text: str) -> Family:
    """Qwen3.5: its text's row of the table, with Qwen3-VL's tower and no DeepStack."""
    of_text, name = HYBRIDS[text], text.removesuffix("_text")
    kind = _TextAndTower(
        name=name,
        text=(mrope((11, 11, 10), interleaved=True), *of_text.parts),
        defaults={k: v for k, v in _QWEN3_TOWER.items() if k != "deepstack_visual_indexes"},
        act=_QWEN3.act,
        ids=(248056, 248057),
    )
    return replace(
        of_text,
        architecture=of_text.architecture.replace("CausalLM", "ConditionalGeneration"),
        parts=(ignored(*_OF_TEXT), _both(kind)),
        fixed=_QWEN3_FIXED | of_text.fixed,
        fused=_FUSED | of_text.fused,
        name_of=_QWEN3_NAMES.name_of,
    )


QWEN_VL: dict[str, Family] = {
    "qwen2_5_vl": Family.of(
        "Qwen2_5_VLForConditionalGeneration",
        ignored(*_OF_TEXT, "vision_token_id"),
        _both(_QWEN2_5),
        fixed=_OF_ALL
        | {"vision.norm": "rmsnorm", "vision.hidden_act": "silu"}
        | {"vision.patch_bias": False},
        fused=_FUSED,
        name_of=_Names(
            tower="visual.",
            text="model.",
            merger={"tower_norm": "ln_q", "linear_1": "mlp.0", "linear_2": "mlp.2"},
        ).name_of,
    ),
    "qwen3_vl": Family.of(
        "Qwen3VLForConditionalGeneration",
        ignored(*_OF_TEXT),
        _both(_QWEN3),
        fixed=_QWEN3_FIXED,
        fused=_FUSED,
        name_of=_QWEN3_NAMES.name_of,
    ),
    "qwen3_vl_moe": Family.of(  # published files have experts' matrices [E, in, out]
        "Qwen3VLMoeForConditionalGeneration",
        ignored(*_OF_TEXT),
        _both(_QWEN3_SPARSE),
        fixed=_QWEN3_FIXED,
        fused=_FUSED | {"experts.gate_up_proj": _IN_ONE},
        rename=(("experts.down_proj.weight", "experts.down_proj"),),
        name_of=_QWEN3_NAMES.name_of,
        layouts={"expert_matrix": experts_stacked(inputs_first)},
    ),
    "qwen3_5": _around("qwen3_5_text"),
    "qwen3_5_moe": _around("qwen3_5_moe_text"),
}
