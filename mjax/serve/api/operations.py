"""Routes for those who run the server: health, metrics, and what needs an administrator's key."""

import asyncio
import contextlib
from collections.abc import Iterable
from typing import Any, Literal

from fastapi import APIRouter
from starlette.responses import Response

import mjax
from mjax.infer.async_engine import EngineDied
from mjax.serve.api.limits import json_reply
from mjax.serve.api.service import Service
from mjax.serve.protocol.errors import ApiError
from mjax.serve.protocol.other_requests import AbortRequest, AdapterRequest, WeightsRequest

# Routes without a body, and the engines' commands that they are.
COMMANDS = {
    "/resume": "resume",
    "/sleep": "sleep",
    "/wake_up": "wake",
    "/reset_prefix_cache": "reset_prefix_cache",
}
_EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"


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
        stats = []
        with contextlib.suppress(TimeoutError, EngineDied):
            stats = await asyncio.wait_for(service.engines.stats(), 5.0)
        return Response(service.metrics.exposed(stats), media_type=_EXPOSITION)


def _unwell(state: str) -> Response:
    error = ApiError(503, f"the engine is {state}", None, state.replace(" ", "_"))
    return json_reply(error.body, error.status_code)


def add_administration(router: APIRouter, service: Service) -> None:
    """Add the routes that change the server."""

    async def command(name: str, /, **given: Any) -> Response:
        return json_reply({"status": "ok", **await service.engines.command(name, **given)})

    async def abort(names: Iterable[str]) -> None:
        for name in names:
            await service.engines.abort(name)

    def add(path: str, name: str) -> None:
        @router.post(path, name=name)
        async def run() -> Response:
            return await command(name)

    for path, name in COMMANDS.items():
        add(path, name)

    @router.post("/v1/load_adapter")
    @router.post("/v1/load_lora_adapter")
    async def load_adapter(body: AdapterRequest) -> Response:
        """Load an adapter."""
        if body.path is None:
            raise ApiError(400, "lora_path: it is missing", "lora_path")
        return await command("load_adapter", name=body.name, path=body.path)

    @router.post("/v1/unload_lora_adapter")
    async def unload_adapter(body: AdapterRequest) -> Response:
        """Unload an adapter."""
        return await command("unload_adapter", name=body.name)

    @router.post("/pause")
    async def pause(mode: Literal["abort", "keep"] = "keep") -> Response:
        """Make no more tokens; requests wait, or end with what they have."""
        await abort(list(service.running) if mode == "abort" else ())
        return await command("pause")

    @router.post("/reload_weights")
    async def reload_weights(body: WeightsRequest) -> Response:
        """Go on with other weights."""
        return await command("reload", path=body.path)

    @router.post("/abort_requests")
    async def abort_requests(body: AbortRequest) -> Response:
        """End requests where they are; their callers get what there is."""
        beginnings = tuple(f"{name}-" for name in body.request_ids)
        parts = [id for id in service.running if id.startswith(beginnings)]
        await abort(list(service.running) if body.abort_all else [*body.request_ids, *parts])
        return json_reply({"status": "ok"})
