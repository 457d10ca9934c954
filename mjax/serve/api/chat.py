"""/v1/chat/completions: conversations that are answered, with tools and reasoning.

Calls that a request demands are a form of the text, so that they are always well formed. Other
calls and reasoning are found in the text by a parser of the model's own marks.
"""

import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from mjax.errors import UserError
from mjax.serve.api.demanded_calls import NamedCall, schema_of_calls
from mjax.serve.api.prompts import ChatPrompt
from mjax.serve.api.replies import Body, Reply
from mjax.serve.api.service import Numbered, Service
from mjax.serve.api.token_logprobs import TokenNames
from mjax.serve.parsers.reader import ToolDelta
from mjax.serve.parsers.reasoning import opens_reasoning
from mjax.serve.parsers.reply import ReplyParser, guess_parsers, reply_parser
from mjax.serve.protocol.chat_request import ChatRequest, NamedTool, Tool
from mjax.serve.protocol.errors import ApiError


class Chat(Reply):
    """Choices with a message, in a stream with deltas of it."""

    prefix, kinds = "chatcmpl", ("chat.completion", "chat.completion.chunk")

    # ---- what is asked ---------------------------------------------------------------------------

    async def prepare(self) -> None:
        """Make the job."""
        body, service = self.body, self.service
        self.names = TokenNames(service.prompts, body.return_tokens_as_token_ids)
        form = self._form()
        self._parsers = (None, None) if form is not None else self._parsers_of_model()
        most = body.max_completion_tokens or body.max_tokens
        own: Body = {"adapter": service.adapter(body.model), "max_tokens": most}
        own |= {"structured": form, "logprobs": (body.top_logprobs or 0) if body.logprobs else None}
        if body.skip_special_tokens is None and any(self._parsers):
            own["skip_special_tokens"] = False  # marks of calls and reasoning are often such
        params = body.params(self.facts.defaults, **own)
        text, ids, images = await service.prompts.of_chat(self._conversation())
        self._in_reasoning = opens_reasoning(text, self._parsers[1])
        ids = service.prompts.cut(ids, body.truncate_prompt_tokens, most or 1)
        service.prompts.require_ids(ids, "messages")
        self.add_job(params, ids, "messages", text=text, images=images)
        self._choices = [_Choice(self._parser()) for _ in range(params.n)]
        if body.return_token_ids:
            self.more["prompt_token_ids"] = ids

    @property
    def _tools(self) -> Sequence[Tool]:
        """The tools that the model may call."""
        return () if self.body.tool_choice == "none" else self.body.tools or ()

    @property
    def _demanded(self) -> str | None:
        """The name of the tool that has to be called, "" for any; None: none has to."""
        choice = self.body.tool_choice
        if isinstance(choice, NamedTool):
            return choice.function.name
        return "" if choice == "required" else None

    def _parsers_of_model(self) -> tuple[str | None, str | None]:
        """Names of parsers of calls and reasoning, by options or the marks in the template."""
        options, template = self.service.options, self.service.prompts.template
        guessed = guess_parsers(template.source) if template else (None, None)
        tools, reasoning = options.tool_parser or guessed[0], options.reasoning_parser or guessed[1]
        if self._tools and tools is None:
            message = "the calls of this model have no known form; use tool_choice=required, or "
            raise ApiError(400, f"tools: {message}start the server with a parser", "tools")
        return tools if self._tools else None, reasoning

    def _form(self) -> Body | None:
        """The form of the text: the one that is asked for, or of the calls that have to be made."""
        form = self.body.form()
        if self._demanded is None:
            return form
        if form is not None:
            raise UserError("tool_choice: a demanded call and another form cannot both be had")
        several = self.body.parallel_tool_calls is not False
        return {"json_schema": schema_of_calls(self._tools, self._demanded, several)}

    def _conversation(self) -> ChatPrompt:
        body, variables = self.body, dict(self.body.chat_template_kwargs or {})
        if body.reasoning_effort is not None:
            variables.setdefault("reasoning_effort", body.reasoning_effort)
            if body.reasoning_effort == "none":
                variables.setdefault("enable_thinking", False)
        return ChatPrompt.of(body, self._tools, variables)

    def _parser(self) -> ReplyParser | NamedCall:
        if self._demanded:
            return NamedCall(self._demanded)
        tools, reasoning = ("json", None) if self._demanded == "" else self._parsers
        definitions = [tool.model_dump() for tool in self._tools]
        given = {"has_tools": bool(self._tools), "in_reasoning": self._in_reasoning}
        return reply_parser(tools, reasoning, definitions=definitions, **given)

    # ---- the reply -------------------------------------------------------------------------------

    async def choices(self) -> AsyncIterator[Body]:
        """Yield what pieces add; the role of each choice comes first."""
        begun: set[int] = set()
        async with aclosing(self.pieces()) as pieces:
            async for each in pieces:
                if each.number not in begun:
                    begun.add(each.number)
                    delta = {"role": "assistant", "content": ""}
                    first = {"index": each.number, "delta": delta, "logprobs": None}
                    yield first | {"finish_reason": None}
                yield self.choice(each)

    def choice(self, each: Numbered) -> Body:
        """The fields that a piece adds to a choice."""
        body, piece, choice = self.body, each.piece, self._choices[each.number]
        is_last = piece.finish_reason is not None
        delta = choice.push(piece.text, is_last)
        if self._demanded is not None:  # a call that was cut is no content
            delta.pop("content", None)
        if delta.keys() == {"reasoning"}:
            self.usage.reasoning += len(piece.token_ids)
        if "reasoning" in delta:
            said = delta.pop("reasoning")
            shows = body.include_reasoning is not False
            delta |= {"reasoning": said, "reasoning_content": said} if shows else {}
        logprobs = self.names.chat(piece, body.top_logprobs or 0) if body.logprobs else None
        found = {"index": each.number, "delta": delta, "logprobs": logprobs}
        found["finish_reason"] = piece.finish_reason
        if is_last:
            is_call = bool(choice.calls) and piece.finish_reason == "stop"
            found["finish_reason"] = "tool_calls" if is_call else piece.finish_reason
            found["stop_reason"] = piece.stop_reason
        if body.return_token_ids:
            found["token_ids"] = piece.token_ids
        if piece.prompt_logprobs is not None:
            self.more["prompt_logprobs"] = self.names.prompt(piece.prompt_logprobs)
        return found

    def whole(self, choice: Body) -> Body:
        """The choice with its message in the place of deltas."""
        message = choice.pop("delta")
        if calls := message.pop("tool_calls", None):
            for call in calls.values():
                del call["index"]
            message["tool_calls"] = [*calls.values()]
            message["content"] = message["content"] or None
        return {"index": choice["index"], "message": message, **choice}


class _Choice:
    """One answer as it comes; `calls`: indices of those that have begun."""

    def __init__(self, parser: ReplyParser | NamedCall):
        self._parser, self.calls = parser, set[int]()

    def push(self, text: str, is_last: bool) -> Body:
        """The fields that a text adds: content, reasoning, tool_calls."""
        parts = [self._parser.push(text)]
        if is_last:
            parts.append(self._parser.close())
        found: Body = {
            "content": "".join(part.content for part in parts),
            "reasoning": "".join(part.reasoning for part in parts),
            "tool_calls": [self._call(call) for part in parts for call in part.tool_calls],
        }
        return {name: value for name, value in found.items() if value}

    def _call(self, call: ToolDelta) -> Body:
        function: dict[str, Any] = {"arguments": call.arguments}
        if call.index in self.calls:
            return {"index": call.index, "function": function}
        self.calls.add(call.index)
        begun = {"index": call.index, "id": f"call_{uuid.uuid4().hex[:24]}", "type": "function"}
        return begun | {"function": {"name": call.name} | function}


def add_chat(router: APIRouter, service: Service) -> None:
    """Add the route."""

    @router.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        return await Chat(service, body, request).respond()
