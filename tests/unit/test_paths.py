"""Law: who is given the address of an object store says in one line what to do, at once."""

import sys

import pytest

from mjax.checkpoint.__main__ import main as inspector
from mjax.config.paths import is_address
from mjax.convert import main as convert
from mjax.errors import run_cli
from mjax.evaluate import main as evaluate
from mjax.export import main as export
from mjax.generate import main as generate
from mjax.train.__main__ import main as train

GS, S3 = "gs://bucket/run", "s3://bucket/run"
COMMANDS = [
    (train, [f"run.dir={GS}", "data.mock=true"]),
    (train, [f"checkpoint.init_from={S3}", "data.mock=true"]),
    (generate, ["--ckpt", GS, "--prompt", "a"]),
    (evaluate, ["perplexity", "--ckpt", S3, "--file", "text"]),
    (export, ["--ckpt", GS, "--out", "made"]),
    (convert, ["config", "--hf", S3]),
    (convert, ["import", "--hf", GS, "--out", "made"]),
    (convert, ["import", "--megatron", S3, "--out", "made"]),
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
    assert end.value.code == 2 and "object store" in line and "mount it" in line
    assert any(
        bucket in line.replace("s:/b", "s://b").replace("3:/b", "3://b") for bucket in (GS, S3)
    )
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


@pytest.mark.parametrize("path", [GS, S3, "gs:/bucket", "https://host/x", "abfs+x://y"])
def test_addresses(path):
    assert is_address(path)


@pytest.mark.parametrize("path", [None, "/tmp/a:/b", "runs/a", "a:b", "c:/x", "./gs://x"])
def test_paths(path):
    assert not is_address(path)
