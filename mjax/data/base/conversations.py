"""Answers in the text of a conversation, wherever the loss is on answers alone.

A chat template writes the text. Invariant: a model that reads the text up to an answer has read
what inference gives it there, for each prefix of the messages is rendered and must begin the next.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mjax.data.base.chat import ChatTemplate
from mjax.errors import UserError

# Roles of chat templates, by the names that ShareGPT's and LLaVA's files give them.
SPEAKERS = {"human": "user", "gpt": "assistant", "system": "system"}


class AnsweredText(NamedTuple):
    """A rendered conversation, and [begin, end) of the characters of each answer."""

    text: str
    answers: list[tuple[int, int]]


def answers_by_prefixes(
    where: str,
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    answers: Sequence[int],
    **variables: Any,
) -> AnsweredText:
    """The text up to the last of `answers`, numbers of messages in rising order.

    An answer is what its message adds to the preceding ones with an opened reply. `variables` are
    those of `ChatTemplate.render`. Raises `UserError` for a template that rewrites what it wrote.
    """
    text, spans = "", []
    for number in answers:
        before = template.render(messages[:number], **variables)
        after = template.render(messages[: number + 1], add_generation_prompt=False, **variables)
        require_beginning(where, template, text, before)
        require_beginning(where, template, before, after)
        spans.append((len(before), len(after)))
        text = after
    return AnsweredText(text, spans)


def require_beginning(where: str, template: ChatTemplate, part: str, text: str) -> None:
    """Raise `UserError` unless a rendered part of a conversation begins the text of more of it."""
    if not text.startswith(part):
        raise UserError(
            f"{where}: {template.origin} rewrites earlier turns; give one turn, or train on the "
            "last answer alone"
        )
