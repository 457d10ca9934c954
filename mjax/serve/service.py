"""The way from a request to the samples of an engine, which all routes for text share.

A route makes `Job`s, one for each prompt; their samples come as one stream of pieces, in the order
in which they are made. Invariant: whatever ends a reply, no job is left in an engine.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from mjax.errors import UserError
from mjax.infer.async_engine import EngineDied
from mjax.infer.requests import SamplingParams
from mjax.infer.scheduling.scheduler import QueueFull
from mjax.serve.engines import Engines, Piece
from mjax.serve.limits import ApiOptions, EventStream, Result, json_reply, unless_gone
from mjax.serve.metrics import ApiMetrics, RequestTimes
from mjax.serve.prompts import Prompts
from mjax.serve.protocol.errors import ApiError, error_of_user

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """A prompt and how it is continued; its samples have the numbers `first`, `first` + 1 .."""

    id: str
    prompt: Sequence[int]
    params: SamplingParams
    text: str | None = None
    images: Sequence[np.ndarray] = ()
    first: int = 0


class Numbered(NamedTuple):
    """A piece, its job and the number of its sample among those of all jobs."""

    number: int
    job: Job
    piece: Piece


@dataclass
class Usage:
    """Tokens of a reply, as they come."""

    prompt: int = 0
    completion: int = 0
    reasoning: int = 0
    cached: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, jobs: Sequence[Job]) -> "Usage":
        return cls(sum(len(job.prompt) for job in jobs))

    def add(self, job: Job, piece: Piece) -> None:
        """Count a piece."""
        self.completion += len(piece.token_ids)
        if piece.cached_tokens:
            self.cached[job.id] = piece.cached_tokens

    @property
    def body(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": sum(self.cached.values())},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning},
        }


@dataclass
class Service:
    """What routes work with."""

    engines: Engines
    options: ApiOptions
    metrics: ApiMetrics
    prompts: Prompts
    running: set[str] = field(default_factory=set)

    def adapter(self, model: str | None) -> str | None:
        """The adapter that a request's model names. Raises `ApiError` for a name that is none."""
        facts = self.engines.facts
        if model in (None, "", facts.name):
            return None
        if model not in facts.adapters:
            have = ", ".join((facts.name, *facts.adapters))
            message = f"there is no model {model[:200]!r} here; give one of {have}"
            raise ApiError(404, message, "model", "model_not_found")
        return model

    def require_text_model(self) -> None:
        """Raise `ApiError` for a model that continues no text."""
        if self.engines.facts.is_encoder:
            raise ApiError(400, "this model continues no text: ask /v1/embeddings", "model")

    def new_id(self, kind: str, request: Request, given: str | None) -> str:
        """The id of a reply; a caller may give its last part."""
        given = given or request.headers.get("x-request-id", "")
        usable = given[:128] if given.isascii() and given.isprintable() else ""
        return f"{kind}-{usable or uuid.uuid4().hex}"

    def ends(self, timeout: float | None) -> float | None:
        """The loop's time at which a request that comes now is late."""
        limits = [limit for limit in (self.options.deadline, timeout) if limit is not None]
        return asyncio.get_running_loop().time() + min(limits) if limits else None

    async def within(
        self, request: Request, ends: float | None, work: Coroutine[Any, Any, Result]
    ) -> Result:
        """The result of work, unless it is late or its caller gone."""
        try:
            async with asyncio.timeout_at(ends):
                return await unless_gone(request.receive, work)
        except TimeoutError as e:
            raise self.as_error(e) from None

    async def streamed(
        self, request: Request, ends: float | None, events: AsyncGenerator[bytes]
    ) -> Response:
        """A stream of events. What ends it before its first one is an error with its status."""
        try:
            first = await self.within(request, ends, anext(events))
        except BaseException:
            await events.aclose()
            raise
        return EventStream(first, events, self.options.slow_seconds, ends, self.as_error)

    async def pieces(self, jobs: Sequence[Job]) -> AsyncIterator[Numbered]:
        """Yield the pieces of all samples of jobs that run at a time."""
        if len(jobs) == 1:
            async with aclosing(self._of_job(jobs[0])) as stream:
                async for each in stream:
                    yield each
            return
        news: asyncio.Queue[Numbered | BaseException | None] = asyncio.Queue()
        tasks = [asyncio.ensure_future(self._fill(news, job)) for job in jobs]
        try:
            left = len(tasks)
            while left:
                each = await news.get()
                if isinstance(each, BaseException):
                    raise each
                left -= each is None
                if each is not None:
                    yield each
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _fill(self, news: asyncio.Queue, job: Job) -> None:
        last = None
        try:
            async with aclosing(self._of_job(job)) as stream:
                async for each in stream:
                    news.put_nowait(each)
        except Exception as e:
            last = e
        news.put_nowait(last)

    async def _of_job(self, job: Job) -> AsyncIterator[Numbered]:
        params, open_samples = job.params, job.params.n
        times = RequestTimes(self.metrics, len(job.prompt), params.n, params.max_tokens)
        found = self.engines.generate(
            job.prompt, params, request_id=job.id, text=job.text, images=job.images
        )
        self.running.add(job.id)
        try:
            async with aclosing(found) as pieces:
                async for piece in pieces:
                    times.add(piece.index, len(piece.token_ids), piece.finish_reason)
                    open_samples -= piece.finish_reason is not None
                    if piece.finish_reason == "error":
                        raise UserError(f"structured_outputs: {piece.stop_reason}")
                    yield Numbered(job.first + piece.index, job, piece)
        except QueueFull:
            self.metrics.rejected.inc()
            raise
        finally:
            self.running.discard(job.id)
            times.end(open_samples == 0)

    def as_error(self, error: BaseException) -> ApiError:
        """What is sent for an error: nothing of the inside of this server."""
        match error:
            case ApiError():
                return error
            case QueueFull():
                wait = {"Retry-After": str(self.options.retry_after)}
                message = "too much is waiting already; ask again later"
                return ApiError(503, message, None, "queue_full", wait)
            case UserError():
                return error_of_user(error)
            case TimeoutError():
                again = {"x-should-retry": "false"}
                return ApiError(504, "the request took too long", None, "deadline", again)
            case EngineDied():
                return ApiError(503, "the engine has ended", None, "engine_dead")
        log.error("a request failed", exc_info=error)
        return ApiError(500, "the server failed; its log says more", None, "internal_error")

    def json(self, request_id: str, body: dict[str, Any]) -> Response:
        """A reply that is complete."""
        return json_reply(body, headers={"X-Request-Id": request_id})


def head(id: str, kind: str, model: str) -> dict[str, Any]:
    """The first fields of a reply or a chunk."""
    return {"id": id, "object": kind, "created": int(time.time()), "model": model}
