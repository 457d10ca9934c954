"""The way from a request to the samples of an engine, which all routes for text share.

A route makes `Job`s, one for each prompt; their samples come as one stream of pieces, in the order
in which they are made. Invariant: whatever ends a reply, no job is left in an engine.
"""

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from starlette.requests import Request

from mjax.errors import UserError
from mjax.infer.async_engine import EngineDied
from mjax.infer.requests import SamplingParams
from mjax.infer.scheduling.scheduler import QueueFull
from mjax.serve.api.limits import ApiOptions, Outcome, unless_gone
from mjax.serve.api.metrics import ApiMetrics, RequestTimes
from mjax.serve.api.prompts import PromptMaker
from mjax.serve.base.engines import Engines, Piece
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
class Service:
    """The engines, options and helpers that routes share."""

    engines: Engines
    options: ApiOptions
    metrics: ApiMetrics
    prompts: PromptMaker
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

    def new_id(self, kind: str, request: Request, given: str | None) -> str:
        """The id of a reply; the caller may give its last part, also in a header."""
        header = request.headers.get("x-request-id", "")[:128]
        usable = f"{kind}-{header}" if header.isascii() and header.isprintable() else ""
        if given is not None:
            return f"{kind}-{given}"
        is_free = header and usable and usable not in self.running
        return usable if is_free else f"{kind}-{uuid.uuid4().hex}"

    def late_at(self, timeout: float | None) -> float | None:
        """The loop's time at which a request that comes now is late; `timeout`: its own seconds."""
        limits = [limit for limit in (self.options.deadline, timeout) if limit is not None]
        return asyncio.get_running_loop().time() + min(limits) if limits else None

    async def within(
        self, request: Request, deadline: float | None, work: Coroutine[Any, Any, Outcome]
    ) -> Outcome:
        """The result of work, unless it is late or its caller gone."""
        try:
            async with asyncio.timeout_at(deadline):
                return await unless_gone(request.receive, work)
        except TimeoutError as e:
            raise self.as_error(e) from None

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
        """The error that is sent, with nothing of the inside of this server."""
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
