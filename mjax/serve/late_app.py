"""The application of a worker, which answers from the first moment on: engines may load for long.

Until they are ready /health is well and all else is 503.
"""

import asyncio
import contextlib
import dataclasses
import os
import traceback
from collections.abc import Callable, Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from mjax.errors import UserError
from mjax.infer.async_engine import EngineDied
from mjax.serve.api.bodies import Bodies
from mjax.serve.api.limits import ApiOptions, json_reply
from mjax.serve.app import make_app
from mjax.serve.base.engines import Engines
from mjax.serve.options import ServeOptions, tell
from mjax.serve.protocol.errors import ApiError


class LateApp:
    """An ASGI application that becomes `make_app`'s once the engines at `addresses` are ready.

    It calls `on_ready` then; an error on the way ends the process.
    """

    def __init__(
        self, addresses: Sequence[str], options: ServeOptions, on_ready: Callable[[], None]
    ):
        self._addresses, self._options, self._on_ready = addresses, options, on_ready
        self._app: ASGIApp = Bodies(_loading, ApiOptions())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        else:
            await self._app(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        """Hold the connection to the engines from the start to the end."""
        await receive()
        async with Engines(self._addresses) as engines:
            work = asyncio.create_task(self._begin(engines))
            work.add_done_callback(_end_with_error)
            await send({"type": "lifespan.startup.complete"})
            await receive()
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
        await send({"type": "lifespan.shutdown.complete"})

    async def _begin(self, engines: Engines) -> None:
        with contextlib.suppress(EngineDied):  # the parent ends this process
            await engines.ready()
            given = self._options.api
            named = {field.name for field in dataclasses.fields(ApiOptions)}
            tuples = {name: tuple(v) if isinstance(v, list) else v for name, v in given.items()}
            options = {name: value for name, value in tuples.items() if name in named}
            options["chat_template"] = self._options.chat_template
            self._app = make_app(engines, ApiOptions(**options))
            self._on_ready()


async def _loading(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "http" and scope["path"] == "/health":
        await json_reply({"status": "loading"})(scope, receive, send)
    elif scope["type"] == "http":
        error = ApiError(503, "the model is being loaded", None, "not_ready")
        wait = {"Retry-After": "5"}
        await json_reply(error.body, 503, wait)(scope, receive, send)


def _end_with_error(work: asyncio.Task) -> None:
    """End this process if the application could not be made; the parent then ends the rest."""
    error = None if work.cancelled() else work.exception()
    if isinstance(error, UserError):
        tell(f"error: {error}")
        os._exit(2)
    if error is not None:
        traceback.print_exception(error)
        os._exit(1)
