"""Families of encoders: rows of the table of families (`families.py`), and what their files say.

The class in a config.json's `architectures` says which heads a model has. Published files may hold
more or other heads than it, so the names of their tensors have the last word (`heads_in_file`).
"""

from collections.abc import Collection
from dataclasses import replace

from mjax.config.languages.layer_pattern import pattern_of, shortest
from mjax.config.schema.model import ModelConfig
from mjax.errors import UserError
from mjax.interop.huggingface.families.family import Family, Slot, SlotsByPath, changed
from mjax.interop.huggingface.families.parts import (
    BIASED,
    Part,
    activation,
    alike,
    biases,
    ignored,
    required,
    same,
    take,
)
from mjax.interop.huggingface.families.rope import typed_rope

_FIXED = BIASED | {
    "layer_pattern": "bidirectional+mlp",
    "norm_placement": "post_residual",
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
_CLASSES = {
    "Bert": ("MaskedLM", "PreTraining", "SequenceClassification"),
    "Roberta": ("MaskedLM", "SequenceClassification"),
    "ModernBert": ("MaskedLM", "SequenceClassification"),
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


_BERT_SHAPE = same(
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
_BERT_PARTS = (
    required(position_embedding_type="absolute", tie_word_embeddings=True),
    _BERT_SHAPE,
    activation("hidden_act", default="gelu"),
)


def _heads(name: str) -> Part:
    """The heads that classes called `name`For.. have, by the class."""

    def read(config: dict) -> dict:
        (kind, *_) = config.get("architectures") or [f"{name}ForMaskedLM"]
        labels = take(config, "num_labels", len(config.get("id2label") or "01"))
        known = [f"{name}For{what}" for what in _CLASSES[name]]
        if kind == f"{name}Model" and labels == 0:
            return {"bert.mlm_head": False, "bert.num_labels": 0}
        if kind not in known:
            raise UserError(
                f"config.json: architectures={kind!r} is not supported (only {', '.join(known)})"
            )
        if kind == f"{name}ForSequenceClassification":
            return {"bert.mlm_head": False, "bert.num_labels": labels}
        both = kind == f"{name}ForPreTraining"
        return {"bert.mlm_head": True, "bert.num_labels": 2 if both else 0}

    def write(cfg: ModelConfig) -> dict:
        if not cfg.bert.mlm_head and not cfg.bert.num_labels:
            return {"architectures": [f"{name}Model"], "num_labels": 0}
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


# ModernBERT's first layer, and those with a window.
_FIRST, _WINDOWED = "bidirectional_unnormed+mlp", "bidirectional_window+mlp"


def _layer_types() -> Part:
    """ModernBERT's windows: `layer_types`, or all but each `global_attn_every_n_layers`-th layer.

    transformers halves `local_attention`: a token sees so many tokens to either side, and itself.
    """

    def read(config: dict) -> dict:
        layers = take(config, "num_hidden_layers")
        every = take(config, "global_attn_every_n_layers", 3)
        older = ["sliding_attention" if i % every else "full_attention" for i in range(layers)]
        types = take(config, "layer_types", older)
        window = take(config, "local_attention", 128) // 2 + 1
        known = {"full_attention": "bidirectional+mlp", "sliding_attention": _WINDOWED}
        unknown = [name for name in types if name not in known]
        if unknown or len(types) != layers or types[0] != "full_attention":
            raise UserError(
                f"config.json: layer_types={types} is not supported (only full_attention in layer "
                f"0, then full_attention or sliding_attention, {layers} in all)"
            )
        kinds = [known[name] for name in types[1:]]
        period = shortest(kinds) if kinds else kinds
        pattern = ", ".join([_FIRST, *kinds])
        if period and len(kinds) % len(period) == 0:
            pattern = f"{_FIRST}, ({pattern_of(period)})*{len(kinds) // len(period)}"
        return {
            "num_hidden_layers": layers,
            "layer_pattern": pattern,
            "attention.sliding_window": window if _WINDOWED in kinds else None,
        }

    def write(cfg: ModelConfig) -> dict:
        window = cfg.attention.sliding_window
        names = {_WINDOWED: "sliding_attention"}
        types = [names.get(kind, "full_attention") for kind in cfg.layer_kinds]
        written = {"num_hidden_layers": cfg.num_hidden_layers, "layer_types": types}
        return written if window is None else written | {"local_attention": 2 * (window - 1)}

    return Part(read, write)


# What ModernBERT's files say of special tokens, of initial values and of how transformers runs it.
_UNUSED = (
    *("cls_token_id", "sep_token_id", "initializer_cutoff_factor", "position_embedding_type"),
    *("deterministic_flash_attn", "reference_compile", "repad_logits_with_grad"),
    "sparse_pred_ignore_index",
)
_MODERN_SHAPE = same(
    alike("vocab_size hidden_size intermediate_size max_position_embeddings")
    | alike("initializer_range norm_eps norm_bias")
    | alike("num_attention_heads", "attention.")
    | {"classifier_pooling": "bert.pooling"},
    {"initializer_range": 0.02, "norm_eps": 1e-5, "norm_bias": False, "classifier_pooling": "cls"},
)


def _with_heads_in_file(cfg: ModelConfig, names: Collection[str]) -> ModelConfig:
    """The model with the heads of pretraining that the tensors `names` make up."""
    if "cls.predictions.transform.dense.weight" not in names:
        return cfg
    labels = 2 if "cls.seq_relationship.weight" in names else 0
    bert = cfg.bert.model_copy(update={"mlm_head": True, "num_labels": labels})
    return cfg.model_copy(update={"bert": bert})


ENCODERS: dict[str, Family] = {
    "bert": Family.of(
        "BertForMaskedLM",
        _heads("Bert"),
        *_BERT_PARTS,
        fixed=_FIXED,
        rename=(
            *_trunk("bert"),
            ("lm_head.dense", "cls.predictions.transform.dense"),
            ("lm_head.layer_norm", "cls.predictions.transform.LayerNorm"),
            ("lm_head.bias", "cls.predictions.bias"),
            ("pooler.", "bert.pooler."),
            ("seq_relationship.", "cls.seq_relationship."),
        ),
        base_class="BertModel",
        mend=_with_heads_in_file,
    ),
    "roberta": Family.of(
        "RobertaForMaskedLM",
        _heads("Roberta"),
        _positions_behind_padding(),
        *_BERT_PARTS,
        fixed=_FIXED,
        rename=(
            *_trunk("roberta"),
            ("classifier.", "classifier.out_proj."),
            ("pooler.dense.", "classifier.dense."),
        ),
        base_class="RobertaModel",
    ),
    "modernbert": Family.of(
        "ModernBertForMaskedLM",
        _heads("ModernBert"),
        _layer_types(),
        typed_rope(160000.0, 10000.0, "global_rope_theta", "local_rope_theta", True),
        _MODERN_SHAPE,
        biases(mlp=True),
        activation("hidden_activation", default="gelu"),
        required(
            attention_dropout=0.0,
            embedding_dropout=0.0,
            mlp_dropout=0.0,
            decoder_bias=True,
            classifier_bias=False,
            classifier_activation="gelu",
            sparse_prediction=False,
            tie_word_embeddings=True,
        ),
        ignored(*_UNUSED),
        base_class="ModernBertModel",
        fixed={
            "norm": "layernorm",
            "tie_word_embeddings": True,
            "bert.embedding_norm": True,
            "bert.prediction_head": True,
        },
        rename=(
            ("model.embed_tokens", "model.embeddings.tok_embeddings"),
            ("model.embed_norm", "model.embeddings.norm"),
            ("model.norm", "model.final_norm"),
            ("input_layernorm", "attn_norm"),
            ("post_attention_layernorm", "mlp_norm"),
            ("self_attn.o_proj", "self_attn.Wo"),
            ("self_attn.", "attn."),
            ("mlp.down_proj", "mlp.Wo"),
            ("lm_head.dense", "head.dense"),
            ("lm_head.layer_norm", "head.norm"),
            ("lm_head.bias", "decoder.bias"),
            ("pooler.", "head."),
        ),
        fused={
            "self_attn.Wqkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "mlp.Wi": ("mlp.gate_proj", "mlp.up_proj"),
        },
    ),
}


def with_old_names(slots: SlotsByPath, names: Collection[str]) -> SlotsByPath:
    """The slots in a file that calls gains and biases of norms gamma and beta, if it does."""
    known = set(names)

    def named(slot: Slot) -> Slot:
        for new, old in _OLD_NORMS.items():
            older = slot.tensor.replace(new, old)
            if slot.tensor not in known and older in known:
                return replace(slot, tensor=older)
        return slot

    return changed(slots, named)
