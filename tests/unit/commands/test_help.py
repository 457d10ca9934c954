"""Law: help of every command fits, says each option and its default; a wrong option is one line."""

import argparse
import sys

import pytest

from mjax import cli
from mjax.bench.__main__ import BENCHMARKS
from mjax.errors import CommandParser

OUTER = {"data": cli.DATA, "bench": BENCHMARKS}
NAMES = [
    *(name for name in cli.COMMANDS if name not in OUTER),
    *(f"{outer} {name}" for outer, inner in OUTER.items() for name in inner),
]
WIDTH = 100  # of tables; argparse breaks the rest at 80, but for a list of choices


@pytest.fixture
def mjax(monkeypatch, capsys):
    def call(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["/usr/bin/mjax", *words])
        monkeypatch.setenv("COLUMNS", "80")
        with pytest.raises(SystemExit) as end:
            cli.main()
        return end.value.code or 0, *capsys.readouterr()

    return call


@pytest.fixture
def parsers(mjax, monkeypatch):
    """The parser of a command, and those of its own commands."""

    def found(name: str) -> list[CommandParser]:
        seen: list[CommandParser] = []
        monkeypatch.setattr(CommandParser, "print_help", lambda parser: seen.append(parser))
        assert mjax(*name.split(), "--help")[0] == 0
        inner = [a.choices for a in seen[0]._actions if isinstance(a, argparse._SubParsersAction)]
        return [seen[0], *(parser for choices in inner for parser in choices.values())]

    return found


def options(parser: CommandParser) -> list[argparse.Action]:
    return [a for a in parser._actions if not isinstance(a, argparse._SubParsersAction)]


@pytest.mark.parametrize("name", NAMES)
def test_help_fits_and_says_every_option_with_its_default(name, parsers):
    for parser in parsers(name):
        assert f"{parser.prog} ".startswith(f"mjax {name} ")
        text = parser.format_help()
        assert not [line for line in text.splitlines() if len(line) > WIDTH and "{" not in line]
        assert len(text) < 8000 and text.startswith(f"usage: {parser.prog} ")
        flat = " ".join(text.split())
        for option in options(parser):
            assert option.help, (parser.prog, option.dest)
            value = option.default
            if (
                option.option_strings
                and type(value) in (int, float, str)
                and value not in ("", argparse.SUPPRESS)
            ):
                assert "default" in option.help or str(value) in flat, (parser.prog, option.dest)


@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_option_is_one_line_and_exit_code_2(name, parsers, mjax):
    for parser in parsers(name):
        inner = parser.prog.removeprefix("mjax ").split()
        needed = [a for a in options(parser) if a.required and a.option_strings]
        given = [word for a in needed for word in (a.option_strings[0], "x")]
        code, out, err = mjax(*inner, *given, "--no-such-option")
        assert code == 2 and not out and len(err.splitlines()) == 1, err
        assert err.startswith("mjax: error: ")


def test_a_mistyped_option_names_the_nearest(mjax):
    for words in ("train --confg x", "convert import --hf a --out b --dtpe float32"):
        code, _, err = mjax(*words.split())
        assert code == 2 and "did you mean --" in err and len(err.splitlines()) == 1


def test_help_of_completion(mjax):
    code, out, err = mjax("completion", "--help")
    assert code == 0 and not err and "usage: mjax completion {bash,zsh,fish}" in out


def test_an_import_of_masters_takes_no_dtype(mjax, tmp_path):
    words = f"convert import --megatron {tmp_path} --out {tmp_path}/o --with-optimizer"
    code, _, err = mjax(*words.split(), "--dtype", "bfloat16")
    assert code == 2 and "keeps fp32 masters; leave out --dtype" in err
