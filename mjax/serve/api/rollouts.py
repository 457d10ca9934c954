"""/inference/v1/generate: ids in, ids out, with what a trainer needs to weigh them.

Each choice has the log-probability of each token under the model and under the distribution that it
was drawn from, and the version of the weights that made it.
"""

from fastapi import APIRouter, Request
from starlette.responses import Response

from mjax.infer.requests import SamplingParams
from mjax.serve.api.replies import Body, Reply
from mjax.serve.api.service import Numbered, Service
from mjax.serve.api.token_logprobs import Tops, finite
from mjax.serve.protocol.other_requests import GenerateRequest


class Rollout(Reply):
    """Choices with ids; lists have an entry a token."""

    prefix, kinds = "gen", ("generation", "generation.chunk")

    async def prepare(self) -> None:
        """Make the job."""
        body = self.body
        self.service.prompts.require_ids(body.token_ids, "token_ids")
        given: Body = {"detokenize": bool(body.sampling_params.get("stop"))}
        own = {"priority": body.priority, "cache_salt": body.cache_salt}
        own["adapter"] = self.service.adapter(body.model)
        given |= body.sampling_params | {n: v for n, v in own.items() if v is not None}
        self.add_job(SamplingParams(**given), body.token_ids, "token_ids")

    def choice(self, each: Numbered) -> Body:
        """The fields that a piece adds to a choice."""
        piece = each.piece
        found: Body = {"index": each.number, "token_ids": piece.token_ids}
        found["logprobs"] = [*map(finite, piece.logprobs)]
        found["processed_logprobs"] = [*map(finite, piece.processed_logprobs)]
        found["weight_versions"] = piece.weight_versions
        if piece.top_logprobs is not None:
            found["top_logprobs"] = [*map(_by_id, piece.top_logprobs)]
        if each.job.params.detokenize:
            found["text"] = piece.text
        if piece.prompt_logprobs is not None:
            self.more["prompt_logprobs"] = [*map(_by_id, piece.prompt_logprobs)]
        return found | {"finish_reason": piece.finish_reason, "stop_reason": piece.stop_reason}


def _by_id(top: Tops | None) -> dict[str, float] | None:
    return top and {str(token): finite(value) for token, value in top.items()}


def add_rollouts(router: APIRouter, service: Service) -> None:
    """Add the route."""

    @router.post("/inference/v1/generate")
    async def generate_tokens(body: GenerateRequest, request: Request) -> Response:
        """Continue ids."""
        return await Rollout(service, body, request).respond()
