"""Servers on this machine that speak as object stores do, and a proxy that makes them fail.

`google_store` is a part of Google's JSON protocol; S3's is moto's server, where it is installed.
"""

import contextlib
import hashlib
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit


@contextlib.contextmanager
def served(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """A server in threads of this process; its URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


class Quiet(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def content(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def answer(self, code: int, body: bytes, headers: dict | None = None) -> None:
        self.send_response(code)
        for name, value in {"Content-Length": len(body), **(headers or {})}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            with contextlib.suppress(ConnectionError):  # of a client that has left
                self.wfile.write(body)


@dataclass
class Proxy:
    """faults: of the next requests whose "METHOD /path" holds `of`; None lets one pass."""

    url: str = ""
    of: str = ""
    faults: list[Callable | None] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)


@contextlib.contextmanager
def faulty_proxy(upstream: str) -> Iterator[Proxy]:
    """A proxy to a server, which makes requests fail as its faults say."""
    proxy, target = Proxy(), urlsplit(upstream)

    class Handler(Quiet):
        def any(self) -> None:
            body, asked = self.content(), f"{self.command} {unquote(self.path)}"
            if proxy.of in asked:
                proxy.asked.append(asked)
                fault = proxy.faults.pop(0) if proxy.faults else None
                if fault is not None:
                    self.close_connection = True
                    answer = None if fault in EARLY else self.forward(body)
                    fault(self, answer)
                    return
            code, content, headers = self.forward(body)
            self.answer(code, content, headers)

        def forward(self, body: bytes) -> tuple[int, bytes, dict]:
            connection = http.client.HTTPConnection(target.hostname, target.port)
            dropped = ("transfer-encoding", "content-length", "connection")
            headers = {k: v for k, v in self.headers.items() if k.lower() not in dropped}
            connection.request(self.command, self.path, body, headers)
            found = connection.getresponse()
            content = found.read()
            kept = {k: v for k, v in found.headers.items() if k.lower() not in dropped}
            if self.command == "HEAD":
                kept["Content-Length"] = found.headers.get("Content-Length", 0)
            connection.close()
            return found.status, content, kept

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = any

    with served(Handler) as proxy.url:
        yield proxy


def refuse(code: int, name: str) -> Callable:
    """A fault: an error as S3 tells it."""

    def fault(handler: Quiet, _: object) -> None:
        text = f"<?xml version='1.0'?><Error><Code>{name}</Code><Message>{name}</Message></Error>"
        handler.answer(code, text.encode(), {"Content-Type": "application/xml"})

    EARLY.add(fault)
    return fault


def google_refuses(code: int) -> Callable:
    """A fault: an error as Google tells it."""

    def fault(handler: Quiet, _: object) -> None:
        text = json.dumps({"error": {"code": code, "message": f"error {code}"}})
        handler.answer(code, text.encode(), {"Content-Type": "application/json"})

    EARLY.add(fault)
    return fault


def hang_up(handler: Quiet, _: object) -> None:
    """Close without a word."""


def never(handler: Quiet, _: object) -> None:
    time.sleep(3)


def cut_body(handler: Quiet, answer: tuple) -> None:
    """Half of the body that was promised."""
    code, content, headers = answer
    handler.send_response(code)
    for name, value in {**headers, "Content-Length": len(content)}.items():
        handler.send_header(name, str(value))
    handler.end_headers()
    handler.wfile.write(content[: len(content) // 2])


def short_body(handler: Quiet, answer: tuple) -> None:
    """A body that is shorter than what was asked for, and says so."""
    code, content, headers = answer
    handler.answer(code, content[: len(content) // 2], headers)


def no_body(handler: Quiet, answer: tuple) -> None:
    handler.answer(200, b"", answer[2])


def trickle(handler: Quiet, answer: tuple) -> None:
    """A byte now and then, for longer than anyone waits."""
    code, content, headers = answer
    handler.send_response(code)
    for name, value in {**headers, "Content-Length": len(content)}.items():
        handler.send_header(name, str(value))
    handler.end_headers()
    with contextlib.suppress(OSError):
        for byte in content[:30]:
            handler.wfile.write(bytes([byte]))
            handler.wfile.flush()
            time.sleep(0.1)


def page_of_a_proxy(handler: Quiet, _: object) -> None:
    handler.answer(502, b"<html>Bad Gateway</html>", {"Content-Type": "text/html"})


EARLY = {hang_up, never, page_of_a_proxy}  # answered without the server


def parts_of(body: bytes, kind: str) -> tuple[str, bytes]:
    """(name, content) of an upload in two parts: what it is about, and the object itself."""
    border = b"--" + kind.split("boundary=")[1].strip("\"'").encode()
    end = b"\r\n" if b"\r\n" in body.partition(border)[2][:2] else b"\n"
    _, about, content = body.split(border, 2)
    name = json.loads(about.split(2 * end, 1)[1])["name"]
    return name, content.split(2 * end, 1)[1].rpartition(end + border)[0]


@contextlib.contextmanager
def google_store(bucket: str) -> Iterator[str]:
    """A bucket in memory behind the part of Google's JSON protocol that gcsfs speaks; its URL."""
    objects: dict[str, tuple[bytes, int]] = {}
    uploads: dict[str, tuple[str, bytes]] = {}
    generations = iter(range(1, 10**6))

    def put(name: str, content: bytes) -> dict:
        objects[name] = content, next(generations)
        return about(name)

    def about(name: str) -> dict:
        content, generation = objects[name]
        etag = hashlib.md5(content).hexdigest()
        found = {"kind": "storage#object", "name": name, "bucket": bucket, "etag": etag}
        return found | {"size": str(len(content)), "generation": str(generation)}

    class Handler(Quiet):
        def json(self, code: int, found: dict, headers: dict | None = None) -> None:
            kind = {"Content-Type": "application/json"}
            self.answer(code, json.dumps(found).encode(), kind | (headers or {}))

        def missing(self) -> None:
            self.json(404, {"error": {"code": 404, "message": "Not Found"}})

        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            query = {k: v[0] for k, v in parse_qs(parts.query).items()}
            way = parts.path.removeprefix("/download").removeprefix("/storage/v1/b/")
            of, _, rest = way.partition("/")
            name = unquote(rest.removeprefix("o").removeprefix("/"))
            if of != bucket:
                self.missing()
            elif not rest:
                self.json(200, {"kind": "storage#bucket", "name": bucket})
            elif not name:
                self.listing(query.get("prefix", ""), query.get("delimiter", ""))
            elif name not in objects:
                self.missing()
            elif query.get("alt") == "media":
                self.media(objects[name][0])
            else:
                self.json(200, about(name))

        def listing(self, prefix: str, delimiter: str) -> None:
            names, folders = [], set()
            for name in sorted(n for n in objects if n.startswith(prefix)):
                rest = name[len(prefix) :]
                if delimiter and delimiter in rest:
                    folders.add(prefix + rest.split(delimiter)[0] + delimiter)
                else:
                    names.append(about(name))
            self.json(200, {"items": names, "prefixes": sorted(folders)})

        def media(self, content: bytes) -> None:
            if (said := self.headers.get("Range")) is None:
                self.answer(200, content)
                return
            first, _, last = said.removeprefix("bytes=").partition("-")
            self.answer(206, content[int(first) : int(last) + 1 if last else None])

        def do_POST(self) -> None:
            parts = urlsplit(self.path)
            query = {k: v[0] for k, v in parse_qs(parts.query).items()}
            if "upload_id" in query:
                self.do_PUT()
                return
            body = self.content()
            if query.get("uploadType") == "multipart":
                self.json(200, put(*parts_of(body, self.headers["Content-Type"])))
                return
            name = query.get("name") or json.loads(body)["name"]
            number = str(next(generations))
            uploads[number] = name, b""
            where = f"http://{self.headers['Host']}{parts.path}?upload_id={number}"
            self.json(200, {}, {"Location": where})

        def do_PUT(self) -> None:
            number = parse_qs(urlsplit(self.path).query)["upload_id"][0]
            name, before = uploads[number]
            uploads[number] = name, before + self.content()
            if self.headers.get("Content-Range", "/").endswith("/*"):
                self.answer(308, b"", {"Range": f"bytes=0-{len(uploads[number][1]) - 1}"})
            else:
                self.json(200, put(name, uploads.pop(number)[1]))

        def do_DELETE(self) -> None:
            name = unquote(urlsplit(self.path).path.partition("/o/")[2])
            if objects.pop(name, None) is None:
                self.missing()
            else:
                self.answer(204, b"")

    with served(Handler) as url:
        yield url
