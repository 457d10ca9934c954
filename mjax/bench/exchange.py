"""Requests to a server of OpenAI's form, over HTTP/1.1, and the times at which replies came.

A load generator must be faster than what it measures. Hence the parser of httptools, with 4 to 9 µs
of CPU a piece of a reply, where a client such as httpx takes 60 to 100. A reply is stored as bytes
and times; `read_reply` reads it when the load is over. A request has a connection of its own.
"""

import asyncio
import json
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from httptools import HttpParserError, HttpResponseParser

from mjax.errors import UserError, reason


class Endpoint:
    """A server's address, the path of its API, a key, and the most seconds of a request."""

    def __init__(self, url: str, path: str, key: str | None, timeout: float):
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(f"--url {url}: is no address; give one such as http://localhost:8000")
        self.host, self.timeout = parts.hostname, timeout
        self.tls = ssl.create_default_context() if parts.scheme == "https" else None
        self.port = parts.port or (443 if self.tls else 80)
        self.head = (
            f"POST {parts.path.rstrip('/').removesuffix('/v1')}{path} HTTP/1.1\r\n"
            f"Host: {parts.netloc.rpartition('@')[2]}\r\nContent-Type: application/json\r\n"
            f"Connection: close\r\n{f'Authorization: Bearer {key}' if key else 'Accept: */*'}"
        )

    async def post(self, body: bytes) -> "RawReply":
        """Send a request and wait for all of its reply; a `RawReply` says what went wrong."""
        head = f"{self.head}\r\nContent-Length: {len(body)}\r\n\r\n"
        exchange, loop = RawReply(head.encode() + body), asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self.timeout):
                transport, _ = await loop.create_connection(
                    lambda: exchange, self.host, self.port, ssl=self.tls
                )
                try:
                    await exchange.closed.wait()
                finally:
                    transport.abort()
        except TimeoutError:
            exchange.error = f"no end within {self.timeout:g} s"
        except OSError as e:
            exchange.error = reason(e)
        exchange.ended = time.perf_counter()
        return exchange


class RawReply(asyncio.Protocol):
    """A request and its reply.

    sent, ended: seconds of `time.perf_counter`. status: of HTTP, 0 before there is one.
    body: what came; marks: (length of `body`, when it was so long). error: None if all came.
    """

    def __init__(self, request: bytes):
        self.request, self.sent, self.ended = request, time.perf_counter(), 0.0
        self.closed, self.error, self.status = asyncio.Event(), None, 0
        self.body, self.marks, self.now = bytearray(), [], 0.0
        self.parser = HttpResponseParser(self)

    def connection_made(self, transport: asyncio.Transport) -> None:
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.now = time.perf_counter()
        try:
            self.parser.feed_data(data)
        except HttpParserError as e:
            self.error = f"no HTTP: {reason(e)}"
            self.closed.set()

    def on_headers_complete(self) -> None:
        self.status = self.parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self.body += body
        self.marks.append((len(self.body), self.now))

    def on_message_complete(self) -> None:
        self.closed.set()

    def connection_lost(self, error: Exception | None) -> None:
        if error is not None:
            self.error = reason(error)
        self.closed.set()

    def events(self) -> Iterator[tuple[float, bytes]]:
        """Yield each event of the stream and the time at which its line was complete."""
        length, mark = 0, 0
        for line in self.body.split(b"\n"):
            length = min(length + len(line) + 1, len(self.body))
            while self.marks and self.marks[mark][0] < length:
                mark += 1
            if line.startswith(b"data:"):
                yield self.marks[mark][1], line[5:].strip()


@dataclass
class TokenTimes:
    """A reply as it was read: times of its tokens, their counts, and what went wrong if any."""

    times: list[float] = field(default_factory=list)
    tokens_in: int | None = None
    tokens_out: int = 0
    error: str | None = None


def read_reply(exchange: RawReply) -> TokenTimes:
    """Read the events of an exchange. Tokens count by `usage`, else an event is one."""
    if exchange.error is not None:
        return TokenTimes(error=exchange.error)
    if exchange.status != 200:
        return TokenTimes(error=f"HTTP {exchange.status}: {_message(exchange.body)}")
    reply, has_end = TokenTimes(), False
    try:
        for when, data in exchange.events():
            if data == b"[DONE]":
                has_end = True
                continue
            event = json.loads(data)
            if event.get("error"):
                reply.error = _message(data)
            usage = event.get("usage") or {}
            reply.tokens_in = usage.get("prompt_tokens", reply.tokens_in)
            reply.tokens_out = usage.get("completion_tokens", reply.tokens_out)
            if any(map(_is_token, event.get("choices") or ())):
                reply.times.append(when)
    except (ValueError, AttributeError, TypeError) as e:
        reply.error = f"no event of OpenAI's form: {reason(e)}"
    reply.tokens_out = reply.tokens_out or len(reply.times)
    if reply.error is None and not (has_end and reply.times):
        reply.error = "no tokens" if has_end else "the stream ended without [DONE]"
    return reply


TEXT_KEYS = "text content reasoning reasoning_content tool_calls".split()


def _is_token(choice: dict) -> bool:
    """Whether a choice brings a token: not where it brings a role or the reason of an end alone.

    A token may have no text: a part of a character.
    """
    delta = choice.get("delta", choice)
    if any(delta.get(name) for name in TEXT_KEYS):
        return True
    return choice.get("finish_reason") is None and "role" not in delta


def _message(data: bytes) -> str:
    """The message of an error of OpenAI's form, else its first 200 letters."""
    try:
        return str(json.loads(data)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return bytes(data[:200]).decode(errors="replace")
