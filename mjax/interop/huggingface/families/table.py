"""The table of Hugging Face's model families: a row each; `engine.py` reads and writes by them.

A family is a list of two-way `Part`s, each reading some keys of a config.json into those of a
`ModelConfig` and writing them back, and a few replacements on the names that the parameters declare
(`ParamSpec.hf`, Llama's).
"""

from mjax.interop.huggingface.families.decoders import DECODERS, MIXTRAL_RENAMES
from mjax.interop.huggingface.families.deepseek import (
    MIMO_PREDICTIONS,
    SHARED_EXPERTS,
    dense_first,
    hidden_state_first,
    latent_attention_part,
    one_prediction_layer,
    prediction_layers,
    routed_experts_v2,
    routed_experts_v3,
    with_prediction_layer,
    without_missing_predictions,
)
from mjax.interop.huggingface.families.encoders import ENCODERS, T5
from mjax.interop.huggingface.families.family import (
    Family,
    experts_stacked,
    inputs_first,
    interleaved,
    vector,
)
from mjax.interop.huggingface.families.hybrids import HYBRIDS, MULTIPLIERS
from mjax.interop.huggingface.families.nas import block_configs, norm_names
from mjax.interop.huggingface.families.parts import (
    BIASED,
    activation,
    all_but_every,
    biases,
    every_second,
    every_second_below,
    expert_layers,
    experts,
    gemma_activation,
    gemma_scales,
    gpt2_shape,
    ignored,
    layer_types,
    of_kind,
    one_window,
    optional_window,
    same,
    shape,
    softcaps,
    two_dropouts,
    window_of_all,
)
from mjax.interop.huggingface.families.qwen_vl import QWEN_VL
from mjax.interop.huggingface.families.recent import GPT_OSS_RENAMES, RECENT, gpt_oss
from mjax.interop.huggingface.families.rope import rope, sizes_with_rope, typed_rope
from mjax.interop.huggingface.families.vision import VISION

_GELU2 = activation("hidden_activation", default="gelu_pytorch_tanh")
_QWEN_LEFT_OUT = {"num_key_value_heads": 32, "sliding_window": 4096}
_GEMMA2_LEFT_OUT = {
    "num_key_value_heads": 4,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
}
_GEMMA3_LEFT_OUT = {  # the published 4B leaves out more than its siblings
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
}
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GEMMA_SHAPE = {"tie_word_embeddings": True, "head_dim": 256}
_MIXTRAL = {"num_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.001}
_OLMOE = {"num_experts": 64, "num_experts_per_tok": 8, "router_aux_loss_coef": 0.01}
_QWEN2_MOE = {
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "router_aux_loss_coef": 0.001,
    "moe_intermediate_size": 1408,
    "norm_topk_prob": False,
    "shared_expert_intermediate_size": 5632,
}
_QWEN3_MOE = {
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "router_aux_loss_coef": 0.001,
    "moe_intermediate_size": 768,
    "norm_topk_prob": False,
}
_SUMMARY = ("activation", "first_dropout", "proj_to_labels", "type", "use_proj")
_GEMMA = {"norm_zero_centered": True}

FAMILIES: dict[str, Family] = {
    "llama": Family.of("LlamaForCausalLM", shape(), rope(), biases(mlp=True)),
    "mistral": Family.of(
        "MistralForCausalLM",
        *sizes_with_rope(),
        one_window(),
        left_out={"num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "qwen2": Family.of(
        "Qwen2ForCausalLM",
        layer_types(optional_window),
        *sizes_with_rope(),
        biases(True, out=False),
        left_out=_QWEN_LEFT_OUT,
    ),
    "mimo": Family.of(
        "MiMoForCausalLM",
        layer_types(optional_window),
        one_prediction_layer("num_nextn_predict_layers"),
        *sizes_with_rope(),
        biases(True, out=False),
        layouts={"eh_proj.weight": hidden_state_first},
        left_out={"num_key_value_heads": 32, "sliding_window": 4096},
        **with_prediction_layer(MIMO_PREDICTIONS),
    ),
    "qwen3": Family.of(
        "Qwen3ForCausalLM",
        layer_types(optional_window),
        *sizes_with_rope(head_dim=128),
        biases(),
        fixed={"attention.qk_norm": True},
        left_out=_QWEN_LEFT_OUT,
    ),
    "gemma": Family.of(
        "GemmaForCausalLM",
        gemma_scales(False),
        shape(gemma_activation(), **_GEMMA_SHAPE),
        rope(),
        biases(),
        fixed=_GEMMA,
        left_out={"num_key_value_heads": 16},
    ),
    "gemma2": Family.of(
        "Gemma2ForCausalLM",
        gemma_scales(True),
        layer_types(every_second),
        shape(_GELU2, **_GEMMA_SHAPE),
        rope(),
        biases(),
        softcaps(),
        ignored("hidden_act"),  # hidden_activation counts
        fixed={**_GEMMA, "norm_placement": "sandwich"},
        left_out=_GEMMA2_LEFT_OUT
        | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "gemma3_text": Family.of(
        "Gemma3ForCausalLM",
        gemma_scales(True),
        layer_types(all_but_every(6)),
        shape(_GELU2, **_GEMMA_SHAPE, vocab_size=262208, max_position_embeddings=131072),
        typed_rope(1e6, 1e4),
        biases(),
        softcaps(),
        ignored("hidden_act"),  # hidden_activation counts
        fixed={**_GEMMA, "norm_placement": "sandwich", "attention.qk_norm": True},
        left_out=_GEMMA2_LEFT_OUT | _GEMMA3_LEFT_OUT,
    ),
    "phi3": Family.of(
        "Phi3ForCausalLM",
        shape(rms_norm_eps=1e-5),
        rope(fraction=1.0, original=True),
        one_window(),
        biases(False),
        two_dropouts(0.0),
        fused={
            "self_attn.qkv_proj": _QKV,
            "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
        },
    ),
    "olmo2": Family.of(
        "Olmo2ForCausalLM",
        *sizes_with_rope(rms_norm_eps=1e-5),
        biases(),
        fixed={
            "norm_placement": "post",
            "attention.qk_norm": True,
            "attention.qk_norm_all_heads": True,
        },
    ),
    "smollm3": Family.of(
        "SmolLM3ForCausalLM",
        layer_types(optional_window, nope=True),
        *sizes_with_rope(2e6, tie_word_embeddings=True),
        biases(mlp=True),
    ),
    "granite": Family.of(
        "GraniteForCausalLM", shape(), rope(), biases(mlp=True), same(MULTIPLIERS)
    ),
    "mixtral": Family.of(
        "MixtralForCausalLM",
        experts("num_local_experts", **_MIXTRAL),
        *sizes_with_rope(1e6, rms_norm_eps=1e-5),
        rename=MIXTRAL_RENAMES,
        left_out={"num_key_value_heads": 8},
    ),
    "deepseek_v2": Family.of(
        "DeepseekV2ForCausalLM",
        dense_first(of_kind("mla+mlp")),
        latent_attention_part(),
        routed_experts_v2(),
        *sizes_with_rope(),
        biases(False, mlp=True),
        rename=SHARED_EXPERTS,
        left_out={"q_lora_rank": 1536},
    ),
    "deepseek_v3": Family.of(
        "DeepseekV3ForCausalLM",
        dense_first(of_kind("mla+mlp")),
        prediction_layers(),
        latent_attention_part(),
        routed_experts_v3(),
        *sizes_with_rope(),
        biases(False),
        rename=SHARED_EXPERTS,
        left_out={"q_lora_rank": 1536, "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4},
        mend=without_missing_predictions,
    ),
    "glm4_moe": Family.of(
        "Glm4MoeForCausalLM",
        dense_first(of_kind("full+mlp")),
        prediction_layers(),
        routed_experts_v3(factor=1.0),
        *sizes_with_rope(fraction=0.5, rms_norm_eps=1e-5),
        biases(out=False),
        same({"use_qk_norm": "attention.qk_norm"}, {"use_qk_norm": False}),
        rename=SHARED_EXPERTS,
        left_out={"num_key_value_heads": 8, "first_k_dense_replace": 1},
        mend=without_missing_predictions,
    ),
    "gpt_oss": Family.of(
        "GptOssForCausalLM",
        layer_types(every_second, kinds=("full+experts", "window+experts")),
        gpt_oss(),
        *sizes_with_rope(150000.0, rms_norm_eps=1e-5, head_dim=64),
        fixed={"attention.attention_sinks": True, "mlp_bias": True, "moe.router_bias": True},
        rename=GPT_OSS_RENAMES,
        layouts={
            "expert_matrix": experts_stacked(interleaved(inputs_first)),
            "expert_vector": experts_stacked(interleaved(vector)),
        },
        left_out={"num_key_value_heads": 8, "sliding_window": 128},
    ),
    "olmoe": Family.of(
        "OlmoeForCausalLM",
        experts("num_experts", **_OLMOE, norm_topk_prob=False),
        *sizes_with_rope(rms_norm_eps=1e-5),
        biases(),
        fixed={"attention.qk_norm": True, "attention.qk_norm_all_heads": True},
    ),
    "qwen2_moe": Family.of(
        "Qwen2MoeForCausalLM",
        expert_layers(every_second_below, typed=True),
        experts("num_experts", **_QWEN2_MOE),
        *sizes_with_rope(),
        same({"qkv_bias": "attention.attention_bias"}, {"qkv_bias": True}),
        fixed={"moe.shared_expert_gate": True},
        left_out={"num_key_value_heads": 16, "sliding_window": 4096},
    ),
    "qwen3_moe": Family.of(
        "Qwen3MoeForCausalLM",
        expert_layers(window_of_all, typed=False),
        experts("num_experts", **_QWEN3_MOE),
        *sizes_with_rope(),
        biases(),
        fixed={"attention.qk_norm": True},
    ),
    "gpt2": Family.of(
        "GPT2LMHeadModel",
        ignored("n_ctx", *(f"summary_{name}" for name in _SUMMARY)),
        gpt2_shape(),
        two_dropouts(0.1),
        activation("activation_function", {"gelu_tanh": "gelu_new"}),
        fixed=BIASED,
        rename=(
            ("model.layers.", "transformer.h."),
            ("model.embed_tokens", "transformer.wte"),
            ("model.embed_positions", "transformer.wpe"),
            ("model.norm", "transformer.ln_f"),
            ("input_layernorm", "ln_1"),
            ("post_attention_layernorm", "ln_2"),
            ("self_attn.c_attn", "attn.c_attn"),
            ("self_attn.o_proj", "attn.c_proj"),
            ("mlp.up_proj", "mlp.c_fc"),
            ("mlp.down_proj", "mlp.c_proj"),
        ),
        fused={"self_attn.c_attn": _QKV},
        layouts={"matrix": inputs_first},
    ),
    "nemotron-nas": Family.of(
        "DeciLMForCausalLM",
        block_configs(),
        *sizes_with_rope(),
        biases(mlp=True),
        name_of=norm_names,
    ),
    **DECODERS,
    **RECENT,
    **HYBRIDS,
    **ENCODERS,
    **T5,
    **VISION,
    **QWEN_VL,
}
FAMILIES["kimi_k2"] = FAMILIES["deepseek_v3"]
