"""Law: a caller whose body is not wanted gets the reply, and then an end, in bounded time."""

import asyncio
import json
import re
import socket
import time
from contextlib import contextmanager, suppress

import pytest

from mjax.serve.late_app import LateApp
from mjax.serve.options import ServeOptions
from tests.marks import slow
from tests.unit.serve.conftest import served

TEXT, MOST = "/v1/completions", 1000
JSON, LONG = "Content-Type: application/json", f"Content-Length: {2 * MOST}"
CHUNKED = "Transfer-Encoding: chunked"
ADMIN = "Authorization: Bearer admin"


@pytest.fixture(scope="module")
def patient(tiny_server):
    """A server that takes small bodies."""
    with served(tiny_server, admin_keys=("admin",), most_body=MOST) as live:
        yield live


@pytest.fixture(scope="module")
def hasty(tiny_server):
    """A server that does not wait for bodies."""
    with served(tiny_server, most_body=MOST, body_seconds=0.5) as live:
        yield live


@pytest.fixture
def brief(monkeypatch):
    """Wait less for the rest of a body than a server does."""
    monkeypatch.setattr("mjax.serve.api.bodies.SILENCE", 0.2)


@contextmanager
def connected(live):
    host, port = live.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as line:
        yield line


def head(path: str, *lines: str, method: str = "POST", version: str = "1.1") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/{version}", "Host: x", *lines, "", ""]).encode()


def one_reply(line: socket.socket) -> tuple[int, bytes]:
    """The status and the head of a reply, which is read to the end of its body and no further."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += line.recv(1) or pytest.fail(f"the reply ends in its head: {data!r}")
    left = int(re.search(rb"content-length: (\d+)", data.lower())[1])
    while left:
        left -= len(line.recv(left)) or pytest.fail("the reply ends in its body")
    return int(data[9:12]), data.lower()


REFUSED = {
    "many bytes": (413, head(TEXT, JSON, LONG) + b"{" * 9),
    "many bytes, as HTTP/1.0 has them": (413, head(TEXT, JSON, LONG, version="1.0") + b"{" * 9),
    "chunks": (413, head(TEXT, JSON, CHUNKED) + b"fff\r\n" + b" " * (MOST + 1)),
    "many bytes for an administrator": (413, head("/abort_requests", ADMIN, JSON, LONG)),
    "chunks for an administrator": (
        413,
        head("/abort_requests", ADMIN, JSON, CHUNKED) + b"fff\r\n" + b" " * (MOST + 1),
    ),
    "no end": (408, head(TEXT, JSON, "Content-Length: 900") + b"{"),
    "no key": (401, head("/pause", JSON, "Content-Length: 900") + b"{"),
    "no JSON": (415, head(TEXT, "Content-Type: text/plain", "Content-Length: 900") + b"{"),
    "no route": (404, head("/nowhere", JSON, CHUNKED) + b"9\r\n{"),
    "no such method": (405, head("/v1/models", JSON, CHUNKED) + b"9\r\n{"),
    "a body that a route does not read": (200, head("/version", CHUNKED, method="GET") + b"9\r\n{"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_connection_ends_whose_body_comes_in_part_after_the_reply(name, patient, hasty, brief):
    status, request = REFUSED[name]
    with connected(hasty if status == 408 else patient) as line:
        line.sendall(request)
        found, said = one_reply(line)
        assert found == status and b"connection: close" in said
        with suppress(ConnectionError):  # on a busy machine this is too late
            line.sendall(b"{" * 5)  # the body goes on, and does not end
            assert line.recv(99) == b""


@pytest.mark.parametrize("own", ["Content-Length: 3000000", CHUNKED])
def test_who_writes_all_before_reading_gets_the_reply(patient, own):
    """A socket closed before all is read resets the connection: callers could lose the reply."""
    begin, end = (b"186a0\r\n", b"\r\n") if own == CHUNKED else (b"", b"")
    with connected(patient) as line:
        line.sendall(head(TEXT, JSON, own))
        for _ in range(30):
            line.sendall(begin + b" " * 100_000 + end)
        line.sendall(b"0\r\n\r\n" if own == CHUNKED else b"")
        assert one_reply(line)[0] == 413 and line.recv(99) == b""


@slow
def test_who_never_ends_is_cut_off(hasty):
    until = time.monotonic() + 20
    with connected(hasty) as line, pytest.raises(ConnectionError):
        line.sendall(head(TEXT, JSON, CHUNKED))
        while time.monotonic() < until:
            line.sendall(b"9000\r\n" + b" " * 0x9000 + b"\r\n")


def test_a_body_that_is_late_goes_on_after_its_408(hasty):
    """A reset would take the reply from a caller who writes first."""
    with connected(hasty) as line:
        line.sendall(head(TEXT, JSON, "Content-Length: 900") + b"{")
        assert one_reply(line)[0] == 408
        for _ in range(9):
            time.sleep(0.02)
            line.sendall(b"{" * 90)
        line.sendall(b"{" * 89)
        assert line.recv(99) == b""


def test_a_body_that_waits_for_leave_is_not_asked_for(patient, brief):
    with connected(patient) as line:
        line.sendall(head(TEXT, JSON, LONG, "Expect: 100-continue"))
        assert one_reply(line)[0] == 413 and line.recv(99) == b""
    with connected(patient) as line:
        line.sendall(head(TEXT, JSON, "Content-Length: 2", "Expect: 100-continue"))
        assert line.recv(25) == b"HTTP/1.1 100 Continue\r\n\r\n"
        line.sendall(b"{}")
        assert one_reply(line)[0] == 400


def test_a_connection_whose_body_was_read_goes_on(patient):
    body = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
    size = f"Content-Length: {len(body)}"
    with connected(patient) as line:
        for status, sent in ((200, body), (400, body.replace(b"mpt", b"tpm")), (200, body)):
            line.sendall(head(TEXT, JSON, size) + sent)
            found, said = one_reply(line)
            assert found == status and b"connection" not in said
        line.sendall(head("/version", method="GET"))
        assert one_reply(line)[0] == 200


def test_so_it_is_while_the_model_is_loaded():
    async def receive():
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message):
        sent.append(message)

    sent, scope = [], {"type": "http", "path": TEXT, "headers": [(b"content-length", b"2")]}
    asyncio.run(LateApp([], ServeOptions("x", "x"), print)(scope, receive, send))
    assert sent[0]["status"] == 503 and (b"connection", b"close") in sent[0]["headers"]
    assert [message.get("more_body", False) for message in sent[1:]] == [True, False]
