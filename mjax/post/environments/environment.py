"""Environments: two calls on token ids, and the built-in ones by their names.

`reset(seed, index)` gives the prompt with a number in the stream of a seed, and `step(state, ids)`
what follows the tokens of an answer. Invariant: each result is a function of the arguments alone.
So a stream goes on at its index, and any process may take any step. State is a JSON value, which a
checkpoint can hold.
"""

import importlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from mjax.data.base.chat import ChatTemplate
from mjax.data.base.tokenizer import Tokenizer
from mjax.errors import UserError, first_line, line_of
from mjax.post.environments.chat_tokens import ChatTokens

ENVIRONMENTS = {
    "arithmetic": "mjax.post.environments.puzzles:Arithmetic",
    "calculator": "mjax.post.environments.calculator:Calculator",
    "code": "mjax.post.environments.code_tests:CodeTests",
    "countdown": "mjax.post.environments.countdown:Countdown",
    "gymnasium": "mjax.post.environments.adapters:GymnasiumText",
    "math": "mjax.post.environments.math_answers:MathAnswers",
    "reasoning_gym": "mjax.post.environments.adapters:ReasoningGym",
    "reverse_text": "mjax.post.environments.puzzles:ReverseText",
    "verifiers": "mjax.post.environments.adapters:Verifiers",
}


@dataclass(frozen=True)
class Turn:
    """The result of a call of an environment.

    ids: tokens that it adds to the transcript: the prompt, later a tool's reply. Never trained.
    state: a JSON value, all that `step` needs.
    reward: None while the episode goes on.
    metrics: logged as means, such as {"correct": 1.0}.
    reason: why the episode ended, such as "answered" or "time limit", for people.
    """

    ids: tuple[int, ...]
    state: Any
    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""

    @property
    def is_done(self) -> bool:
        return self.reward is not None


class Environment(Protocol):
    """A source of prompts and rewards."""

    def reset(self, seed: int, index: int) -> Turn:
        """Prompt number `index` of the stream with this seed."""

    def step(self, state: Any, ids: Sequence[int]) -> Turn:
        """The turn after an answer; ids as they were sampled, the end token included if drawn."""


def make_environment(
    name: str,
    tokenizer: Tokenizer,
    end_ids: Sequence[int],
    *,
    template: ChatTemplate | None = None,
    plain: bool = False,
    **args: Any,
) -> Environment:
    """The environment with a built-in name or of a class "module.path:Class", called as
    `Class(chat, **args)` with `ChatTokens`. `plain`: prompts without the chat template. Raises
    `UserError` for other names and arguments."""
    module, _, attribute = ENVIRONMENTS.get(name, name).partition(":")
    if not attribute:
        known = ", ".join(ENVIRONMENTS)
        raise UserError(f"no environment {name!r}; give one of {known}, or module.path:Class")
    chat = ChatTokens(tokenizer, tuple(end_ids), None if plain else template)
    try:
        kind = getattr(importlib.import_module(module), attribute)
        return kind(chat, **args)
    except UserError:
        raise
    except Exception as e:  # whatever a class of the user's own raises
        raise UserError(f"environment {name}: {_described(e)}; mend it or its arguments") from e


def _described(error: BaseException) -> str:
    """An error in one line, with the place in the code that raised it."""
    return f"{type(error).__name__}: {first_line(error)}{line_of(error)}"


def call_environment(environment: Environment, name: str, method: str, args: Sequence) -> Turn:
    """The turn of a call. An error in `step` gives the reward 0 and counts as "failed".

    Raises `UserError` for an error in `reset`, without which there is no prompt.
    """
    try:
        return _checked(getattr(environment, method)(*args))
    except UserError:
        raise
    except (Exception, SystemExit) as e:
        if method == "step":
            return Turn((), None, 0.0, {"failed": 1.0}, _described(e))
        raise UserError(
            f"environment {name}: {method}{tuple(args)}: {_described(e)}; mend it"
        ) from e


def _checked(turn: Turn) -> Turn:
    """The turn, if it is one that a transcript and a checkpoint can hold."""
    if not isinstance(turn, Turn):
        raise TypeError(f"{type(turn).__name__} is no Turn")
    json.dumps(turn.state)
    if turn.is_done and not math.isfinite(turn.reward):
        raise ValueError(f"the reward {turn.reward} is not finite")
    return turn


def draws(seed: int, index: int) -> np.random.Generator:
    """Random numbers for prompt `index` of the stream with this seed, and no other."""
    return np.random.Generator(np.random.Philox(key=(index << 64) + seed % 2**64))


def graded(is_correct: bool, reason: str = "answered", **metrics: float) -> Turn:
    """The last turn of an answer that is right or wrong."""
    reward = float(is_correct)
    return Turn((), None, reward, {"correct": reward, **metrics}, reason)
