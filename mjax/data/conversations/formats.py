"""Records in four formats as messages for chat templates, or as a prompt with its completion.

The formats are OpenAI's messages, ShareGPT, Alpaca and pairs of prompt and completion; a record's
keys say which it is. Invariant: what a conversation holds of a record is all its text; a record
with more than that, such as images, is refused.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, Field, Json, ValidationError

from mjax.data.base.conversations import SPEAKERS
from mjax.errors import UserError
from mjax.json_file import parse_json

ROLES = "system", "developer", "user", "assistant", "tool"
_SPEAKERS = SPEAKERS | {name: name for name in ROLES}
_SPEAKERS |= {"chatgpt": "assistant", "observation": "tool", "function_call": "assistant"}
_GIVEN = {"messages", "tools", "documents", "add_generation_prompt"}  # to a template, by us
_ITEMS = "image", "images", "videos", "audio"


@dataclass(frozen=True)
class Conversation:
    """A record that can be trained on.

    where: its place, FILE:LINE.
    messages: dictionaries with role and content, and maybe tool_calls and reasoning_content.
    answers: the numbers of the messages that the loss may be on.
    tools: JSON schemas of functions.
    variables: more for the template.
    plain: a prompt and its completion, texts without a template; then there are no messages.
    """

    where: str
    messages: list[dict[str, Any]] = field(default_factory=list)
    answers: list[int] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    variables: dict[str, Any] = field(default_factory=dict)
    plain: tuple[str, str] | None = None


class _Part(BaseModel):
    """A text in a list of parts; images and sounds have none."""

    text: str


class _Function(BaseModel):
    """A call's function; arguments in JSON become a dictionary, which templates want."""

    name: str
    arguments: dict[str, Any] | Json[dict[str, Any]] = {}


class _Call(BaseModel):
    function: _Function

    def for_template(self, given: dict[str, Any]) -> dict[str, Any]:
        """The call as it was given, with parsed arguments."""
        arguments = {"arguments": self.function.arguments}
        return given | {"function": given["function"] | arguments}


class _Message(BaseModel):
    """A message; `weight` 0 keeps an answer out of the loss."""

    role: Literal[ROLES]
    content: str | list[_Part] = ""
    tool_calls: list[_Call] = []
    reasoning_content: str = ""
    weight: Literal[0, 1] = 1

    def for_template(self, given: dict[str, Any]) -> dict[str, Any]:
        """The message as it was given, but with one text and with parsed arguments.

        Its keys keep their order, for templates write dictionaries as JSON. Raises `ValueError`.
        """
        parts = self.content if isinstance(self.content, list) else []
        text = "".join(part.text for part in parts) or self.content or ""
        message = {key: one for key, one in given.items() if key != "weight"} | {"content": text}
        if self.tool_calls:
            calls = zip(given["tool_calls"], self.tool_calls, strict=True)
            message["tool_calls"] = [parsed.for_template(call) for call, parsed in calls]
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"tool_calls of {self.role}")
        if self.role == "assistant" and not any((text, self.tool_calls, self.reasoning_content)):
            raise ValueError("an answer is empty")
        return message


class _Turn(BaseModel):
    """A turn of ShareGPT."""

    speaker: Literal[tuple(_SPEAKERS)] = Field(alias="from")
    value: str
    weight: Literal[0, 1] = 1

    def message(self) -> dict[str, Any]:
        found = {"role": _SPEAKERS[self.speaker], "content": self.value, "weight": self.weight}
        if self.speaker == "function_call":
            calls = parse_json(self.value)
            calls = calls if isinstance(calls, list) else [calls]
            found["tool_calls"] = [{"type": "function", "function": call} for call in calls]
            found["content"] = ""
        return found


class _ShareGpt(BaseModel):
    conversations: list[_Turn]


class _Alpaca(BaseModel):
    instruction: str = Field(min_length=1)
    input: str = ""
    output: str
    history: list[tuple[str, str]] = []


class _Record(BaseModel):
    """A record once it has messages."""

    messages: list[_Message] = Field(min_length=1)
    tools: list[dict[str, Any]] | Json[list[dict[str, Any]]] = []
    chat_template_kwargs: dict[str, Any] = {}


def parse_record(record: dict, where: str) -> Conversation:
    """The conversation of a record. Raises `UserError` for a broken one, naming its place."""
    try:
        return _parsed(where, without_nulls(record))
    except ValueError as e:
        said = str(e)
        if isinstance(e, ValidationError):
            errors = e.errors()[:2]  # a value of two kinds has one for each
            said = ", ".join(f"{'.'.join(map(str, x['loc']))}: {x['msg']}" for x in errors)
        raise UserError(f"{where}: {said}; mend the record or leave it out") from None


def without_nulls(value: Any) -> Any:
    """A value without the nulls that tables put where a row lacks a key of another one."""
    if isinstance(value, dict):
        return {key: without_nulls(one) for key, one in value.items() if one is not None}
    return [without_nulls(one) for one in value] if isinstance(value, list) else value


def _parsed(where: str, record: dict) -> Conversation:
    """The conversation of a record. Raises `ValueError`."""
    if items := [key for key in _ITEMS if record.get(key)]:
        raise ValueError(f"it has {', '.join(items)}: data.images.path reads such records")
    if "prompt" in record and "completion" in record and "messages" not in record:
        prompt, completion = record["prompt"], record["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            if not completion:
                raise ValueError("its completion is empty")
            return Conversation(where, plain=(prompt, completion))
        if not isinstance(prompt, list) or not isinstance(completion, list):
            raise ValueError("prompt and completion are neither two texts nor two lists")
        given, first = [*prompt, *completion], len(prompt)
    else:
        given, first = _messages(record), 0
    found = _Record.model_validate(record | {"messages": given})
    pairs = zip(found.messages, given, strict=True)
    messages = [message.for_template(one) for message, one in pairs]
    roles = [message.role for message in found.messages]
    calls = [bool(message.tool_calls) for message in found.messages]
    if "tool" in roles and not any(calls[: roles.index("tool")]):
        raise ValueError("a tool answers before it is called")
    trained = [message.role == "assistant" and message.weight for message in found.messages]
    answers = [number for number in range(first, len(trained)) if trained[number]]
    if not answers:
        raise ValueError("the assistant says nothing that is trained on")
    if _GIVEN.intersection(found.chat_template_kwargs):
        raise ValueError(f"chat_template_kwargs sets one of {', '.join(sorted(_GIVEN))}")
    return Conversation(where, messages, answers, found.tools or None, found.chat_template_kwargs)


def _messages(record: dict) -> list[dict[str, Any]]:
    """The messages of a record of one of three formats, not yet checked."""
    if "messages" in record:
        return record["messages"]
    before = [{"role": "system", "content": record["system"]}] if record.get("system") else []
    if "conversations" in record:
        turns = record["conversations"]
        if isinstance(turns, list) and turns and "role" in turns[0]:
            return before + turns
        turns = _ShareGpt.model_validate(record).conversations
        return before + [turn.message() for turn in turns]
    if "instruction" not in record or "output" not in record:
        has = ", ".join(map(repr, sorted(record)[:8])) or "nothing"
        raise ValueError(
            "none of messages, conversations, instruction and output, or prompt and completion, "
            f"but {has}"
        )
    said = _Alpaca.model_validate(record)
    question = "\n\n".join(filter(None, (said.instruction, said.input)))
    for asked, answer in [*said.history, (question, said.output)]:
        before.append({"role": "user", "content": asked})
        before.append({"role": "assistant", "content": answer})
    return before
