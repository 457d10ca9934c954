"""The application: routes, the door before them, and errors in OpenAI's form.

`make_app` is for one process; several may serve the same engines, each with its own `Engines`.
"""

import base64
import hashlib
import re
from collections.abc import Callable
from importlib import resources
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

import mjax
from mjax.errors import UserError
from mjax.infer.async_engine import EngineDied
from mjax.serve.api.bodies import Bodies
from mjax.serve.api.chat import add_chat
from mjax.serve.api.completions import add_completions
from mjax.serve.api.limits import ApiOptions, Door, json_reply
from mjax.serve.api.metrics import ApiMetrics
from mjax.serve.api.models import add_embeddings, add_models, add_tokenizer
from mjax.serve.api.operations import add_administration, add_health
from mjax.serve.api.prompts import PromptMaker
from mjax.serve.api.rollouts import add_rollouts
from mjax.serve.api.service import Service
from mjax.serve.base.engines import Engines
from mjax.serve.protocol.errors import ApiError, error_of_fields


def make_app(engines: Engines, options: ApiOptions = ApiOptions()) -> FastAPI:  # noqa: B008
    """The application of engines that are ready."""
    metrics = ApiMetrics(engines.facts.name)
    service = Service(engines, options, metrics, PromptMaker(engines, options))
    app = FastAPI(title="mjax", version=mjax.__version__, docs_url=None, redoc_url=None)
    app.state.service = service
    app.router.redirect_slashes = False
    router = APIRouter(route_class=_JsonRoute)
    for add in (
        add_completions,
        add_chat,
        add_embeddings,
        add_models,
        add_tokenizer,
        add_rollouts,
        add_health,
        add_administration,
    ):
        add(router, service)
    _add_page(router)
    app.include_router(router)
    _answer_errors(app, service)
    app.add_middleware(Door, options=options)
    if options.origins:
        named = {"allow_methods": ["*"], "allow_headers": ["*"]}
        app.add_middleware(CORSMiddleware, allow_origins=[*options.origins], **named)
    app.add_middleware(Bodies, options=options)
    return app


class _JsonRequest(Request):
    """A request whose body is JSON in the strict sense: no NaN, no half of a character."""

    async def json(self) -> Any:
        try:
            return from_json(await self.body(), allow_inf_nan=False)
        except ValueError as e:
            raise ApiError(400, f"the body is no JSON: {str(e)[:200]}") from None


class _JsonRoute(APIRoute):
    def get_route_handler(self) -> Callable:
        answer = super().get_route_handler()

        async def handler(request: Request) -> Response:
            return await answer(_JsonRequest(request.scope, request.receive))

        return handler


def _answer_errors(app: FastAPI, service: Service) -> None:
    """Make every error a JSON object of OpenAI's form."""

    def reply(error: ApiError) -> Response:
        return json_reply(error.body, error.status_code, dict(error.headers or {}))

    @app.exception_handler(UserError)
    @app.exception_handler(EngineDied)
    @app.exception_handler(Exception)
    async def of_service(request: Request, error: Exception) -> Response:
        return reply(service.as_error(error))

    @app.exception_handler(RequestValidationError)
    async def of_fields(request: Request, error: RequestValidationError) -> Response:
        return reply(error_of_fields(error.errors()))

    @app.exception_handler(HTTPException)
    async def of_routes(request: Request, error: HTTPException) -> Response:
        if isinstance(error, ApiError):
            return reply(error)
        said = {404: "there is no such route", 405: "the route does not take this method"}
        message = said.get(error.status_code, str(error.detail))
        where = f"{request.method} {request.url.path[:200]}"
        headers = dict(error.headers or {})
        code = "unknown_route" if error.status_code == 404 else None
        return reply(ApiError(error.status_code, f"{where}: {message}", None, code, headers))


def _add_page(router: APIRouter) -> None:
    """Add the page at /, which may run its own script alone and ask this server alone."""
    file = resources.files("mjax.serve") / "page" / "index.html"
    text = file.read_text(encoding="utf-8")
    policy = (
        f"default-src 'none'; {_own_source(text, 'script')}; {_own_source(text, 'style')}; "
        "img-src data: blob:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }

    @router.get("/", include_in_schema=False)
    async def page() -> Response:
        return Response(text, 200, headers, "text/html; charset=utf-8")


def _own_source(text: str, tag: str) -> str:
    """The part of a page's policy that allows what stands in its own elements of this tag."""
    found = re.findall(rf"<{tag}[^>]*>(.*?)</{tag}>", text, re.DOTALL)
    hashes = [base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in found]
    return f"{tag}-src " + " ".join(f"'sha256-{one}'" for one in hashes)
