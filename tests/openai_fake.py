"""A server that speaks as OpenAI's do and makes its texts up, for tests of what talks to one."""

import asyncio
import base64
import contextlib
import hashlib
import json
import math
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, StreamingResponse

PAGE = Path(__file__).parents[1] / "mjax" / "serve" / "page" / "index.html"
BUCKETS = (0.01, 0.02, 0.05, 0.1, 1.0)


@dataclass
class FakeServer:
    """What it answers and what it was asked.

    pieces: of every answer, by model. thoughts: before them. calls: of tools, after them. delay:
    seconds before a piece. key: that requests must give. error: an event in place of the last
    piece. asked: bodies of requests. left: how many answers a client left.
    """

    url: str = ""
    pieces: dict[str, list[str]] = field(default_factory=lambda: {"tiny": ["Hello", " there"]})
    thoughts: list[str] = field(default_factory=list)
    calls: list[dict] = field(default_factory=list)
    delay: float = 0.0
    key: str | None = None
    error: str | None = None
    refusal: tuple[int, str] | None = None
    asked: list[dict] = field(default_factory=list)
    left: int = 0
    running: int = 0
    made: int = 0


def app_of(fake: FakeServer) -> FastAPI:
    app = FastAPI()

    @app.middleware("http")
    async def guard(request: Request, call_next):
        if fake.key and request.url.path.startswith("/v1"):
            if request.headers.get("authorization") != f"Bearer {fake.key}":
                return _refused(401, "a key is needed")
        return await call_next(request)

    @app.get("/")
    def page():
        text = PAGE.read_text(encoding="utf-8")
        return HTMLResponse(text, headers={"Content-Security-Policy": _policy(text)})

    @app.get("/v1/models")
    def models():
        first = next(iter(fake.pieces))
        cards = [
            {"id": name, "object": "model", "max_model_len": 4096, "parent": first if i else None}
            for i, name in enumerate(fake.pieces)
        ]
        cards[0]["modalities"] = ["text", "image"]
        return {"object": "list", "data": cards}

    @app.post("/v1/chat/completions")
    @app.post("/v1/completions")
    async def answer(request: Request):
        body = await request.json()
        fake.asked.append(body)
        if fake.refusal:
            return _refused(*fake.refusal)
        is_chat = request.url.path.endswith("chat/completions")
        return StreamingResponse(_events(fake, body, is_chat), media_type="text/event-stream")

    @app.get("/metrics")
    def metrics():
        return PlainTextResponse(_metrics(fake))

    return app


def _policy(text: str) -> str:
    """The strictest one: the page's own script and style alone, and no other server."""
    parts = ["default-src 'none'; img-src data:; connect-src 'self'"]
    for tag in ("script", "style"):
        (inner,) = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.S)
        digest = base64.b64encode(hashlib.sha256(inner.encode()).digest()).decode()
        parts.append(f"{tag}-src 'sha256-{digest}'")
    return "; ".join(parts)


def _refused(status: int, message: str) -> JSONResponse:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    return JSONResponse({"error": error}, status)


async def _events(fake: FakeServer, body: dict, is_chat: bool):
    pieces = fake.pieces[body["model"]]
    fake.running += 1
    try:
        for thought in fake.thoughts if is_chat else ():
            await asyncio.sleep(fake.delay)
            yield _event({"delta": {"reasoning": thought}})
        for piece in pieces:
            await asyncio.sleep(fake.delay)
            fake.made += 1
            if fake.error and piece == pieces[-1]:
                yield f"data: {json.dumps({'error': {'message': fake.error}})}\n\n"
                return
            yield _event(_choice(piece, body, is_chat))
        for number, call in enumerate(fake.calls if is_chat else ()):
            head = {"index": number, "id": f"call_{number}", "function": {"name": call["name"]}}
            yield _event({"delta": {"tool_calls": [head]}})
            for letter in json.dumps(call["arguments"]):
                part = {"index": number, "function": {"arguments": letter}}
                yield _event({"delta": {"tool_calls": [part]}})
        yield _event({"delta": {}, "text": "", "finish_reason": "stop"})
        count = len(pieces)
        usage = {"prompt_tokens": 3, "completion_tokens": count, "total_tokens": 3 + count}
        yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n"
        yield "data: [DONE]\n\n"
    except asyncio.CancelledError:
        fake.left += 1
        raise
    finally:
        fake.running -= 1


def _choice(piece: str, body: dict, is_chat: bool) -> dict:
    others = {piece: math.log(0.05 + 0.9 * (len(piece) % 4) / 4), " other": math.log(0.03)}
    own = others[piece]
    if not is_chat:
        found = {"tokens": [piece], "token_logprobs": [own], "top_logprobs": [others]}
        return {"text": piece, "logprobs": found if "logprobs" in body else None}
    top = [{"token": text, "logprob": value} for text, value in others.items()]
    found = {"content": [{"token": piece, "logprob": own, "top_logprobs": top}]}
    return {"delta": {"content": piece}, "logprobs": found if body.get("logprobs") else None}


def _event(choice: dict) -> str:
    return f"data: {json.dumps({'choices': [{'index': 0, 'finish_reason': None, **choice}]})}\n\n"


def _metrics(fake: FakeServer) -> str:
    lines = ["# HELP vllm:num_requests_running Number of requests."]
    given = {
        "num_requests_running": fake.running,
        "num_requests_waiting": 0,
        "kv_cache_usage_perc": fake.running / 8,
        "prompt_tokens_total": 3 * len(fake.asked),
        "generation_tokens_total": fake.made,
    }
    lines += [f'vllm:{name}{{model_name="tiny"}} {value}' for name, value in given.items()]
    for name in ("time_to_first_token_seconds", "inter_token_latency_seconds"):
        for bound in BUCKETS:
            count = fake.made if bound >= 0.05 else 0
            lines.append(f'vllm:{name}_bucket{{le="{bound}",model_name="tiny"}} {count}')
        lines.append(f'vllm:{name}_bucket{{le="+Inf",model_name="tiny"}} {fake.made}')
    return "\n".join(lines) + "\n"


@contextlib.contextmanager
def served(app: FastAPI) -> Iterator[str]:
    """The URL of an app that runs in a thread."""
    # With a `log_config` uvicorn closes handlers that exist, and absl's closes standard error.
    options = {"log_config": None, "log_level": "error", "timeout_graceful_shutdown": 1}
    config = uvicorn.Config(app, port=0, **options)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        thread.join(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


@contextlib.contextmanager
def fake_server(**given) -> Iterator[FakeServer]:
    fake = FakeServer(**given)
    with served(app_of(fake)) as fake.url:
        yield fake
