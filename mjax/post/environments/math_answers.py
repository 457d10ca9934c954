"""Mathematical questions, whose answers math-verify compares: 1/2 is 0.5.

Its own limits of time are alarms, which fail outside of a main thread. They are off here: a worker
has a wall clock (`workers.py`).
"""

import logging
from collections.abc import Sequence
from typing import Any

from mjax.errors import or_user_error
from mjax.post.environments.chat_tokens import ChatTokens, final_answer
from mjax.post.environments.environment import Turn, graded
from mjax.post.environments.problem_files import problem_at, read_problems

LONGEST_ANSWER = 10_000  # characters; the parser's time grows with them


class MathAnswers:
    """Questions of a file with the fields question and answer; the reward is 1 for an equal one."""

    def __init__(self, chat: ChatTokens, path: str, question: str = "{problem}\n"):
        with or_user_error("environment math needs `pip install 'mjax[math]'`", ImportError):
            import math_verify
        logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of no limit of time
        self.chat, self.question, self.library = chat, question, math_verify
        self.problems = read_problems(path, question=str, answer=str)

    def reset(self, seed: int, index: int) -> Turn:
        """A question of the file."""
        number = problem_at(seed, index, len(self.problems))
        problem = self.problems[number]["question"]
        return Turn(self.chat.prompt(self.question, problem=problem), number)

    def step(self, state: Any, ids: Sequence[int]) -> Turn:
        """The reward of the answer in \\boxed, in <answer>, or at the end of the text."""
        text = self.chat.text(ids)[-LONGEST_ANSWER:]
        text = text if r"\boxed" in text else final_answer(text)
        parse, verify = self.library.parse, self.library.verify
        wanted = parse(f"${self.problems[state]['answer']}$", parsing_timeout=None)
        found = parse(text, parsing_timeout=None)
        is_equal = verify(wanted, found, timeout_seconds=None)
        return graded(is_equal, well_formed=float(bool(found)))
