"""THE table of what must be so for keys to be read, and the one rule that no key goes unread.

Branches of layers, objectives and readers of data say here which keys they read. A key needs every
row that names it, and one that no row names is read by all runs. Keys that choose how to compute
(kernels, exchanges, the mesh) are in no row. They hold wherever they apply, so that a file trains
on any number of devices. So are lengths of what null switches off (train.eval_steps).
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from mjax.config.keys import leaf_keys, value_of
from mjax.config.model_schema import ModelConfig, MoeConfig
from mjax.config.optax_arguments import PREFIX
from mjax.config.pattern import BRANCHES, has_heads
from mjax.config.rule import rule
from mjax.config.schema import Config

Condition = Callable[[Config], bool]


@dataclass(frozen=True)
class Need:
    """What must be so for keys to be read.

    switch: the key that decides it; a message says its value.
    wanted: what must be so, in words.
    holds: whether it is so in a config.
    keys: dotted names; that of a group stands for all keys in it.
    """

    switch: str
    wanted: str
    holds: Condition
    keys: tuple[str, ...]

    def names(self, key: str) -> bool:
        return any(key == own or key.startswith(f"{own}.") for own in self.keys)


def _prefixed(group: str, names: str) -> tuple[str, ...]:
    return tuple(f"{group}.{name}" for name in names.split())


def _layers(wanted: str, letters: str, group: str, keys: str = "") -> Need:
    """Branches of these letters read a group of `model`, or these keys of it."""

    def holds(c: Config) -> bool:
        return not c.model.branches.isdisjoint(letters)

    return Need("model.layer_pattern", wanted, holds, _prefixed(group, keys) or (group,))


def _objectives(*names: str) -> Condition:
    """Whether a run has one of these objectives, or one of its own, which may read anything."""

    def holds(c: Config) -> bool:
        return c.train.objective in names or ":" in c.train.objective

    return holds


def _reads_tokens(c: Config) -> bool:
    return not c.model.reads_images


def _reads_items(c: Config) -> bool:
    """Whether a run reads images or sounds."""
    return bool(c.model.embedded)


def _reads_pixels(c: Config) -> bool:
    return "vision" in c.model.embedded


def _is_stream(c: Config) -> bool:
    """Whether samples are cut out of a stream of tokens."""
    return _is_corpus(c) and not c.data.masked.sentences


def _is_corpus(c: Config) -> bool:
    """Whether samples come from documents of tokens."""
    return not _reads_items(c) and c.train.objective != "classify"


def _is_optax(c: Config) -> bool:
    return c.optimizer.name.startswith(PREFIX)


def _puts_in_texts(c: Config) -> bool:
    """Whether images stand in texts."""
    return "vision" in c.model.modalities and not c.model.is_dual_encoder


_KV_HEADS = "attention.num_key_value_heads"
_TOWER = "hidden_size intermediate_size num_attention_heads hidden_act layer_norm_eps"
_ATTENTION = "".join(letter for letter in BRANCHES if has_heads(letter))
_FEATURES = (
    "attention_bias attention_key_bias attention_out_bias qk_norm qk_norm_all_heads "
    "attention_sinks attention_output_gate attn_logit_softcapping attention_multiplier "
    "attention_dropout key_multiplier attention_in_multiplier attention_out_multiplier"
)
# Files of families that have models without experts give num_experts_per_tok in all of them.
_EXPERTS = " ".join(name for name in MoeConfig.model_fields if name != "num_experts_per_tok")
_KV = {letter for letter, branch in BRANCHES.items() if _KV_HEADS in branch.sizes}
_ROTARY = {letter for letter, branch in BRANCHES.items() if branch.rotary}
_WINDOWED = "".join(letter for letter, branch in BRANCHES.items() if branch.windowed)

_OF_MODEL = (
    _layers("A blocks", "A", "model.mla"),
    _layers("M blocks", "M", "model.mamba"),
    _layers("T blocks", "T", "model.deltanet"),
    _layers("E blocks", "E", "model.moe", _EXPERTS),
    _layers("R blocks", "R", "model.retro"),
    _layers("S blocks", "S", "model.audio"),
    _layers("S blocks", "S", "checkpoint", "init_audio"),
    _layers("X blocks", "X", "model", "decoder_start_token_id"),
    _layers("L or W blocks", _WINDOWED, "model.attention", "sliding_window"),
    _layers("L or W blocks", _WINDOWED, "model.rope", "rope_local_theta"),
    _layers("D or E blocks", "DE", "model", "mlp_bias mlp_gated"),
    _layers("attention", _ATTENTION, "model.attention", _FEATURES),
    Need(
        "model.layer_pattern",
        "other attention: A blocks have no kv heads",
        lambda c: "A" not in c.model.branches or bool(_KV & c.model.branches),
        (f"model.{_KV_HEADS}",),
    ),
    Need(
        "model.position_embedding",
        "rope and attention that it turns",
        lambda c: c.model.position_embedding == "rope" and bool(_ROTARY & c.model.branches),
        ("model.rope",),
    ),
    Need(
        "model.position_embedding",
        "relative",
        lambda c: c.model.position_embedding == "relative",
        ("model.relative",),
    ),
    Need(
        "model.position_embedding",
        "learned",
        lambda c: c.model.position_embedding == "learned",
        ("model.bert.position_offset",),
    ),
    Need(
        "model.attention.qk_norm",
        "true",
        lambda c: c.model.attention.qk_norm,
        ("model.attention.qk_norm_all_heads",),
    ),
    Need(
        "model.attention.attention_bias",
        "true",
        lambda c: c.model.attention.attention_bias,
        ("model.attention.attention_key_bias",),
    ),
    Need("model.norm", "layernorm", lambda c: c.model.norm == "layernorm", ("model.norm_bias",)),
    Need(
        "model.moe.shared_expert_intermediate_size",
        "a shared expert",
        lambda c: c.model.moe.shared_expert_intermediate_size > 0,
        ("model.moe.shared_expert_gate",),
    ),
    Need(
        "model.moe.capacity_factor",
        "a capacity",
        lambda c: c.model.moe.capacity_factor is not None,
        ("model.moe.drop_policy",),
    ),
    Need(
        "model.bert.num_labels",
        "1 or more, or mlm_head",
        lambda c: c.model.bert.mlm_head or c.model.bert.num_labels > 0,
        ("model.bert.prediction_head",),
    ),
    Need(
        "model.num_nextn_predict_layers",
        "1 or more",
        lambda c: c.model.num_nextn_predict_layers > 0,
        ("train.mtp_loss_scaling_factor",),
    ),
)

_OF_IMAGES = (
    Need("model.vision.patch_size", "1 or more", _reads_pixels, ("model.vision",)),
    Need(
        "model.layer_pattern",
        "V blocks",
        lambda c: "vision" in c.model.modalities,
        _prefixed("model.vision", f"{_TOWER} length_multiple embedding_norm"),
    ),
    Need(
        "model.layer_pattern",
        "V blocks and a P",
        _puts_in_texts,
        _prefixed(
            "model.vision",
            "image_token_id max_images image_grid_pinpoints tile_tags pixel_shuffle "
            "vision_aspect_ratio",
        ),
    ),
    Need(
        "train.objective",
        "classify_images",
        _objectives("classify_images"),
        ("model.vision.num_labels",),
    ),
    Need(
        "model.layer_pattern",
        "V blocks without a P",
        lambda c: c.model.is_dual_encoder,
        ("model.contrastive",),
    ),
    Need(
        "model.layer_pattern",
        "a model that predicts or classifies texts",
        lambda c: _reads_tokens(c) and not c.model.is_dual_encoder,
        _prefixed(
            "model",
            "bert tie_word_embeddings logits_scaling final_logit_softcapping "
            "num_nextn_predict_layers",
        ),
    ),
    Need(
        "model.vision.patch_size",
        "a model that reads tokens",
        _reads_tokens,
        ("model.embedding_multiplier",),
    ),
)

_OF_DATA = (
    Need(
        "data.mock",
        "data of files",
        lambda c: not c.data.mock,
        ("data.valid_paths", "data.images.valid_path"),
    ),
    Need(
        "data.images.path",
        "data of tokens (images and sounds have data.images.valid_path)",
        lambda c: not _reads_items(c),
        ("data.valid_paths",),
    ),
    Need(
        "model.layer_pattern",
        "a model that reads images or sounds",
        _reads_items,
        _prefixed("data.images", "path valid_path workers"),
    ),
    Need(
        "model.layer_pattern",
        "a model that reads images",
        _reads_pixels,
        _prefixed("data.images", "image_size mean std"),
    ),
    Need(
        "data.valid_paths",
        "held-out data that is a share of the rest",
        lambda c: not c.data.valid_paths and c.data.images.valid_path is None,
        ("data.split",),
    ),
    Need(
        "train.objective",
        "streams of tokens",
        _is_stream,
        _prefixed("data", "reset_position_ids eod_mask_loss fim_rate"),
    ),
    Need("train.objective", "data.paths or data.text", _is_corpus, ("data.cache_dir",)),
    Need(
        "model.vision.patch_size",
        "a model that reads tokens",
        _reads_tokens,
        _prefixed("data", "paths text tokenizer eod_token_id"),
    ),
    Need(
        "data.fim_rate",
        "more than 0",
        lambda c: c.data.fim_rate > 0,
        _prefixed(
            "data",
            "fim_spm_rate fim_prefix_token fim_middle_token fim_suffix_token fim_pad_token "
            "fim_split_sample fim_fragment_rate fim_no_prefix",
        ),
    ),
)

_OF_OBJECTIVES = (
    Need(
        "train.objective",
        "span_corruption",
        _objectives("span_corruption"),
        ("data.target_length", "data.masked.sentinel_ids"),
    ),
    Need(
        "train.objective",
        "masked_lm or span_corruption",
        _objectives("masked_lm", "span_corruption"),
        ("data.masked.probability", "data.masked.sentences"),
    ),
    Need(
        "train.objective",
        "masked_lm, classify, span_corruption or contrastive",
        _objectives("masked_lm", "classify", "span_corruption", "contrastive"),
        _prefixed("data.masked", "mask_token_id cls_token_id sep_token_id pad_token_id"),
    ),
    Need(
        "data.masked.sentences",
        "true",
        lambda c: c.data.masked.sentences,
        _prefixed("data.masked", "short_probability max_ngram whole_words"),
    ),
    Need(
        "train.objective",
        "span_corruption of a stream (data.masked.sentences=false)",
        lambda c: _objectives("span_corruption")(c) and not c.data.masked.sentences,
        ("data.masked.mean_span",),
    ),
    Need(
        "train.objective",
        "an objective that predicts tokens",
        _objectives("next_token", "masked_lm", "span_corruption"),
        _prefixed("train", "label_smoothing z_loss loss_chunk"),
    ),
)

_OF_TRAINING = (
    Need(
        "mesh.pp",
        "2 or more",
        lambda c: c.mesh.pp > 1 or c.mesh.auto,
        _prefixed("mesh", "pipeline_layout pipeline_account_for virtual_stages"),
    ),
    Need("optimizer.name", "a function of optax", _is_optax, ("optimizer.args",)),
    Need(
        "optimizer.name",
        "adamw or muon",
        lambda c: not _is_optax(c),
        _prefixed("optimizer", "b1 b2 eps"),
    ),
    Need(
        "optimizer.name",
        "muon",
        lambda c: c.optimizer.name == "muon",
        _prefixed("optimizer", "muon_momentum muon_nesterov muon_steps muon_roles muon_scale"),
    ),
    Need(
        "optimizer.weight_decay_end",
        "a number",
        lambda c: c.optimizer.weight_decay_end is not None,
        ("optimizer.weight_decay_style",),
    ),
    Need(
        "precision.params",
        "bfloat16, or a dtype of the moments that is (nothing is stored in bf16)",
        lambda c: "bfloat16" in (c.precision.params, c.optimizer.mu_dtype, c.optimizer.nu_dtype),
        ("optimizer.stochastic_rounding",),
    ),
    Need(
        "schedule.decay",
        "wsd",
        lambda c: c.schedule.decay == "wsd",
        _prefixed("schedule", "wsd_decay_steps wsd_style"),
    ),
    Need(
        "schedule.warmup_steps",
        "1 or more",
        lambda c: c.schedule.warmup_steps > 0,
        ("schedule.warmup_init_lr",),
    ),
    Need(
        "precision.fp8",
        "current or delayed",
        lambda c: c.precision.fp8 != "none",
        _prefixed("precision", "fp8_skip_layers fp8_experts fp8_backend"),
    ),
    Need(
        "precision.fp8",
        "delayed",
        lambda c: c.precision.fp8 == "delayed",
        ("precision.fp8_amax_history",),
    ),
    Need(
        "precision.compute",
        "float16",
        lambda c: c.precision.compute == "float16",
        _prefixed("precision", "initial_loss_scale min_loss_scale loss_scale_window hysteresis"),
    ),
    Need(
        "checkpoint.init_from",
        "a folder of weights",
        lambda c: c.checkpoint.init_from is not None,
        ("checkpoint.init_changes",),
    ),
)

NEEDS = (*_OF_MODEL, *_OF_IMAGES, *_OF_DATA, *_OF_OBJECTIVES, *_OF_TRAINING)


@functools.cache
def _needs_by_key() -> dict[str, tuple[Need, ...]]:
    """The rows of each key that has some."""
    rows = {key: tuple(n for n in NEEDS if n.names(key)) for key in leaf_keys(Config)}
    return {key: needs for key, needs in rows.items() if needs}


def _defaults(model: ModelConfig) -> Config:
    """The config of a model that sets no more than the sizes that others derive from."""
    sizes = {
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "attention": {"num_attention_heads": model.attention.num_attention_heads},
    }
    return Config(model=ModelConfig.model_validate(sizes))


@rule("remove it, or change what it needs")
def every_key_is_read(c: Config) -> Iterator[str]:
    defaults = _defaults(c.model)
    for key, needs in _needs_by_key().items():
        if value_of(c, key) == value_of(defaults, key):
            continue
        for need in needs:
            if not need.holds(c):
                yield f"`{key}` has no effect with `{need.switch}`, only with {need.wanted}"
