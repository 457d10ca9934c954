"""Keys that have moved into groups: old files, overrides and checkpoints load, and say so."""

from pathlib import Path

import pytest

from mjax.config import dump, load
from mjax.config.keys import MOVED, leaf_keys, move_keys, nested, value_of
from mjax.config.model_schema import LayerSizes, ModelConfig
from mjax.config.schema import Config
from mjax.errors import UserError

MOCK = ["data.mock=true"]
# The resolved config.yaml of a run by mjax from before the groups.
OLD_FILE = Path(__file__).with_name("old_config.yaml")
CONFIGS = sorted((Path(__file__).parents[2] / "configs").rglob("*.yaml"))


@pytest.fixture
def write(tmp_path):
    def write(name, text):
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return write


def refused(path, overrides, *parts):
    with pytest.raises(UserError) as error:
        load(path, overrides)
    assert "\n" not in str(error.value)
    for part in parts:
        assert part in str(error.value), str(error.value)


def flattened(model):
    """A model's tree as it was before the groups."""
    flat = {}
    for name, value in model.items():
        if name in ("attention", "rope", "moe"):
            flat |= value
        elif name == "layer_sizes":
            flat[name] = [flattened(entry) for entry in value]
        else:
            flat[name] = value
    return flat


def test_every_moved_key_has_one_home_and_no_other_meaning():
    assert len(MOVED[ModelConfig]) >= 21 and set(MOVED[LayerSizes]) < set(MOVED[ModelConfig])
    for group, homes in MOVED.items():
        assert not set(homes) & set(group.model_fields)
        assert {f"{home}.{name}" for name, home in homes.items()} <= set(leaf_keys(group))
    # towers' groups, which are younger than the others, repeat names of Hugging Face's
    keys = [key for key in leaf_keys(ModelConfig) if not key.startswith(("vision.", "audio."))]
    names = [key.rpartition(".")[2] for key in keys]
    assert len(set(names)) == len(names)


def test_a_resolved_file_of_old_loads_and_says_so_in_one_line(capsys, write):
    cfg = load(OLD_FILE)
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and line.startswith(f"mjax: {OLD_FILE}: model.num_attention_heads")
    assert "and 10 more are now in model.attention;" in line
    assert (cfg.model.attention.head_dim, cfg.model.rope.rope_theta) == (128, 1e6)
    assert cfg.model.rope.rope_scaling.factor == 4.0 and cfg.model.moe.num_experts == 8
    sizes = cfg.model.of_layer("L@1")
    assert sizes.attention.num_key_value_heads == 32 and sizes.attention.sliding_window == 7
    assert (sizes.intermediate_size, sizes.attention.num_attention_heads) == (96, 32)
    assert sizes.moe == cfg.model.moe and cfg.model.attention.num_key_value_heads == 16
    assert load(write("new.yaml", dump(cfg))) == cfg
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configs_equal_their_flat_form(path, capsys):
    cfg = load(path)
    assert capsys.readouterr().err == ""
    tree = cfg.model_dump()
    old = tree | {"model": flattened(tree["model"])}
    moves = move_keys(old, "old")
    assert len(moves) == len(MOVED[ModelConfig]) and Config.model_validate(old) == cfg


OLD_AND_NEW = {
    "num_key_value_heads": ("2", "attention.num_key_value_heads"),
    "qk_norm": ("true", "attention.qk_norm"),
    "rope_theta": ("5e5", "rope.rope_theta"),
    "rope_scaling.factor": ("8", "rope.rope_scaling.factor"),
    "num_experts_per_tok": ("3", "moe.num_experts_per_tok"),
}


@pytest.mark.parametrize("old", OLD_AND_NEW)
def test_overrides_load_under_both_names(old, capsys):
    value, new = OLD_AND_NEW[old]
    scaling = ["model.rope.rope_scaling={rope_type: linear}"]
    cfg = load(None, [*MOCK, *scaling, f"model.{old}={value}"])
    name, home = old.partition(".")[0], new.rpartition(f".{old}")[0]
    said = f"mjax: overrides: model.{name} is now model.{home}.{name} (the old place still works"
    assert capsys.readouterr().err.startswith(said)
    assert cfg == load(None, [*MOCK, *scaling, f"model.{new}={value}"])
    assert cfg == load(None, [*MOCK, *scaling, f"model.{new}={value}", f"model.{old}={value}"])
    assert value_of(cfg.model, new) != value_of(load(None, [*MOCK, *scaling]).model, new)


def test_layer_sizes_load_in_both_spellings(capsys):
    pattern = [*MOCK, "model.layer_pattern='G@1,L@2'", "model.intermediate_size=64"]
    pattern.append("model.attention.sliding_window=8")
    old = "[{num_key_value_heads: 2, intermediate_size: 96}, {sliding_window: 3}]"
    new = "[{attention: {num_key_value_heads: 2}, intermediate_size: 96}, {attention: {X: 3}}]"
    cfg = load(None, [*pattern, f"model.layer_sizes={old}"])
    said = "model.layer_sizes.num_key_value_heads and sliding_window are now in model.layer_sizes."
    assert said in capsys.readouterr().err
    assert cfg == load(None, [*pattern, f"model.layer_sizes={new}".replace("X", "sliding_window")])
    first, second = cfg.model.of_layer("G@1"), cfg.model.of_layer("L@2")
    assert (first.attention.num_key_value_heads, first.intermediate_size) == (2, 96)
    assert first.attention.sliding_window == 8 and second.attention.sliding_window == 3
    assert (second.attention.num_key_value_heads, second.intermediate_size) == (4, 64)


def test_what_comes_later_wins_under_either_name(write):
    write("a.yaml", "model: {attention: {num_attention_heads: 8}, rope_theta: 3.0}")
    path = write("b.yaml", "base: a.yaml\nmodel: {num_attention_heads: 2, rope: {rope_theta: 4.0}}")
    cfg = load(path, MOCK)
    assert (cfg.model.attention.num_attention_heads, cfg.model.rope.rope_theta) == (2, 4.0)
    cfg = load(path, [*MOCK, "model.rope_theta=5.0", "model.attention.num_attention_heads=16"])
    assert (cfg.model.attention.num_attention_heads, cfg.model.rope.rope_theta) == (16, 5.0)
    assert cfg.model.attention.head_dim == 16  # derived of both


def test_two_values_for_one_key_are_refused(write):
    both = "model: {rope_theta: 3.0, rope: {rope_theta: 4.0}}"
    same_key = (
        "model.rope_theta=3.0 and model.rope.rope_theta=4.0 are the same key; keep the second"
    )
    path = write("both.yaml", both)
    refused(path, MOCK, f"{path}: {same_key}")
    refused(None, [*MOCK, "model.rope_theta=3.0", "model.rope.rope_theta=4.0"], same_key)
    refused(None, ["model.rope.rope_theta=4.0", "model.rope_theta=3.0"], f"overrides: {same_key}")
    scaling = ["model.rope_scaling={factor: 2.0}", "model.rope.rope_scaling.factor=4.0"]
    refused(None, scaling, "model.rope_scaling.factor=2.0 and model.rope.rope_scaling.factor=4.0")
    sizes = "[{num_key_value_heads: 2, attention: {num_key_value_heads: 4}}]"
    refused(None, [f"model.layer_sizes={sizes}"], "model.layer_sizes[0].num_key_value_heads=2 and")
    agreeing = write("same.yaml", both.replace("3.0", "4"))
    assert load(agreeing, MOCK).model.rope.rope_theta == 4.0


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
        ("model.head_dim=x", "model.attention.head_dim='x': must be a valid integer (override"),
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


def test_a_wrong_value_in_an_old_place_names_its_line(write):
    path = write("a.yaml", "model:\n  hidden_size: 8\n  rope_scaling:\n    rope_type: tiny")
    refused(path, MOCK, "model.rope.rope_scaling.rope_type='tiny'", f"({path}:4)")


def test_dotted_names():
    assert nested({"a.b": 1, "a.c": 2, "d": 3}) == {"a": {"b": 1, "c": 2}, "d": 3}
    assert value_of(ModelConfig(), "attention.head_dim") == 64
    keys = leaf_keys(Config)
    assert "model.rope.rope_scaling" in keys and "optimizer.args" in keys
    assert not {"model", "model.rope"} & set(keys)
