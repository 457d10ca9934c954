"""Whisper's encoder in Hugging Face's files, as the tower of sounds of a model (S, Q).

A file has more than the encoder, and the model has more than the tower: what is read is what both
have. The last norm of the encoder is that of the projector behind it.
"""

import re
from dataclasses import replace
from pathlib import Path

from flax.traverse_util import unflatten_dict

from mjax.checkpoint.base.safetensors import open_folder
from mjax.checkpoint.base.source import Source, flat
from mjax.config.languages.layer_pattern import modality_of, of_tower
from mjax.config.schema.model import ModelConfig
from mjax.errors import UserError
from mjax.interop.huggingface.families.engine import slots
from mjax.interop.huggingface.families.family import Family
from mjax.interop.huggingface.files import hf_source
from mjax.json_file import read_json
from mjax.models import definition_of

_WHISPER_EDGES = {
    "model.embed_frames.": "",
    "model.embed_sound_positions.": "embed_positions.",
}
_OF_LAYER = (
    ("input_layernorm", "self_attn_layer_norm"),
    ("post_attention_layernorm", "final_layer_norm"),
    ("self_attn.o_proj", "self_attn.out_proj"),
    ("mlp.up_proj", "fc1"),
    ("mlp.down_proj", "fc2"),
)
# Keys of config.json, ours in model.audio, and what transformers takes where one is left out.
_WHISPER_SIZES = {
    "d_model": ("hidden_size", 384),
    "encoder_ffn_dim": ("intermediate_size", 1536),
    "encoder_attention_heads": ("num_attention_heads", 6),
    "num_mel_bins": ("num_mel_bins", 80),
    "max_source_positions": ("max_source_positions", 1500),
    "activation_function": ("hidden_act", "gelu"),
}


def whisper_source(folder: Path, cfg: ModelConfig) -> Source:
    """The encoder in a folder of WhisperModel or of one of its kind, for the tower of `cfg`.

    Raises `UserError` for another model, or one of another number of layers.
    """
    config = read_json(folder / "config.json")
    kinds = [of_tower(kind) for kind in cfg.layer_kinds if modality_of(kind) == "audio"]
    layers = config.get("encoder_layers", 4)
    if config.get("model_type") != "whisper" or config.get("scale_embedding"):
        raise UserError(f"{folder}: config.json is not that of a Whisper with unscaled embeddings")
    if sum(kinds) != layers:
        raise UserError(
            f"{folder}: its encoder has {layers} layers, but model.layer_pattern has {sum(kinds)} "
            "of sounds (S); make them agree"
        )
    sizes = {ours: config.get(key, default) for key, (ours, default) in _WHISPER_SIZES.items()}
    audio = cfg.audio.model_copy(update=sizes | {"layer_norm_eps": 1e-5})
    cfg = cfg.model_copy(update={"audio": audio})
    specs = flat(definition_of(cfg).specs)
    mine = {path: spec for path, spec in specs.items() if _is_of_encoder(path)}
    names = [name for name in open_folder(folder) if name.endswith("encoder.conv1.weight")]
    prefix = names[0].removesuffix("conv1.weight") if names else "model.encoder."
    family = Family.of("WhisperModel", name_of=lambda cfg, name: prefix + _whisper_name(cfg, name))
    parts = unflatten_dict(mine)
    source = hf_source(folder, cfg, parts, slots(cfg, parts, family), has_more=True)
    return replace(source, has=frozenset(mine), name=f"the weights in {folder}")


def _is_of_encoder(path: tuple[str, ...]) -> bool:
    return path[0] in ("frame_embedding", "audio_mlp") or path[:3:2] == ("audio_projector", "norm")


def _whisper_name(cfg: ModelConfig, name: str) -> str:
    """The name within the encoder of a tensor, from that which its parameter declares."""
    for ours, theirs in _WHISPER_EDGES.items():
        if name.startswith(ours):
            return name.replace(ours, theirs)
    number, rest = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name).groups()
    if rest.startswith("tower_norm."):
        return rest.replace("tower_norm.", "layer_norm.")
    first = [modality_of(kind) for kind in cfg.layer_kinds].index("audio")
    for ours, theirs in _OF_LAYER:
        rest = rest.replace(ours, theirs)
    return f"layers.{int(number) - first}.{rest}"
