"""Chats as ids: those of an opened reply, and those that end an answer."""

from collections.abc import Mapping, Sequence
from typing import Any

from mjax.data.base.chat import ChatTemplate
from mjax.data.base.tokenizer import Tokenizer
from mjax.errors import UserError

_QUESTION, _ANSWER = "question", "answer"


def reply_ids(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer,
    template: ChatTemplate,
    **variables: Any,
) -> list[int]:
    """The ids of messages with an opened reply; `variables` are those of `ChatTemplate.render`."""
    return tokenizer.encode(template.render(messages, **variables))


def answer_ends(tokenizer: Tokenizer, template: ChatTemplate | None) -> list[int]:
    """The ids that end an answer: the tokenizer's end, and what the template writes after one.

    Only special tokens count. A template that renders no plain answer adds none.
    """
    ends = [] if tokenizer.eod_id is None else [tokenizer.eod_id]
    if template is None:
        return ends
    said = {"user": _QUESTION, "assistant": _ANSWER}
    messages = [{"role": role, "content": text} for role, text in said.items()]
    try:
        text = template.render(messages, add_generation_prompt=False)
    except UserError:
        return ends
    behind = tokenizer.encode(text.rpartition(_ANSWER)[2])
    return ends + [i for i in behind if i not in ends and tokenizer.special_text(i)][:1]
