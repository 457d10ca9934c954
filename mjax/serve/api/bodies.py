"""Bodies of requests: how much of them is read, how long, and what becomes of the rest.

Invariant: a caller whose body is not read gets the whole reply, then an end in bounded time.
uvicorn alone keeps the connection, and forgets its keep-alive time as soon as more of the body
comes. To close at once would reset it: callers who write all before they read could lose the reply.
"""

import asyncio
import contextlib
from collections.abc import Awaitable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mjax.serve.api.limits import ApiOptions, too_large
from mjax.serve.protocol.errors import ApiError

SILENCE = 5.0  # seconds without anything, after which no more of a body is dropped


class Bodies:
    """Middleware that bounds bodies, and closes a connection whose body was not read to its end.

    `receive` raises `ApiError` for a body that is too long or takes too long. The rest of a body is
    dropped after the reply, until it ends, nothing comes for `SILENCE`, or its time is over. It has
    at least `SILENCE` from the reply on.
    """

    def __init__(self, app: ASGIApp, options: ApiOptions):
        self.app, self._options = app, options

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] == "http" else {}
        if "transfer-encoding" in headers or headers.get("content-length", "0") != "0":
            exchange = _Exchange(receive, send, self._options)
            receive, send = exchange.receive, exchange.send
        await self.app(scope, receive, send)


class _Exchange:
    """A request with a body, and its reply."""

    def __init__(self, receive: Receive, send: Send, options: ApiOptions):
        self._receive, self._send, self._most = receive, send, options.most_body
        self._deadline = asyncio.get_running_loop().time() + options.body_seconds
        self._size, self._is_read = 0, False

    async def receive(self) -> Message:
        try:
            message = await self._next(None if self._is_read else self._deadline)
        except TimeoutError:
            raise ApiError(408, "the body did not come in time") from None
        self._size += len(message.get("body", b""))
        if self._size > self._most:
            raise too_large(self._most)
        return message

    async def _next(self, until: float | None) -> Message:
        async with asyncio.timeout_at(until):
            message = await self._receive()
        self._is_read = not message.get("more_body", False)  # or the caller is gone
        return message

    def send(self, message: Message) -> Awaitable[None]:
        return self._send(message) if self._is_read else self._send_and_close(message)

    async def _send_and_close(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
        elif not message.get("more_body", False):
            await self._send({**message, "more_body": True})
            await self._drop()
            message = {"type": "http.response.body"}
        await self._send(message)

    async def _drop(self) -> None:
        loop = asyncio.get_running_loop()
        last = max(self._deadline, loop.time() + SILENCE)
        with contextlib.suppress(TimeoutError):
            while not self._is_read:
                await self._next(min(loop.time() + SILENCE, last))
