"""Whatever comes is answered: bad requests, strangers, and callers who leave or do not read."""

import asyncio
import base64
import hashlib
import json
import os
import re
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx
import pytest

from mjax.infer.async_engine import EngineDied
from mjax.serve.api.limits import EventStream, event, events_of
from mjax.serve.base.engines import Piece
from mjax.serve.protocol.errors import ApiError
from tests.marks import slow
from tests.unit.serve.conftest import LENGTH, QUEUED, served

CHAT, TEXT, IDS = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"
HI = [{"role": "user", "content": "Hi."}]
TOOL = {"type": "function", "function": {"name": "f"}}
NAMED = {"type": "function", "function": {"name": "g"}}


def checked(reply: httpx.Response, status: int) -> dict:
    """The error of a reply, which must have OpenAI's form."""
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == "application/json"
    found = reply.json()
    assert list(found) == ["error"] and {*found["error"]} == {"message", "type", "param", "code"}
    error = found["error"]
    assert error["message"] and "/tmp" not in error["message"] and "Traceback" not in reply.text
    assert error["type"] == ("server_error" if status >= 500 else "invalid_request_error")
    return error


def chat(**own):
    return CHAT, {"messages": HI} | own


def text(**own):
    return TEXT, {"prompt": "a"} | own


BAD = [
    (*chat(temperature=-1), "temperature"),
    (*chat(temperature="warm"), "temperature"),
    (*chat(temperature=True), "temperature"),
    (*chat(top_p=0), "top_p"),
    (*chat(n=0), "n"),
    (*chat(n=2, temperature=0), "n"),
    (*chat(n=10**30), "n"),
    (*chat(seed=2**70), "seed"),
    (*chat(stop=[""]), "stop.0"),
    (*chat(stop=["a"] * 65), "stop"),
    (*chat(logit_bias={"a": 1}), "logit_bias.a"),
    (*chat(logit_bias={"259": 101}), "logit_bias.259"),
    (*chat(logit_bias={"260": 1}), "logit_bias"),
    (*chat(logit_bias={"-1": 1}), "logit_bias"),
    (*chat(bad_words=[""]), "bad_words.0"),
    (*chat(top_logprobs=21, logprobs=True), "top_logprobs"),
    (*chat(top_logprobs=2), "top_logprobs"),
    (*chat(max_tokens=0), "max_tokens"),
    (*chat(max_tokens=LENGTH), None),
    (*chat(min_tokens=5, max_tokens=4), "min_tokens"),
    (*chat(tools=[TOOL], tool_choice="any"), "tool_choice"),
    (*chat(tool_choice="auto"), "tool_choice"),
    (*chat(tools=[TOOL, TOOL]), "tools"),
    (*chat(tools=[TOOL] * 513), "tools"),
    (*chat(tools=[{"type": "function"}]), "tools.0.function"),
    (
        *chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "g"}}),
        "tool_choice",
    ),
    (*chat(stream_options={"include_usage": True}), "stream_options"),
    (*chat(messages=[]), "messages"),
    (*chat(messages=[{"role": "wizard", "content": ""}]), "messages.0.role"),
    (*chat(messages=[{"content": "a"}]), "messages.0.role"),
    (*chat(messages=[{"role": "user", "content": "x" * 9000}]), "messages"),
    (*chat(messages=[{"role": "user", "content": "x" * 300}]), "messages"),
    (*chat(messages=[{"role": "user", "content": [{"type": "video"}]}]), "messages.content.type"),
    (
        *chat(
            messages=[
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": "http://"}}],
                }
            ]
        ),
        "messages.content.image_url",
    ),
    (*chat(chat_template="{{ 1 }}"), "chat_template"),
    (*chat(chat_template_kwargs={"messages": []}), "chat_template_kwargs.messages"),
    (*chat(chat_template_kwargs={"self": 1}), "chat_template_kwargs.self"),
    (*chat(chat_template_kwargs={"bos_token": "a"}), "chat_template_kwargs.bos_token"),
    (*chat(guided_json="no"), "structured_outputs"),
    (*chat(guided_jsno={}), "guided_jsno"),
    (*chat(guided_regex="a", guided_json={}), "structured_outputs"),
    (*chat(guided_regex=3), "structured_outputs.regex"),
    (*chat(structured_outputs={"regex": "("}), "structured"),
    (*chat(structured_outputs={"choice": []}), "structured_outputs"),
    (*chat(structured_outputs={"rx": "a"}), "structured_outputs.rx"),
    (*chat(response_format={"type": "xml"}), "response_format"),
    (*chat(response_format={"type": "json_schema"}), "response_format"),
    (
        *chat(response_format={"type": "json_schema", "json_schema": {"schema": {"type": 3}}}),
        "structured",
    ),
    (*chat(continue_final_message=True, add_generation_prompt=True), "continue_final_message"),
    (*chat(timeout=0), "timeout"),
    (*chat(request_id="a b"), "request_id"),
    (*text(prompt=[]), "prompt"),
    (*text(prompt=""), "prompt"),
    (*text(prompt=[[]]), "prompt"),
    (*text(prompt=[-1]), "prompt"),
    (*text(prompt=[260]), "prompt"),
    (*text(prompt=[2**80]), "prompt"),
    (*text(prompt=[1, "a"]), "prompt"),
    (*text(prompt=[1] * LENGTH), "prompt"),
    (*text(prompt=["a"] * 2000), "prompt"),
    (*text(prompt=["a"] * 600, n=2), "n"),
    (*text(prompt=None), "prompt"),
    (*text(best_of=2), "best_of"),
    (*text(suffix="x"), "suffix"),
    (*text(logprobs=-1), "logprobs"),
    (*text(max_tokens=-1), "max_tokens"),
    (*text(stop_token_ids=[260]), "stop_token_ids"),
    (*text(allowed_token_ids=[]), "allowed_token_ids"),
    (IDS, {"token_ids": []}, "token_ids"),
    (IDS, {"token_ids": [1], "sampling_params": {"temprature": 1}}, "temprature"),
    (IDS, {"token_ids": [1], "sampling_params": {"": 1}}, None),
    ("/v1/embeddings", {"input": []}, "input"),
    ("/v1/embeddings", {"input": "a", "dimensions": 3}, "dimensions"),
    ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format"),
    ("/tokenize", {}, "prompt"),
    ("/detokenize", {"tokens": [-1]}, "tokens"),
    ("/detokenize", {"tokens": [2**70]}, "tokens"),
]


@pytest.mark.parametrize("path, body, param", BAD)
def test_a_bad_field_is_named(live, path, body, param):
    reply = httpx.post(f"{live.url}{path}", json=body, timeout=60)
    error = checked(reply, 400)
    assert error["param"] == param


RAW = [
    (TEXT, b"", "application/json", 400),
    (TEXT, b"{", "application/json", 400),
    (TEXT, b"[]", "application/json", 400),
    (TEXT, b"null", "application/json", 400),
    (TEXT, b"\xff\xfe", "application/json", 400),
    (TEXT, b'{"prompt": "\\ud800"}', "application/json", 400),
    (TEXT, b'{"prompt": "a", "temperature": NaN}', "application/json", 400),
    (TEXT, b'{"prompt": "a", "temperature": 1e999}', "application/json", 400),
    (TEXT, b'{"prompt": ' + b"[" * 100_000, "application/json", 400),
    (TEXT, b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "application/json", 400),
    (TEXT, b'{"prompt": "a"}', "text/plain", 415),
    (TEXT, b'{"prompt": "a"}', "", 415),
    (TEXT, b"prompt=a", "application/x-www-form-urlencoded", 415),
    (TEXT, b'{"prompt": "a", "model": "gpt"}', "application/json", 404),
]


@pytest.mark.parametrize("path, body, kind, status", RAW)
def test_a_body_that_is_no_request(live, path, body, kind, status):
    reply = httpx.post(f"{live.url}{path}", content=body, headers={"Content-Type": kind})
    checked(reply, status)


def test_deep_json_is_refused(live):
    deep = {"a": None}
    for _ in range(150):
        deep = {"properties": deep}
    for own in ({"guided_json": deep}, {"chat_template_kwargs": deep}, {"tools": [TOOL | deep]}):
        reply = httpx.post(f"{live.url}{CHAT}", json={"messages": HI, "max_tokens": 1} | own)
        assert reply.status_code in (200, 400), reply.text


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "HEAD", "PATCH"])
def test_other_routes_and_methods(live, method):
    for path, own in ((TEXT, "POST"), ("/v1/models", "GET"), ("/nowhere", ""), ("/health/", "")):
        if method == own:
            continue
        reply = httpx.request(method, f"{live.url}{path}")
        status = 405 if own else 404
        if method == "HEAD":
            assert reply.status_code == status
        else:
            checked(reply, status)


def test_a_large_body_is_refused_before_it_is_read(tiny_server):
    with served(tiny_server, most_body=1000) as live:
        body = json.dumps({"prompt": "a" * 2000}).encode()
        kind = {"Content-Type": "application/json"}
        for content in body, iter([body[:600], body[600:]]):
            reply = httpx.post(f"{live.url}{TEXT}", content=content, headers=kind)
            assert checked(reply, 413)["code"] == "body_too_large"


def test_a_body_that_does_not_come_is_refused(tiny_server):
    with served(tiny_server, body_seconds=0.5) as live:
        host, port = live.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as line:
            head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            line.sendall(f"{head}Content-Length: 900\r\n\r\n{{".encode())
            assert b" 408 " in line.recv(4096)


def test_keys(tiny_server):
    with served(tiny_server, api_keys=("one", "zwei"), admin_keys=("admin",)) as live:
        for path in ("/health", "/ready", "/metrics"):
            assert httpx.get(f"{live.url}{path}").status_code == 200
        for path in ("/v1/models", "/version", "/nowhere", "/openapi.json"):
            for own in ({}, {"Authorization": "Bearer on"}, {"Authorization": "one"}):
                error = checked(httpx.get(f"{live.url}{path}", headers=own), 401)
                assert error["code"] == "invalid_api_key"
        for key in ("one", "zwei", "admin"):
            own = {"Authorization": f"Bearer {key}"}
            assert httpx.get(f"{live.url}/v1/models", headers=own).status_code == 200
            status = 200 if key == "admin" else 401
            assert httpx.post(f"{live.url}/resume", headers=own).status_code == status
            assert httpx.post(f"{live.url}/resume/", headers=own).status_code in (401, 404)


def test_a_server_without_an_administrator_has_no_such_routes(tiny_server):
    with served(tiny_server) as live:
        assert checked(httpx.post(f"{live.url}/pause"), 403)["code"] == "no_admin_key"


@pytest.fixture
def slow_engine(live, monkeypatch):
    """Steps that leave time to leave; `engine.slow_steps` counts them."""
    step = live.engine.step
    monkeypatch.setattr(live.engine, "slow_steps", 0, raising=False)

    def slow_step():
        live.engine.slow_steps += 1
        time.sleep(0.02)
        return step()

    monkeypatch.setattr(live.engine, "step", slow_step)
    return live


LONG = {"prompt": "a", "max_tokens": 100, "ignore_eos": True}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("own", [{}, {"n": 3}, {"prompt": ["a", "b"], "n": 2}])
def test_who_leaves_frees_pages(slow_engine, stream, own):
    live, body = slow_engine, LONG | own | {"stream": stream}
    with pytest.raises(httpx.ReadTimeout), httpx.Client(timeout=0.3) as client:
        if not stream:
            client.post(f"{live.url}{TEXT}", json=body)
        with client.stream("POST", f"{live.url}{TEXT}", json=body) as reply:
            next(reply.iter_lines())
            raise httpx.ReadTimeout("enough")
    live.at_rest()
    assert live.engine.slow_steps < 90  # to the end it would take 100


@pytest.mark.parametrize("stream", [True, False])
def test_a_late_request_ends(slow_engine, stream):
    body = LONG | {"timeout": 0.4, "stream": stream}
    reply = httpx.post(f"{slow_engine.url}{TEXT}", json=body)
    if stream:
        assert reply.status_code == 200 and "[DONE]" not in reply.text
        error = json.loads(reply.text.strip().split("data: ")[-1])["error"]
        assert error["code"] == "deadline"
    else:
        assert checked(reply, 504)["code"] == "deadline"
        assert reply.headers["x-should-retry"] == "false"
    slow_engine.at_rest()


def test_a_reader_that_takes_nothing_is_dropped(live, monkeypatch):
    async def generate(prompt, params, **_):
        try:
            while True:
                yield Piece(0, "x" * 10_000, [1], [0.0], None, [0])
        finally:
            ended.append(True)

    ended = []
    monkeypatch.setattr(live.engines, "generate", generate)
    host, port = live.url.removeprefix("http://").split(":")
    body = json.dumps({"prompt": "a", "stream": True}).encode()
    head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with socket.create_connection((host, int(port))) as line:
        line.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        begin = time.monotonic()
        while not ended and time.monotonic() - begin < 20:
            time.sleep(0.05)
    assert ended


@slow
def test_a_full_queue_is_told(slow_engine):
    live, count = slow_engine, QUEUED + 12
    with ThreadPoolExecutor(count) as pool:
        body = LONG | {"max_tokens": 15}
        asked = [pool.submit(httpx.post, f"{live.url}{TEXT}", json=body) for _ in range(count)]
        replies = [each.result() for each in asked]
    refused = [reply for reply in replies if reply.status_code != 200]
    assert 0 < len(refused) < count
    for reply in refused:
        assert checked(reply, 503)["code"] == "queue_full" and reply.headers["retry-after"] == "1"
    assert "vllm:admission_rejections_total" in httpx.get(f"{live.url}/metrics").text
    live.at_rest()


FAILURES = [
    (EngineDied("the engine ended by an error: secret"), 503),
    (RuntimeError("secret"), 500),
    (KeyError("secret"), 500),
]


@pytest.mark.parametrize("error, status", FAILURES)
def test_failures_inside_tell_nothing(live, monkeypatch, error, status):
    async def generate(prompt, params, **_):
        if prompt[0] == 2:
            yield Piece(0, "x", [1], [0.0], None, [0])
        raise error

    monkeypatch.setattr(live.engines, "generate", generate)
    for own in ({}, {"stream": True}):
        reply = httpx.post(f"{live.url}{TEXT}", json={"prompt": [1]} | own)
        assert "secret" not in checked(reply, status)["message"]
    reply = httpx.post(f"{live.url}{TEXT}", json={"prompt": [2], "stream": True})
    assert reply.status_code == 200 and "secret" not in reply.text and "DONE" not in reply.text
    assert '"error"' in reply.text.strip().split("\n")[-1]


def test_a_template_that_does_not_end(live, monkeypatch):
    monkeypatch.setattr("mjax.data.base.chat.LONGEST_RENDERING", 0.3)
    source = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    prompts = live.app.state.service.prompts
    monkeypatch.setattr(prompts, "template", replace(prompts.template, source=source))
    begin = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(httpx.post, f"{live.url}{CHAT}", json={"messages": HI}, timeout=60)
        while not asked.done():  # meanwhile others are answered
            assert httpx.get(f"{live.url}/health", timeout=2).status_code == 200
    checked(asked.result(), 400)
    assert time.monotonic() - begin < 20


def test_administration(live, monkeypatch):
    asked = []

    async def command(name, /, **given):
        asked.append((name, given))
        return {}

    monkeypatch.setattr(live.engines, "command", command)
    own = {"Authorization": "Bearer admin"}
    calls = [
        ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/b"}),
        ("/v1/load_adapter", {"name": "a", "path": "/b"}),
        ("/v1/unload_lora_adapter", {"lora_name": "a"}),
        ("/pause", None),
        ("/resume", None),
        ("/sleep", None),
        ("/wake_up", None),
        ("/reload_weights", {"path": "/c"}),
        ("/reset_prefix_cache", None),
    ]
    for path, body in calls:
        assert httpx.post(f"{live.url}{path}", json=body, headers=own).status_code == 200
        checked(httpx.post(f"{live.url}{path}", json=body), 401)
    assert asked[:3] == [("load_adapter", {"name": "a", "path": "/b"})] * 2 + [
        ("unload_adapter", {"name": "a"})
    ]
    names = [name for name, _ in asked[3:]]
    assert names == ["pause", "resume", "sleep", "wake", "reload", "reset_prefix_cache"]


def test_requests_are_aborted_by_the_id_of_their_reply(slow_engine):
    live, own = slow_engine, {"Authorization": "Bearer admin"}
    with ThreadPoolExecutor(1) as pool:
        body = LONG | {"request_id": "mine"}
        asked = pool.submit(httpx.post, f"{live.url}{TEXT}", json=body, timeout=60)
        while not live.app.state.service.running:
            time.sleep(0.01)
        body = {"request_ids": ["cmpl-mine"]}
        httpx.post(f"{live.url}/abort_requests", json=body, headers=own)
    made = asked.result().json()
    assert made["id"] == "cmpl-mine" and made["choices"][0]["finish_reason"] == "abort"
    assert made["usage"]["completion_tokens"] < 100


def test_the_page_runs_its_own_script_alone(live):
    reply = httpx.get(f"{live.url}/")
    assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/html")
    policy = dict(
        part.split(" ", 1) for part in reply.headers["content-security-policy"].split("; ")
    )
    (script,) = re.findall(r"<script>(.*?)</script>", reply.text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy["default-src"] == "'none'" and policy["connect-src"] == "'self'"
    assert policy["script-src"] == f"'sha256-{digest}'"


WORKER = """
import sys
from mjax.serve.api.metrics import ApiMetrics, RequestTimes
metrics = ApiMetrics("tiny")
times = RequestTimes(metrics, 3, 1, 5)
for number in range(4):
    times.add(0, 1, "stop" if number == 3 else None)
times.end(True)
print(metrics.exposed([{"running": 2}]).decode())
"""


def test_metrics_of_several_processes_are_added(tmp_path):
    environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    for number in (1, 2):
        command = [sys.executable, "-c", WORKER]
        made = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        labels = r'\{engine="0",model_name="tiny"\}'
        for name, count in (("time_to_first_token_seconds", 1), ("inter_token_latency_seconds", 3)):
            found = re.search(f"^vllm:{name}_count{labels} (.*)$", made.stdout, re.M)
            assert float(found[1]) == count * number
        assert re.search(f"^vllm:num_requests_running{labels} 2.0$", made.stdout, re.M)


def test_metrics_have_the_names_of_dashboards(live):
    httpx.post(f"{live.url}{TEXT}", json={"prompt": "a", "max_tokens": 5})
    found = httpx.get(f"{live.url}/metrics").text
    labels = r'\{engine="0",model_name="tiny"\}'
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert re.search(f"^vllm:{name}{labels} ", found, re.M)
    for name in ("time_to_first_token_seconds", "inter_token_latency_seconds"):
        count = re.search(f"^vllm:{name}_count{labels} ([0-9.]+)$", found, re.M)
        assert float(count[1]) > 0, found
    assert re.search(r'^vllm:request_success_total{.*finished_reason="length".*} ', found, re.M)
    assert re.search(r"^vllm:generation_tokens_total{", found, re.M)


@pytest.mark.parametrize("takes", [True, False])
def test_a_stream_ends_where_its_reader_takes_nothing(takes):
    closed, sent = [], []

    async def events():
        try:
            for _ in range(8):
                await asyncio.sleep(0.05)  # together longer than a reader may take
                yield b"data: 1\n\n"
        finally:
            closed.append(True)

    async def send(message):
        sent.append(message.get("body"))
        if not takes and len(sent) == 3:
            await asyncio.Event().wait()

    async def run():
        stream = EventStream(b"data: 0\n\n", events(), {}, 0.2, None, ApiError)
        begin = time.monotonic()
        await asyncio.wait_for(stream({}, asyncio.Event().wait, send), 10)
        return time.monotonic() - begin

    seconds = asyncio.run(run())
    assert closed and (sent[-1] == b"data: [DONE]\n\n") == takes
    assert len(sent) == (1 + 1 + 8 + 1 if takes else 3) and (takes or seconds >= 0.2)


def test_events_that_begin_alike_are_those_of_their_objects():
    head, choice = {"id": "a", "model": 'x"y'}, {"index": 0, "text": "é", "logprobs": None}
    for more in ({}, {"usage": None}, {"usage": {"a": 1}, "prompt_token_ids": [1, 2]}):
        assert events_of(head)(choice, more) == event(head | {"choices": [choice]} | more)
