"""Records in four formats as messages for chat templates, or as a prompt with its completion.

The formats are OpenAI's messages, ShareGPT, Alpaca and pairs of prompt and completion; a record's
keys say which it is. Invariant: what a conversation holds of a record is all its text; a record
with more than that, such as images, is refused.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mjax.data.base.conversations import SPEAKERS
from mjax.errors import UserError
from mjax.json_file import parse_json

ROLES = "system", "developer", "user", "assistant", "tool"
_SPEAKERS = SPEAKERS | {name: name for name in ROLES}
_SPEAKERS |= {"chatgpt": "assistant", "observation": "tool", "function_call": "assistant"}
_KNOWN = "messages, conversations, instruction and output, or prompt and completion"
_GIVEN = {"messages", "tools", "documents", "add_generation_prompt"}  # to a template, by us


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


def parse_record(where: str, record: dict) -> Conversation:
    """The conversation of a record. Raises `UserError` for a broken one, naming its place."""
    try:
        return _parsed(where, record)
    except _Broken as e:
        raise UserError(f"{where}: {e}; mend the record or leave it out") from None


class _Broken(Exception):
    """A record that is no conversation; the message says why."""


def _parsed(where: str, record: dict) -> Conversation:
    first = 0
    if "messages" in record:
        messages = _messages(record["messages"], "messages")
    elif "conversations" in record:
        messages = _share_gpt(record)
    elif "instruction" in record and "output" in record:
        messages = _alpaca(record)
    elif "prompt" in record and "completion" in record:
        prompt, completion = record["prompt"], record["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            if not completion:
                raise _Broken("its completion is empty")
            return Conversation(where, plain=(prompt, completion))
        first = len(_messages(prompt, "prompt"))
        messages = [*_messages(prompt, "prompt"), *_messages(completion, "completion")]
    else:
        has = ", ".join(map(repr, sorted(record)[:8])) or "nothing"
        raise _Broken(f"none of {_KNOWN}, but {has}")
    if items := [key for key in ("image", "images", "videos", "audio") if record.get(key)]:
        raise _Broken(f"it has {', '.join(items)}: data.images.path reads such records")
    _require_calls(messages)
    answers = [n for n, m in enumerate(messages) if m["role"] == "assistant" and n >= first]
    answers = [n for n in answers if messages[n].pop("weight", 1)]
    if not answers:
        raise _Broken("the assistant says nothing that is trained on")
    return Conversation(where, messages, answers, _tools(record), _variables(record))


def _messages(given: Any, key: str) -> list[dict[str, Any]]:
    """Messages with checked roles and contents that are texts."""
    if not isinstance(given, list) or not all(isinstance(one, dict) for one in given):
        raise _Broken(f"{key} is no list of messages")
    if not given:
        raise _Broken(f"{key} is empty")
    return [_message({k: v for k, v in one.items() if v is not None}) for one in given]


def _message(message: dict[str, Any]) -> dict[str, Any]:
    role = message.get("role")
    if role not in ROLES:
        raise _Broken(f"role {role!r} is none of {', '.join(ROLES)}")
    message["content"] = _text(message.get("content", ""), role)
    for key in ("reasoning_content", "thinking", "name", "tool_call_id"):
        if not isinstance(message.get(key, ""), str):
            raise _Broken(f"{key} of a message is no text")
    if message.get("weight", 1) not in (0, 1):
        raise _Broken(f"weight {message['weight']!r} of a message is neither 0 nor 1")
    if "tool_calls" in message:
        message["tool_calls"] = _calls(message["tool_calls"], role)
    said = message["content"], message.get("tool_calls"), message.get("reasoning_content")
    if role == "assistant" and not any(said):
        raise _Broken("an answer is empty")
    return message


def _text(content: Any, role: str) -> str:
    """Joins the texts of a content of typed parts."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    for part in parts:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            kind = part.get("type", "?") if isinstance(part, dict) else type(part).__name__
            raise _Broken(f"the content of a message of {role} is no text but {kind!r}")
    return "".join(part["text"] for part in parts)


def _calls(calls: Any, role: str) -> list[dict[str, Any]]:
    """Calls of tools, whose arguments are dictionaries, as chat templates want them."""
    if role != "assistant" or not isinstance(calls, list):
        raise _Broken(f"tool_calls of {role} are no list of an assistant's")
    return [_call(call) for call in calls]


def _call(call: Any) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _Broken("a tool call has no function with a name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):  # OpenAI's files have them as JSON, which would be quoted twice
        arguments = _from_json(arguments or "{}", "arguments of a tool call")
    if not isinstance(arguments, dict):
        raise _Broken("arguments of a tool call are no dictionary")
    rest = {key: call[key] for key in ("id",) if key in call}
    function = {"name": function["name"], "arguments": arguments}
    return {"type": "function", **rest, "function": function}


def _require_calls(messages: Sequence[dict[str, Any]]) -> None:
    """Raise `_Broken` for a result of a tool that nothing called."""
    called = False
    for message in messages:
        called |= bool(message.get("tool_calls"))
        if message["role"] == "tool" and not called:
            raise _Broken("a tool answers before it is called")


def _share_gpt(record: dict) -> list[dict[str, Any]]:
    turns = record["conversations"]
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise _Broken("conversations is no list of turns")
    if turns and "role" in turns[0]:
        return _messages(turns, "conversations")
    messages = [{"role": "system", "content": record["system"]}] if record.get("system") else []
    for turn in turns:
        name, value = turn.get("from"), turn.get("value")
        if name not in _SPEAKERS:
            raise _Broken(f"a turn is from {name!r}, none of {', '.join(_SPEAKERS)}")
        message = {"role": _SPEAKERS[name], "content": value}
        if name == "function_call":
            call = _from_json(value, "value of a function_call")
            message |= {"content": "", "tool_calls": call if isinstance(call, list) else [call]}
        if "weight" in turn:
            message["weight"] = turn["weight"]
        messages.append(message)
    return _messages(messages, "conversations")


def _alpaca(record: dict) -> list[dict[str, Any]]:
    """A system text, earlier turns under `history`, the instruction with its input, the output."""
    said = [record["instruction"], record.get("input") or ""]
    if not all(isinstance(text, str) for text in said):
        raise _Broken("instruction or input is no text")
    history = record.get("history") or []
    pairs = isinstance(history, list) and all(isinstance(p, list) and len(p) == 2 for p in history)
    if not pairs:
        raise _Broken("history is no list of pairs")
    messages = [{"role": "system", "content": record["system"]}] if record.get("system") else []
    question = "\n\n".join(filter(None, said))
    for asked, answer in [*history, [question, record["output"]]]:
        if not asked:
            raise _Broken("instruction is empty")
        messages.append({"role": "user", "content": asked})
        messages.append({"role": "assistant", "content": answer})
    return _messages(messages, "output")


def _tools(record: dict) -> list[dict[str, Any]] | None:
    """The tools of a record, which may be JSON in a text."""
    tools = record.get("tools") or None
    if isinstance(tools, str):
        tools = _from_json(tools, "tools") or None
    is_list = isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
    if tools is not None and not is_list:
        raise _Broken("tools is no list of JSON schemas")
    return tools


def _variables(record: dict) -> dict[str, Any]:
    given = record.get("chat_template_kwargs") or {}
    if not isinstance(given, dict) or _GIVEN.intersection(given):
        raise _Broken(f"chat_template_kwargs is no dictionary without {', '.join(sorted(_GIVEN))}")
    return given


def _from_json(text: Any, what: str) -> Any:
    try:
        return parse_json(text)
    except (TypeError, json.JSONDecodeError, ValueError):
        raise _Broken(f"{what}: no JSON") from None
