"""Guesses of texts that repeat themselves."""

import numpy as np
import pytest

from mjax.infer.drafting.repeated_texts import RepeatedText


def by_search(tokens: list[int], most: int) -> list[int]:
    for length in (4, 3, 2):
        last = tokens[-length:]
        for first in range(len(tokens) - length - 1, -1, -1):
            if len(last) == length and tokens[first : first + length] == last:
                found = list(tokens)
                for i in range(most):
                    found.append(found[first + length + i])
                return found[len(tokens) :]
    return []


def test_guesses_are_those_of_a_search_at_every_length():
    rng = np.random.default_rng(0)
    for letters in (2, 4, 9):
        text, drafter = rng.integers(0, letters, 60).tolist(), RepeatedText()
        # Several tokens may come at a time.
        for length in sorted({*rng.integers(1, 60, 40).tolist(), 1, 2, 60}):
            assert drafter.guess(text[:length], 5) == by_search(text[:length], 5)


@pytest.mark.parametrize(
    ("tokens", "guesses"),
    [
        ([1, 2, 3, 1, 2], [3, 1, 2, 3]),
        ([1, 2, 3, 9, 2, 3], [9, 2, 3, 9]),
        ([7, 7, 7], [7, 7, 7, 7]),
        ([1, 2, 3, 4], []),
        ([1], []),
    ],
)
def test_guesses_go_on_as_the_latest_longest_match_did(tokens, guesses):
    assert RepeatedText().guess(tokens, 4) == guesses
