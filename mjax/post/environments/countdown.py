"""Countdown: an expression of given numbers, each used once, that reaches a target.

The target comes from an expression, so each problem has a solution. Only the right one is
rewarded: a reward for the form alone is one that a model stays at.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mjax.post.environments.chat_tokens import ChatTokens, final_answer
from mjax.post.environments.environment import Turn, draws, graded
from mjax.post.environments.expressions import evaluate_expression
from mjax.post.environments.puzzles import require_sizes

COUNTDOWN_QUESTION = (
    "Use each of the numbers {numbers} once, with + - * / and parentheses, to make {target}. "
    "Give the expression in <answer> </answer>.\n"
)


@dataclass(frozen=True)
class Countdown:
    """Problems of `numbers` numbers from 1 to `largest`."""

    chat: ChatTokens
    numbers: int = 3
    largest: int = 99
    question: str = COUNTDOWN_QUESTION

    def __post_init__(self):
        require_sizes("countdown", 6, numbers=self.numbers)
        require_sizes("countdown", 999, largest=self.largest)

    def reset(self, seed: int, index: int) -> Turn:
        """Numbers and their target."""
        numbers, target = countdown_problem(draws(seed, index), self.numbers, self.largest)
        listed = " ".join(map(str, numbers))
        prompt = self.chat.prompt(self.question, numbers=listed, target=target)
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
