"""Dotted names of config keys: every leaf has one name, and a wrong place is one clear line."""

import pytest

from mjax.config import load
from mjax.config.schema.keys import leaf_keys, nested, value_of
from mjax.config.schema.model import ModelConfig
from mjax.config.schema.run import Config
from mjax.errors import UserError

MOCK = ["data.mock=true"]


def refused(path, overrides, *parts):
    with pytest.raises(UserError) as error:
        load(path, overrides)
    assert "\n" not in str(error.value)
    for part in parts:
        assert part in str(error.value), str(error.value)


def test_no_two_groups_have_a_key_of_one_name():
    # towers' groups repeat names of Hugging Face's; so does num_labels, of decoders and encoders
    repeated = "vision.", "audio.", "bert.num_labels"
    keys = [key for key in leaf_keys(ModelConfig) if not key.startswith(repeated)]
    names = [key.rpartition(".")[2] for key in keys]
    assert len(set(names)) == len(names)


def test_what_comes_later_wins(tmp_path):
    (tmp_path / "a.yaml").write_text("model: {attention: {num_attention_heads: 8}}")
    path = tmp_path / "b.yaml"
    path.write_text("base: a.yaml\nmodel: {attention: {num_attention_heads: 2}}")
    cfg = load(path, MOCK)
    assert cfg.model.attention.num_attention_heads == 2
    cfg = load(path, [*MOCK, "model.attention.num_attention_heads=16"])
    assert (cfg.model.attention.num_attention_heads, cfg.model.attention.head_dim) == (16, 16)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "model.rope_thetta=1",
            "model.rope_thetta: unknown key; did you mean model.rope.rope_theta?",
        ),
        ("model.theta=1", "did you mean model.rope.rope_theta?"),
        (
            "model.rope.thetta=1",
            "model.rope.thetta: unknown key; did you mean model.rope.rope_theta",
        ),
        ("rope_theta=1", "rope_theta: unknown key; did you mean model.rope.rope_theta?"),
        ("model.rope.head_dim=1", "did you mean model.attention.head_dim?"),
        ("model.attention.hidden_size=1", "did you mean model.hidden_size?"),
        ("model.num_expert=1", "did you mean model.moe.num_experts?"),
        ("checkpoint.intervl=1", "did you mean checkpoint.interval?"),
        ("model.head_dim=8", "model.head_dim: unknown key; did you mean model.attention.head_dim?"),
        ("model.attention=3", "model.attention=3: must be a group of keys"),
        (
            "model.layer_sizes=[{num_attn_heads: 1}]",
            "model.layer_sizes[0].num_attn_heads: unknown key; did you mean "
            "model.layer_sizes.attention.num_attention_heads?",
        ),
    ],
)
def test_a_wrong_nested_key_is_one_clear_line(override, message):
    refused(None, [*MOCK, override], message)


def test_a_wrong_value_names_its_line(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("model:\n  rope:\n    rope_scaling:\n      rope_type: tiny")
    refused(path, MOCK, "model.rope.rope_scaling.rope_type='tiny'", f"({path}:4)")


def test_dotted_names():
    assert nested({"a.b": 1, "a.c": 2, "d": 3}) == {"a": {"b": 1, "c": 2}, "d": 3}
    assert value_of(ModelConfig(), "attention.head_dim") == 64
    keys = leaf_keys(Config)
    assert "model.rope.rope_scaling" in keys and "optimizer.args" in keys
    assert not {"model", "model.rope"} & set(keys)
