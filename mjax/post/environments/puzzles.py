"""Sums and reversed words: puzzles whose answer is one text."""

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

import numpy as np

from mjax.errors import UserError
from mjax.post.environments.chat_tokens import ChatTokens, final_answer
from mjax.post.environments.environment import Turn, draws, graded

MOST_DIGITS = 18  # of a number that numpy draws
SOUNDS = "aeiou", "bdfgklmnprstvz"


def require_sizes(environment: str, most: int, **sizes: int) -> None:
    """Raise `UserError` unless all sizes are whole numbers from 1 to `most`."""
    for name, size in sizes.items():
        if type(size) is not int or not 1 <= size <= most:
            raise UserError(f"environment {environment}: {name}={size!r}: give 1 to {most}")


def draw_numbers(rng: np.random.Generator, digits: int, count: int) -> list[int]:
    """Numbers with so many digits each."""
    first = 10 ** (digits - 1) if digits > 1 else 0
    return rng.integers(first, 10**digits, count).tolist()


@dataclass(frozen=True)
class Arithmetic:
    """Sums of `terms` numbers with `digits` digits each; the reward is 1 for the right one."""

    chat: ChatTokens
    digits: int = 2
    terms: int = 2
    question: str = "{problem}="

    def __post_init__(self):
        require_sizes("arithmetic", MOST_DIGITS, digits=self.digits)
        require_sizes("arithmetic", 100, terms=self.terms)

    def reset(self, seed: int, index: int) -> Turn:
        """A sum, such as "12+34="."""
        numbers = draw_numbers(draws(seed, index), self.digits, self.terms)
        problem = "+".join(map(str, numbers))
        return Turn(self.chat.prompt(self.question, problem=problem), str(sum(numbers)))

    def step(self, state: Any, ids: Sequence[int]) -> Turn:
        """The reward of an answer."""
        answer = final_answer(self.chat.text(ids))
        return graded(answer == state, well_formed=float(answer.isdecimal()))


@dataclass(frozen=True)
class ReverseText:
    """Made-up words to write backwards; the reward is how similar the answer is, from 0 to 1."""

    chat: ChatTokens
    words: int = 4
    question: str = "Reverse the text: {problem}\n"

    def __post_init__(self):
        require_sizes("reverse_text", 200, words=self.words)

    def reset(self, seed: int, index: int) -> Turn:
        """Words of two to six letters."""
        rng = draws(seed, index)
        words = []
        for length in rng.integers(2, 7, self.words):
            letters = [rng.choice(list(SOUNDS[n % 2])) for n in range(length)]
            words.append("".join(letters))
        text = " ".join(words)
        return Turn(self.chat.prompt(self.question, problem=text), text[::-1])

    def step(self, state: Any, ids: Sequence[int]) -> Turn:
        """2 M / T: M letters in common and in order, T letters of both texts (`difflib`)."""
        answer = final_answer(self.chat.text(ids))[: 4 * len(state)]  # its time is quadratic
        alike = SequenceMatcher(None, answer, state, autojunk=False).ratio()
        return Turn((), None, alike, {"correct": float(answer == state)}, "answered")
