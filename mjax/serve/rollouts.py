"""/inference/v1/generate: ids in, ids out, with what a trainer needs to weigh them.

Each choice has the log-probability of each token under the model and under the distribution that it
was drawn from, and the version of the weights that made it.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from mjax.infer.requests import SamplingParams
from mjax.serve.limits import event
from mjax.serve.protocol.errors import ApiError
from mjax.serve.protocol.other_requests import GenerateRequest
from mjax.serve.service import Job, Numbered, Service, Usage
from mjax.serve.token_logprobs import Tops, finite


def _job(service: Service, body: GenerateRequest, request_id: str) -> Job:
    """The job of a request. Raises `ApiError` and `UserError` for what cannot be served."""
    service.require_text_model()
    service.prompts.require_ids(body.token_ids, "token_ids")
    service.prompts.require_room(len(body.token_ids), "token_ids")
    given = {"detokenize": bool(body.sampling_params.get("stop"))} | body.sampling_params
    if (adapter := service.adapter(body.model)) is not None:
        given["adapter"] = adapter
    for name in ("priority", "cache_salt"):
        if (value := getattr(body, name)) is not None:
            given[name] = value
    params = SamplingParams(**given)
    if params.n > service.options.most_choices:
        raise ApiError(400, f"n: at most {service.options.most_choices}", "sampling_params.n")
    return Job(request_id, body.token_ids, params)


def _choice(each: Numbered) -> dict[str, Any]:
    """What a piece adds to a choice; lists have an entry a token."""
    piece = each.piece
    found: dict[str, Any] = {"index": each.number, "token_ids": piece.token_ids}
    found["logprobs"] = [*map(finite, piece.logprobs)]
    found["processed_logprobs"] = [*map(finite, piece.processed_logprobs)]
    found["weight_versions"] = piece.weight_versions
    if piece.top_logprobs is not None:
        found["top_logprobs"] = [*map(_by_id, piece.top_logprobs)]
    if each.job.params.detokenize:
        found["text"] = piece.text
    end = {"finish_reason": piece.finish_reason, "stop_reason": piece.stop_reason}
    return found | end


def _by_id(top: Tops | None) -> dict[str, float] | None:
    return top and {str(token): finite(value) for token, value in top.items()}


async def _whole(service: Service, job: Job) -> dict[str, Any]:
    usage, choices, scores = Usage.of([job]), {}, None
    async with aclosing(service.pieces([job])) as pieces:
        async for each in pieces:
            usage.add(job, each.piece)
            scores = each.piece.prompt_logprobs or scores
            made = choices.setdefault(each.number, {})
            for name, value in _choice(each).items():
                joins = isinstance(value, list | str) and name in made and name != "finish_reason"
                made[name] = made[name] + value if joins else value
    found = {"request_id": job.id, "choices": [choices[index] for index in sorted(choices)]}
    if scores is not None:
        found["prompt_logprobs"] = [*map(_by_id, scores)]
    return found | {"usage": usage.body}


async def _chunks(service: Service, job: Job, with_usage: bool) -> AsyncGenerator[bytes]:
    usage, first = Usage.of([job]), {"request_id": job.id}
    async with aclosing(service.pieces([job])) as pieces:
        async for each in pieces:
            usage.add(job, each.piece)
            own = {}
            if each.piece.prompt_logprobs is not None:
                own = {"prompt_logprobs": [*map(_by_id, each.piece.prompt_logprobs)]}
            yield event(first | {"choices": [_choice(each)]} | own)
    if with_usage:
        yield event(first | {"choices": [], "usage": usage.body})


def add_rollouts(router: APIRouter, service: Service) -> None:
    """Add the route."""

    @router.post("/inference/v1/generate")
    async def generate_tokens(body: GenerateRequest, request: Request) -> Response:
        """Continue ids."""
        ends = service.ends(body.timeout)
        job = _job(service, body, service.new_id("gen", request, body.request_id))
        if body.stream:
            with_usage = bool(body.stream_options and body.stream_options.include_usage)
            return await service.streamed(request, ends, _chunks(service, job, with_usage))
        return service.json(job.id, await service.within(request, ends, _whole(service, job)))
