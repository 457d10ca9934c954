"""Loading: inheritance, overrides, interpolation, and one clear line for every mistake."""

import argparse
import json
from pathlib import Path

import pytest

from mjax.config import add_config_arguments, config_from_args, dump, json_schema, load
from mjax.errors import UserError

MOCK = ["data.mock=true"]


@pytest.fixture
def write(tmp_path: Path):
    def write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write


def fails(path: Path | None, overrides: list[str], *parts: str) -> None:
    with pytest.raises(UserError) as e:
        load(path, overrides)
    message = str(e.value)
    assert "\n" not in message
    for part in parts:
        assert part in message, message


def test_dump_reloads_to_the_same_config(write, tmp_path):
    cfg = load(
        None,
        [
            *MOCK,
            "schedule.lr=3e-4",
            "model.rope.rope_scaling={rope_type: yarn, factor: 4}",
            "optimizer.lr_multipliers.embedding=0.5",
            "run.dir='1e3'",
            "train.sample_prompt='a: $${X} # b'",
            "data.tokenizer='yes'",
        ],
    )
    assert cfg.run.dir == "1e3" and cfg.train.sample_prompt == "a: ${X} # b"
    again = load(write("resolved.yaml", dump(cfg)))
    assert again == cfg and dump(again) == dump(cfg)


def test_later_bases_win_then_the_file_then_overrides(write):
    write("lib/a.yaml", "model: {hidden_size: 32, num_hidden_layers: 7}\ntrain: {steps: 1}")
    write("lib/b.yaml", "base: a.yaml\nmodel:\n  hidden_size: 64\ndata: {split: [1, 1, 1]}")
    write("c.yaml", "train: {steps: 2}")
    top = write("top.yaml", "base: [lib/b.yaml, c.yaml]\ndata: {mock: true, split: [8, 1, 1]}")
    cfg = load(top, ["train.steps=3"])
    assert (cfg.model.hidden_size, cfg.model.num_hidden_layers) == (64, 7)
    assert cfg.train.steps == 3 and load(top).train.steps == 2
    assert cfg.data.split == [8, 1, 1]


def test_base_problems_name_the_chain(write):
    write("a.yaml", "base: b.yaml")
    fails(write("b.yaml", "base: a.yaml"), [], "b.yaml -> ", "a.yaml -> ", "cycle")
    fails(write("c.yaml", "base: gone.yaml"), [], "c.yaml -> ", "gone.yaml", "No such file")
    fails(write("d.yaml", "base: 3"), [], "d.yaml:1", "base=3")


@pytest.mark.parametrize("text, value", [("3e-4", 3e-4), ("1.5E+2", 150.0), (".5", 0.5), ("2", 2)])
def test_numbers_are_numbers(write, text, value):
    cfg = load(write("a.yaml", f"data: {{mock: true}}\nschedule:\n  lr: {text}"))
    assert cfg.schedule.lr == value
    assert load(None, [*MOCK, "train.max_tokens=1_000_000"]).train.max_tokens == 1_000_000
    assert load(None, [*MOCK, "train.max_tokens=010"]).train.max_tokens == 10


def test_yaml_1_1_traps_are_strings():
    for text in ("yes", "no", "on", "1:30", "2001-01-01", "0x10"):
        assert load(None, [*MOCK, f"run.dir={text}"]).run.dir == text


def test_environment_is_interpolated(write, monkeypatch):
    monkeypatch.setenv("MJ_DIR", "/scratch")
    monkeypatch.setenv("MJ_LR", "2e-5")
    monkeypatch.setenv("MJ_ID", "123")
    monkeypatch.setenv("MJ_EMPTY", "")
    monkeypatch.delenv("MJ_NONE", raising=False)
    text = """
        data: {mock: true}
        schedule:
          lr: ${MJ_LR}
          min_lr: ${MJ_NONE:-1e-6}
        train:
          steps: ${MJ_EMPTY:-12}
        run:
          dir: ${MJ_DIR}/runs/${MJ_ID}
        log:
          wandb_project: "${MJ_ID}"
    """
    cfg = load(write("a.yaml", text))
    assert (cfg.schedule.lr, cfg.schedule.min_lr, cfg.train.steps) == (2e-5, 1e-6, 12)
    assert cfg.run.dir == "/scratch/runs/123" and cfg.log.wandb_project == "123"
    assert load(None, [*MOCK, "run.dir=${MJ_DIR}"]).run.dir == "/scratch"
    bad = write("bad.yaml", "run:\n  dir: a/${MJ_NONE}")
    fails(bad, MOCK, "bad.yaml:2", "run.dir", "MJ_NONE is not set", "${MJ_NONE:-default}")
    fails(None, ["run.dir=${1X}"], "run.dir", "malformed interpolation")


@pytest.mark.parametrize(
    "override, parts",
    [
        ("model.hiden_size=3", ["model.hiden_size: unknown key; did you mean model.hidden_size?"]),
        ("modle.hidden_size=3", ["did you mean model? (override 'modle."]),
        ("model.seq_length=3", ["did you mean data.seq_length?"]),
        ("hidden_sise=3", ["hidden_sise: unknown key; did you mean model.hidden_size?"]),
        (
            "model.rope.rope_scaling.rope_typ=yarn",
            ["did you mean model.rope.rope_scaling.rope_type?"],
        ),
        ("model.zzz=3", ["model.zzz: unknown key; --print-schema"]),
        ("model.hidden_size=big", ["model.hidden_size='big'", "valid integer", "override 'model."]),
        ("train.steps=1e6", ["train.steps=1000000.0", "valid integer"]),
        ("train.steps=0", ["train.steps=0", "greater than or equal to 1"]),
        ("mesh.dp=some", ["mesh.dp='some': must be a valid integer or 'auto'"]),
        ("optimizer.name=sgd", ["optimizer.name='sgd' is no optimizer (did you mean optax.sgd?)"]),
        ("data.split=9,1,0", ["data.split='9,1,0': must be a list, as [a, b]"]),
        ("runs/a/config.yaml", ["a config file is --config runs/a/config.yaml"]),
        ("data.split=[1]", ["data.split=[1]", "at least 3 items"]),
        ("data.paths=[a, 1]", ["data.paths[1]=1", "valid string", "(override"]),
        ("optimizer.lr_multipliers.head=x", ["optimizer.lr_multipliers.head='x'", "valid number"]),
        ("model=3", ["model=3", "group of keys"]),
        ("model.hidden_size=", ["'model.hidden_size='", "a.b=value", "null"]),
        ("model.hidden_size", ["a.b=value"]),
        (".hidden_size=3", ["a.b=value"]),
        ("data.text=*.txt", ["not valid YAML", "quote the value"]),
    ],
)
def test_a_bad_override_is_one_clear_line(override, parts):
    fails(None, [*MOCK, override], *parts)


@pytest.mark.parametrize(
    "text, parts",
    [
        (
            "model: {hiden_size: 3}\ntrain: {step: 1}",
            ["file.yaml:1", "did you mean", "(and 1 more)"],
        ),
        ("train:\n  steps: 1\n  steps: 2", ["file.yaml:3", "train.steps is set twice"]),
        ("model:\n - 1\n k: 2", ["file.yaml:3", "not valid YAML"]),
        ("- 1", ["must hold a mapping"]),
        ("1: 2", ["must be text"]),
        ("run: {dir: !!python/name:os.system x}", ["not valid YAML"]),
        ("data:\n  split:\n    - 1\n    - x\n    - 0", ["data.split[1]='x'", "file.yaml:4"]),
        ("a: &x [*x]", ["not valid YAML"]),
    ],
)
def test_a_bad_file_is_one_clear_line(write, text, parts):
    fails(write("file.yaml", text), [], *parts)


def test_unreadable_files(tmp_path):
    fails(tmp_path / "none.yaml", [], "none.yaml", "No such file")
    fails(tmp_path, [], "cannot read")
    (tmp_path / "latin.yaml").write_bytes(b"run: {dir: \xff}")
    fails(tmp_path / "latin.yaml", [], "not UTF-8")


def test_json_schema_knows_every_group_and_base():
    schema = json.loads(json.dumps(json_schema()))
    assert {"base", "model", "train", "log"} <= set(schema["properties"])
    assert schema["additionalProperties"] is False


def test_command_line(capsys, write):
    parser = argparse.ArgumentParser()
    add_config_arguments(parser)
    parser.add_argument("--dry-run", action="store_true")
    path = str(write("a.yaml", "data: {mock: true}"))
    argv = ["train.steps=5", "--config", path, "--dry-run", "run.seed=2"]
    args, cfg = config_from_args(parser, argv)
    assert args.dry_run and cfg.train.steps == 5 and cfg.run.seed == 2
    for flag, parse in (
        ("--print-config", lambda t: load(write("b.yaml", t))),
        ("--print-schema", json.loads),
    ):
        with pytest.raises(SystemExit) as e:
            config_from_args(parser, [*argv, flag])
        assert e.value.code == 0
        parsed = parse(capsys.readouterr().out)
        assert parsed == (cfg if flag == "--print-config" else json_schema())


def test_what_a_notebook_shows_is_what_was_set():
    assert repr(load(None, MOCK)) == "Config(data=DataConfig(mock=True))"
    rope = load(None, [*MOCK, "model.rope.rope_theta=5.0"]).model.rope
    assert repr(rope) == "RopeConfig(rope_theta=5.0)"
