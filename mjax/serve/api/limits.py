"""Bounds of a request: keys, the size of its body, deadlines, readers that are slow or gone.

`Door` looks at headers, so that too much is refused before it is read. `bodies.py` counts what has
no length there. Invariant: work for a caller who is gone is cancelled.
"""

import asyncio
import hashlib
import hmac
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mjax.serve.protocol.errors import ApiError

Outcome = TypeVar("Outcome")
OPEN = frozenset({"/", "/health", "/ready", "/metrics"})  # routes without a key
ADMIN = frozenset(
    """/v1/load_lora_adapter /v1/unload_lora_adapter /v1/load_adapter /pause /resume /sleep /wake_up
    /reload_weights /reset_prefix_cache /abort_requests""".split()
)


@dataclass(frozen=True)
class ApiOptions:
    """Limits and keys of the routes; times are in seconds.

    - api_keys: one of them has to come with each request; none: all may ask. admin_keys: for routes
      that change the server; none: these are closed.
    - most_body: bytes of a body. body_seconds: until it has come.
    - most_choices: texts of one request, prompts times n.
    - deadline: until a request is answered; the field `timeout` makes it shorter. None: no limit.
    - slow_seconds: how long a reader of a stream may take nothing.
    - retry_after: what a caller is told to wait when too much is queued.
    - chat_template: the file of a template in the place of the model's own.
    - tool_parser, reasoning_parser: of replies; None: the one that the chat template suggests.
    - pooling: mean or last, of embeddings. normalize: whether they have length 1.
    - origins: web pages of others that may ask, such as https://chat.example.
    - threads: for templates and tokenizers.
    """

    api_keys: tuple[str, ...] = ()
    admin_keys: tuple[str, ...] = ()
    most_body: int = 16 * 2**20
    body_seconds: float = 60.0
    most_choices: int = 1024
    deadline: float | None = None
    slow_seconds: float = 30.0
    retry_after: int = 1
    chat_template: str | None = None
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    pooling: str = "last"
    normalize: bool = True
    origins: tuple[str, ...] = ()
    threads: int = 4


class Door:
    """Middleware that lets requests with a key and a body of a fair size in."""

    def __init__(self, app: ASGIApp, options: ApiOptions):
        self.app, self._options = app, options
        self._keys, self._admins = map(_digests, (options.api_keys, options.admin_keys))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        try:
            headers = Headers(scope=scope)
            path = scope["path"].removeprefix(scope.get("root_path", "")).rstrip("/") or "/"
            self._check(scope["method"], path, headers)
        except ApiError as e:
            return await json_reply(e.body, e.status_code, e.headers)(scope, receive, send)
        await self.app(scope, receive, send)

    def _check(self, method: str, path: str, headers: Headers) -> None:
        if method == "OPTIONS":  # a browser asks before it sends a key
            return
        scheme, _, key = headers.get("authorization", "").partition(" ")
        key = key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        is_admin = _is_among(key, self._admins)
        if path in ADMIN and not is_admin:
            raise _refusal("this route needs a key of the administrator", bool(self._admins))
        if path not in OPEN and self._keys and not (is_admin or _is_among(key, self._keys)):
            raise _refusal("give a key of this server: Authorization: Bearer KEY")
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > self._options.most_body:
            raise too_large(self._options.most_body)
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        has_body = length != "0" or "transfer-encoding" in headers
        if method == "POST" and has_body and kind != "application/json":
            raise ApiError(415, "the body must be JSON: Content-Type: application/json")
        if headers.get("content-encoding", "identity") != "identity":
            raise ApiError(415, "the body must not be compressed")


def _refusal(message: str, may_have_key: bool = True) -> ApiError:
    if not may_have_key:
        return ApiError(403, f"{message}; this server was started without one", code="no_admin_key")
    return ApiError(401, message, None, "invalid_api_key", {"WWW-Authenticate": "Bearer"})


def too_large(most: int) -> ApiError:
    """The error for a body of more than `most` bytes."""
    return ApiError(413, f"the body has more than {most} bytes", code="body_too_large")


def _digests(keys: Sequence[str]) -> list[bytes]:
    return [hashlib.sha256(key.encode()).digest() for key in keys]


def _is_among(key: str, digests: Sequence[bytes]) -> bool:
    """Whether a key has one of these digests; all are compared, in equal time."""
    given = hashlib.sha256(key.encode()).digest()
    found = [hmac.compare_digest(given, digest) for digest in digests]
    return any(found)


def json_reply(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON object as a response; numbers that are not finite are null."""
    return Response(msgspec.json.encode(body), status, headers, "application/json")


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Outcome]) -> Outcome:
    """The result of work, which is cancelled when the caller hangs up.

    Raises `ApiError` 499 then, which nobody reads.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_until_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(499, "the caller is gone")
        return task.result()
    finally:
        await _ended(task, gone)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _ended(*tasks: asyncio.Future) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def event(body: Any) -> bytes:
    """An event of a stream."""
    return b"data: %b\n\n" % msgspec.json.encode(body)


def events_of(head: dict[str, Any]) -> Callable[[Any, dict[str, Any]], bytes]:
    """`event` of objects that begin alike: f(choice, more) of `head`, its one choice, and more."""
    encode = msgspec.json.encode
    begin = b'data: %b,"choices":[' % encode(head)[:-1]

    def made(choice: Any, more: dict[str, Any]) -> bytes:
        end = b"}\n\n"
        if more:
            end = b",%b\n\n" % encode(more)[1:]
        return b"%b%b]%b" % (begin, encode(choice), end)

    return made


class EventStream(Response):
    """A first event and others until their end, then [DONE]; or up to an error as the last event.

    It stops when the caller is gone or takes nothing for `slow` seconds, up to a quarter more.
    `deadline`: the loop's time at which the request is late. `as_error` makes of an
    exception the error that is sent.
    """

    def __init__(
        self,
        first: bytes,
        events: AsyncGenerator[bytes],
        headers: dict[str, str],
        slow: float,
        deadline: float | None,
        as_error: Callable[[BaseException], ApiError],
    ):
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers}
        super().__init__(None, 200, headers, "text/event-stream")
        del self.headers["content-length"]
        self._first, self._events, self._as_error = first, events, as_error
        self._slow, self._deadline = slow, deadline
        self._sends_since: float | None = None  # while a reader has yet to take something

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = asyncio.ensure_future(self._write(send))
        gone = asyncio.ensure_future(_until_gone(receive))
        both = {"timeout": self._slow / 4, "return_when": asyncio.FIRST_COMPLETED}
        try:  # a look now and then costs less than a timer for each event
            while not self._is_slow() and not (await asyncio.wait({writer, gone}, **both))[0]:
                pass
        finally:
            await _ended(writer, gone)
            await self._events.aclose()

    async def _write(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        last = b"data: [DONE]\n\n"
        await self._send(send, start)
        await self._send(send, _body(self._first, True))
        try:
            async with asyncio.timeout_at(self._deadline):
                async for data in self._events:
                    await self._send(send, _body(data, True))
        except Exception as e:
            last = event(self._as_error(e).body)
        await self._send(send, _body(last, False))

    async def _send(self, send: Send, message: Message) -> None:
        self._sends_since = time.monotonic()
        await send(message)
        self._sends_since = None

    def _is_slow(self) -> bool:
        since = self._sends_since
        return since is not None and time.monotonic() - since > self._slow


def _body(data: bytes, more: bool) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}
