"""Routes about the model: its cards, its tokenizer, its embeddings."""

import base64
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import Response

from mjax.serve.api.limits import json_reply
from mjax.serve.api.prompts import ChatPrompt
from mjax.serve.api.service import Service
from mjax.serve.protocol.errors import ApiError
from mjax.serve.protocol.other_requests import DetokenizeRequest, EmbeddingRequest, TokenizeRequest


def _cards(service: Service) -> list[dict[str, Any]]:
    """The model and its adapters."""
    facts = service.engines.facts
    own = {"object": "model", "created": facts.created, "owned_by": "mjax"}
    own["max_model_len"] = facts.max_model_len
    own["modalities"] = ["text"] if facts.image is None else ["text", "image"]
    base = {"id": facts.name, **own, "root": facts.name, "parent": None}
    named = [{"id": name, **own, "root": name, "parent": facts.name} for name in facts.adapters]
    return [base, *named]


def add_models(router: APIRouter, service: Service) -> None:
    """Add /v1/models."""

    @router.get("/v1/models")
    async def list_models() -> Response:
        """List the model and its adapters."""
        return json_reply({"object": "list", "data": _cards(service)})

    @router.get("/v1/models/{name:path}")
    async def show_model(name: str) -> Response:
        """Show one of them."""
        service.adapter(name)
        return json_reply(next(card for card in _cards(service) if card["id"] == name))


def add_tokenizer(router: APIRouter, service: Service) -> None:
    """Add /tokenize, /detokenize and /tokenizer_info."""
    prompts = service.prompts

    @router.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        """Show the chat template and special tokens, which lm-eval's remote tokenizer reads."""
        template, ends = prompts.template, prompts.tokenizer.eod_id
        found = {} if ends is None else {"eos_token": prompts.piece(ends)[0]}
        if template is not None:
            found |= template.tokens | {"chat_template": template.source}
        return json_reply(found)

    @router.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Response:
        """Turn a text or a conversation into ids."""
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "prompt: give it or messages", "prompt")
        if body.prompt is not None:
            (ids,) = await prompts.of_texts([body.prompt], body.add_special_tokens)
        else:
            chat = ChatPrompt.of(body, body.tools or (), body.chat_template_kwargs or {})
            _, ids, _ = await prompts.of_chat(chat)
        most = service.engines.facts.max_model_len
        found: dict[str, Any] = {"count": len(ids), "max_model_len": most, "tokens": ids}
        if body.return_token_strs:
            texts = await prompts.in_thread(lambda: [prompts.piece(token)[0] for token in ids])
            found["token_strs"] = texts
        return json_reply(found)

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> Response:
        """Turn ids into a text."""
        return json_reply({"prompt": await prompts.of_ids(body.tokens) if body.tokens else ""})


async def _embedded(service: Service, body: EmbeddingRequest) -> dict[str, Any]:
    prompts, given = service.prompts, body.input
    if body.dimensions is not None:
        raise ApiError(400, "dimensions: embeddings of this model have one length", "dimensions")
    if not given:
        raise ApiError(400, "input: give one text or more", "input")
    is_one = isinstance(given, str) or isinstance(given[0], int)
    several = [given] if is_one else given
    if len(several) > service.options.most_choices:
        raise ApiError(400, f"input: {len(several)} are too many for one request", "input")
    ids = await prompts.of_texts(several) if isinstance(several[0], str) else several
    most = service.engines.facts.max_model_len
    if (cut := body.truncate_prompt_tokens) is not None:
        ids = [row[: cut if cut > 0 else most] for row in ids]
    for row in ids:
        prompts.require_ids(row, "input")
        prompts.require_room(len(row) - 1, "input")
    pooling, adapter = body.pooling or service.options.pooling, service.adapter(body.model)
    vectors = await service.engines.embed(ids, pooling, adapter)
    normalize = service.options.normalize if body.normalize is None else body.normalize
    if normalize:
        vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)
    rows = [_vector(row, body.encoding_format) for row in np.asarray(vectors, "<f4")]
    data = [{"object": "embedding", "index": n, "embedding": row} for n, row in enumerate(rows)]
    tokens = sum(map(len, ids))
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    model = body.model or service.engines.facts.name
    return {"object": "list", "model": model, "data": data, "usage": usage}


def _vector(row: np.ndarray, form: str) -> str | list[float]:
    return row.tolist() if form == "float" else base64.b64encode(row.tobytes()).decode()


def add_embeddings(router: APIRouter, service: Service) -> None:
    """Add /v1/embeddings."""

    @router.post("/v1/embeddings")
    async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
        """Embed texts."""
        work = _embedded(service, body)
        return json_reply(await service.within(request, service.late_at(body.timeout), work))
