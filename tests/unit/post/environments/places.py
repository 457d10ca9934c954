"""Environments for tests: over bytes, and the answers that they read."""

import pytest

from mjax.data.base.tokenizer import load_tokenizer
from mjax.errors import UserError
from mjax.post.environments.environment import Environment, Turn, make_environment
from mjax.post.environments.sandbox import Sandbox

BYTES = load_tokenizer("byte")
END = BYTES.eod_id


def over_bytes(name: str, **args) -> Environment:
    return make_environment(name, BYTES, [END], **args)


def text_of(turn: Turn) -> str:
    return BYTES.decode(turn.ids)


def answer(environment: Environment, turn: Turn, text: str) -> Turn:
    """The turn that follows a text and its end token."""
    return environment.step(turn.state, [*BYTES.encode(text), END])


def require_sandbox() -> None:
    """Skip a test where none can be had."""
    try:
        Sandbox().run("")
    except UserError as e:
        pytest.skip(str(e))
