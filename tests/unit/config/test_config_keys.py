"""Dotted names of config keys: every leaf has one name, and a wrong place is one clear line."""

import pytest

from mjax.config import load
from mjax.config.languages.megatron_names import KEY_OF_ARGUMENT
from mjax.config.load import key_of_name
from mjax.config.schema.keys import leaf_keys, nested, value_of
from mjax.config.schema.model import ModelConfig
from mjax.config.schema.run import Config
from mjax.errors import UserError
from mjax.interop.megatron.run_arguments import FLAGS
from mjax.train.__main__ import main as train_main

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
        ("num_layers=2", "num_layers: unknown key; did you mean model.num_hidden_layers?"),
        ("train.train_iters=9", "train.train_iters: unknown key; did you mean train.steps?"),
        ("model.ffn_hidden_size=8", "did you mean model.intermediate_size?"),
        ("checkpoint.intervl=1", "did you mean checkpoint.interval?"),
        ("model.head_dim=8", "model.head_dim: unknown key; did you mean model.attention.head_dim?"),
        (
            "model.attention=3",
            "model.attention=3: must be a group of keys, such as model.",
        ),
        ("data.path=a", "data.path: unknown key; did you mean data.paths?"),
        ("lora.r=8", "lora.r: unknown key; lora has rank, alpha, "),
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


def test_names_of_megatrons_arguments_mean_the_keys_that_their_values_set():
    keys = leaf_keys(Config)
    assert all(key in keys for key in KEY_OF_ARGUMENT.values())
    assert {flag.name: key_of_name(flag.name) for flag in FLAGS} == {f.name: f.key for f in FLAGS}
    assert key_of_name("--model") is None, "a group of keys takes no value"


def test_an_option_that_is_a_key_is_named_as_one(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["mjax train", "--num-layers", "2"])
    with pytest.raises(SystemExit):
        train_main()
    assert "--num-layers; set model.num_hidden_layers=.., without dashes" in capsys.readouterr().err
