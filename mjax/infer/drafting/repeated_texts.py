"""Guesses of the next tokens of texts, which one step of the engine then verifies.

A step computes the logits after each guess at once, draws the token of each place with the noise
that belongs there, and keeps guesses as long as they are what was drawn. So guesses change when
tokens come, not which ones.
"""

from collections.abc import Sequence
from typing import Protocol
from weakref import WeakKeyDictionary

from mjax.infer.scheduling.scheduler import TokenSequence


class TextInWork(Protocol):
    """A text that is made, as `RequestSample`; `guesses` are of the model's own layers."""

    sequence: TokenSequence
    guesses: list[int]


class Drafter(Protocol):
    """Guesses for the rows of an engine."""

    def propose(self, samples: Sequence[TextInWork], most: int) -> list[list[int]]:
        """At most so many guesses of what follows the tokens of each sample."""


class RepeatedTexts:
    """Guesses that texts repeat themselves, from the tokens of each alone."""

    def __init__(self):
        self._of_samples: WeakKeyDictionary[TextInWork, RepeatedText] = WeakKeyDictionary()

    def propose(self, samples: Sequence[TextInWork], most: int) -> list[list[int]]:
        found = []
        for sample in samples:
            text = self._of_samples.setdefault(sample, RepeatedText())
            found.append(text.guess(sample.sequence.tokens, most))
        return found


class RepeatedText:
    """Guesses that a text goes on as it did after its last tokens were there before.

    The last 4 tokens count, or 3 or 2 where so many were not there before. The latest of their
    places is taken.
    """

    _LENGTHS = 4, 3, 2

    def __init__(self):
        self._after: dict[tuple[int, ...], int] = {}  # the place after the latest such tokens
        self._seen = 0

    def guess(self, tokens: Sequence[int], most: int) -> list[int]:
        """Guesses of what follows `tokens`, which grow from call to call.

        A text that repeats a short period gives it as often as it takes.
        """
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
