"""Countdown: an expression of given numbers, each used once, that reaches a target.

The target comes from an expression, so each problem has a solution. Only the right one is
rewarded: a reward for the form alone is one that a model stays at.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from mjax.post.environments.chat_tokens import ChatTokens, final_answer
from mjax.post.environments.environment import Turn, draws, graded
from mjax.post.environments.expressions import evaluate_expression
from mjax.post.environments.puzzles import require_sizes

QUESTION = (
    "Use each of the numbers {numbers} once, with + - * / and parentheses, to make {target}. "
    "Give the expression in <answer> </answer>.\n"
)


@dataclass(frozen=True)
class Countdown:
    """Problems of `numbers` numbers from 1 to `largest`."""

    chat: ChatTokens
    numbers: int = 3
    largest: int = 99
    question: str = QUESTION

    def __post_init__(self):
        require_sizes("countdown", 6, numbers=self.numbers)
        require_sizes("countdown", 999, largest=self.largest)

    def reset(self, seed: int, index: int) -> Turn:
        """Numbers and their target."""
        numbers, target = countdown_problem(draws(seed, index), self.numbers, self.largest)
        text = self.question.replace("{numbers}", " ".join(map(str, numbers)))
        prompt = self.chat.prompt(text.replace("{target}", str(target)))
        return Turn(prompt, {"numbers": numbers, "target": target})

    def step(self, state: Any, ids: Sequence[int]) -> Turn:
        """The reward of an expression; what follows its = is not read."""
        expression = final_answer(self.chat.text(ids)).partition("=")[0]
        try:
            value, used = evaluate_expression(expression)
        except ValueError as e:
            return graded(False, str(e), well_formed=0.0)
        if sorted(used) != sorted(state["numbers"]):
            return graded(False, "other numbers", well_formed=0.0)
        is_right = value == state["target"]
        return graded(is_right, "answered" if is_right else "another value", well_formed=1.0)


def countdown_problem(rng: np.random.Generator, count: int, largest: int) -> tuple[list[int], int]:
    """(numbers, a target that an expression of all of them reaches)."""
    numbers = rng.integers(1, largest + 1, count).tolist()
    values = list(numbers)
    while len(values) > 1:
        a, b = (values.pop(rng.integers(len(values))) for _ in range(2))
        reached = [a + b]
        reached += [a - b] if a > b else []
        reached += [a * b] if a * b <= 10 * largest else []
        reached += [a // b] if a % b == 0 and b > 1 else []
        values.append(reached[rng.integers(len(reached))])
    return numbers, values[0]


def solve_countdown(numbers: Sequence[int], target: int) -> tuple[list[str], str] | None:
    """(steps such as "12-7=5", an expression of all numbers) that reach a target; None: none do."""
    return _solved([(Fraction(number), str(number)) for number in numbers], target)


def _solved(terms: list[tuple[Fraction, str]], target: int) -> tuple[list[str], str] | None:
    if len(terms) == 1:
        value, text = terms[0]
        expression = text.removeprefix("(").removesuffix(")")
        return ([], expression) if value == target else None
    for i, (a, left) in enumerate(terms):
        for j, (b, right) in enumerate(terms):
            rest = [term for k, term in enumerate(terms) if k not in (i, j)]
            for sign, value in _combined(a, b) if i != j else ():
                found = _solved([*rest, (value, f"({left}{sign}{right})")], target)
                if found is not None:
                    return [f"{a}{sign}{b}={value}", *found[0]], found[1]
    return None


def _combined(a: Fraction, b: Fraction) -> list[tuple[str, Fraction]]:
    """Results of a and b that are positive and whole, by their signs."""
    found = [("+", a + b), ("*", a * b)] if a >= b else []  # the order does not matter
    found += [("-", a - b)] if a > b else []
    found += [("/", a / b)] if (a / b).denominator == 1 else []
    return found
