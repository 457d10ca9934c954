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
    rows = [HEADINGS, *(_row(name, found, code="`") for name, found in published().items())]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(HEADINGS), *lines[1:], ""])


def print_table() -> None:
    """Print it for a terminal, without classes and links."""
    table = Table(show_lines=True)
    for heading in _without_class(HEADINGS):
        table.add_column(heading.replace("`", ""))
    for name, found in published().items():
        notes = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", found.notes)
        row = _row(name, found._replace(notes=notes), code="")
        table.add_row(*_without_class(row))
    width = None if sys.stdout.isatty() else 160
    Console(markup=False, width=width).print(table)


def _without_class(row: tuple[str, ...]) -> tuple[str, ...]:
    at = HEADINGS.index("class")
    return row[:at] + row[at + 1 :]


def _row(name: str, found: Published, code: str) -> tuple[str, ...]:
    classes = ", ".join([FAMILIES[name].architecture, *found.classes])
    configs = ", ".join(f"{code}{config}{code}" for config in found.configs)
    return name, found.models, found.sizes or "-", classes, configs or "-", found.notes
