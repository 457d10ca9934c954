"""/v1/completions: texts or ids that are continued, and scored with `echo`."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from mjax.serve.limits import event
from mjax.serve.protocol.completion_request import CompletionRequest
from mjax.serve.protocol.errors import ApiError
from mjax.serve.service import Job, Numbered, Service, Usage, head
from mjax.serve.token_logprobs import TokenNames, Tops


@dataclass
class _Choice:
    """One text as it comes; `offset`: of the next token in it."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    tops: list[Tops | None] = field(default_factory=list)
    offset: int = 0
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    prompt: list[Tops | None] | None = None

    def add(self, each: Numbered, echoes: bool, most: int | None) -> None:
        """Add a piece; with `echoes` the prompt, whose scores come last, stands before all."""
        piece = each.piece
        if most != 0:
            self.text += piece.text
            self.tokens += piece.token_ids
            self.logprobs += piece.logprobs
            self.tops += piece.top_logprobs or []
        self.finish_reason, self.stop_reason = piece.finish_reason, piece.stop_reason
        if most == 0 and self.finish_reason:
            self.finish_reason, self.stop_reason = "length", None
        self.prompt = piece.prompt_logprobs or self.prompt


class Completion:
    """One request: its jobs, and its reply as one object or as chunks."""

    def __init__(self, service: Service, body: CompletionRequest, request_id: str):
        self.service, self.body, self.id = service, body, request_id
        self.names = TokenNames(service.prompts, body.return_tokens_as_token_ids)
        self.model = body.model or service.engines.facts.name
        self.jobs: list[Job] = []

    async def prepare(self) -> None:
        """Make the jobs. Raises `ApiError` and `UserError` for what cannot be served."""
        body, service = self.body, self.service
        service.require_text_model()
        own: dict[str, Any] = {"adapter": service.adapter(body.model)}
        if body.max_tokens is not None:
            own["max_tokens"] = max(body.max_tokens, 1)
        if (form := body.form()) is not None:
            own["structured"] = form
        if body.logprobs is not None:
            own["logprobs"] = body.logprobs
            if body.echo:
                own["prompt_logprobs"] = body.logprobs
        params = body.params(service.engines.facts.defaults, **{"max_tokens": None} | own)
        texts, prompts = await self._prompts()
        count = len(prompts) * params.n
        if count > service.options.most_choices:
            most = service.options.most_choices
            raise ApiError(400, f"n: {count} choices in all; at most {most} are made", "n")
        for number, (text, ids) in enumerate(zip(texts, prompts, strict=True)):
            service.prompts.require_room(len(ids), "prompt")
            name = self.id if len(prompts) == 1 else f"{self.id}-{number}"
            self.jobs.append(Job(name, ids, params, text, (), number * params.n))

    async def _prompts(self) -> tuple[Sequence[str | None], Sequence[Sequence[int]]]:
        """The texts that are known, and ids."""
        body, prompts = self.body, self.service.prompts
        given = body.prompts
        if not given:
            raise ApiError(400, "prompt: give one or more", "prompt")
        if len(given) > self.service.options.most_choices:
            raise ApiError(400, f"prompt: {len(given)} are too many for one request", "prompt")
        texts: Sequence[str | None] = [None] * len(given)
        if isinstance(given[0], str):
            texts = given
            given = await prompts.of_texts(given, body.add_special_tokens is not False)
        if (cut := body.truncate_prompt_tokens) is not None:
            room = self.service.engines.facts.max_model_len - max(body.max_tokens or 1, 1)
            given = [ids[-(cut if cut > 0 else max(room, 1)) :] for ids in given]
        for ids in given:
            prompts.require_ids(ids, "prompt")
        return texts, given

    async def echoed(self, job: Job) -> str:
        """The text of a prompt."""
        return job.text if job.text is not None else await self.service.prompts.of_ids(job.prompt)

    async def whole(self) -> dict[str, Any]:
        """The reply as one object."""
        usage, choices = Usage.of(self.jobs), [_Choice() for _ in range(self._count)]
        async with aclosing(self.service.pieces(self.jobs)) as pieces:
            async for each in pieces:
                self._count_tokens(usage, each)
                choices[each.number].add(each, bool(self.body.echo), self.body.max_tokens)
        bodies = []
        for job in self.jobs:
            before = await self.echoed(job) if self.body.echo else ""
            scores = choices[job.first].prompt  # all samples of a job have the same
            for number in range(job.first, job.first + job.params.n):
                bodies.append(self._choice(number, choices[number], job, before, scores))
        reply = head(self.id, "text_completion", self.model)
        return reply | {"choices": bodies, "usage": usage.body}

    @property
    def _count(self) -> int:
        return sum(job.params.n for job in self.jobs)

    def _count_tokens(self, usage: Usage, each: Numbered) -> None:
        usage.add(each.job, each.piece)
        if self.body.max_tokens == 0:
            usage.completion = 0

    def _choice(
        self,
        number: int,
        choice: _Choice,
        job: Job,
        before: str | None,
        scores: Sequence[Tops | None] | None = None,
    ) -> dict[str, Any]:
        """The object of a choice, which takes its tokens; `before`: an echo of the prompt."""
        body = self.body
        tokens, logprobs, tops = choice.tokens, choice.logprobs, choice.tops
        if before and body.logprobs is not None and scores is not None:
            own = [top and top[token] for token, top in zip(job.prompt, scores, strict=True)]
            tokens, logprobs, tops = [*job.prompt, *tokens], [*own, *logprobs], [*scores, *tops]
        found = {"index": number, "text": (before or "") + choice.text, "logprobs": None}
        if body.logprobs is not None:
            found["logprobs"], choice.offset = self.names.legacy(
                tokens, logprobs, tops, choice.offset
            )
        found |= {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
        if body.return_token_ids:
            found["token_ids"] = choice.tokens
            if before is not None:
                found["prompt_token_ids"] = [*job.prompt]
        if body.prompt_logprobs is not None and scores is not None:
            found["prompt_logprobs"] = self.names.prompt(scores)
        choice.text, choice.tokens, choice.logprobs, choice.tops = "", [], [], []
        return found

    async def chunks(self) -> AsyncGenerator[bytes]:
        """The reply as events."""
        body, first = self.body, head(self.id, "text_completion", self.model)
        usage, choices = Usage.of(self.jobs), [_Choice() for _ in range(self._count)]
        is_new, shown = [True] * len(choices), {"usage": None} if body.wants_usage else {}
        in_each = body.wants_usage and body.stream_options.continuous_usage_stats
        # Scores of a prompt come with its last tokens: its texts then come in one piece.
        waits = body.echo and body.logprobs is not None
        scores: dict[str, list[Tops | None]] = {}
        async with aclosing(self.service.pieces(self.jobs)) as pieces:
            async for each in pieces:
                self._count_tokens(usage, each)
                choice = choices[each.number]
                choice.add(each, bool(body.echo), body.max_tokens)
                if choice.prompt is not None:
                    scores[each.job.id] = choice.prompt
                if waits:
                    continue
                before = None
                if is_new[each.number]:
                    before = await self.echoed(each.job) if body.echo else ""
                    is_new[each.number] = False
                own = {"usage": usage.body} if in_each else shown
                made = self._choice(each.number, choice, each.job, before)
                yield event(first | {"choices": [made]} | own)
        for job in self.jobs if waits else ():
            before, known = await self.echoed(job), scores.get(job.id)
            for number in range(job.first, job.first + job.params.n):
                made = self._choice(number, choices[number], job, before, known)
                yield event(first | {"choices": [made]} | shown)
        if body.wants_usage:
            yield event(first | {"choices": [], "usage": usage.body})


def add_completions(router: APIRouter, service: Service) -> None:
    """Add the route."""

    @router.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue texts."""
        ends = service.ends(body.timeout)
        asked = Completion(service, body, service.new_id("cmpl", request, body.request_id))
        await service.within(request, ends, asked.prepare())
        if body.stream:
            return await service.streamed(request, ends, asked.chunks())
        return service.json(asked.id, await service.within(request, ends, asked.whole()))
