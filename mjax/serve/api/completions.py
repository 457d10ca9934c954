"""/v1/completions: texts or ids that are continued, and scored with `echo`."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from mjax.serve.api.replies import Body, Reply
from mjax.serve.api.service import Numbered, Service
from mjax.serve.api.token_logprobs import TokenNames, Tops
from mjax.serve.protocol.completion_request import CompletionRequest
from mjax.serve.protocol.errors import ApiError


class Completion(Reply):
    """Choices with texts; their numbers are those of the prompt times n, and of the sample."""

    prefix, kinds = "cmpl", ("text_completion", "text_completion")

    async def prepare(self) -> None:
        """Make a job for each prompt."""
        body, prompts = self.body, self.service.prompts
        self.names = TokenNames(prompts, body.return_tokens_as_token_ids)
        self._offsets: dict[int, int] = {}  # of the next token in the text of a choice
        self._scores: dict[str, list[Tops | None]] = {}  # of prompts, which come with a last piece
        self._echoes: dict[str, str] = {}
        most = None if body.max_tokens is None else max(body.max_tokens, 1)
        own: Body = {"adapter": self.service.adapter(body.model), "max_tokens": most}
        own |= {"structured": body.form(), "logprobs": body.logprobs}
        if body.echo and body.logprobs is not None:
            own["prompt_logprobs"] = body.logprobs
        params = body.params(self.facts.defaults, **own)
        given = body.prompts
        if not given:
            raise ApiError(400, "prompt: give one or more", "prompt")
        self.require_few(len(given), "prompt")
        is_text = isinstance(given[0], str)
        ids = await prompts.of_texts(given, body.add_special_tokens) if is_text else given
        for number, row in enumerate(ids):
            row = prompts.cut(row, body.truncate_prompt_tokens, most or 1)
            prompts.require_ids(row, "prompt")
            name = self.id if len(ids) == 1 else f"{self.id}-{number}"
            text = given[number] if is_text else None
            self.add_job(params, row, "prompt", id=name, text=text)
            if body.echo:
                self._echoes[name] = text or await prompts.of_ids(row)

    async def choices(self) -> AsyncIterator[Body]:
        """Yield what pieces add. An echo that is scored waits for the scores."""
        waits, held = self.body.echo and self.body.logprobs is not None, []
        async with aclosing(self.pieces()) as pieces:
            async for each in pieces:
                if each.piece.prompt_logprobs is not None:
                    self._scores[each.job.id] = each.piece.prompt_logprobs
                if self.body.max_tokens == 0:
                    self.usage.completion = 0
                    each = each._replace(piece=_emptied(each.piece))
                if waits:
                    held.append(each)
                else:
                    yield self.choice(each)
        for each in held:
            yield self.choice(each)

    def choice(self, each: Numbered) -> Body:
        """The fields that a piece adds to a choice, the echo first."""
        body, piece, job = self.body, each.piece, each.job
        is_first = each.number not in self._offsets
        echo = self._echoes.get(job.id) if is_first else None
        scores = self._scores.get(job.id)
        found: Body = {"index": each.number, "text": (echo or "") + piece.text, "logprobs": None}
        offset = self._offsets.setdefault(each.number, 0)
        if body.logprobs is not None:
            columns = piece.token_ids, piece.logprobs, piece.top_logprobs or []
            if echo is not None and scores is not None:
                own = [top and top[token] for token, top in zip(job.prompt, scores, strict=True)]
                before = job.prompt, own, scores
                columns = [[*one, *other] for one, other in zip(before, columns, strict=True)]
            found["logprobs"], self._offsets[each.number] = self.names.legacy(*columns, offset)
        found |= {"finish_reason": piece.finish_reason, "stop_reason": piece.stop_reason}
        if body.return_token_ids:
            found["token_ids"] = piece.token_ids
            if is_first:
                found["prompt_token_ids"] = [*job.prompt]
        if body.prompt_logprobs is not None and piece.finish_reason and scores is not None:
            found["prompt_logprobs"] = self.names.prompt(scores)
        return found


def _emptied(piece: Any) -> Any:
    """The piece without its tokens, for a request of none: an engine always makes one."""
    reason = piece.finish_reason and "length"
    empty = {"token_ids": [], "logprobs": [], "top_logprobs": [], "finish_reason": reason}
    return replace(piece, text="", stop_reason=None, **empty)


def add_completions(router: APIRouter, service: Service) -> None:
    """Add the route."""

    @router.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue texts."""
        return await Completion(service, body, request).respond()
