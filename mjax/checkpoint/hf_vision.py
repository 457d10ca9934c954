"""Families of models that read images: rows of the table of families (`families.py`)."""

from mjax.checkpoint.family import Family
from mjax.checkpoint.hf_config import Part, activation, alike, ignored, same, take
from mjax.errors import UserError

_SHAPE = same(
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


def _squares() -> Part:
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


VISION: dict[str, Family] = {
    "vit": Family.of(
        "ViTForImageClassification",
        ignored("encoder_stride", "pooler_output_size", "pooler_act"),
        _classes(),
        _squares(),
        _SHAPE,
        activation("hidden_act", default="gelu"),
        fixed={
            "layer_pattern": "B",
            "position_embedding": "learned",
            "norm": "layernorm",
            "mlp_gated": False,
            "mlp_bias": True,
            "attention.attention_out_bias": True,
        },
        rename=(
            ("model.layers.", "vit.encoder.layer."),
            ("model.embed_patches.", "vit.embeddings.patch_embeddings.projection."),
            ("model.embed_class", "vit.embeddings.cls_token"),
            ("model.embed_positions", "vit.embeddings.position_embeddings"),
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
        ones={"vit.embeddings.cls_token": 2, "vit.embeddings.position_embeddings": 1},
    ),
}
