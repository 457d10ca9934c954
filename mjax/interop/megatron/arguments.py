"""Megatron-LM's saved arguments -> `ModelConfig`.

Invariant: every argument that changes what a model computes is either translated here or, when it
is on, refused by name. Arguments that only change training, sharding or rounding are not read.
An argument newer than this list shows as a tensor without a place, which is refused, too.
Source: megatron/training/arguments.py, core/transformer/transformer_config.py, gpt_builders.py,
hybrid_builders.py. Latent attention, experts and hybrid patterns are in `arguments_of_parts.py`.
"""

from collections.abc import Mapping

from mjax.config.languages.layer_pattern import pattern_of
from mjax.config.schema.keys import model_of, nested
from mjax.config.schema.model import ModelConfig
from mjax.interop.megatron.arguments_of_parts import (
    bert_fields,
    expert_fields,
    hybrid_fields,
    is_hybrid,
    latent_fields,
    t5_fields,
)
from mjax.interop.megatron.heterogeneous import heterogeneous_fields, is_heterogeneous
from mjax.interop.megatron.llava import Shapes, llava_fields
from mjax.interop.megatron.saved_arguments import Args

# Must be absent, None, False, 0 or empty.
OFF = (
    "experimental_attention_variant", "linear_attention_type",
    "attention_output_gate", "qk_l2_norm", "rotary_interleaved", "mrope_section",
    "rotary_seq_len_interpolation_factor", "apply_residual_connection_post_layernorm",
    "openai_gelu", "quick_geglu", "glu_linear_offset", "activation_func_clamp_value",
    "use_legacy_models", "mtp_use_repeated_layer", "use_mup", "enable_hyper_connections",
    "chunk_attention_freq", "moe_router_topk_limited_devices",
    "moe_router_force_load_balancing", "moe_expert_capacity_factor", "moe_apply_probs_on_input",
)  # fmt: skip

# Where it is looked at, the argument must be one of these.
CHOICES = {
    "position_embedding_type": ("rope", "learned_absolute", "none", "relative"),
    "normalization": ("LayerNorm", "RMSNorm"),
    "softmax_type": ("vanilla", "learnable"),
    "moe_router_score_function": ("softmax", "sigmoid"),
}

_POSITION_NAMES = {"learned_absolute": "learned"}  # where ours differs
_NORM_NAMES = {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}


def model_config(
    values: Mapping[str, object], where: str, kind: str = "gpt", shapes: Shapes | None = None
) -> ModelConfig:
    """The model of saved arguments; `UserError` names the argument that stands against it.

    `kind`: gpt (hybrids, too), bert, t5 or llava. shapes: of a llava's tensors.
    """
    args = Args(values, where)
    dense = not args("num_experts")
    for name in OFF:
        if args(name, False) not in (False, 0, (), [], "") and not _idle(name, dense):
            raise args.refuse(name)
    for name, allowed in CHOICES.items():
        if args(name, allowed[0]) not in allowed and not _idle(name, dense):
            raise args.refuse(name, f"is none of {', '.join(map(str, allowed))}")
    bias = bool(args("add_bias_linear", True))
    fields = {
        **_size_fields(args),
        **_positions(args),
        **_activation(args, bias),
        **_layer_fields(args),
        **expert_fields(args, bias),
        **_attention_fields(args, bias),
        "num_nextn_predict_layers": args("mtp_num_layers", 0),
        "mlp_bias": bias,
        "norm": _NORM_NAMES[args.need("normalization")],
        "norm_eps": float(args.need("norm_epsilon")),
        "norm_zero_centered": bool(args("apply_layernorm_1p", False)),
        "tie_word_embeddings": not args("untie_embeddings_and_output_weights", False),
        "hidden_dropout": float(args("hidden_dropout", 0.0)),
        "initializer_range": float(args("init_method_std", 0.02)),
    }
    if args("multi_latent_attention"):
        fields |= latent_fields(args)
    if is_hybrid(args):
        fields |= hybrid_fields(args)
    if is_heterogeneous(args):
        fields |= heterogeneous_fields(args)
    if kind == "bert":
        fields |= bert_fields(args)
    if kind == "t5":
        fields |= t5_fields(args)
    elif args("position_embedding_type") == "relative":
        raise args.refuse("position_embedding_type", "is T5's alone")
    if kind == "llava":
        fields |= llava_fields(args, fields, shapes or {})
    wrong = f"{where}: the arguments give model.{{key}}={{value}}: {{why}}"
    return model_of(nested(fields), f"{wrong}; such a model cannot be imported")


def _idle(name: str, dense: bool) -> bool:
    return dense and name.startswith("moe_")


def _size_fields(args: Args) -> dict:
    hidden, heads = args.need("hidden_size"), args.need("num_attention_heads")
    padded = args.need("padded_vocab_size")
    vocab = args("vocab_size", padded)
    if args("vocab_size") and "Null" in str(args("tokenizer_type")):
        vocab += 1  # its end-of-document id comes on top
    if vocab > padded:
        raise args.refuse("vocab_size", f"exceeds args.padded_vocab_size={padded}")
    ffn = 4 * hidden if not args("swiglu") else int(4 * hidden * 2 / 3 / 64) * 64
    grouped = args("group_query_attention", False)
    return {
        "vocab_size": vocab,
        "vocab_multiple": args("make_vocab_size_divisible_by", 128),
        "hidden_size": hidden,
        "num_hidden_layers": args.need("num_layers"),
        "intermediate_size": args("ffn_hidden_size", ffn),
        "attention.num_attention_heads": heads,
        "attention.num_key_value_heads": args.need("num_query_groups") if grouped else heads,
        "attention.head_dim": args("kv_channels", hidden // heads),
        "max_position_embeddings": args.need("max_position_embeddings"),
    }


def _attention_fields(args: Args, bias: bool) -> dict:
    return {
        "attention.attention_bias": bias or bool(args("add_qkv_bias", False)),
        "attention.attention_out_bias": bias,
        "attention.qk_norm": bool(args("qk_layernorm", False)),
        "attention.attention_sinks": args("softmax_type") == "learnable",
        "attention.attention_multiplier": args("softmax_scale"),
        "attention.attention_dropout": float(args("attention_dropout", 0.0)),
    }


def _positions(args: Args) -> dict:
    theirs = args.need("position_embedding_type")
    found = {"position_embedding": _POSITION_NAMES.get(theirs, theirs)}
    if found["position_embedding"] != "rope":
        return found
    found["rope.rope_theta"] = float(args("rotary_base", 10000))
    found["rope.partial_rotary_factor"] = float(args("rotary_percent", 1.0))
    if args("use_rope_scaling"):
        found["rope.rope_scaling"] = {
            "rope_type": "llama3",
            "factor": float(args("rope_scaling_factor", 8.0)),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    return found


def _activation(args: Args, bias: bool) -> dict:
    """Megatron's fused gelu kernels compute the tanh form, its unfused path the erf form."""
    gated = bool(args("swiglu") or args("gated_linear_unit"))
    if args("swiglu"):
        act = "silu"
    elif args("use_te_activation_func"):
        raise args.refuse("use_te_activation_func", "is understood with swiglu only")
    elif args("squared_relu"):
        act = "relu2"
    else:
        act = "gelu_tanh" if args("bias_gelu_fusion") and (bias or gated) else "gelu"
    return {"hidden_act": act, "mlp_gated": gated}


# The kinds of layers besides "full+mlp", and the arguments that ask for them.
_MARKED = {
    "full+experts": "num_experts",
    "window+mlp": "window_size",
    "nope+mlp": "no_rope_freq",
}


def _layer_fields(args: Args) -> dict:
    """layer_pattern and attention.sliding_window, from Megatron's three per-layer arguments."""
    if is_hybrid(args) or is_heterogeneous(args):
        return {}
    n = args.need("num_layers")
    marks = {kind: [False] * n for kind in _MARKED}
    window = args("window_size")
    if window is not None:
        left, right = window
        if right not in (0, -1):
            raise args.refuse("window_size", "sees keys to the right")
        full = _every(args, "window_attn_skip_freq", n, marked=False) or [False] * n
        marks["window+mlp"] = [left >= 0 and not whole for whole in full]
    if args("no_rope_freq"):
        marks["nope+mlp"] = _every(args, "no_rope_freq", n)
    if args("num_experts"):
        marks["full+experts"] = _every(args, "moe_layer_freq", n, first=0) or [True] * n
    kinds = []
    for layer in range(n):
        marked = [kind for kind, mark in marks.items() if mark[layer]]
        if len(marked) > 1:
            both = " and ".join(f"args.{_MARKED[kind]}" for kind in marked)
            raise args.refuse(_MARKED[marked[0]], f"meets another in layer {layer} ({both})")
        kinds += marked or ["full+mlp"]
    if args("multi_latent_attention"):
        if {kind.split("+")[0] for kind in kinds} != {"full"}:
            raise args.refuse("multi_latent_attention", "meets window_size or no_rope_freq")
        kinds = [kind.replace("full", "mla") for kind in kinds]
    found = {"layer_pattern": pattern_of(kinds)}
    has_windows = "window+mlp" in kinds
    return found | ({"attention.sliding_window": window[0] + 1} if has_windows else {})


def _every(
    args: Args, name: str, layers: int, first: int = 1, marked: bool = True
) -> list[bool] | None:
    """The layers that an argument chooses; None: it is not given.

    A number N chooses each N-th layer, the first of which has the number `first`. A list has a mark
    a layer; those that are `marked` are chosen.
    """
    value = args(name)
    if value is None:
        return None
    if isinstance(value, int):
        return [(layer + first) % value == 0 for layer in range(layers)]
    if not isinstance(value, list | tuple) or len(value) != layers:
        raise args.refuse(name, f"is neither a number nor a list of {layers}")
    return [bool(mark) == marked for mark in value]
