"""/v1/chat/completions: conversations that are answered, with tools and reasoning.

A reply that is complete is the sum of the deltas of its stream. Calls that a request demands are a
form of the text (`json_schema`), so that they are always well formed; other calls and reasoning are
found in the text by a parser of the model's own marks.
"""

import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from fastapi import APIRouter, Request
from starlette.responses import Response

from mjax.errors import UserError
from mjax.serve.demanded_calls import NamedCall, schema_of_calls
from mjax.serve.limits import event
from mjax.serve.parsers import Delta, guess_parsers, opens_reasoning, reply_parser
from mjax.serve.prompts import Conversation
from mjax.serve.protocol.chat_request import ChatRequest, NamedTool, Tool
from mjax.serve.protocol.errors import ApiError
from mjax.serve.service import Job, Numbered, Service, Usage, head
from mjax.serve.token_logprobs import TokenNames


class _Parser(Protocol):
    def push(self, text: str) -> Delta: ...

    def close(self) -> Delta: ...


class _Choice:
    """One answer as it comes."""

    def __init__(self, parser: _Parser, shows_reasoning: bool, is_call: bool):
        """`is_call`: nothing but calls is demanded; a call that was cut is no content."""
        self._parser, self._shows_reasoning, self._is_call = parser, shows_reasoning, is_call
        self._calls: set[int] = set()
        self.is_new = True

    def push(self, text: str, is_last: bool) -> tuple[dict[str, Any], bool]:
        """(the fields of a delta, whether there is reasoning and nothing else in it)."""
        parts = [self._parser.push(text)]
        if is_last:
            parts.append(self._parser.close())
        content = "".join(part.content for part in parts if not self._is_call)
        reasoning = "".join(part.reasoning for part in parts)
        calls = [self._call(call) for part in parts for call in part.tool_calls]
        found: dict[str, Any] = {}
        if content:
            found["content"] = content
        if reasoning and self._shows_reasoning:
            found |= {"reasoning": reasoning, "reasoning_content": reasoning}
        if calls:
            found["tool_calls"] = calls
        return found, bool(reasoning) and not content and not calls

    def _call(self, call: Any) -> dict[str, Any]:
        function = {"arguments": call.arguments}
        if call.index in self._calls:
            return {"index": call.index, "function": function}
        self._calls.add(call.index)
        id = f"call_{uuid.uuid4().hex[:24]}"
        function = {"name": call.name, "arguments": call.arguments}
        return {"index": call.index, "id": id, "type": "function", "function": function}

    def reason(self, given: str) -> str:
        """Why it ended."""
        return "tool_calls" if self._calls and given == "stop" else given


class Chat:
    """One request: its job, and its reply as one object or as chunks."""

    def __init__(self, service: Service, body: ChatRequest, request_id: str):
        self.service, self.body, self.id = service, body, request_id
        self.names = TokenNames(service.prompts, body.return_tokens_as_token_ids)
        self.model = body.model or service.engines.facts.name
        self.usage = Usage()
        self._guessed = _parsers(service)
        self._in_reasoning = False
        self.job: Job | None = None

    # ---- what is asked ---------------------------------------------------------------------------

    async def prepare(self) -> None:
        """Make the job. Raises `ApiError` and `UserError` for what cannot be served."""
        body, service = self.body, self.service
        service.require_text_model()
        most = body.max_completion_tokens or body.max_tokens
        own: dict[str, Any] = {"adapter": service.adapter(body.model), "max_tokens": most}
        if body.logprobs:
            own["logprobs"] = body.top_logprobs or 0
        if (form := self._form()) is not None:
            own["structured"] = form
        self._is_formed = form is not None
        if self._tools and body.tool_choice in (None, "auto") and self._guessed[0] is None:
            raise ApiError(
                400,
                "tools: the calls of this model have no known form; use tool_choice=required, or "
                "start the server with a parser",
                "tools",
            )
        if body.skip_special_tokens is None and self._reads_marks:
            own["skip_special_tokens"] = False  # marks of calls and reasoning are often such
        params = body.params(service.engines.facts.defaults, **own)
        if params.n > service.options.most_choices:
            most = service.options.most_choices
            raise ApiError(400, f"n: at most {most} choices are made", "n")
        text, ids, images = await service.prompts.of_chat(self._conversation())
        self._in_reasoning = opens_reasoning(text, self._guessed[1])
        if (cut := body.truncate_prompt_tokens) is not None:
            ids = ids[-(cut if cut > 0 else service.engines.facts.max_model_len - 1) :]
        service.prompts.require_ids(ids, "messages")
        service.prompts.require_room(len(ids), "messages")
        self.job = Job(self.id, ids, params, text, images)
        self.usage = Usage.of([self.job])

    @property
    def _tools(self) -> Sequence[Tool]:
        """The tools that the model may call."""
        return () if self.body.tool_choice == "none" else self.body.tools or ()

    @property
    def _demands_call(self) -> bool:
        return self.body.tool_choice == "required" or isinstance(self.body.tool_choice, NamedTool)

    @property
    def _reads_marks(self) -> bool:
        """Whether a parser reads the reply."""
        tools, reasoning = self._guessed
        has_tools = bool(self._tools) and tools is not None
        return not self._is_formed and (has_tools or reasoning is not None)

    def _form(self) -> dict[str, Any] | None:
        form = self.body.form()
        if not self._demands_call:
            return form
        if form is not None:
            raise UserError("tool_choice: a demanded call and another form cannot both be had")
        is_named = isinstance(self.body.tool_choice, NamedTool)
        name = self.body.tool_choice.function.name if is_named else None
        several = self.body.parallel_tool_calls is not False
        return {"json_schema": schema_of_calls(self._tools, name, several)}

    def _conversation(self) -> Conversation:
        body = self.body
        variables = dict(body.chat_template_kwargs or {})
        if body.reasoning_effort is not None:
            variables.setdefault("reasoning_effort", body.reasoning_effort)
            if body.reasoning_effort == "none":
                variables.setdefault("enable_thinking", False)
        continues = bool(body.continue_final_message)
        opens = body.add_generation_prompt is not False and not continues
        return Conversation(body.messages, self._tools, opens, continues, variables)

    # ---- the reply -------------------------------------------------------------------------------

    def _choices(self) -> list[_Choice]:
        shows = self.body.include_reasoning is not False
        given = shows, self._demands_call
        return [_Choice(self._parser(), *given) for _ in range(self.job.params.n)]

    def _parser(self) -> _Parser:
        if isinstance(self.body.tool_choice, NamedTool):
            return NamedCall(self.body.tool_choice.function.name)
        if self._demands_call:
            return reply_parser("json", None, has_tools=True, in_reasoning=False)
        tools, reasoning = self._guessed if self._reads_marks else (None, None)
        return reply_parser(
            tools,
            reasoning,
            has_tools=bool(self._tools),
            in_reasoning=self._in_reasoning and reasoning is not None,
            definitions=[tool.model_dump() for tool in self._tools],
        )

    def _delta(self, choice: _Choice, each: Numbered) -> dict[str, Any]:
        """What a piece adds to a choice: `delta` and fields beside it."""
        body, piece = self.body, each.piece
        self.usage.add(each.job, piece)
        is_last = piece.finish_reason is not None
        delta, is_reasoning = choice.push(piece.text, is_last)
        self.usage.reasoning += len(piece.token_ids) if is_reasoning else 0
        found = {"index": each.number, "delta": delta, "logprobs": None, "finish_reason": None}
        if body.logprobs:
            found["logprobs"] = self.names.chat(piece, body.top_logprobs or 0)
        if is_last:
            found["finish_reason"] = choice.reason(piece.finish_reason)
            found["stop_reason"] = piece.stop_reason
        if body.return_token_ids:
            found["token_ids"] = piece.token_ids
        return found

    async def whole(self) -> dict[str, Any]:
        """The reply as one object."""
        choices = self._choices()
        bodies: list[dict[str, Any]] = [{} for _ in choices]
        scores = None
        async with aclosing(self.service.pieces([self.job])) as pieces:
            async for each in pieces:
                _add(bodies[each.number], self._delta(choices[each.number], each))
                scores = each.piece.prompt_logprobs or scores
        found = head(self.id, "chat.completion", self.model)
        found |= {"choices": bodies, "usage": self.usage.body}
        if self.body.return_token_ids:
            found["prompt_token_ids"] = [*self.job.prompt]
        if scores is not None:
            found["prompt_logprobs"] = self.names.prompt(scores)
        return found

    async def chunks(self) -> AsyncGenerator[bytes]:
        """The reply as events."""
        body, first = self.body, head(self.id, "chat.completion.chunk", self.model)
        choices = self._choices()
        shown = {"usage": None} if body.wants_usage else {}
        in_each = body.wants_usage and body.stream_options.continuous_usage_stats
        ids = {"prompt_token_ids": [*self.job.prompt]} if body.return_token_ids else {}
        async with aclosing(self.service.pieces([self.job])) as pieces:
            async for each in pieces:
                choice = choices[each.number]
                if choice.is_new:
                    choice.is_new = False
                    delta = {"role": "assistant", "content": ""}
                    empty = {"index": each.number, "delta": delta, "logprobs": None}
                    opened = empty | {"finish_reason": None}
                    yield event(first | {"choices": [opened]} | shown | ids)
                found = self._delta(choice, each)
                own = {"usage": self.usage.body} if in_each else shown
                yield event(first | {"choices": [found]} | own)
        if body.wants_usage:
            yield event(first | {"choices": [], "usage": self.usage.body})


def _add(choice: dict[str, Any], new: dict[str, Any]) -> None:
    """Add a delta to the object of a choice."""
    message = choice.setdefault("message", {"role": "assistant", "content": None})
    delta = new.pop("delta")
    for name in ("content", "reasoning", "reasoning_content"):
        if name in delta:
            message[name] = (message.get(name) or "") + delta[name]
    for call in delta.get("tool_calls", ()):
        calls = message.setdefault("tool_calls", [])
        if (index := call.pop("index")) < len(calls):
            calls[index]["function"]["arguments"] += call["function"]["arguments"]
        else:
            calls.append(call)
    if new["logprobs"] and choice.get("logprobs"):
        choice["logprobs"]["content"] += new.pop("logprobs")["content"]
    if "token_ids" in choice:
        choice["token_ids"] += new.pop("token_ids")
    choice |= new
    is_empty = message["content"] is None and "tool_calls" not in message
    if choice["finish_reason"] is not None and is_empty:
        message["content"] = ""


def _parsers(service: Service) -> tuple[str | None, str | None]:
    """The names of the parsers of calls and of reasoning."""
    options, template = service.options, service.prompts.template
    tools, reasoning = guess_parsers(template.source) if template else (None, None)
    return options.tool_parser or tools, options.reasoning_parser or reasoning


def add_chat(router: APIRouter, service: Service) -> None:
    """Add the route."""

    @router.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        ends = service.ends(body.timeout)
        asked = Chat(service, body, service.new_id("chatcmpl", request, body.request_id))
        await service.within(request, ends, asked.prepare())
        if body.stream:
            return await service.streamed(request, ends, asked.chunks())
        return service.json(asked.id, await service.within(request, ends, asked.whole()))
