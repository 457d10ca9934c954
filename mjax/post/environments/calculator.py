"""A calculator that the model may call: an answer that ends in `<calc>12*7</calc>` is a call.

The environment adds the tokens of `<result>84</result>`, and the model writes on. Calls are
bounded. Only the last answer is rewarded.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mjax.post.environments.chat_tokens import ChatTokens, final_answer
from mjax.post.environments.environment import Turn, draws, graded
from mjax.post.environments.expressions import evaluate_expression, number_text
from mjax.post.environments.puzzles import MOST_DIGITS, draw_numbers, require_sizes

CALL = re.compile(r"<calc>([^<]*)</calc>\s*$")
CALCULATOR_QUESTION = (
    "Compute {problem}. To use a calculator, end your answer with a call such as "
    "<calc>12*7</calc>; you will read its result. Give the final number in <answer> </answer>.\n"
)


@dataclass(frozen=True)
class Calculator:
    """Expressions of `terms` numbers with `digits` digits each, and at most `calls` calls."""

    chat: ChatTokens
    digits: int = 3
    terms: int = 3
    calls: int = 4
    question: str = CALCULATOR_QUESTION

    def __post_init__(self):
        require_sizes("calculator", MOST_DIGITS // 2, digits=self.digits)
        require_sizes("calculator", 10, terms=self.terms, calls=self.calls)

    def reset(self, seed: int, index: int) -> Turn:
        """An expression, such as "123*45-6"."""
        rng = draws(seed, index)
        first, *others = draw_numbers(rng, self.digits, self.terms)
        problem = str(first) + "".join(f"{rng.choice(list('+-*'))}{number}" for number in others)
        answer = number_text(evaluate_expression(problem)[0])
        prompt = self.chat.prompt(self.question, problem=problem)
        return Turn(prompt, {"answer": answer, "calls": 0})

    def step(self, state: Any, ids: Sequence[int]) -> Turn:
        """The result of a call, or the reward of the last answer."""
        text, calls = self.chat.text(ids), state["calls"]
        call = CALL.search(text)
        if call is None:
            return graded(final_answer(text) == state["answer"], calls=float(calls))
        if calls == self.calls:
            return graded(False, "too many calls", calls=float(calls))
        try:
            result = number_text(evaluate_expression(call[1])[0])
        except ValueError as e:
            result = f"error: {e}"
        said = self.chat.reply(f"<result>{result}</result>\n", ids)
        return Turn(said, state | {"calls": calls + 1})
