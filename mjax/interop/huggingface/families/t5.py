"""The family of T5: versions 1.0 and 1.1 (Flan-T5), a row of the table of families (`families.py`).

Its files number the layers of encoder and decoder apart, and the parts of a layer by their place.
Biases by distance lie in the first layer of each side.
"""

import re
from collections.abc import Collection

from mjax.config.languages.layer_pattern import BRANCHES, of_decoder
from mjax.config.schema.model import ModelConfig
from mjax.errors import UserError
from mjax.interop.huggingface.families.family import Family
from mjax.interop.huggingface.families.parts import ACTIVATIONS, Part, alike, ignored, same, take

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
