"""Rows of the table of families (`families.py`): state-space mixers and linear attention."""

from dataclasses import replace

from mjax.interop.huggingface.families.deepseek import (
    QWEN_PREDICTIONS,
    one_prediction_layer,
    with_prediction_layer,
)
from mjax.interop.huggingface.families.family import (
    Family,
    Slot,
    TensorLayout,
    experts_as_in,
    experts_stacked,
    outputs_first,
)
from mjax.interop.huggingface.families.mamba import (
    MAMBA2_SHAPE,
    NEMOTRON_IGNORED,
    attention_among,
    every_nth_attends,
    falcon_layers,
    granite_experts,
    granite_kinds,
    granite_positions,
    mixer,
    nemotron_experts,
    nemotron_shape,
    one_branch_a_layer,
)
from mjax.interop.huggingface.families.parts import (
    Part,
    activation,
    alike,
    biases,
    experts,
    ignored,
    required,
    same,
)
from mjax.interop.huggingface.families.rope import sizes_with_rope
from mjax.sharding.spec import ParamSpec

_MIXER = {
    "mamba.in_proj": tuple(f"mamba.{name}_proj" for name in ("z", "x", "b", "c", "dt")),
    "mamba.conv1d": tuple(f"mamba.{name}_conv" for name in "xbc"),
}
_BACKBONE = (
    ("model.norm.", "backbone.norm_f."),
    ("model.embed_tokens", "backbone.embeddings"),
    ("model.layers.", "backbone.layers."),
    ("input_layernorm", "norm"),
    ("mlp.shared_expert.", "mlp.shared_experts."),
    *((f".{name}.", ".mixer.") for name in ("mamba", "self_attn", "mlp")),
)
_FEED_FORWARD = (
    ("model.norm.", "model.final_layernorm."),
    ("post_attention_layernorm", "pre_ff_layernorm"),
    (".mlp.", ".feed_forward."),
)
MULTIPLIERS = alike("embedding_multiplier residual_multiplier logits_scaling")
MULTIPLIERS |= alike("attention_multiplier", "attention.")
# Granite's experts lie in one tensor.
STACKED = {"expert_matrix": experts_stacked(outputs_first)}
GRANITE_FUSED = {
    "mlp.experts.input_linear": ("mlp.experts.gate_proj", "mlp.experts.up_proj"),
}
GRANITE_RENAMES = (
    ("mlp.gate.weight", "block_sparse_moe.router.layer.weight"),
    ("mlp.experts.down_proj", "block_sparse_moe.output_linear"),
    ("mlp.experts.", "block_sparse_moe."),
)


def side_by_side(*tensors: str) -> TensorLayout:
    """The projections `ParamSpec.parts` of each head of keys, in tensors of all heads.

    `tensors`: that of each part; parts of one tensor follow each other.
    """

    def place(spec: ParamSpec, at: dict[str, int]) -> tuple[Slot, ...]:
        slot, axis, heads = outputs_first(spec, at), len(spec.shape) - 1, spec.shape[-2]
        found, first, rows = [], 0, dict.fromkeys(tensors, 0)
        for tensor, width in zip(tensors, spec.parts, strict=True):
            name = f"linear_attn.in_proj_{tensor}.weight"
            part = axis, first, first + width
            found.append(replace(slot, tensor=name, part=part, start=rows[tensor]))
            first += width
            rows[tensor] += heads * width
        return tuple(found)

    return place


def _multimodal_rope() -> Part:
    """Positions of three axes, which are equal in a text. Reads before `rope`."""

    def read(config: dict) -> dict:
        for name in ("rope_parameters", "rope_scaling"):
            if isinstance(config.get(name), dict):
                config[name] = dict(config[name])
                for key in ("mrope_section", "mrope_interleaved"):
                    config[name].pop(key, None)
        return {}

    return Part(read, lambda cfg: {})


_DELTANET = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
_NEXT_EXPERTS = {
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "router_aux_loss_coef": 0.001,
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "shared_expert_intermediate_size": 512,
}
_QWEN35_EXPERTS = {
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "router_aux_loss_coef": 0.001,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
_GATED = {
    "norm_zero_centered": True,
    "attention.qk_norm": True,
    "attention.attention_output_gate": True,
}
_SHARED_GATE = {"moe.shared_expert_gate": True}
_CONV = {"linear_attn.conv1d": tuple(f"linear_attn.{name}_conv" for name in "qkv")}
_DELTANET_PROJECTIONS = {
    "linear_attn.in_proj_qkvz.weight": side_by_side("qkv", "qkv", "qkv", "z"),
    "linear_attn.in_proj_ba.weight": side_by_side("b", "a"),
}
_EXPERT_PAIR = ("mlp.experts.gate_proj", "mlp.experts.up_proj")


def _deltanet_layers(feedforward: str) -> tuple[Part, ...]:
    """Gated DeltaNet and attention, each before the same feed-forward. Reads first."""
    kinds = f"deltanet+{feedforward}", f"full+{feedforward}"
    return (
        every_nth_attends(),
        attention_among(False, lambda config: kinds),
        same(alike(" ".join(_DELTANET), "deltanet."), _DELTANET),
    )


_QWEN35 = (
    _multimodal_rope(),
    one_prediction_layer("mtp_num_hidden_layers"),
    required(attn_output_gate=True, mtp_use_dedicated_embeddings=False, mlp_only_layers=[]),
    ignored("mamba_ssm_dtype"),
    biases(),
)

HYBRIDS: dict[str, Family] = {
    "mamba2": Family.of(
        "Mamba2ForCausalLM",
        mixer("mamba2", n_groups=8, chunk_size=256, use_conv_bias=True),
        required(hidden_act="silu"),
        MAMBA2_SHAPE,
        fixed={"position_embedding": "none", "layer_pattern": "mamba"},
        rename=_BACKBONE,
        fused=_MIXER,
    ),
    "nemotron_h": Family.of(
        "NemotronHForCausalLM",
        one_branch_a_layer(),
        mixer("nemotron_h", use_conv_bias=True),
        nemotron_experts(),
        NEMOTRON_IGNORED,
        required(attention_bias=False, mlp_bias=False, hidden_dropout=0.0, sliding_window=None),
        nemotron_shape(),
        activation("mlp_hidden_act", default="relu2"),
        fixed={"position_embedding": "none", "mlp_gated": False},
        rename=_BACKBONE,
        fused=_MIXER,
    ),
    "bamba": Family.of(
        "BambaForCausalLM",
        attention_among(True, lambda config: ("mamba+mlp", "full+mlp")),
        mixer("bamba", mamba_conv_bias=True),
        *sizes_with_rope(fraction=0.5, rms_norm_eps=1e-5),
        biases(mlp=True),
        rename=_FEED_FORWARD,
        fused=_MIXER,
        left_out={"num_key_value_heads": 8},
    ),
    "granitemoehybrid": Family.of(
        "GraniteMoeHybridForCausalLM",
        attention_among(False, granite_kinds),
        mixer("bamba", mamba_conv_bias=True),
        granite_positions(),
        granite_experts(),
        *sizes_with_rope(),
        biases(),
        same(MULTIPLIERS, dict.fromkeys(MULTIPLIERS, 1.0)),
        rename=(
            ("mlp.shared_expert.down_proj", "shared_mlp.output_linear"),
            ("mlp.shared_expert.", "shared_mlp."),
            *GRANITE_RENAMES,
            (".mlp.down_proj", ".shared_mlp.output_linear"),
        ),
        fused=_MIXER
        | {
            "shared_mlp.input_linear": ("mlp.gate_proj", "mlp.up_proj"),
            "mlp.shared_expert.input_linear": tuple(
                f"mlp.shared_expert.{name}_proj" for name in ("gate", "up")
            ),
        }
        | GRANITE_FUSED,
        layouts=STACKED,
    ),
    "falcon_h1": Family.of(
        "FalconH1ForCausalLM",
        falcon_layers(),
        mixer("bamba", mamba_conv_bias=True),
        *sizes_with_rope(rms_norm_eps=1e-5),
        biases(mlp=True),
        rename=_FEED_FORWARD,
        fused=_MIXER,
        left_out={"num_key_value_heads": 8},
    ),
    "qwen3_next": Family.of(
        "Qwen3NextForCausalLM",
        *_deltanet_layers("experts"),
        one_prediction_layer("num_nextn_predict_layers"),
        experts("num_experts", **_NEXT_EXPERTS),
        *sizes_with_rope(fraction=0.25, head_dim=256),
        biases(),
        required(use_sliding_window=False, decoder_sparse_step=1, mlp_only_layers=[]),
        fixed=_GATED | _SHARED_GATE,
        fused=_CONV,
        left_out={"num_key_value_heads": 2},
        **with_prediction_layer(QWEN_PREDICTIONS),
    ),
    "qwen3_5_text": Family.of(
        "Qwen3_5ForCausalLM",
        *_deltanet_layers("mlp"),
        *_QWEN35,
        *sizes_with_rope(fraction=0.25, head_dim=256),
        fixed=_GATED,
        fused=_CONV,
        layouts=_DELTANET_PROJECTIONS,
        left_out={"num_key_value_heads": 4},
        **with_prediction_layer(QWEN_PREDICTIONS),
    ),
    "qwen3_5_moe_text": Family.of(
        "Qwen3_5MoeForCausalLM",
        *_deltanet_layers("experts"),
        *_QWEN35,
        experts("num_experts", **_QWEN35_EXPERTS),
        *sizes_with_rope(fraction=0.25, head_dim=256, intermediate_size=0),
        fixed=_GATED | _SHARED_GATE,
        fused=_CONV | {"mlp.experts.gate_up_proj": _EXPERT_PAIR},
        rename=tuple(
            (f"mlp.experts.{name}.weight", f"mlp.experts.{name}")
            for name in ("gate_up_proj", "down_proj")
        ),
        layouts=_DELTANET_PROJECTIONS | {"expert_matrix": experts_stacked(outputs_first)},
        left_out={"num_key_value_heads": 2},
        renamed_in=experts_as_in,
        **with_prediction_layer(QWEN_PREDICTIONS),
    ),
}
