"""Guesses of the next tokens of a text, which one step of the engine then verifies.

A step computes the logits after each guess at once, draws the token of each place with the noise
that belongs there, and keeps guesses as long as they are what was drawn. So guesses change when
tokens come, not which ones.
"""

from collections.abc import Sequence
from typing import Protocol


class Drafter(Protocol):
    """Follows one text."""

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        """At most so many guesses of what follows `tokens`, which grow from call to call."""


class RepeatedText:
    """Guesses that a text goes on as it did after its last tokens were there before.

    Of the last 4, 3 or 2 tokens the longest that were there before count, and of their places the
    latest.
    """

    _LENGTHS = 4, 3, 2

    def __init__(self):
        self._after: dict[tuple[int, ...], int] = {}  # the place after the latest such tokens
        self._seen = 0

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        """Guesses; a text that repeats a short period gives it as often as it takes."""
        self._learn(tokens)
        for length in self._LENGTHS:
            place = self._after.get(tuple(tokens[-length:]))
            if place is not None:
                period = tokens[place:]
                return [period[i % len(period)] for i in range(most)]
        return []

    def _learn(self, tokens: Sequence[int]) -> None:
        """Note the places after tokens that have one after them."""
        for place in range(max(self._seen, 1), len(tokens)):
            for length in self._LENGTHS:
                if place >= length:
                    self._after[tuple(tokens[place - length : place])] = place
        self._seen = len(tokens)
