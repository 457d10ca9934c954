"""A model on a server of OpenAI's form, whose answers come as server-sent events."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from mjax.chat.models import ChatPiece
from mjax.errors import UserError, reason

_WAIT = httpx.Timeout(30.0, read=None)  # a long prompt may take minutes to its first token


class RemoteTalker:
    """One model of a server."""

    def __init__(self, url: str, key: str | None, name: str | None, is_raw: bool):
        """`url`: with or without /v1. `name`: of the model; None: the server's first one."""
        self._url, self._name, self._is_raw = url, name, is_raw
        root = url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.AsyncClient(base_url=f"{root}/v1/", headers=headers, timeout=_WAIT)

    async def open(self) -> None:
        if self._name is None:
            async with self._asked("GET", "models") as response:
                cards = json.loads(await response.aread())["data"]
                self._name = cards[0]["id"]

    async def close(self) -> None:
        await self._client.aclose()

    def check(self, settings: dict[str, Any]) -> None:
        """Nothing: the server checks what it reads."""

    async def stream(
        self, messages: list[dict], settings: dict[str, Any]
    ) -> AsyncIterator[ChatPiece]:
        body = {"model": self._name, "stream": True, "stream_options": {"include_usage": True}}
        if self._is_raw:
            path, prompt = "completions", "".join(message["content"] for message in messages)
            body |= {"max_tokens": 256, "prompt": prompt}
        else:
            path, body["messages"] = "chat/completions", messages
        async with self._asked("POST", path, json=body | settings) as response:
            async for event in _sent_events(response):
                if error := event.get("error"):
                    raise UserError(f"{self._url}: {error['message']}")
                yield _chat_piece(event)

    @asynccontextmanager
    async def _asked(self, method: str, path: str, **given) -> AsyncIterator[httpx.Response]:
        """A response whose status is good. Raises `UserError`, also for what is read of it."""
        try:
            async with self._client.stream(method, path, **given) as response:
                if response.is_error:
                    said = json.loads(await response.aread())["error"]["message"]
                    raise UserError(f"{self._url}: {response.status_code}: {said}")
                yield response
        except UserError:
            raise
        except (httpx.HTTPError, httpx.InvalidURL) as e:
            raise UserError(f"{self._url}: {reason(e)}; does a server run there?") from None
        except (ValueError, LookupError, TypeError, AttributeError):
            raise UserError(f"{self._url}: replies otherwise than OpenAI's servers do") from None


async def _sent_events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """Yield the objects of events up to the one that ends them.

    Bytes are cut at newlines alone: texts may hold other characters that end lines.
    """
    rest = b""
    async for part in response.aiter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return
            if line.startswith(b"data:"):
                yield json.loads(data)
    raise httpx.ReadError("the connection ended before the answer did")


def _chat_piece(event: dict[str, Any]) -> ChatPiece:
    usage, choices = event.get("usage") or {}, event.get("choices") or [{}]
    choice = choices[0]
    delta = choice.get("delta") or {"content": choice.get("text")}
    calls = [part["function"] for part in delta.get("tool_calls") or ()]
    return ChatPiece(
        text=delta.get("content") or "",
        reasoning=delta.get("reasoning") or delta.get("reasoning_content") or "",
        call="".join((each.get("name") or "") + (each.get("arguments") or "") for each in calls),
        tokens=usage.get("completion_tokens", 0),
    )
