"""Law: `mjax COMMAND` is `python -m mjax.COMMAND`; its own help is short and starts no JAX."""

import importlib
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from mjax import __version__, cli
from mjax.errors import run_cli

ROOT = Path(__file__).parents[3]
NAMES = [*(name for name in cli.COMMANDS if name != "data"), *(f"data {name}" for name in cli.DATA)]


@pytest.fixture
def mjax(monkeypatch, capsys):
    """Call the program; returns (exit code, standard output, standard error)."""

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["/usr/bin/mjax", *arguments])
        with pytest.raises(SystemExit) as end:
            cli.main()
        return end.value.code or 0, *capsys.readouterr()

    return call


def test_help_fits_a_screen_and_has_a_line_for_each_command(mjax):
    code, out, _ = mjax("--help")
    assert code == 0 and out == mjax()[1]
    lines = out.splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines if line[:2] == "  "] == [*cli.COMMANDS, "completion"]
    assert mjax("--version") == (0, f"mjax {__version__}\n", "")


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["trian"], "no command 'trian'; did you mean train?"),
        (["data", "preproces"], "no command 'preproces'; did you mean preprocess?"),
        (["zzz"], "no command 'zzz'; one of train, sft, "),
        (["completion", "tcsh"], "mjax completion tcsh: name one shell, of bash, zsh, fish"),
        (["train", "model.hiden_size=3"], "did you mean model.hidden_size?"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, words, mjax):
    code, out, err = mjax(*arguments)
    assert code == 2 and not out and err.startswith("mjax: error: ") and words in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    "command, given, least",
    [
        ("evaluate answers --ckpt a --file b", "--limit -1", 1),
        ("evaluate answers --ckpt a --file b", "--max-new-tokens 0", 1),
        ("evaluate answers --ckpt a --file b", "--batch-size 0", 1),
        ("evaluate answers --ckpt a --file b", "--show -1", 0),
        ("evaluate loss --run a", "--steps 0", 1),
        ("evaluate perplexity --ckpt a --file b", "--seq-length 0", 1),
        ("evaluate perplexity --ckpt a --file b", "--stride 0", 1),
        ("evaluate harness --ckpt a --tasks b", "--limit 0", 1),
        ("evaluate harness --ckpt a --tasks b", "--num-fewshot -1", 0),
        ("distill", "--top 0", 1),
        ("train", "--min-processes 0", 1),
        ("data preprocess --input a --output b --tokenizer byte", "--workers 0", 1),
        ("chat a", "--max-model-len 0", 1),
        ("bench train", "--steps 0", 1),
        ("bench train", "--warmup -1", 0),
        ("bench train", "--documents 0", 1),
        ("bench train", "--top -1", 0),
        ("bench kernel all", "--samples 0", 1),
        ("bench collective", "--samples -2", 1),
        ("bench data", "--images 0", 1),
        ("bench data", "--image-size 0", 1),
        ("bench engine", "--shared -1", 0),
        ("bench engine", "--requests 0", 1),
        ("bench engine", "--new 1", 2),
        ("bench engine", "--drafts -1", 0),
        ("bench decode", "--new 2", 3),
        ("bench decode", "--prompt x", 1),
        ("bench decode", "--samples 0", 1),
        ("bench data", "--batch 0", 1),
        ("bench checkpoint", "--steps 1", 2),
        ("bench serve --url a", "--requests 0", 1),
        ("bench serve --url a", "--warmup -1", 0),
        ("prove", "--jobs 0", 1),
        ("prove", "--devices 0", 1),
    ],
)
def test_a_count_that_is_too_small_is_one_line(command, given, least, mjax):
    option, number = given.split()
    code, out, err = mjax(*command.split(), option, number)
    assert code == 2 and not out and len(err.splitlines()) == 1
    assert f"argument {option}: {number}: give a whole number of at least {least};" in err


@pytest.mark.parametrize("name", NAMES)
def test_a_command_is_reached_by_both_names(name, mjax, monkeypatch, capsys):
    code, out, _ = mjax(*name.split(), "--help")
    assert code == 0 and out.startswith(f"usage: mjax {name} ")
    of_post = name in "sft preference reward reinforce distill prune quantize".split()
    module = "mjax." + ("post." if of_post else "") + name.replace(" ", ".")
    monkeypatch.setattr(sys, "argv", [f"/mjax/{module}", "--help"])
    path = module if name in ("convert", "docs") or of_post or " " in name else f"{module}.__main__"
    with pytest.raises(SystemExit) as end:
        run_cli(importlib.import_module(path).main)
    assert not end.value.code
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: python -m {module} ")
    assert shown.split()[4:] == out.split()[2 + len(name.split()) :]


def test_the_exit_code_of_a_command_is_the_programs(mjax, tmp_path):
    assert mjax("checkpoint", "ls", str(tmp_path / "none"))[0] == 2
    assert mjax("data")[0] == 0


def test_a_module_beside_is_found_after_those_that_are_installed(mjax, monkeypatch, tmp_path):
    (tmp_path / "numpy.py").write_text("raise SystemExit(7)")
    (tmp_path / "beside_a_config.py").write_text("")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    code, _, err = mjax("train", "data.mock=true", "train.objective=beside_a_config:Denoise")
    assert code == 2 and "'beside_a_config' has no attribute 'Denoise'" in err


def test_help_imports_no_jax():
    code = "import sys; from mjax import cli; cli.run(['--help']); assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ, timeout=60)


def test_the_package_installs_the_program():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"mjax": "mjax.cli:main"}


@pytest.fixture(scope="module")
def words() -> dict[str, list[str]]:
    return cli.words_by_command()


def test_completion_knows_commands_and_their_options(words):
    assert words[""][:2] == ["train", "sft"]
    assert {"--config", "--dry-run", "--restarts"} <= set(words["train"])
    assert {"import", "export", "config"} <= set(words["convert"])
    assert "--megatron" in words["convert import"] and "--ckpt" not in words["convert import"]
    assert {"kernel", "train"} <= set(words["bench"]) and "--shape" in words["bench kernel"]
    assert words["data"] == ["preprocess", "preview", "neighbors"]
    assert "--top-k" in words["generate"] and "float32" not in words["generate"]


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_bash_completes_words_options_and_config_files(words, tmp_path):
    for name in ("a.yaml", "a.txt"):
        (tmp_path / name).touch()
    script = cli.bash(words)
    expected = {
        "mjax tr": {"train"},
        "mjax convert i": {"import"},
        "mjax convert import --m": {"--megatron"},
        "mjax train --dry": {"--dry-run"},
        "mjax train --config a": {"a.yaml"},
    }
    for line, found in expected.items():
        count = len(line.split()) - 1
        asked = f"COMP_WORDS=({line}) COMP_CWORD={count}; _mjax; printf '%s\\n' ${{COMPREPLY[@]}}"
        shell = subprocess.run(
            ["bash", "-c", f"{script}\n{asked}"], cwd=tmp_path, capture_output=True, text=True
        )
        assert set(shell.stdout.split()) == found, (line, shell)
    assert cli.zsh(words).endswith(script)
    assert "__fish_seen_subcommand_from train' -a '--config --print-config" in cli.fish(words)
