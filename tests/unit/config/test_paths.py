"""Law: who is given the address of an object store says in one line what to do, at once."""

import argparse
import sys

import pytest

from mjax.checkpoint.__main__ import main as inspector
from mjax.config import load, yaml_text
from mjax.config.languages.paths import is_address
from mjax.config.load import add_config_arguments, config_from_args
from mjax.config.schema.keys import nested, value_of
from mjax.config.schema.run import Config
from mjax.convert import main as convert
from mjax.data.base.object_store import file_system
from mjax.data.preprocess import main as preprocess
from mjax.errors import UserError, run_cli
from mjax.evaluate.__main__ import main as evaluate
from mjax.export.__main__ import main as export
from mjax.generate.__main__ import main as generate
from mjax.train.__main__ import main as train

GS, S3 = "gs://bucket/run", "s3://bucket/run"
COMMANDS = [
    (train, [f"run.dir={GS}", "data.mock=true"]),
    (convert, ["import", "--megatron", S3, "--out", "made"]),
]
READERS = [
    (train, [f"checkpoint.init_from={S3}", "data.mock=true"]),
    (generate, ["--ckpt", GS, "--prompt", "a"]),
    (evaluate, ["perplexity", "--ckpt", S3, "--file", __file__]),
    (export, ["--ckpt", GS, "--out", "made"]),
    (convert, ["config", "--hf", S3]),
    (convert, ["import", "--hf", GS, "--out", "made"]),
    (convert, ["export", "--ckpt", GS, "--hf", "made"]),
    (inspector, ["ls", GS]),
    (inspector, ["diff", "made", S3]),
]


@pytest.mark.parametrize("main, arguments", COMMANDS)
def test_an_object_store_is_refused_in_one_line(main, arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("some text")
    monkeypatch.setattr(sys, "argv", ["mjax", *arguments])
    with pytest.raises(SystemExit) as end:
        run_cli(main)
    (line,) = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and "object store" in line
    assert "mount it" in line or "checkpoint.mirror" in line
    assert any(
        bucket in line.replace("s:/b", "s://b").replace("3:/b", "3://b") for bucket in (GS, S3)
    )
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


@pytest.mark.parametrize("main, arguments", READERS)
def test_a_store_whose_package_is_missing_is_one_line(main, arguments, monkeypatch, capsys):
    for package in ("s3fs", "gcsfs"):
        monkeypatch.setitem(sys.modules, package, None)
    file_system.cache_clear()
    monkeypatch.setattr(sys, "argv", ["mjax", *arguments])
    with pytest.raises(SystemExit) as end:
        run_cli(main)
    line = capsys.readouterr().err.splitlines()[-1]
    assert end.value.code == 2 and "needs another package: pip install 'mjax[" in line


@pytest.mark.parametrize("path", [GS, S3, "gs:/bucket", "https://host/x", "abfs+x://y"])
def test_addresses(path):
    assert is_address(path)


@pytest.mark.parametrize("path", [None, "/tmp/a:/b", "runs/a", "a:b", "c:/x", "./gs://x"])
def test_paths(path):
    assert not is_address(path)


LISTS = "data.paths data.valid_paths data.images.path".split()
TEXTS = "run.dir data.text data.tokenizer data.cache_dir data.images.path data.images.valid_path"
TEXTS += " checkpoint.local_dir checkpoint.init_from checkpoint.init_audio"
KEYS = [(key, "[{}]") for key in LISTS] + [(key, "{}") for key in TEXTS.split()]


@pytest.mark.parametrize("key, form", KEYS)
def test_a_key_of_a_path_knows_the_home_folder_and_refuses_an_empty_path(key, form, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    tree = nested({key: yaml_text.read(form.format("~/x"), "test", {})})
    found = value_of(Config.model_validate(tree), key)
    assert found in ("/home/me/x", ["/home/me/x"])
    for wrong in ("''", "' '", "~nobody-here/x"):
        with pytest.raises(UserError, match=rf"^{key}\S*=.*: must be .*a path") as e:
            load(None, [f"{key}={form.format(wrong)}"])
        assert "\n" not in str(e.value)


def test_a_base_and_arguments_know_the_home_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "base.yaml").write_text("data: {mock: true}")
    (tmp_path / "own.yaml").write_text("base: ~/base.yaml")
    assert load(tmp_path / "own.yaml").data.mock
    commands = [
        (train, ["--config=~/own.yaml", "--print-config"], ["--config="]),
        (inspector, ["ls", "~/runs"], ["ls", ""]),
        (convert, ["config", "--hf=~/model"], ["config", "--hf="]),
        (generate, ["--ckpt=~/model", "--prompt", "a"], ["--ckpt=", "--prompt", "a"]),
        (preprocess, ["--input=~/in", "--output=~/out", "--tokenizer=byte"], ["--input="]),
    ]
    for main, arguments, empty in commands:
        monkeypatch.setattr(sys, "argv", ["mjax", *arguments])
        with pytest.raises(SystemExit):
            run_cli(main)
        said = "".join(capsys.readouterr())
        assert "mock: true" in said if main is train else str(tmp_path) in said and "~" not in said
        monkeypatch.setattr(sys, "argv", ["mjax", *empty])
        with pytest.raises(SystemExit) as end:
            run_cli(main)
        assert end.value.code == 2 and "must be a path, not empty" in capsys.readouterr().err


def test_the_config_of_a_moved_run_does_not_train_anew_elsewhere(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run, moved = tmp_path / "runs" / "a", tmp_path / "runs" / "b"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").touch()
    (run / "config.yaml").write_text("run: {dir: runs/a}\ndata: {mock: true}\n")
    given = ["--config", "runs/a/config.yaml"]
    parser = argparse.ArgumentParser()
    add_config_arguments(parser)
    assert config_from_args(parser, given)[1].run.dir == "runs/a"
    run.rename(moved)
    given[1] = "runs/b/config.yaml"
    with pytest.raises(UserError) as e:
        config_from_args(parser, given)
    assert "run.dir='runs/a'" in str(e.value) and f"give run.dir={moved} to go" in str(e.value)
    assert config_from_args(parser, [*given, "run.dir=runs/c"])[1].run.dir == "runs/c"
    assert not run.exists()
