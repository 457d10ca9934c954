"""Every family says which published models it reads; the page and the command say the same."""

import re
import sys
from pathlib import Path

import pytest

from mjax import convert
from mjax.config import load
from mjax.interop.huggingface.families.engine import config_to_hf
from mjax.interop.huggingface.families.table import FAMILIES
from mjax.interop.huggingface.published import markdown_table, published
from tests.marks import slow

ROOT = Path(__file__).parents[3]


@slow
def test_every_family_has_an_entry():
    """In mjax/interop/huggingface/published.yaml."""
    assert not [name for name in FAMILIES if name not in published()]
    assert not [name for name in published() if name not in FAMILIES]
    assert all(found.models and found.notes for found in published().values())


def test_the_page_has_the_table_of_the_command():
    page = (ROOT / "docs/models/families.md").read_text(encoding="utf-8")
    table = re.search(r"^\| family .*?\n(?=\n)", page, re.M | re.S)[0]
    wrong = (
        "run `mjax convert families --markdown` and put what it prints in docs/models/families.md"
    )
    assert table == markdown_table(), wrong


def test_every_config_stands_beside_its_family():
    homes = {}
    for file in (ROOT / "configs/models").glob("*.yaml"):
        model = load(file).model
        homes[file.stem] = model.model_type or config_to_hf(model)["model_type"]
    said = {config: name for name, found in published().items() for config in found.configs}
    said["gpt_1b3"] = homes["gpt_1b3"] or said["gpt_1b3"]
    assert said == homes


def test_the_command_prints_a_table(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["convert", "families"])
    convert.main()
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) == 160
    words = " ".join(lines)
    assert all(name in words for name in FAMILIES) and "](" not in words
    monkeypatch.setattr(sys, "argv", ["convert", "families", "--markdown"])
    convert.main()
    assert capsys.readouterr().out == markdown_table()


@slow
def test_a_family_without_an_entry_is_named(monkeypatch):
    monkeypatch.setitem(FAMILIES, "new_family", FAMILIES["llama"])
    with pytest.raises(AssertionError, match="new_family"):
        test_every_family_has_an_entry()
