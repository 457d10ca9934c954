"""Megatron-LM's saved arguments -> `ModelConfig`.

Invariant: every argument that changes what a GPT computes is either translated here or, when it is
on, refused by name. Arguments that only change how it is trained, sharded or rounded are not read.
An argument newer than this list shows as a tensor without a place, which is refused, too.
Source: megatron/training/arguments.py, core/transformer/transformer_config.py, gpt_builders.py.
"""

from collections.abc import Mapping

from mjax.config.languages.layer_pattern import pattern_of
from mjax.config.schema.keys import model_of, nested
from mjax.config.schema.model import ModelConfig
from mjax.errors import UserError

# Must be absent, None, False, 0 or empty.
OFF = (
    "multi_latent_attention", "experimental_attention_variant", "linear_attention_type",
    "attention_output_gate", "qk_l2_norm", "rotary_interleaved", "mrope_section",
    "rotary_seq_len_interpolation_factor", "apply_residual_connection_post_layernorm",
    "openai_gelu", "quick_geglu", "glu_linear_offset", "activation_func_clamp_value",
    "use_legacy_models", "mtp_num_layers", "is_hybrid_model", "hybrid_override_pattern",
    "hybrid_layer_pattern", "hybrid_attention_ratio", "hybrid_mlp_ratio", "use_mup", "spec",
    "heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json",
    "chunk_attention_freq", "moe_shared_expert_intermediate_size",
    "moe_router_num_groups", "moe_router_group_topk", "moe_router_topk_limited_devices",
    "moe_router_enable_expert_bias", "moe_router_force_load_balancing", "moe_latent_size",
    "moe_expert_capacity_factor", "moe_apply_probs_on_input",
)  # fmt: skip

# Where it is looked at, the argument must be one of these.
CHOICES = {
    "position_embedding_type": ("rope", "learned_absolute", "none"),
    "normalization": ("LayerNorm", "RMSNorm"),
    "softmax_type": ("vanilla", "learnable"),
    "moe_router_score_function": ("softmax",),
    "moe_router_topk_scaling_factor": (None, 1.0),
    "moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss", "global_aux_loss", "none"),
}

_POSITION_NAMES = {"rope": "rope", "learned_absolute": "learned", "none": "none"}
_NORM_NAMES = {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}


class _Args:
    """The arguments, with errors that name the one and the file."""

    def __init__(self, values: Mapping[str, object], where: str):
        self.values, self.where = values, where

    def __call__(self, name: str, default: object = None) -> object:
        value = self.values.get(name)
        return default if value is None else value

    def need(self, name: str) -> object:
        if self(name) is None:
            raise UserError(f"{self.where}: args.{name} is missing; save with a newer Megatron-LM")
        return self(name)

    def refuse(self, name: str, why: str = "has no counterpart in mjax") -> UserError:
        return UserError(
            f"{self.where}: args.{name}={self(name)!r} {why}; such a model cannot be imported "
            "(docs/start/from-megatron.md)"
        )


def model_config(values: Mapping[str, object], where: str) -> ModelConfig:
    """The model of saved arguments; `UserError` names the argument that stands against it."""
    args = _Args(values, where)
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
        **_expert_fields(args, bias),
        **_attention_fields(args, bias),
        "mlp_bias": bias,
        "norm": _NORM_NAMES[args.need("normalization")],
        "norm_eps": float(args.need("norm_epsilon")),
        "norm_zero_centered": bool(args("apply_layernorm_1p", False)),
        "tie_word_embeddings": not args("untie_embeddings_and_output_weights", False),
        "hidden_dropout": float(args("hidden_dropout", 0.0)),
        "initializer_range": float(args("init_method_std", 0.02)),
    }
    wrong = f"{where}: the arguments give model.{{key}}={{value}}: {{why}}"
    return model_of(nested(fields), f"{wrong}; such a model cannot be imported")


def _idle(name: str, dense: bool) -> bool:
    return dense and name.startswith("moe_")


def _size_fields(args: _Args) -> dict:
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


def _attention_fields(args: _Args, bias: bool) -> dict:
    return {
        "attention.attention_bias": bias or bool(args("add_qkv_bias", False)),
        "attention.attention_out_bias": bias,
        "attention.qk_norm": bool(args("qk_layernorm", False)),
        "attention.attention_sinks": args("softmax_type") == "learnable",
        "attention.attention_multiplier": args("softmax_scale"),
        "attention.attention_dropout": float(args("attention_dropout", 0.0)),
    }


def _positions(args: _Args) -> dict:
    found = {"position_embedding": _POSITION_NAMES[args.need("position_embedding_type")]}
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


def _activation(args: _Args, bias: bool) -> dict:
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


def _layer_fields(args: _Args) -> dict:
    """layer_pattern and attention.sliding_window, from Megatron's three per-layer arguments."""
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
    found = {"layer_pattern": pattern_of(kinds)}
    has_windows = "window+mlp" in kinds
    return found | ({"attention.sliding_window": window[0] + 1} if has_windows else {})


def _every(
    args: _Args, name: str, layers: int, first: int = 1, marked: bool = True
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


def _expert_fields(args: _Args, bias: bool) -> dict:
    if not args("num_experts"):
        return {}
    if bias:
        raise args.refuse("add_bias_linear", "with experts (args.num_experts)")
    balanced = args("moe_router_load_balancing_type", "aux_loss") != "none"
    return {
        "moe.num_experts": args("num_experts"),
        "moe.num_experts_per_tok": args.need("moe_router_topk"),
        "moe.moe_intermediate_size": args("moe_ffn_hidden_size") or args.need("ffn_hidden_size"),
        "moe.norm_topk_prob": not args("moe_router_pre_softmax", False),
        "moe.router_aux_loss_coef": float(args("moe_aux_loss_coeff", 0.0)) if balanced else 0.0,
    }
