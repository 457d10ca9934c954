"""Routes for those who run the server: health, metrics, and what needs an administrator's key."""

from typing import Any, Literal

from fastapi import APIRouter
from starlette.responses import Response

import mjax
from mjax.serve.limits import json_reply
from mjax.serve.protocol.errors import ApiError
from mjax.serve.protocol.other_requests import (
    AbortRequest,
    AdapterRequest,
    LoadRequest,
    WeightsRequest,
)
from mjax.serve.service import Service

TEXT = "text/plain; version=0.0.4; charset=utf-8"


def add_health(router: APIRouter, service: Service) -> None:
    """Add /health, /ready, /version and /metrics."""

    @router.get("/health")
    async def health() -> Response:
        """Say whether the engines live."""
        return json_reply({"status": "ok"}) if service.engines.is_alive else _unwell("dead")

    @router.get("/ready")
    async def ready() -> Response:
        """Say whether requests are taken."""
        takes = service.engines.is_alive and service.engines.is_ready
        return json_reply({"status": "ready"}) if takes else _unwell("not ready")

    @router.get("/version")
    async def version() -> Response:
        """Say which version serves."""
        return json_reply({"version": mjax.__version__})

    @router.get("/metrics")
    async def metrics() -> Response:
        """Show numbers for Prometheus."""
        stats = await service.engines.stats() if service.engines.is_alive else []
        return Response(service.metrics.exposed(stats), media_type=TEXT)


def _unwell(state: str) -> Response:
    error = ApiError(503, f"the engine is {state}", None, state.replace(" ", "_"))
    return json_reply(error.body, error.status_code)


def add_administration(router: APIRouter, service: Service) -> None:
    """Add the routes that change the server."""
    engines = service.engines

    async def command(name: str, /, **given: Any) -> Response:
        return json_reply({"status": "ok", **await engines.command(name, **given)})

    @router.post("/v1/load_lora_adapter")
    async def load_lora_adapter(body: AdapterRequest) -> Response:
        """Load an adapter, by vLLM's names."""
        if body.lora_path is None:
            raise ApiError(400, "lora_path: it is missing", "lora_path")
        return await command("load_adapter", name=body.lora_name, path=body.lora_path)

    @router.post("/v1/load_adapter")
    async def load_adapter(body: LoadRequest) -> Response:
        """Load an adapter."""
        return await command("load_adapter", name=body.name, path=body.path)

    @router.post("/v1/unload_lora_adapter")
    async def unload_lora_adapter(body: AdapterRequest) -> Response:
        """Unload an adapter."""
        return await command("unload_adapter", name=body.lora_name)

    @router.post("/pause")
    async def pause(mode: Literal["abort", "keep"] = "keep") -> Response:
        """Make no more tokens; requests wait, or end with what they have."""
        if mode == "abort":
            await _abort_all(service)
        return await command("pause")

    @router.post("/resume")
    async def resume() -> Response:
        """Go on after a pause."""
        return await command("resume")

    @router.post("/sleep")
    async def sleep() -> Response:
        """Free the memory of the caches."""
        return await command("sleep")

    @router.post("/wake_up")
    async def wake_up() -> Response:
        """Go on after sleep."""
        return await command("wake")

    @router.post("/reload_weights")
    async def reload_weights(body: WeightsRequest) -> Response:
        """Go on with other weights."""
        return await command("reload", path=body.path)

    @router.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> Response:
        """Forget what is cached of prompts."""
        return await command("reset_prefix_cache")

    @router.post("/abort_requests")
    async def abort_requests(body: AbortRequest) -> Response:
        """End requests where they are; their callers get what there is."""
        for name in body.request_ids:
            await engines.abort(name)
            for part in [id for id in service.running if id.startswith(f"{name}-")]:
                await engines.abort(part)
        if body.abort_all:
            await _abort_all(service)
        return json_reply({"status": "ok"})


async def _abort_all(service: Service) -> None:
    for name in list(service.running):
        await service.engines.abort(name)
