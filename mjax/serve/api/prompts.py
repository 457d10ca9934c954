"""Prompts as ids, from texts, ids and conversations; in threads, as this may take long.

Templates are the model's own and run in a sandbox with a limit of time (`mjax/data/base/chat.py`).
A request gives variables to a template, never the template.
"""

import asyncio
import contextlib
import functools
import json
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from mjax.data.base.chat import MARKS, TOKENS, ChatTemplate, load_chat_template
from mjax.data.base.documents import read_text
from mjax.data.base.token_pieces import TokenPieces
from mjax.data.base.tokenizer import Tokenizer
from mjax.errors import UserError
from mjax.serve.api.images import IMAGE_MARK, expanded_ids, images_of
from mjax.serve.api.limits import ApiOptions
from mjax.serve.base.engines import Engines
from mjax.serve.protocol.chat_request import Message, MessagePart, Tool
from mjax.serve.protocol.errors import ApiError

RESERVED = frozenset(
    """self messages tools documents marked add_generation_prompt continue_final_message
    chat_template tokenize""".split()
) | {*TOKENS}
_LETTERS = 64  # more characters than that no text has for each token
_READS_PARTS = re.compile(r"""(content|item|part|block)\w*(\.type\b|\[['"]type['"]\])""")
Made = TypeVar("Made")


@dataclass(frozen=True)
class ChatPrompt:
    """Messages and how they are rendered; `continues`: the last one is not complete."""

    messages: Sequence[Message]
    tools: Sequence[Tool] = ()
    opens_reply: bool = True
    continues: bool = False
    variables: dict[str, Any] | None = None

    @classmethod
    def of(cls, body: Any, tools: Sequence[Tool], variables: dict[str, Any]) -> "ChatPrompt":
        """The conversation of a request."""
        continues = bool(body.continue_final_message)
        opens = body.add_generation_prompt is not False and not continues
        return cls(body.messages, tools, opens, continues, variables)


class PromptMaker:
    """Makes ids of what requests ask, and texts of ids, for one model."""

    def __init__(self, engines: Engines, options: ApiOptions):
        """Raises `UserError` for a file of a template that cannot be read."""
        self._engines = engines
        self.template = _template(engines.facts.folder, options.chat_template)
        self._pool = ThreadPoolExecutor(options.threads, "mjax-prompts")
        self._pieces: dict[int, tuple[str, list[int] | None]] = {}

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's. Raises `ApiError` where it has none."""
        if self._engines.tokenizer is None:
            raise ApiError(400, "the model has no tokenizer: give ids to /inference/v1/generate")
        return self._engines.tokenizer

    async def in_thread(self, function: Callable[..., Made], *given: Any) -> Made:
        """The result of a function that takes long."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *given)

    async def of_texts(
        self, texts: Sequence[str], with_prefix: bool | None = None
    ) -> list[list[int]]:
        """Ids of texts, but for `with_prefix` false after those that the model wants before one."""
        self._require_short(texts, "prompt")
        prefix = () if with_prefix is False else self.tokenizer.prefix
        found = await self.in_thread(self.tokenizer.encode_batch, list(texts))
        return [[*prefix, *ids] for ids in found]

    async def of_ids(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens among them."""
        self.require_ids(ids, "tokens")
        decode = self.tokenizer.decode_whole or self.tokenizer.decode
        return await self.in_thread(decode, list(ids))

    async def of_chat(self, chat: ChatPrompt) -> tuple[str, list[int], list[np.ndarray]]:
        """The text of a conversation, its ids, and its images, fp32 [H, W, C]."""
        if self.template is None:
            raise ApiError(
                400,
                "the model has no chat template: ask /v1/completions (mjax chat --raw)",
                "messages",
            )
        if wrong := RESERVED & (chat.variables or {}).keys():
            name = f"chat_template_kwargs.{min(wrong)}"
            raise ApiError(400, f"{name}: the server sets this variable", name)
        return await self.in_thread(self._made, chat)

    def _made(self, chat: ChatPrompt) -> tuple[str, list[int], list[np.ndarray]]:
        image, encode = self._engines.facts.image, self.tokenizer.encode
        images = images_of(image, chat.messages)
        text = self._render(chat)
        self._require_short([text], "messages")
        return text, expanded_ids(encode, text, encode(text), image, images), images

    def require_ids(self, ids: Sequence[int], param: str) -> None:
        """Raise `ApiError` for ids that are not the model's, or too many."""
        facts = self._engines.facts
        if not ids:
            raise ApiError(400, f"{param}: give one or more tokens", param)
        if min(ids) < 0 or max(ids) >= facts.vocab_size:
            raise ApiError(400, f"{param}: give ids in [0, {facts.vocab_size})", param)

    def cut(self, ids: list[int], most: int | None, room: int) -> list[int]:
        """The last `most` ids; -1: as many as leave room for so many new ones; None: all."""
        if most == -1:
            most = max(self._engines.facts.max_model_len - room, 1)
        return ids if most is None else ids[max(len(ids) - most, 0) :]

    def require_room(self, count: int, param: str) -> None:
        """Raise `ApiError` unless a token fits behind a prompt of so many."""
        most = self._engines.facts.max_model_len
        if count >= most:
            message = f"{count} tokens leave no room for a new one within {most}"
            raise _too_long(f"{message}, the longest text of this model; shorten it", param)

    def piece(self, token: int) -> tuple[str, list[int] | None]:
        """The text of a token, and its bytes if they are known."""
        if (found := self._pieces.get(token)) is None:
            found = self._pieces[token] = self._new_piece(token)
        return found

    def _new_piece(self, token: int) -> tuple[str, list[int] | None]:
        tokenizer = self._engines.tokenizer
        if tokenizer is None or token >= tokenizer.vocab_size:
            return "", None
        text, known = self._token_pieces(token)
        return text, [*known] or None

    @functools.cached_property
    def _token_pieces(self) -> TokenPieces:
        return TokenPieces(self.tokenizer)

    def _require_short(self, texts: Sequence[str], param: str) -> None:
        longest = max(map(len, texts), default=0)
        if longest > _LETTERS * self._engines.facts.max_model_len:
            raise _too_long(f"{longest} characters are longer than any text of this model", param)

    def _render(self, chat: ChatPrompt) -> str:
        messages = [_plain(message, self.template) for message in chat.messages]
        mark = MARKS[0]
        if chat.continues:
            _mark_end(messages[-1], mark)
        tools = [tool.model_dump(exclude_unset=True) for tool in chat.tools] or None
        variables = chat.variables or {}
        text = self.template.render(messages, chat.opens_reply, tools, **variables)
        if chat.continues:
            text, found, _ = text.rpartition(mark)
            if not found:
                raise UserError("continue_final_message: the template leaves out the last message")
        return text


def _too_long(message: str, param: str) -> ApiError:
    return ApiError(400, f"{param}: {message}", param, "context_length_exceeded")


def _template(folder: Path | None, file: str | None) -> ChatTemplate | None:
    """The template of the model, or of a file; its messages name no path of this machine."""
    found = None
    with contextlib.suppress(UserError):
        found = None if folder is None else load_chat_template(folder)
    if file is not None:
        source = read_text(Path(file).expanduser())
        return ChatTemplate(source, "messages", {} if found is None else found.tokens)
    return None if found is None else replace(found, origin="messages")


def _plain(message: Message, template: ChatTemplate) -> dict[str, Any]:
    """A message as templates read it: parts joined, arguments of calls as objects."""
    said = message.model_dump(exclude_unset=True)
    if message.role == "developer" and "developer" not in template.source:
        said["role"] = "system"
    if "reasoning" in said:  # templates know the other name
        said.setdefault("reasoning_content", said["reasoning"])
    if isinstance(message.content, list):
        said["content"] = _joined_parts(message.content, template)
    calls = [dict(call) for call in message.tool_calls or ()]
    for call in calls:
        function = call.get("function")
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            call["function"] = function | {"arguments": _object(function["arguments"])}
    return said | ({"tool_calls": calls} if calls else {})


def _object(arguments: str) -> Any:
    """Arguments as an object, or as they are where they are no JSON."""
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


def _joined_parts(
    parts: Sequence[MessagePart], template: ChatTemplate
) -> str | list[dict[str, str]]:
    """Parts of a message as one text, or as a list where the template reads one."""
    found = []
    for part in parts:
        if part.type not in ("text", "image_url"):
            name = "messages.content.type"
            raise ApiError(400, f"{name}: {part.type[:40]!r} is neither text nor image_url", name)
        if part.type == "text" and part.text is None:
            raise ApiError(400, "messages.content.text: it is missing", "messages.content.text")
        own = {"type": "text", "text": part.text} if part.type == "text" else {"type": "image"}
        found.append(own)
    if _READS_PARTS.search(template.source):
        return found
    return "\n".join(part.get("text", IMAGE_MARK) for part in found)


def _mark_end(message: dict[str, Any], mark: str) -> None:
    """Put a mark behind the last text of a message."""
    content = message["content"]
    if isinstance(content, str):
        message["content"] = content + mark
    elif content and content[-1]["type"] == "text":
        message["content"] = [*content[:-1], content[-1] | {"text": content[-1]["text"] + mark}]
    else:
        raise UserError("continue_final_message: the last message does not end with a text")
