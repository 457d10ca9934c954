"""Families of encoders: rows of the table of families (`families.py`), and what their files say.

The class in a config.json's `architectures` says which heads a model has. Published files may hold
more or other heads than it, so the names of their tensors have the last word (`Family.mend`).
T5 has a decoder, too (1.0 and 1.1, Flan-T5). Its files number the layers of encoder and decoder
apart, and the parts of a layer by their place. Biases by distance lie in the first layer of each
side.
"""

import re
from collections.abc import Collection
from dataclasses import replace

from mjax.config.languages.layer_pattern import BRANCHES, of_decoder, pattern_of, shortest
from mjax.config.schema.model import ModelConfig
from mjax.errors import UserError
from mjax.interop.huggingface.families.family import Family, Slot, SlotsByPath, changed
from mjax.interop.huggingface.families.parts import (
    ACTIVATIONS,
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


# ---- T5 ------------------------------------------------------------------------------------------

_T5_PARTS = {
    "self_attn": "SelfAttention",
    "cross_attn": "EncDecAttention",
    "mlp": "DenseReluDense",
}
_PLACES = {  # of what stands in a layer, by side
    "encoder": {"self_attn": 0, "mlp": 1},
    "decoder": {"self_attn": 0, "cross_attn": 1, "mlp": 2},
}
_T5_NORMS = ("input_layernorm", "post_attention_layernorm", "post_attention_layernorm_2")
_PROJECTIONS = {
    "q_proj": "q",
    "k_proj": "k",
    "v_proj": "v",
    "o_proj": "o",
    "gate_proj": "wi_0",
    "down_proj": "wo",
}
_T5_EDGES = {
    "model.embed_tokens.weight": "shared.weight",
    "model.norm.weight": "decoder.final_layer_norm.weight",
    "model.encoder_norm.weight": "encoder.final_layer_norm.weight",
}
_RELATIVE_BIASES = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"


def _shape() -> Part:
    """T5's sizes, in its own words."""
    names = {
        "d_model": "hidden_size",
        "d_ff": "intermediate_size",
        "n_positions": "max_position_embeddings",
        "d_kv": "attention.head_dim",
        "num_heads": "attention.num_attention_heads",
        "layer_norm_epsilon": "norm_eps",
        "relative_attention_num_buckets": "relative.num_buckets",
        "relative_attention_max_distance": "relative.max_distance",
        "dropout_rate": "hidden_dropout",
    } | alike("vocab_size decoder_start_token_id")
    defaults = {"n_positions": 512, "layer_norm_epsilon": 1e-6, "decoder_start_token_id": 0}
    defaults |= {"relative_attention_num_buckets": 32, "relative_attention_max_distance": 128}
    keys = same(names, defaults | {"dropout_rate": 0.1})

    def read(config: dict) -> dict:
        fields = keys.read(config)
        return fields | {"attention.attention_dropout": fields["hidden_dropout"]}

    return Part(read, keys.write)


def _head() -> Part:
    """Whether the head is the embedding, and scales what it reads as T5 1.0 does.

    Older files say both by one key, and transformers 5 says the second by its own.
    """

    def read(config: dict) -> dict:
        tied = take(config, "tie_word_embeddings", True)
        scaled = take(config, "scale_decoder_outputs", tied)
        scaling = config["d_model"] ** 0.5 if scaled else None
        return {"tie_word_embeddings": tied, "logits_scaling": scaling}

    def write(cfg: ModelConfig) -> dict:
        scaled = cfg.logits_scaling is not None
        return {"tie_word_embeddings": cfg.tie_word_embeddings, "scale_decoder_outputs": scaled}

    return Part(read, write)


def _tied_in_file(cfg: ModelConfig, names: Collection[str]) -> ModelConfig:
    """The model without a head of its own if the tensors `names` have none, as transformers 5
    reads it."""
    if cfg.logits_scaling is not None or "lm_head.weight" in names:
        return cfg
    return cfg.model_copy(update={"tie_word_embeddings": True})


def _sides() -> Part:
    """The layers of both sides, as `model.layer_pattern`."""

    def read(config: dict) -> dict:
        encoder = take(config, "num_layers")
        decoder = take(config, "num_decoder_layers", encoder)
        pattern = f"bidirectional+mlp*{encoder}, full+cross+mlp*{decoder}"
        return {"num_hidden_layers": encoder + decoder, "layer_pattern": pattern}

    def write(cfg: ModelConfig) -> dict:
        decoder = sum(map(of_decoder, cfg.layer_kinds))
        return {"num_layers": cfg.num_hidden_layers - decoder, "num_decoder_layers": decoder}

    return Part(read, write)


def _feed_forward() -> Part:
    """The activation function, and whether it gates."""
    names = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}

    def read(config: dict) -> dict:
        name = take(config, "feed_forward_proj", "relu")
        gate, _, act = name.rpartition("-")
        if gate not in ("", "gated") or act not in ACTIVATIONS:
            known = ", ".join(f"[gated-]{act}" for act in ACTIVATIONS)
            raise UserError(
                f"config.json: feed_forward_proj={name!r} is not supported (only {known})"
            )
        # T5 1.1 says gelu and means its tanh form.
        tanh = bool(gate) and act == "gelu"
        return {"mlp_gated": bool(gate), "hidden_act": "gelu_tanh" if tanh else ACTIVATIONS[act]}

    def write(cfg: ModelConfig) -> dict:
        act = names[cfg.hidden_act]
        if cfg.mlp_gated and cfg.hidden_act == "gelu_tanh":
            act = "gelu"
        return {"feed_forward_proj": f"gated-{act}" if cfg.mlp_gated else act}

    return Part(read, write)


def _t5_name(cfg: ModelConfig, name: str) -> str:
    """The name of a tensor in a file of T5, from that which its parameter declares."""
    if name in _T5_EDGES:
        return _T5_EDGES[name]
    biases = re.fullmatch(r"model\.relative_bias\.([A-Z])\.weight", name)
    if biases:
        side = "encoder" if biases[1] == BRANCHES["bidirectional"].letter else "decoder"
        return f"{side}.{_RELATIVE_BIASES}"
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(\w+)\.(?:(\w+)\.)?weight", name)
    if layer is None:
        return name  # the head's
    number, part, projection = int(layer[1]), layer[2], layer[3]
    encoders = sum(not of_decoder(kind) for kind in cfg.layer_kinds)
    side, block = ("encoder", number) if number < encoders else ("decoder", number - encoders)
    if part in _T5_NORMS:
        return f"{side}.block.{block}.layer.{_T5_NORMS.index(part)}.layer_norm.weight"
    if projection == "up_proj":
        projection = "wi_1" if cfg.mlp_gated else "wi"
    place = f"{side}.block.{block}.layer.{_PLACES[side][part]}"
    return f"{place}.{_T5_PARTS[part]}.{_PROJECTIONS.get(projection, projection)}.weight"


T5: dict[str, Family] = {
    "t5": Family.of(
        "T5ForConditionalGeneration",
        ignored("output_past", "dense_act_fn", "is_gated_act", "initializer_factor"),
        _head(),
        _sides(),
        _shape(),
        _feed_forward(),
        fixed={"position_embedding": "relative", "attention.attention_multiplier": 1.0},
        name_of=_t5_name,
        mend=_tied_in_file,
    )
}
