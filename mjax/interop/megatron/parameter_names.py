"""Megatron-LM's names of every parameter: GPT, hybrid, BERT and T5 models.

Layers are stacked on a leading axis or named by number, experts likewise. The first
name that is there counts: those of Transformer Engine's modules, then those of Megatron's own.
Source: the `sharded_state_dict` of megatron/core's models.
"""

from mjax.checkpoint.base.source import Path as Leaf
from mjax.config.languages.layer_pattern import ENCODER, PROJECTORS, of_tower, stack_of, stream_of
from mjax.config.schema.model import ModelConfig
from mjax.interop.megatron.layouts import (
    CROSS_KV,
    CROSS_KV_BIAS,
    FLAT,
    FLAT_PAIR,
    GATED,
    KV,
    KV_BIAS,
    OF_PATCHES,
    OF_ROWS,
    OUT,
    PAIR,
    PLAIN,
    Q_BIAS,
    SINGLE,
    TAPS,
    TAPS_PAIR,
    TRANSPOSED,
    VOCABULARY,
    MegatronLayout,
    Q,
)
from mjax.interop.megatron.llava import is_llava

Named = tuple[tuple[str, ...], MegatronLayout]  # its names, and its layout


def _rows_of_norm(name: str, *layer_norms: str, also: str = "") -> dict[tuple[str, ...], Named]:
    """The rows of a norm: `layer_norms` are linear layers that hold it, `also` its own name."""
    rows = {}
    for ours, theirs in (("gain", "weight"), ("bias", "bias")):
        names = [f"{linear}.layer_norm_{theirs}" for linear in layer_norms]
        names += [f"{also}.{theirs}"] if also else []
        rows[(*name.split("."), ours)] = tuple(names), PLAIN
    return rows


_QKV, _FC1, _MIXER = "self_attention.linear_qkv", "mlp.linear_fc1", "mixer.in_proj"
_SELF, _CROSS = "self_attention.", "cross_attention."
_IN = _MIXER + ".weight"
_Q_UP, _KV_UP = _SELF + "linear_q_up_proj", _SELF + "linear_kv_up_proj"

WHOLE: dict[Leaf, Named] = {
    ("embedding",): (("embedding.word_embeddings.weight",), VOCABULARY),
    ("position_embedding",): (("embedding.position_embeddings.weight",), PLAIN),
    ("type_embedding",): (("embedding.tokentype_embeddings.weight",), PLAIN),
    ("final_norm", "gain"): (
        tuple(f"{at}.weight" for at in ("decoder.final_layernorm", "decoder.final_norm")), PLAIN),
    ("final_norm", "bias"): (
        tuple(f"{at}.bias" for at in ("decoder.final_layernorm", "decoder.final_norm")), PLAIN),
    ("head",): (("output_layer.weight",), VOCABULARY),
    ("masked_head", "projection", "weight"): (("lm_head.dense.weight",), TRANSPOSED),
    ("masked_head", "projection", "bias"): (("lm_head.dense.bias",), PLAIN),
    **_rows_of_norm("masked_head.norm", also="lm_head.layer_norm"),
    ("masked_head", "bias"): (("output_layer.bias",), VOCABULARY),
    ("classifier", "pooler", "weight"): (("pooler.dense.weight",), TRANSPOSED),
    ("classifier", "pooler", "bias"): (("pooler.dense.bias",), PLAIN),
    ("classifier", "weight"): (("binary_head.weight",), PLAIN),
    ("classifier", "bias"): (("binary_head.bias",), PLAIN),
}  # fmt: skip

_T5_HEAD = "lm_head.output_layer."
T5_TWINS = {  # how the names of modules that are there twice begin
    _T5_HEAD: "output_layer.",
    "embedding.position_embeddings.": "position_embeddings.",
}
T5_WHOLE: dict[Leaf, Named] = {  # in the place of `WHOLE`
    ("head",): ((_T5_HEAD + "weight",), VOCABULARY),
    ("vocabulary_bias",): ((_T5_HEAD + "bias",), VOCABULARY),
    **_rows_of_norm("joint.encoder_norm", also="encoder.final_layernorm"),
    ("joint", "relative_B"): (("encoder_relative_pos_emb.relative_attention_bias.weight",), PLAIN),
    ("joint", "relative_G"): (("decoder_relative_pos_emb.relative_attention_bias.weight",), PLAIN),
}

_TEXT, _IMAGES = "language_model.", "vision_model."
_BRIDGE = "vision_projection.encoder."
_OF_PROJECTOR = (
    (("up",), ((_BRIDGE + "linear_fc1.weight",), TRANSPOSED)),
    (("up_bias",), ((_BRIDGE + "linear_fc1.bias",), PLAIN)),
    (("down",), ((_BRIDGE + "linear_fc2.weight",), TRANSPOSED)),
    (("down_bias",), ((_BRIDGE + "linear_fc2.bias",), PLAIN)),
)
LLAVA_WHOLE: dict[Leaf, Named] = {  # beside those of the language model
    ("patch_embedding", "weight"): ((_IMAGES + "conv1.weight",), OF_PATCHES),
    ("patch_embedding", "bias"): ((_IMAGES + "conv1.bias",), PLAIN),
    ("patch_embedding", "class_token"): ((_IMAGES + "class_token",), SINGLE),
    ("patch_embedding", "positions"): ((_IMAGES + "position_embeddings.weight",), PLAIN),
    **_rows_of_norm("patch_embedding.norm", also=_IMAGES + "ln_pre"),
    **_rows_of_norm("normed_projector.projector.norm", also=_IMAGES + "ln_post"),
    **{(stack, "projector", *ours): named for stack in PROJECTORS for ours, named in _OF_PROJECTOR},
}

LAYER: dict[Leaf, Named] = {  # within a layer
    **_rows_of_norm("attention_norm", _QKV, also="input_layernorm"),
    ("attention", "q"): ((_QKV + ".weight",), Q),
    ("attention", "kv"): ((_QKV + ".weight",), KV),
    ("attention", "q_bias"): ((_QKV + ".bias",), Q_BIAS),
    ("attention", "kv_bias"): ((_QKV + ".bias",), KV_BIAS),
    **_rows_of_norm("attention.q_norm", also=_SELF + "q_layernorm"),
    **_rows_of_norm("attention.k_norm", also=_SELF + "k_layernorm"),
    ("attention", "sinks"): ((_SELF + "core_attention.softmax_offset",), PLAIN),
    ("attention", "out"): ((_SELF + "linear_proj.weight",), OUT),
    ("attention", "out_bias"): ((_SELF + "linear_proj.bias",), PLAIN),
    **_rows_of_norm("cross_attention_norm", also="pre_cross_attn_layernorm"),
    ("cross_attention", "q"): ((_CROSS + "linear_q.weight",), OF_ROWS),
    ("cross_attention", "q_bias"): ((_CROSS + "linear_q.bias",), FLAT),
    ("cross_attention", "kv"): ((_CROSS + "linear_kv.weight",), CROSS_KV),
    ("cross_attention", "kv_bias"): ((_CROSS + "linear_kv.bias",), CROSS_KV_BIAS),
    ("cross_attention", "out"): ((_CROSS + "linear_proj.weight",), OUT),
    ("cross_attention", "out_bias"): ((_CROSS + "linear_proj.bias",), PLAIN),
    **_rows_of_norm("mlp_norm", _FC1, also="pre_mlp_layernorm"),
    ("mlp", "up"): ((_FC1 + ".weight",), TRANSPOSED),
    ("mlp", "up_bias"): ((_FC1 + ".bias",), PLAIN),
    ("mlp", "down"): (("mlp.linear_fc2.weight",), TRANSPOSED),
    ("mlp", "down_bias"): (("mlp.linear_fc2.bias",), PLAIN),
    ("mlp", "router"): (("mlp.router.weight",), TRANSPOSED),
    ("mlp", "router_bias"): (("mlp.router.bias",), PLAIN),
    ("mlp", "expert_bias"): (("mlp.router.expert_bias",), PLAIN),
    ("mlp", "latent_in"): (("mlp.fc1_latent_proj.weight",), TRANSPOSED),
    ("mlp", "latent_out"): (("mlp.fc2_latent_proj.weight",), TRANSPOSED),
    ("mlp", "shared", "up"): (("mlp.shared_experts.linear_fc1.weight",), TRANSPOSED),
    ("mlp", "shared", "down"): (("mlp.shared_experts.linear_fc2.weight",), TRANSPOSED),
    ("mlp", "shared_gate"): (("mlp.shared_experts.gate_weight",), TRANSPOSED),
    **_rows_of_norm("linear_norm", "self_attention", also="input_layernorm"),
    ("linear", "weight"): ((_SELF + "weight",), TRANSPOSED),
    **_rows_of_norm("linear_mlp_norm", "mlp", also="pre_mlp_layernorm"),
    ("linear_mlp", "weight"): (("mlp.weight",), TRANSPOSED),
    **_rows_of_norm("mamba_norm", _MIXER, also="norm"),
    ("mamba", "inner"): ((_IN,), PAIR.ending(".z", ".x")),
    ("mamba", "bc"): ((_IN,), PAIR.ending(".B", ".C")),
    ("mamba", "dt"): ((_IN,), TRANSPOSED.ending(".dt")),
    ("mamba", "x_conv"): (("mixer.conv1d.weight",), TAPS.ending(".x")),
    ("mamba", "x_conv_bias"): (("mixer.conv1d.bias",), FLAT.ending(".x")),
    ("mamba", "bc_conv"): (("mixer.conv1d.weight",), TAPS_PAIR.ending(".B", ".C")),
    ("mamba", "bc_conv_bias"): (("mixer.conv1d.bias",), FLAT_PAIR.ending(".B", ".C")),
    ("mamba", "A_log"): (("mixer.A_log",), PLAIN),
    ("mamba", "D"): (("mixer.D",), PLAIN),
    ("mamba", "dt_bias"): (("mixer.dt_bias",), PLAIN),
    ("mamba", "norm"): (("mixer.norm.weight",), FLAT),
    ("mamba", "out"): (("mixer.out_proj.weight",), OUT),
}

LATENT: dict[Leaf, Named] = {  # of latent attention, in the place of plain attention's
    **_rows_of_norm("attention_norm", also="input_layernorm"),
    ("attention", "q"): ((_SELF + "linear_q_proj.weight",), OF_ROWS),
    ("attention", "q_a"): ((_SELF + "linear_q_down_proj.weight",), TRANSPOSED),
    ("attention", "q_b"): ((_Q_UP + ".weight",), OF_ROWS),
    ("attention", "kv_a"): ((_SELF + "linear_kv_down_proj.weight",), TRANSPOSED),
    ("attention", "kv_b"): ((_KV_UP + ".weight",), OF_ROWS),
    **_rows_of_norm("attention.q_norm", _Q_UP, also=_SELF + "q_layernorm"),
    **_rows_of_norm("attention.kv_norm", _KV_UP, also=_SELF + "kv_layernorm"),
}  # fmt: skip

PREDICTION: dict[Leaf, Named] = {  # within a layer of multi-token prediction
    **_rows_of_norm("embedding_norm", also="enorm"),
    **_rows_of_norm("hidden_norm", also="hnorm"),
    **_rows_of_norm("final_norm", also="final_layernorm"),
    ("projection",): (("eh_proj.weight",), OUT),
}

EXPERTS_PREFIX = "mlp.experts.experts."


def named_in_layer(path: Leaf, kind: str, cfg: ModelConfig) -> Named:
    """Megatron's names within a layer of this kind, and the layout, of a parameter in it."""
    names, layout = (LATENT if "mla" in kind else {}).get(path) or LAYER[path]
    of_experts = {("mlp", name) for name in ("up", "down")} if "experts" in kind else ()
    if path in of_experts:
        names = tuple(name.replace("mlp.", EXPERTS_PREFIX, 1) for name in names)
    gated = {"up": GATED, "up_bias": FLAT_PAIR.ending("_w", "_v")}
    if cfg.mlp_gated:
        layout = gated.get(path[-1], layout)
    return names, layout


def layer_prefixes(cfg: ModelConfig) -> list[tuple[str, int, int]]:
    """For each layer the prefix of its block, its number there, and the layers of the block."""
    kinds = cfg.layer_kinds
    blocks = ["encoder" if stream_of(kind) == ENCODER else "decoder" for kind in kinds]
    if is_llava(cfg):
        blocks = [f"{(_TEXT, _IMAGES)[of_tower(kind)]}decoder" for kind in kinds]
        blocks = [kind if kind in PROJECTORS else b for kind, b in zip(kinds, blocks, strict=True)]
    found = []
    for layer, block in enumerate(blocks):
        found.append((f"{block}.layers.", blocks[:layer].count(block), blocks.count(block)))
    return found


def layers_in_stack(cfg: ModelConfig, stack: str) -> list[int]:
    return [layer for layer, kind in enumerate(cfg.layer_kinds) if stack_of(kind) == stack]


def sizes_at(path: Leaf, cfg: ModelConfig) -> ModelConfig:
    """`cfg` with the sizes of the layers that a parameter lies in."""
    layers = layers_in_stack(cfg, path[0])
    return cfg.of_layer(cfg.layer_kinds[layers[0]]) if layers else cfg


def named_in_model(path: Leaf, cfg: ModelConfig) -> Named | None:
    """Megatron's names of a parameter that lies in no layer; None: it lies in one."""
    if is_llava(cfg):
        if path in LLAVA_WHOLE or path not in WHOLE:
            return LLAVA_WHOLE.get(path)
        names, layout = WHOLE[path]
        return tuple(_TEXT + name for name in names), layout
    if len(streams := {stream_of(kind) for kind in cfg.layer_kinds}) == 2:
        return T5_WHOLE.get(path) or WHOLE.get(path)
    if path not in WHOLE or streams != {ENCODER}:
        return WHOLE.get(path)
    names, layout = WHOLE[path]
    return tuple(name.replace("decoder.", "encoder.") for name in names), layout
