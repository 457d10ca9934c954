"""Keys of a config.json that no family reads, and models of which the text alone is read.

A key is taken without being read where it cannot change the numbers: transformers reads it nowhere
for these models, or it has the one value that all of them have.
"""

from mjax.errors import UserError
from mjax.interop.huggingface.families.parts import only, say_unused, take
from mjax.interop.huggingface.families.vision import LLAMA, QWEN2

# Keys that say nothing about the function a model computes.
MEANINGLESS = frozenset(
    """_attn_implementation _attn_implementation_autoset _commit_hash _name_or_path architectures
    attn_implementation auto_map bad_words_ids begin_suppress_tokens bos_token_id
    cache_implementation chunk_size_feed_forward classifier_dropout decoder_start_token_id
    diversity_penalty do_sample dtype early_stopping encoder_no_repeat_ngram_size eod_token_id
    eos_token_id ep_size exponential_decay_length_penalty finetuning_task forced_bos_token_id
    forced_eos_token_id gradient_checkpointing id2label is_encoder_decoder label2id
    length_penalty mamba_ssm_cache_dtype max_length min_length model_type name_or_path
    no_repeat_ngram_size num_beam_groups num_beams num_labels num_logits_to_keep
    num_return_sequences output_attentions output_hidden_states output_router_logits
    output_scores pad_token_id prefix problem_type remove_invalid_values reorder_and_upcast_attn
    repetition_penalty rescale_prenorm_residual residual_in_fp32 return_dict
    return_dict_in_generate sep_token_id suppress_tokens task_specific_params temperature
    tf_legacy_loss tokenizer_class top_k top_p torch_dtype torchscript transformers_version
    typical_p unsloth_version use_bfloat16 use_cache use_mamba_kernels""".split()
)
# Keys that have one value in all models that mjax can express; a family may read them itself.
SETTLED = {
    "add_cross_attention": False,
    "attention_bias": False,
    "attn_pdrop": 0.0,
    "clip_qkv": 0.0,
    "embd_pdrop": 0.0,
    "is_decoder": False,
    "mamba_proj_bias": False,
    "mamba_hidden_act": "silu",
    "mlp_bias": False,
    "moe_layer_freq": 1,
    "pretraining_tp": 1,
    "projectors_bias": False,
    "pruned_heads": {},
    "resid_pdrop": 0.0,
    "router_jitter_noise": 0.0,
    "scale_attn_by_inverse_layer_idx": False,
    "scale_attn_weights": True,
    "tie_encoder_decoder": False,
    "use_bias": False,
    "use_bidirectional_attention": False,
    "use_mrope": False,
    "use_sliding_window": False,
    "z_loss_coefficient": 0.0,
}
# Keys that others than transformers write (Unsloth, SmolVLM of its towers, ...), and such with the
# only value that is taken (Falcon 3, Phi-4-mini). A line names them.
_ANY = frozenset(
    """_flash_attn_2_enabled _unsloth_fixed is_composition is_llama_config max_window_layers
    model_max_length neftune_noise_alpha onnx perceiver_config pixel_shuffle_factor
    seq_length tokenizer_model_max_length transformers.js_config unsloth_fixed
    unsloth_template use_flash_attention use_flash_attn use_reentrant_checkpointing""".split()
)
_ONE = {
    "activation": "swiglu",
    "attention_out_bias": False,
    "bias": False,
    "dropout": 0.0,
    "embedding_multiplier": 1.0,
    "full_attn_mod": 1,
    "hidden_dropout": 0.0,
    "interpolate_factor": 1,
    "layerdrop": 0.0,
    "lm_head_bias": False,
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    "n_shared_experts": 0,
    "num_nextn_predict_layers": 0,
    "qk_layer_norms": False,
    "qk_layernorm": False,
    "qk_norm": False,
    "qkv_bias": False,
    "residual_multiplier": 1.0,
    "rope_interleaved": False,
    "rope_ratio": 1.0,
    "use_alibi": False,
    "use_parallel_residual": False,
    "use_qk_norm": False,
    "use_resampler": False,
}
FOREIGN = _ANY | _ONE.keys()


def require_known(rest: dict, family: str) -> None:
    """Raise `UserError` for a key that nobody has read, unless it cannot change the numbers."""
    if rest.get("layer_types") and set(rest["layer_types"]) == {"full_attention"}:
        del rest["layer_types"]  # what such a family has
    taken = sorted(key for key in FOREIGN if rest.get(key) is not None)
    for key, value in (SETTLED | _ONE).items():
        only(rest, key, value)
    known = MEANINGLESS | _ANY
    unread = sorted(key for key, value in rest.items() if value is not None and key not in known)
    if unread:
        value = rest[unread[0]]
        raise UserError(
            f"config.json: {unread[0]}={value!r} is not known to mjax for model_type {family!r}; "
            "remove it if it does not change the model"
        )
    if taken:
        verb = "do" if taken[1:] else "does"
        say_unused(f"{', '.join(taken)} {verb} not change the numbers: not used")


# ---- the text of models of more than text --------------------------------------------------------

_MISTRAL = LLAMA | {"intermediate_size": 14336, "max_position_embeddings": 131072}
# What transformers takes for keys that such a text leaves out. Their other defaults are ours.
_LEFT_OUT: dict[str, dict] = {
    "llama": LLAMA,
    "mistral": _MISTRAL,
    "qwen2": QWEN2,
}
# model_type -> (that of its text, whether the head is tied where nothing is said). Without images
# or sounds the class computes what that of its text does.
_TEXTS = {
    "gemma3": ("gemma3_text", True),
    "got_ocr2": ("qwen2", True),
    "idefics3": ("llama", False),
    "internvl": ("qwen2", True),
    "kimi_k25": ("kimi_k2", False),
    "kimi_vl": ("deepseek_v3", False),
    "llava_next": ("llama", False),
    "mistral3": ("mistral", True),
    "qwen2_audio": ("qwen2", False),
    "qwen3_5": ("qwen3_5_text", False),
    "qwen3_5_moe": ("qwen3_5_moe_text", False),
    "smolvlm": ("llama", False),
    "video_llava": ("llama", False),
    "vipllava": ("llama", False),
}
# Of these the tower is built, too.
_READ_WHOLE = "qwen3_5", "qwen3_5_moe"


def read_of(config: dict) -> dict:
    """The config of what is read of a file where nothing else is asked for."""
    return config if config.get("model_type") in _READ_WHOLE else text_of(config)


def text_of(config: dict) -> dict:
    """The config of the text of a model that can be read without its towers; else `config`."""
    name = config.get("model_type")
    is_pixtral = name == "llava" and _kind(config.get("vision_config")) == "pixtral"
    if not isinstance(config.get("text_config"), dict) or not (name in _TEXTS or is_pixtral):
        return config
    usual, tied = _TEXTS.get(name, ("mistral", False))
    text = {"model_type": usual} | config["text_config"]
    # A file with a head of its own has the last word (`names.py`).
    says = config.get("tie_word_embeddings", tied), text.get("tie_word_embeddings", False)
    text["tie_word_embeddings"] = any(says)
    kind = take(dict(text), "model_type")
    if config.get("quantization_config"):
        text["quantization_config"] = config["quantization_config"]
    return {"hidden_act": "silu"} | _LEFT_OUT[kind] | text if kind in _LEFT_OUT else text


def _kind(config: object) -> object:
    return config.get("model_type") if isinstance(config, dict) else None
