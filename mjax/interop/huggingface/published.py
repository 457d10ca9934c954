"""The published models of the families: facts from `published.yaml`, as tables.

Invariant: every family of the table has an entry, and every entry a family.
"""

import re
import sys
from pathlib import Path
from typing import NamedTuple

import yaml
from rich.console import Console
from rich.table import Table

from mjax.interop.huggingface.families.table import FAMILIES

HEADINGS = "family", "published models", "parameters", "class", "`configs/models/`", "in and out"


class Published(NamedTuple):
    """A family's entry; `published.yaml` says what its fields are."""

    models: str
    notes: str
    sizes: str = ""
    configs: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()


def published() -> dict[str, Published]:
    """The published models of each family, by its model_type in the order of the table."""
    text = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    entries = yaml.safe_load(text)
    return {name: Published(**entries[name]) for name in [*FAMILIES, *entries] if name in entries}


def markdown_table() -> str:
    """The table of docs/models/families.md."""
    rows = [HEADINGS, *map(_row, published().items())]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(HEADINGS), *lines[1:], ""])


def print_table() -> None:
    """Print it for a terminal, without classes and links."""
    rows = [HEADINGS, *map(_row, published().items())]
    table = Table(show_header=False, show_lines=True)
    for family, models, sizes, _, *others in rows:
        plain = [re.sub(r"\[([^]]*)\]\([^)]*\)|`", r"\1", text) for text in others]
        table.add_row(family, models, sizes, *plain)
    width = None if sys.stdout.isatty() else 160
    Console(markup=False, width=width).print(table)


def _row(entry: tuple[str, Published]) -> tuple[str, ...]:
    name, found = entry
    classes = ", ".join([FAMILIES[name].architecture, *found.classes])
    configs = ", ".join(f"`{config}`" for config in found.configs)
    return name, found.models, found.sizes or "-", classes, configs or "-", found.notes
