"""THE table of what must be so for keys to be read, and the one rule that no key goes unread.

Branches of layers, objectives and readers of data say here which keys they read. A key needs every
row that names it, and one that no row names is read by all runs. Keys that choose how to compute
(kernels, exchanges, the mesh) are in no row. They hold wherever they apply, so that a file trains
on any number of devices. So are lengths of what null switches off (train.eval_steps).
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from mjax.config.languages.layer_pattern import BRANCHES
from mjax.config.languages.optax_arguments import PREFIX
from mjax.config.rules.reinforce_rules import draws_answers
from mjax.config.rules.rule import rule
from mjax.config.schema.keys import leaf_keys, value_of
from mjax.config.schema.model import AttentionConfig, ModelConfig, MoeConfig
from mjax.config.schema.run import FP8_OF_BLOCKS, FP8_RECIPES, Config


@dataclass(frozen=True)
class Need:
    """A condition that a run must meet for keys to be read.

    keys: "group: name name", or "group" for all keys in it.
    switch: the key that decides it; a message says its value.
    wanted: what must be so, in words.
    holds: whether it is so in a config.
    """

    keys: str
    switch: str
    wanted: str
    holds: Callable[[Config], bool]

    @property
    def names(self) -> list[str]:
        """The dotted names of keys and of groups."""
        group, colon, names = self.keys.partition(": ")
        return [f"{group}.{name}" for name in names.split()] if colon else [group]

    @functools.cached_property
    def leaves(self) -> list[str]:
        """The dotted names of all keys."""
        within = tuple(f"{name}." for name in self.names)
        return [key for key in leaf_keys(Config) if f"{key}.".startswith(within)]


def _branches(keys: str, *words: str) -> Need:
    """Keys of branches with one of these words."""

    def holds(c: Config) -> bool:
        return not c.model.branches.isdisjoint(words)

    return Need(keys, "model.layer_pattern", f"{' or '.join(words)} blocks", holds)


def _value(keys: str, switch: str, *values: str | bool) -> Need:
    """Keys that are read with these values of `switch`; none: with any but an empty one."""

    def holds(c: Config) -> bool:
        value = value_of(c, switch)
        return value in values if values else bool(value)

    return Need(keys, switch, " or ".join(map(str, values)) or "a value", holds)


def _of_recipes(key: str, *names: str) -> Need:
    """A key of these recipes of `precision.fp8`."""

    def holds(c: Config) -> bool:
        return not set(names).isdisjoint(c.precision.fp8_recipes)

    return Need(f"precision.{key}", "precision.fp8", " or ".join(names), holds)


def _objective(keys: str, *names: str) -> Need:
    """Keys of these objectives, and of one's own, which may read anything."""

    def holds(c: Config) -> bool:
        return c.train.objective in names or ":" in c.train.objective

    return Need(keys, "train.objective", " or ".join(names), holds)


def _has_heads(c: Config) -> bool:
    return any(BRANCHES[word].has_heads for word in c.model.branches)


def _has_kv_heads(c: Config) -> bool:
    branches = (BRANCHES[word] for word in c.model.branches)
    has_others = any("attention.num_key_value_heads" in branch.sizes for branch in branches)
    return has_others or not c.model.reads_group("mla")


def _reads_tokens(c: Config) -> bool:
    return c.model.architecture.reads_tokens


def _predicts_texts(c: Config) -> bool:
    return _reads_tokens(c) and not c.model.architecture.compares


def _reads_items(c: Config) -> bool:
    return bool(c.model.embedded)


def _reads_pixels(c: Config) -> bool:
    return "vision" in c.model.embedded


def _has_vision_in_texts(c: Config) -> bool:
    return "vision" in c.model.modalities and not c.model.architecture.compares


def _reads_corpus(c: Config) -> bool:
    """Whether samples come from documents of tokens."""
    return not _reads_items(c) and c.train.objective != "classify"


def _reads_stream(c: Config) -> bool:
    is_of_turns = c.data.conversations.path is not None
    return _reads_corpus(c) and not c.data.masked.sentences and not is_of_turns


def _is_split(c: Config) -> bool:
    return not c.data.valid_paths and c.data.images.valid_path is None


def _reads_data_set(c: Config) -> bool:
    return c.train.objective not in ("policy", "value")


def _corrects(c: Config) -> bool:
    return c.reinforce.correction != "none"


def _rounds_beside(c: Config) -> bool:
    """Whether something but weights is rounded to 8 bits."""
    return c.precision.fp8_dispatch or c.precision.fp8_attention


def _names_optax(c: Config) -> bool:
    return c.optimizer.name.startswith(PREFIX)


def _stores_bf16(c: Config) -> bool:
    return "bfloat16" in (c.precision.params, c.optimizer.mu_dtype, c.optimizer.nu_dtype)


_PATTERN, _PATCH, _MASKED = (
    "model.layer_pattern",
    "model.vision.patch_size",
    "data.masked.sentences",
)
_CLIPPED = "grpo", "dr_grpo", "dapo", "gspo", "rloo", "reinforce_pp", "ppo"
_OF_PROMPTS = "environment environment_args eval_environment_args workers reward_timeout"
# Sizes are those of any model: others derive from them.
_OF_HEADS = " ".join(name for name in AttentionConfig.model_fields if "head" not in name)
# Files of families that have models without experts give num_experts_per_tok in all of them.
_OF_EXPERTS = " ".join(name for name in MoeConfig.model_fields if name != "num_experts_per_tok")

NEEDS = (
    _objective("data: target_length masked.sentinel_ids", "span_corruption"),
    _branches("model.mla", "mla"),
    _branches("model.mamba", "mamba"),
    _branches("model.deltanet", "deltanet"),
    _branches(f"model.moe: {_OF_EXPERTS}", "experts"),
    _branches("precision.fp8_dispatch", "experts"),
    Need("precision.fp8_attention", _PATTERN, "attention", _has_heads),
    _branches("model.audio", "audio"),
    _branches("checkpoint.init_audio", "audio"),
    _branches("model.decoder_start_token_id", "cross"),
    _branches("model: mlp_bias mlp_gated", "mlp", "experts"),
    Need(
        "model: attention.sliding_window rope.rope_local_theta",
        _PATTERN,
        "window or bidirectional_window blocks",
        lambda c: any(BRANCHES[word].windowed for word in c.model.branches),
    ),
    Need(
        f"model.attention: {_OF_HEADS} qk_norm_all_heads",
        _PATTERN,
        "attention",
        _has_heads,
    ),
    Need("model.attention.num_key_value_heads", _PATTERN, "heads that mla lacks", _has_kv_heads),
    _value(
        "model.attention: qk_norm_all_heads qk_norm_after_rope", "model.attention.qk_norm", True
    ),
    _value("model.attention.attention_key_bias", "model.attention.attention_bias", True),
    _value("model.rope", "model.position_embedding", "rope"),
    _value("model.relative", "model.position_embedding", "relative"),
    _value("model.bert.position_offset", "model.position_embedding", "learned"),
    _value("model.norm_bias", "model.norm", "layernorm"),
    _value("model.norm_zero_centered", "model.norm_gain", True),
    Need(
        "model.parallel_norms",
        _PATTERN,
        "branches side by side",
        lambda c: any("|" in kind for kind in c.model.layer_kinds),
    ),
    Need(
        "model.rope.rope_interleave",
        _PATTERN,
        "attention with heads of its own keys (mla has such pairs anyway)",
        lambda c: any(BRANCHES[word].rotary == "attention.head_dim" for word in c.model.branches),
    ),
    _value("model.moe.shared_expert_gate", "model.moe.shared_expert_intermediate_size"),
    _value("model.moe.drop_policy", "model.moe.capacity_factor"),
    _value(
        "lora: alpha targets rank_pattern alpha_pattern rslora dora init base dropout trained",
        "lora.rank",
    ),
    _value("train.mtp_loss_scaling_factor", "model.num_nextn_predict_layers"),
    Need(
        "model.bert.prediction_head",
        "model.bert.num_labels",
        "classes, or mlm_head",
        lambda c: c.model.bert.mlm_head or c.model.bert.num_labels > 0,
    ),
    Need("model.vision", _PATCH, "patches", _reads_pixels),
    _branches(
        "model.vision: hidden_size intermediate_size num_attention_heads hidden_act "
        "layer_norm_eps length_multiple",
        *("vision", "vision_2d", "vision_window"),
    ),
    _branches("model.vision: embedding_norm", "vision"),
    _branches("model.vision.window_size", "vision_window"),
    _branches("model.vision.deepstack_visual_indexes", "deep_merger"),
    Need(
        "model.vision: min_pixels max_pixels norm video_token_id tokens_per_second",
        "model.vision.max_patches",
        "a value",
        lambda c: c.model.vision.is_packed,
    ),
    Need(
        "model.vision: class_token max_images image_grid_pinpoints vision_aspect_ratio tile_tags "
        "pixel_shuffle",
        "model.vision.max_patches",
        "0",
        lambda c: not c.model.vision.is_packed,
    ),
    Need(
        "model.vision: image_token_id max_images image_grid_pinpoints vision_aspect_ratio "
        "tile_tags pixel_shuffle",
        _PATTERN,
        "vision blocks and a projector",
        _has_vision_in_texts,
    ),
    _objective("model.vision.num_labels", "classify_images"),
    Need(
        "model.contrastive",
        _PATTERN,
        "vision blocks without a projector",
        lambda c: c.model.architecture.compares,
    ),
    Need(
        "model: bert tie_word_embeddings logits_scaling final_logit_softcapping "
        "num_nextn_predict_layers",
        _PATTERN,
        "a model of texts alone, or with images in them",
        _predicts_texts,
    ),
    Need("model.embedding_multiplier", _PATCH, "0, or a vision tower", _reads_tokens),
    _value("data: valid_paths images.valid_path", "data.mock", False),
    Need(
        "data.valid_paths",
        "data.images.path",
        "data of tokens (images and sounds have data.images.valid_path)",
        lambda c: not _reads_items(c),
    ),
    _objective(
        "preference: loss_type loss_weights beta label_smoothing f_divergence_type "
        "f_alpha_divergence_coef discopop_tau simpo_gamma desirable_weight undesirable_weight "
        "loss_divisor reference_free reference precompute_ref_log_probs",
        "preference",
    ),
    _objective(
        "distill: teacher teacher_mesh stored beta temperature student_share label_weight "
        "hidden_layers hidden_losses",
        "distill",
    ),
    _objective("reward: loss_type center_rewards_coefficient", "reward"),
    Need(
        f"reinforce: {_OF_PROMPTS} prompts_per_step group_size max_new_tokens sampling engine "
        "max_staleness updates_per_rollout",
        "train.objective",
        "policy or value, or distill and distill.student_share",
        lambda c: draws_answers(c) or ":" in c.train.objective,
    ),
    Need(
        f"reinforce: {_OF_PROMPTS}",
        "data.conversations.path",
        "null: its prompts are answered",
        lambda c: c.train.objective != "distill" or c.data.conversations.path is None,
    ),
    _objective(
        "reinforce: drops_equal_groups loss_type advantage_scale clip_low clip_high loss_divisor "
        "kl_coef kl_estimator kl_in_reward reference entropy_coef correction correction_low "
        "correction_high router_replay overlong_tokens critic gamma gae_lambda critic_lr "
        "value_clip",
        *("policy", "value"),
    ),
    _objective("data.shared_prefixes", "preference", "reward"),
    _branches("reinforce.router_replay", "experts"),
    _value("reinforce: critic gamma gae_lambda critic_lr value_clip", "reinforce.loss_type", "ppo"),
    _value("reinforce: kl_estimator kl_in_reward reference", "reinforce.kl_coef"),
    _value("reinforce.correction_low", "reinforce.correction", "mask", "sequence_mask"),
    Need("reinforce.correction_high", "reinforce.correction", "a correction", _corrects),
    Need("data: paths text", "train.objective", "objectives of a data set", _reads_data_set),
    _value("reinforce.clip_low", "reinforce.loss_type", *_CLIPPED),
    _value("reinforce.clip_high", "reinforce.loss_type", *_CLIPPED, "cispo"),
    _value("data.conversations: answers rows too_long broken", "data.conversations.path"),
    Need(
        "data.conversations.path",
        _PATTERN,
        "a model of texts alone (images and sounds have data.images.path)",
        lambda c: _predicts_texts(c) and not _reads_items(c),
    ),
    Need("data.images: path valid_path workers", _PATTERN, "images or sounds", _reads_items),
    Need("data.images: image_size mean std", _PATTERN, "images", _reads_pixels),
    Need("data.split", "data.valid_paths", "no held-out data of its own", _is_split),
    Need(
        "data: reset_position_ids eod_mask_loss fim_rate",
        "train.objective",
        "streams of tokens",
        _reads_stream,
    ),
    Need("data.cache_dir", "train.objective", "documents of tokens", _reads_corpus),
    Need(
        "data: paths text tokenizer eod_token_id",
        _PATCH,
        "0, or a vision tower",
        _reads_tokens,
    ),
    _value(
        "data: fim_spm_rate fim_prefix_token fim_middle_token fim_suffix_token fim_pad_token "
        "fim_split_sample fim_fragment_rate fim_no_prefix",
        "data.fim_rate",
    ),
    _objective("data.masked: probability sentences mean_span", "masked_lm", "span_corruption"),
    _objective(
        "data.masked: mask_token_id cls_token_id sep_token_id pad_token_id",
        *("masked_lm", "classify", "span_corruption", "contrastive"),
    ),
    _value("data.masked: short_probability max_ngram whole_words", _MASKED, True),
    _objective("data.masked.mean_span", "span_corruption"),
    _value("data.masked.mean_span", _MASKED, False),
    _objective("train: label_smoothing z_loss", "next_token", "masked_lm", "span_corruption"),
    _objective(
        "train: loss_chunk",
        *("next_token", "masked_lm", "span_corruption", "preference", "distill", "policy"),
    ),
    _objective("train.loss_divisor", "next_token", "masked_lm"),
    _objective("train.neftune_alpha", "next_token"),
    _value("train.early_stop", "train.eval_interval"),
    _value("data.eval_sets", "train.eval_interval"),
    _value("train.eval_tasks_interval", "train.eval_tasks"),
    Need("train.test_steps", "data.valid_paths", "no held-out data of its own", _is_split),
    _value("train.sample_interval", "train.sample_prompt"),
    Need(
        "mesh: pipeline_layout pipeline_account_for virtual_stages",
        "mesh.pp",
        "2 or more",
        lambda c: c.mesh.pp > 1 or c.mesh.auto,
    ),
    Need("optimizer.args", "optimizer.name", "a function of optax", _names_optax),
    _value("optimizer: b1 b2 eps", "optimizer.name", "adamw", "muon"),
    _value(
        "optimizer: muon_momentum muon_nesterov muon_steps muon_roles muon_scale",
        "optimizer.name",
        "muon",
    ),
    _value("optimizer.weight_decay_style", "optimizer.weight_decay_end"),
    Need(
        "optimizer.stochastic_rounding",
        "precision.params",
        "bfloat16 there or in moments: nothing is stored in bf16",
        _stores_bf16,
    ),
    _value("schedule: wsd_decay_steps wsd_style", "schedule.decay", "wsd"),
    _value("schedule.warmup_init_lr", "schedule.warmup_steps"),
    _value(
        "precision: fp8_skip_layers fp8_experts fp8_rules",
        "precision.fp8",
        *FP8_RECIPES,
    ),
    Need(
        "precision.fp8_evaluation",
        "precision.fp8",
        "a recipe, or precision.fp8_dispatch or fp8_attention",
        lambda c: c.precision.fp8 != "none" or _rounds_beside(c),
    ),
    _of_recipes("fp8_backend", "current", "delayed"),
    _of_recipes("fp8_amax_history", "delayed"),
    _of_recipes("fp8_format", "block128", "mxfp8"),
    _of_recipes("fp8_scales", "block128", "mxfp8"),
    _of_recipes("fp8_block", "block128"),
    _of_recipes("fp8_emulate", *FP8_OF_BLOCKS),
    _value(
        "precision: initial_loss_scale min_loss_scale loss_scale_window hysteresis",
        "precision.compute",
        "float16",
    ),
)


@rule("remove it, or change what it needs")
def every_key_is_read(c: Config) -> Iterator[str]:
    m = c.model
    # Other sizes derive from these.
    given = {"hidden_size": m.hidden_size, "intermediate_size": m.intermediate_size}
    heads = {"num_attention_heads": m.attention.num_attention_heads}
    defaults = Config(model=ModelConfig.model_validate(given | {"attention": heads}))
    for need in NEEDS:
        for key in need.leaves if not need.holds(c) else ():
            if value_of(c, key) != value_of(defaults, key):
                yield f"`{key}` has no effect with `{need.switch}`, only with {need.wanted}"
