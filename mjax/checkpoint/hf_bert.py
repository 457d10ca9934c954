"""Families of encoders: rows of the table of families (`families.py`), and what their files say.

The class in a config.json's `architectures` says which heads a model has. Published files may hold
more or other heads than it, so the names of their tensors have the last word (`heads_in_file`).
"""

from collections.abc import Sequence
from dataclasses import replace

from mjax.checkpoint.family import Family
from mjax.checkpoint.hf_config import Part, activation, alike, required, same, take
from mjax.checkpoint.slots import Slot, Slots, changed
from mjax.config.model_schema import ModelConfig
from mjax.errors import UserError

_FIXED = {
    "layer_pattern": "B",
    "position_embedding": "learned",
    "norm": "layernorm",
    "norm_placement": "post_residual",
    "mlp_gated": False,
    "mlp_bias": True,
    "attention.attention_bias": True,
    "attention.attention_out_bias": True,
    "tie_word_embeddings": True,
    "bert.embedding_norm": True,
}
_LAYERS = (
    ("self_attn.q_proj", "attention.self.query"),
    ("self_attn.k_proj", "attention.self.key"),
    ("self_attn.v_proj", "attention.self.value"),
    ("self_attn.o_proj", "attention.output.dense"),
    ("post_attention_layernorm", "attention.output.LayerNorm"),
    ("mlp.up_proj", "intermediate.dense"),
    ("mlp.down_proj", "output.dense"),
    ("post_feedforward_layernorm", "output.LayerNorm"),
)
_KINDS = {
    "Bert": ("MaskedLM", "PreTraining", "SequenceClassification"),
    "Roberta": ("MaskedLM", "SequenceClassification"),
}
_OLD_NORMS = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}


def _trunk(prefix: str) -> tuple[tuple[str, str], ...]:
    """Replacements on the names of all but the heads."""
    return (
        ("model.layers.", f"{prefix}.encoder.layer."),
        ("model.embed_tokens", f"{prefix}.embeddings.word_embeddings"),
        ("model.embed_positions", f"{prefix}.embeddings.position_embeddings"),
        ("model.embed_types", f"{prefix}.embeddings.token_type_embeddings"),
        ("model.embed_norm", f"{prefix}.embeddings.LayerNorm"),
        *_LAYERS,
    )


_SHAPE = same(
    alike("vocab_size hidden_size intermediate_size num_hidden_layers")
    | alike("max_position_embeddings initializer_range")
    | alike("num_attention_heads", "attention.")
    | alike("type_vocab_size", "bert.")
    | {
        "layer_norm_eps": "norm_eps",
        "hidden_dropout_prob": "hidden_dropout",
        "attention_probs_dropout_prob": "attention.attention_dropout",
    },
    {"initializer_range": 0.02, "layer_norm_eps": 1e-12, "type_vocab_size": 2}
    | {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1},
)
_PARTS = (
    required(position_embedding_type="absolute", tie_word_embeddings=True),
    _SHAPE,
    activation("hidden_act", default="gelu"),
)


def _heads(name: str) -> Part:
    """The heads that classes called `name`For.. have, by the class."""

    def read(config: dict) -> dict:
        (kind, *_) = config.get("architectures") or [f"{name}ForMaskedLM"]
        labels = take(config, "num_labels", len(config.get("id2label") or "01"))
        known = [f"{name}For{what}" for what in _KINDS[name]]
        if kind not in known:
            raise UserError(
                f"config.json: architectures={kind!r} is not supported (only {', '.join(known)})"
            )
        if kind == f"{name}ForSequenceClassification":
            return {"bert.mlm_head": False, "bert.num_labels": labels}
        both = kind == f"{name}ForPreTraining"
        return {"bert.mlm_head": True, "bert.num_labels": 2 if both else 0}

    def write(cfg: ModelConfig) -> dict:
        if not cfg.bert.mlm_head:
            kind, labels = "SequenceClassification", {"num_labels": cfg.bert.num_labels}
        else:
            kind, labels = "PreTraining" if cfg.bert.num_labels else "MaskedLM", {}
        return {"architectures": [f"{name}For{kind}"], **labels}

    return Part(read, write)


def _positions_behind_padding() -> Part:
    """RoBERTa counts positions from pad_token_id + 1."""

    def read(config: dict) -> dict:
        return {"bert.position_offset": take(config, "pad_token_id", 1) + 1}

    return Part(read, lambda cfg: {"pad_token_id": cfg.bert.position_offset - 1})


ENCODERS: dict[str, Family] = {
    "bert": Family.of(
        "BertForMaskedLM",
        _heads("Bert"),
        *_PARTS,
        fixed=_FIXED,
        rename=(
            *_trunk("bert"),
            ("lm_head.dense", "cls.predictions.transform.dense"),
            ("lm_head.layer_norm", "cls.predictions.transform.LayerNorm"),
            ("lm_head.bias", "cls.predictions.bias"),
            ("pooler.", "bert.pooler."),
            ("seq_relationship.", "cls.seq_relationship."),
        ),
    ),
    "roberta": Family.of(
        "RobertaForMaskedLM",
        _heads("Roberta"),
        _positions_behind_padding(),
        *_PARTS,
        fixed=_FIXED,
        rename=(
            *_trunk("roberta"),
            ("classifier.", "classifier.out_proj."),
            ("pooler.dense.", "classifier.dense."),
        ),
    ),
}


def heads_in_file(cfg: ModelConfig, names: Sequence[str]) -> ModelConfig:
    """The config of an encoder with those heads of BERT that the tensors `names` make up."""
    if cfg.model_type != "bert" or "cls.predictions.transform.dense.weight" not in names:
        return cfg
    labels = 2 if "cls.seq_relationship.weight" in names else 0
    bert = cfg.bert.model_copy(update={"mlm_head": True, "num_labels": labels})
    return cfg.model_copy(update={"bert": bert})


def with_old_names(slots: Slots, names: Sequence[str]) -> Slots:
    """The slots in a file that calls gains and biases of norms gamma and beta, if it does."""
    known = set(names)

    def named(slot: Slot) -> Slot:
        for new, old in _OLD_NORMS.items():
            older = slot.tensor.replace(new, old)
            if slot.tensor not in known and older in known:
                return replace(slot, tensor=older)
        return slot

    return changed(slots, named)
