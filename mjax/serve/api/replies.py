"""Replies of all routes for text: one object, or a stream whose sum is that object.

A route says which jobs a request asks for, and what each piece of a sample adds to a choice.
"""

import time
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import Response

from mjax.infer.requests import SamplingParams
from mjax.serve.api.limits import EventStream, event, events_of, json_reply
from mjax.serve.api.service import Job, Numbered, Service
from mjax.serve.api.token_logprobs import TokenNames
from mjax.serve.base.engines import Piece
from mjax.serve.protocol.errors import ApiError
from mjax.serve.protocol.sampling_fields import StreamOptions

MOST_SCORES = 2**20  # log-probabilities of a prompt: more would hold up other replies
Body = dict[str, Any]


@dataclass
class Usage:
    """Tokens of a reply, as they come."""

    prompt: int = 0
    completion: int = 0
    reasoning: int = 0
    cached: dict[str, int] = field(default_factory=dict)

    def add(self, job: Job, piece: Piece) -> None:
        """Count a piece."""
        self.completion += len(piece.token_ids)
        if piece.cached_tokens:
            self.cached[job.id] = piece.cached_tokens

    @property
    def body(self) -> Body:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": sum(self.cached.values())},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning},
        }


class Reply:
    """The reply to one request. A route's class has `prepare`, which fills `jobs`, and `choice`.

    prefix: how its id begins. kinds: the names of its object and of a chunk. more: further fields
    beside the choices.
    """

    prefix: ClassVar[str]
    kinds: ClassVar[tuple[str, str]]

    def __init__(self, service: Service, body: Any, request: Request):
        self.service, self.body, self._request = service, body, request
        self.id = service.new_id(self.prefix, request, body.request_id)
        self.facts = service.engines.facts
        self.names = TokenNames(service.prompts, False)
        self.jobs: list[Job] = []
        self.usage, self.more = Usage(), {}
        if self.facts.is_encoder:
            raise ApiError(400, "model: it continues no text; ask /v1/embeddings", "model")

    async def prepare(self) -> None:
        """Make the jobs. Raises `ApiError` and `UserError` for what cannot be served."""
        raise NotImplementedError

    def choice(self, each: Numbered) -> Body:
        """The fields that a piece adds to a choice."""
        raise NotImplementedError

    def whole(self, choice: Body) -> Body:
        """The choice of a reply from the sum of its parts."""
        return choice

    def add_job(self, params: SamplingParams, prompt: list[int], param: str, **own: Any) -> None:
        """Add a job for a prompt, which the field `param` gave."""
        self.service.prompts.require_room(len(prompt), param)
        first = sum(job.params.n for job in self.jobs)
        self.require_few(first + params.n, "n")
        scores = len(prompt) * (params.prompt_logprobs or 0)
        if scores > MOST_SCORES:
            message = f"{scores} of one prompt; at most {MOST_SCORES} are sent"
            raise ApiError(400, f"prompt_logprobs: {message}", "prompt_logprobs")
        job = Job(self.id, prompt, params, first=first)
        self.jobs.append(replace(job, **own))
        self.usage.prompt += len(prompt)

    def require_few(self, count: int, param: str) -> None:
        """Raise `ApiError` for more choices than one request may have."""
        if count > (most := self.service.options.most_choices):
            raise ApiError(400, f"{param}: the request asks for over {most} choices", param)

    async def choices(self) -> AsyncIterator[Body]:
        """Yield what pieces add to choices, as they come."""
        async with aclosing(self.pieces()) as pieces:
            async for each in pieces:
                yield self.choice(each)

    async def pieces(self) -> AsyncIterator[Numbered]:
        """Yield the pieces of all samples, which are counted."""
        async with aclosing(self.service.pieces(self.jobs)) as pieces:
            async for each in pieces:
                self.usage.add(each.job, each.piece)
                yield each

    # ---- what is sent ----------------------------------------------------------------------------

    async def respond(self) -> Response:
        """The response, or an error with its status if nothing has been sent."""
        service, request = self.service, self._request
        deadline = service.late_at(self.body.timeout)
        await service.within(request, deadline, self.prepare())
        headers = {"X-Request-Id": self.id}
        if not self.body.stream:
            body = await service.within(request, deadline, self._object())
            return json_reply(body, 200, headers)
        events = self._events()
        try:
            first = await service.within(request, deadline, anext(events))
        except BaseException:
            await events.aclose()
            raise
        slow = service.options.slow_seconds
        return EventStream(first, events, headers, slow, deadline, service.as_error)

    def _head(self, kind: str) -> Body:
        model = self.body.model or self.facts.name
        return {"id": self.id, "object": kind, "created": int(time.time()), "model": model}

    async def _object(self) -> Body:
        sums: dict[int, Body] = defaultdict(dict)
        async with aclosing(self.choices()) as parts:
            async for part in parts:
                add_fields(sums[part["index"]], part)
        choices = [self.whole(sums[index]) for index in sorted(sums)]
        found = self._head(self.kinds[0]) | {"choices": choices, "usage": self.usage.body}
        return found | self.more

    async def _events(self) -> AsyncGenerator[bytes]:
        head, options = self._head(self.kinds[1]), self.body.stream_options or StreamOptions()
        usage: Body = {"usage": None} if options.include_usage else {}
        made = events_of(head)
        async with aclosing(self.choices()) as parts:
            async for part in parts:
                more, self.more = self.more, {}
                if options.include_usage and options.continuous_usage_stats:
                    usage = {"usage": self.usage.body}
                yield made(part, usage | more)
        if options.include_usage:
            yield event(head | {"choices": [], "usage": self.usage.body})


def add_fields(whole: Body, part: Body) -> None:
    """Add a part of an object: texts and lists are joined, calls by their index."""
    for name, value in part.items():
        old = whole.get(name)
        if name == "tool_calls":
            for call in value:
                add_fields(whole.setdefault(name, {}).setdefault(call["index"], {}), call)
        elif isinstance(old, dict) and isinstance(value, dict):
            add_fields(old, value)
        elif isinstance(old, str | list) and type(old) is type(value):
            whole[name] = old + value
        elif value is not None or name not in whole:
            whole[name] = dict(value) if isinstance(value, dict) else value
