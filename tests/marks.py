"""What README's test command leaves to `.ci/run`: tests marked slow.

The command runs unit tests, docs, and of each law the cases that have caught most, in minutes.
Of the slow cases of a test, `tests/conftest.py` leaves all but the first to
`pytest -m exhaustive tests`.
"""

from collections.abc import Iterable

import pytest

slow = pytest.mark.slow


def quick(cases: Iterable, *numbers: int) -> list:
    """Cases of a parametrized test, all marked slow but those with these numbers."""
    marked = []
    for number, case in enumerate(cases):
        values = case if type(case) is tuple else (case,)
        marks = () if number in numbers else slow
        marked.append(pytest.param(*values, marks=marks))
    return marked
