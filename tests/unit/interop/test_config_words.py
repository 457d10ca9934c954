"""Laws of an exported config.json: the words of the import, but for what the run changed."""

import pytest

from mjax.interop.huggingface.config_words import in_words_of
from mjax.interop.huggingface.families.engine import config_from_hf, config_to_hf

SIZES = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2)
LLAMA = dict(
    architectures=["LlamaForCausalLM"],
    model_type="llama",
    **SIZES,
    num_attention_heads=4,
    max_position_embeddings=64,
    hidden_act="gelu_new",
    rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    use_cache=False,
    torch_dtype="float16",
)
TOWER = dict(model_type="clip_vision_model", hidden_size=24, num_hidden_layers=3)
TOWER |= dict(num_attention_heads=2, intermediate_size=32, image_size=12, patch_size=4)
LLAVA = dict(
    architectures=["LlavaForConditionalGeneration"],
    model_type="llava",
    text_config={k: LLAMA[k] for k in LLAMA if k not in ("architectures",)},
    vision_config=TOWER | {"hidden_act": "gelu_new", "torch_dtype": "float16"},
    image_token_index=60,
    vision_feature_layer=-2,
    torch_dtype="float16",
)


def exported(config: dict, change: dict | None = None) -> dict:
    """`config` as it comes out of a run that changed `change` of its model."""
    cfg = config_from_hf(config)
    for key, value in (change or {}).items():
        group, _, name = key.rpartition(".")
        update = {name: value}
        if group:
            update = {group: getattr(cfg, group).model_copy(update=update)}
        cfg = cfg.model_copy(update=update)
    out = in_words_of(config, config_to_hf(cfg), "float16")
    assert config_from_hf(out) == cfg
    return out


@pytest.mark.parametrize("config", [LLAMA, LLAVA], ids=["llama", "llava"])
def test_what_no_run_changed_comes_back_word_for_word(config):
    assert exported(config) == config and list(exported(config)) == list(config)


@pytest.mark.parametrize("config", [LLAMA, LLAVA], ids=["llama", "llava"])
def test_a_change_of_a_key_leaves_the_other_words(config):
    longer = exported(config, {"max_position_embeddings": 128})
    if config is LLAVA:
        text = config["text_config"] | {"max_position_embeddings": 128}
        assert longer == config | {"text_config": text}
    else:
        assert longer == config | {"max_position_embeddings": 128}


def test_a_changed_value_stands_in_one_place_only():
    out = exported(LLAMA, {"rope.rope_theta": 9.0})
    assert "rope_parameters" not in out and out["rope_theta"] == 9.0
    assert out["hidden_act"] == "gelu_new" and out["use_cache"] is False


def test_the_dtype_is_that_of_the_export_in_every_part():
    out = in_words_of(LLAVA, config_to_hf(config_from_hf(LLAVA)), "bfloat16")
    parts = out, out["text_config"], out["vision_config"]
    assert [part["torch_dtype"] for part in parts] == ["bfloat16"] * 3 and "dtype" not in out
