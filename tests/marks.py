"""What README's test command leaves to `.ci/run`: tests marked slow.

The command runs unit tests, docs, and of each law the cases that have caught most, in minutes.
Of a test whose cases are all slow, `.ci/run` runs those that `quick` names, or the first one.
`pytest -m exhaustive tests` runs the other slow cases (`tests/conftest.py`).
"""

from collections.abc import Iterable

import pytest

slow = pytest.mark.slow
exhaustive = pytest.mark.exhaustive  # for what takes long, and has a smaller sister
chosen = pytest.mark.chosen  # of several cases, for what would be missed most


def quick(cases: Iterable, *numbers: int) -> list:
    """Cases of a parametrized test, all marked slow but those with these numbers.

    Where the test is marked slow as a whole, these are the ones that `.ci/run` runs.
    """
    marked = []
    for number, case in enumerate(cases):
        values = case if type(case) is tuple else (case,)
        marks = chosen if number in numbers else slow
        marked.append(pytest.param(*values, marks=marks))
    return marked
