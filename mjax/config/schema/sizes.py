"""Sizes that no run has: refused before anything is made of them, in one line.

They are slips of the hand. Lists as long as a count of layers, or strings as long as the product of
a pattern's repeats, would else fill the memory of the host before a rule could speak.
"""

import math
import re
from collections.abc import Mapping
from typing import Annotated

from pydantic import BeforeValidator, Field

from mjax.config.languages.difference import keys_and_values
from mjax.errors import UserError

MOST_REPEATS = 1_000_000  # the product of all counts in a pattern
# Of numbers in the schema: a hundred times what the largest known run has, or more.
UpTo16 = Annotated[int, Field(le=2**16)]
UpTo20 = Annotated[int, Field(le=2**20)]
UpTo24 = Annotated[int, Field(le=2**24)]
UpTo28 = Annotated[int, Field(le=2**28)]


def _step_number(key: object) -> object:
    """The number that a key is, which JSON writes as text."""
    return int(key) if isinstance(key, str) and key.isdecimal() else key


StepKey = Annotated[int, Field(ge=0), BeforeValidator(_step_number)]
PATTERNS = ("layer_pattern", "pipeline_layout", "remat")


def require_sane_patterns(tree: Mapping, places: Mapping[str, str]) -> None:
    """Raise `UserError` for the first pattern of a tree that repeats beyond all measure."""
    for key, value in keys_and_values(tree):
        if isinstance(value, str) and key.rpartition(".")[2] in PATTERNS:
            repeats = math.prod(map(int, re.findall(r"\*\s*(\d{1,15})", value)))
            if repeats > MOST_REPEATS or re.search(r"\d{16}", value):
                where = f" ({places[key]})" if key in places else ""
                raise UserError(
                    f"{key}={shortened(value)!r}: repeats more than {MOST_REPEATS:,} times; lower "
                    f"its counts{where}"
                )


def shortened(value: str, most: int = 200) -> str:
    """A text that fits in a line."""
    return value if len(value) <= most else f"{value[:most]}..."
