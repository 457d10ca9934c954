"""Model families: a Hugging Face config.json and its tensor names <-> ours, in one table.

A family is a list of two-way `Part`s, each reading some keys of a config.json into those of a
`ModelConfig` and writing them back, and a few replacements on the names that the parameters declare
(`ParamSpec.hf`, Llama's). Invariant: every key of a config.json is read, listed as meaningless
here, or refused by name; a config is written only if reading it back gives the same model.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import NoReturn

from mjax.checkpoint.base.source import Path, flat
from mjax.config.languages.layer_pattern import stack_of
from mjax.config.schema.keys import leaf_keys, model_of, nested, value_of
from mjax.config.schema.model import ModelConfig
from mjax.errors import UserError
from mjax.interop.huggingface.families.bert import ENCODERS
from mjax.interop.huggingface.families.config_values import with_named_values
from mjax.interop.huggingface.families.deepseek import (
    dense_first,
    latent_attention,
    prediction_layers,
    routed_experts_v2,
    routed_experts_v3,
)
from mjax.interop.huggingface.families.engine import Family
from mjax.interop.huggingface.families.gpt_oss import GPT_OSS_RENAMES, gpt_oss
from mjax.interop.huggingface.families.hybrids import HYBRIDS, MULTIPLIERS
from mjax.interop.huggingface.families.nas import block_configs, norm_names
from mjax.interop.huggingface.families.parts import (
    BIASED,
    activation,
    all_but_every_sixth,
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
    one_window,
    optional_window,
    same,
    shape,
    softcaps,
    two_dropouts,
    window_of_all,
)
from mjax.interop.huggingface.families.rope import rope, typed_rope
from mjax.interop.huggingface.families.slots import Slot, Slots
from mjax.interop.huggingface.families.t5 import T5
from mjax.interop.huggingface.families.unread_keys import require_known, text_of
from mjax.interop.huggingface.families.vision import VISION
from mjax.sharding.spec import ENUMERATING_AXES, ParamSpec

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
        shape(),
        rope(),
        one_window(),
        left_out={"num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "qwen2": Family.of(
        "Qwen2ForCausalLM",
        layer_types(optional_window),
        shape(),
        rope(),
        biases(True, out=False),
        left_out=_QWEN_LEFT_OUT,
    ),
    "qwen3": Family.of(
        "Qwen3ForCausalLM",
        layer_types(optional_window),
        shape(head_dim=128),
        rope(),
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
        layer_types(all_but_every_sixth),
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
        shape(rms_norm_eps=1e-5),
        rope(),
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
        shape(tie_word_embeddings=True),
        rope(2e6),
        biases(mlp=True),
    ),
    "granite": Family.of(
        "GraniteForCausalLM", shape(), rope(), biases(mlp=True), same(MULTIPLIERS)
    ),
    "mixtral": Family.of(
        "MixtralForCausalLM",
        experts("num_local_experts", **_MIXTRAL),
        shape(rms_norm_eps=1e-5),
        rope(1e6),
        rename=(
            ("mlp.gate.", "block_sparse_moe.gate."),
            ("mlp.experts.", "block_sparse_moe.experts."),
            (".gate_proj.", ".w1."),
            (".up_proj.", ".w3."),
            (".down_proj.", ".w2."),
        ),
        left_out={"num_key_value_heads": 8},
    ),
    "deepseek_v2": Family.of(
        "DeepseekV2ForCausalLM",
        dense_first("mla+mlp", "mla+experts"),
        latent_attention(),
        routed_experts_v2(),
        shape(),
        rope(),
        biases(False, mlp=True),
        rename=(("mlp.shared_expert.", "mlp.shared_experts."),),
        left_out={"q_lora_rank": 1536},
    ),
    "deepseek_v3": Family.of(
        "DeepseekV3ForCausalLM",
        dense_first("mla+mlp", "mla+experts"),
        prediction_layers(),
        latent_attention(),
        routed_experts_v3(),
        shape(),
        rope(),
        biases(False),
        rename=(("mlp.shared_expert.", "mlp.shared_experts."),),
        left_out={"q_lora_rank": 1536, "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4},
    ),
    "glm4_moe": Family.of(
        "Glm4MoeForCausalLM",
        dense_first("full+mlp", "full+experts"),
        prediction_layers(),
        routed_experts_v3(factor=1.0),
        shape(rms_norm_eps=1e-5),
        rope(fraction=0.5),
        biases(out=False),
        same({"use_qk_norm": "attention.qk_norm"}, {"use_qk_norm": False}),
        rename=(("mlp.shared_expert.", "mlp.shared_experts."),),
        left_out={"num_key_value_heads": 8, "first_k_dense_replace": 1},
    ),
    "gpt_oss": Family.of(
        "GptOssForCausalLM",
        layer_types(every_second, kinds=("full+experts", "window+experts")),
        gpt_oss(),
        shape(rms_norm_eps=1e-5, head_dim=64),
        rope(150000.0),
        fixed={"attention.attention_sinks": True, "mlp_bias": True, "moe.router_bias": True},
        rename=GPT_OSS_RENAMES,
        stacked=True,
        interleaved=True,
        left_out={"num_key_value_heads": 8, "sliding_window": 128},
    ),
    "olmoe": Family.of(
        "OlmoeForCausalLM",
        experts("num_experts", **_OLMOE, norm_topk_prob=False),
        shape(rms_norm_eps=1e-5),
        rope(),
        biases(),
        fixed={"attention.qk_norm": True, "attention.qk_norm_all_heads": True},
    ),
    "qwen2_moe": Family.of(
        "Qwen2MoeForCausalLM",
        expert_layers(every_second_below, typed=True),
        experts("num_experts", **_QWEN2_MOE),
        shape(),
        rope(),
        same({"qkv_bias": "attention.attention_bias"}, {"qkv_bias": True}),
        fixed={"moe.shared_expert_gate": True},
        left_out={"num_key_value_heads": 16, "sliding_window": 4096},
    ),
    "qwen3_moe": Family.of(
        "Qwen3MoeForCausalLM",
        expert_layers(window_of_all, typed=False),
        experts("num_experts", **_QWEN3_MOE),
        shape(),
        rope(),
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
        conv1d=True,
    ),
    "nemotron-nas": Family.of(
        "DeciLMForCausalLM",
        block_configs(),
        shape(),
        rope(),
        biases(mlp=True),
        name_of=norm_names,
    ),
    **HYBRIDS,
    **ENCODERS,
    **T5,
    **VISION,
}

# The weight of the balance loss.
BALANCE_KEYS = "router_aux_loss_coef", "aux_loss_alpha"
# Keys of ours that a config.json does not carry, or that do not change the trained function.
UNSAID = frozenset(
    """model_type vocab_multiple scaled_output_init moe.router_z_loss_coef moe.router_aux_loss_over
    moe.router_aux_loss_type moe.expert_bias_update_rate moe.capacity_factor moe.drop_policy
    moe.router_jitter_noise moe.sinkhorn moe.skip_padding vision.max_images
    vision.length_multiple""".split()
)


class _Keys(dict):
    """A config.json, whose missing keys are named."""

    def __missing__(self, key: str) -> NoReturn:
        raise UserError(f"config.json lacks {key!r}, which its model_type needs; add it")


def config_from_hf(config: dict) -> ModelConfig:
    """A parsed config.json -> ours. Raises `UserError` naming what is unknown or unsupported."""
    return with_named_values(_model_of, config)


def _model_of(config: dict) -> ModelConfig:
    config = text_of(config)
    name = config.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise UserError(
            f"config.json: model_type={name!r} is not supported; known: {', '.join(FAMILIES)}"
        )
    family = FAMILIES[name]
    rest = _Keys(family.left_out | config)
    fields: dict = dict(family.fixed)
    for part in family.parts:
        fields |= part.read(rest)
    require_known(rest, name)
    return model_of({"model_type": name, **nested(fields)}, "config.json: {key}: {why}")


def config_to_hf(cfg: ModelConfig) -> dict:
    """Our model -> a config.json of its family. Raises `UserError` if none can express it.

    Where the family's balance loss is another one, its coefficient is 0: none means the same.
    """
    problems = []
    for name in [cfg.model_type] if cfg.model_type else FAMILIES:
        said, config = cfg, _written(name, cfg)
        try:
            back = config_from_hf(dict(config))
            if back.moe.router_aux_loss_type != cfg.moe.router_aux_loss_type:
                moe = cfg.moe.model_copy(update={"router_aux_loss_coef": 0.0})
                said = cfg.model_copy(update={"moe": moe})
                config = _written(name, said)
                back = config_from_hf(dict(config))
        except UserError as e:
            problems.append(f"{name}: {e}")
            continue
        differing = [key for key in _said(cfg) if _meaning(back, key) != _meaning(said, key)]
        if not differing:
            return config
        problems.append(f"{name}: no model.{differing[0]}={value_of(cfg, differing[0])!r}")
    raise UserError(f"no Hugging Face family can express this model ({'; '.join(problems)})")


def _written(name: str, cfg: ModelConfig) -> dict:
    """A config.json of the family of that name, which may not say all of `cfg`."""
    family = FAMILIES[name]
    config: dict = {"architectures": [family.architecture], "model_type": name}
    for part in reversed(family.parts):  # what reads first has the last word
        config |= part.write(cfg)
    return config


def family_of(cfg: ModelConfig) -> Family:
    """The family that `config_to_hf` writes."""
    return FAMILIES[config_to_hf(cfg)["model_type"]]


def _said(cfg: ModelConfig) -> list[str]:
    skipped = UNSAID | {"hidden_dropout", "attention.attention_dropout", "initializer_range"}
    if not cfg.has_role("feedforward"):
        skipped |= {"intermediate_size"}
    if not cfg.reads_group("attention"):
        skipped |= {"attention.head_dim", "attention.num_key_value_heads"}
    return [key for key in leaf_keys(ModelConfig) if key not in skipped]


def _meaning(cfg: ModelConfig, key: str) -> object:
    """The value of a key; patterns that are spelled differently mean the same layers."""
    return cfg.layer_kinds if key == "layer_pattern" else value_of(cfg, key)


# ---- names -------------------------------------------------------------------------------------


def slots(cfg: ModelConfig, specs: dict, family: Family | None = None) -> Slots:
    """For each parameter, where its matrices and vectors lie in a checkpoint of the family.

    `family`: None: the model's.
    """
    family, leaves = family or family_of(cfg), flat(specs)
    pieces = {path: list(_places(cfg, family, path[0], spec)) for path, spec in leaves.items()}
    sizes: dict[str, dict[int, int]] = {}  # of fused tensors: position -> length
    for path, of_path in pieces.items():
        for slot, order in of_path:
            lengths = [leaves[path].shape[axis] for axis in slot.dims[slot.axis]]
            sizes.setdefault(slot.tensor, {})[order] = math.prod(lengths)

    def placed(slot: Slot, order: int) -> Slot:
        before = [n for position, n in sizes[slot.tensor].items() if position < order]
        return replace(slot, start=slot.start + sum(before))

    found = {}
    for path, of_path in pieces.items():
        places = tuple(placed(slot, order) for slot, order in of_path)
        found[path] = (*_copies(cfg, path, places), *places)
    return found


def _copies(cfg: ModelConfig, path: Path, places: tuple[Slot, ...]) -> Iterator[Slot]:
    """Where files repeat the embedding and the head, for each layer of multi-token prediction."""
    for depth in range(cfg.num_nextn_predict_layers):
        layer = f"model.layers.{cfg.num_hidden_layers + depth}"
        names = {"embedding": "embed_tokens", "head": "shared_head.head"}
        if path[0] in names:
            yield replace(places[0], tensor=f"{layer}.{names[path[0]]}.weight")


def _places(cfg: ModelConfig, family: Family, stack: str, spec: ParamSpec):
    """(slot, position in a fused tensor) of each piece; `slots` moves it behind those before."""
    layers = [i for i, kind in enumerate(cfg.layer_kinds) if stack_of(kind) == stack]
    batch = [i for i, axis in enumerate(spec.axes) if axis in ENUMERATING_AXES]
    is_stacked = family.stacked and "experts" in spec.axes
    takes_turns = is_stacked and family.interleaved
    rest = tuple(i for i in range(len(spec.shape)) if i not in batch)
    if spec.role in ("matrix", "router"):
        dims = rest[spec.inputs :], rest[: spec.inputs]
        dims = dims[::-1] if family.conv1d or takes_turns else dims
        if "patch" in spec.axes:  # of a convolution: [D, C, P, P]
            dims = dims[0], *((axis,) for axis in dims[1])
    elif spec.role == "conv":  # [channels, 1, taps]
        dims = rest[:-1], (), rest[-1:]
    else:
        dims = tuple((a,) for a in rest) if spec.role in ("embedding", "head") else (rest,)
    axis = 1 if (family.conv1d or takes_turns) and len(dims) == 2 else 0
    for index in product(*(range(spec.shape[a]) for a in batch)):
        at = dict(zip((spec.axes[a] for a in batch), index, strict=True))
        pair, where = at.get("pair", 0), {}
        name = spec.hf[0 if takes_turns else pair]  # gate and up have the name of gate
        if is_stacked:
            name, where = name.replace(".{expert}", ""), {"lead": (at["experts"],)}
        if takes_turns and "pair" in at:
            where |= {"start": pair, "step": 2}
        name = name.format(expert=at.get("experts"))
        if "layers" in at:
            name = f"model.layers.{layers[at['layers']]}.{name}"
        order = 0
        for fused, parts in (family.fused or {}).items():
            for i, part in enumerate(parts):
                if re.search(rf"\b{re.escape(part)}\b", name):
                    name, order = name.replace(part, fused), i
        for old, new in family.rename:
            name = name.replace(old, new)
        if family.name_of is not None:
            name = family.name_of(cfg, name)
        if name in family.ones:
            where = {"lead": (0,) * family.ones[name]}
        number = name in family.numbers
        yield Slot(name, index, dims, axis=axis, number=number, **where), order
