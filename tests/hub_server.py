"""A server that speaks as the Hugging Face hub does to huggingface_hub, for tests of what asks it.

Models lie in memory. It serves listings, files (small ones itself, weights by a redirect, with
ranges), and takes pushes: new models, branches, large files and commits.
"""

import base64
import contextlib
import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


@dataclass
class FakeModel:
    """The files of a model by revision. token: what requests must have; gated: refuses all."""

    revisions: dict[str, dict[str, bytes]] = field(default_factory=lambda: {"main": {}})
    token: str | None = None
    gated: bool = False
    private: bool = False

    def commit_of(self, revision: str) -> str | None:
        """The commit of a branch or of a commit itself."""
        for name in self.revisions:
            if revision in (name, self._commit(name)):
                return self._commit(name)
        return None

    def files(self, commit: str) -> dict[str, bytes]:
        return next(f for name, f in self.revisions.items() if self._commit(name) == commit)

    def _commit(self, name: str) -> str:
        files = self.revisions[name]
        text = [name, *(path + digest(files[path]) for path in sorted(files))]
        return hashlib.sha1("".join(text).encode()).hexdigest()


@dataclass
class FakeHub:
    """What it has and what it was asked.

    cuts: bytes after which it drops the connection, one for each time that a file is sent.
    refuses: the next so many requests of a kind (a start of "METHOD /path") fail with HTTP 500.
    asked: "METHOD /path" of requests, and the bytes sent of each file. messages: of commits.
    """

    url: str = ""
    models: dict[str, FakeModel] = field(default_factory=dict)
    cuts: dict[str, list[int]] = field(default_factory=dict)
    refuses: Counter = field(default_factory=Counter)
    asked: list[str] = field(default_factory=list)
    sent: Counter = field(default_factory=Counter)
    objects: dict[str, bytes] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def is_large(path: str) -> bool:
    return path.endswith(".safetensors")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        self._answer()

    do_HEAD = do_POST = do_PUT = do_GET

    # ---- answers -----------------------------------------------------------------------------

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        line = f"{self.command} {path}"
        self.hub.asked.append(line)
        self._body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        for start in self.hub.refuses:
            if line.startswith(start) and self.hub.refuses[start] > 0:
                self.hub.refuses[start] -= 1
                return self._refuse(500, "", "broken on purpose")
        if path.startswith("/objects/"):
            return self._object(path.removeprefix("/objects/"))
        if path == "/api/repos/create":
            return self._create()
        if path == "/api/validate-yaml":  # the metadata of a model card
            return self._json({"warnings": [], "errors": []})
        parts = path.removeprefix("/api/models").strip("/").split("/")
        name, rest = "/".join(parts[:2]).removesuffix(".git"), parts[2:]
        model = self.hub.models.get(name)
        if not self._may(model):
            return None
        return self._of_model(name, model, rest)

    def _of_model(self, name: str, model: FakeModel, rest: list[str]) -> None:
        kind, revision = rest[0] if rest else "revision", "/".join(rest[1:]) or "main"
        if kind == "resolve":
            revision, _, file = revision.partition("/")
        if kind == "info":
            return self._batch()
        if kind == "branch":
            model.revisions[revision] = dict(model.revisions["main"])
            return self._json({})
        commit = model.commit_of(revision)
        if commit is None:
            return self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        if kind == "preupload":
            return self._preupload()
        if kind == "commit":
            return self._commit(name, model, revision)
        files = model.files(commit)
        if kind == "revision":
            siblings = [{"rfilename": file} for file in files]
            return self._json({"id": name, "sha": commit, "siblings": siblings, "private": False})
        if kind == "tree":
            return self._json([_entry(file, content) for file, content in files.items()])
        assert kind == "resolve", self.path
        if file not in files:
            return self._refuse(404, "EntryNotFound", f"{file} does not exist")
        if model.gated:
            return self._refuse(403, "GatedRepo", "Access to this model is restricted")
        return self._file(file, files[file], commit)

    def _may(self, model: FakeModel | None) -> bool:
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if given == "wrong":
            self._refuse(401, "", "Invalid credentials in Authorization header")
        elif given == "reads" and self.command in ("POST", "PUT"):
            self._refuse(403, "", "You don't have the rights to write")
        elif model is None or model.token not in (None, given):
            self._refuse(404 if given else 401, "RepoNotFound", "Repository not found")
        else:
            return True
        return False

    def _file(self, file: str, content: bytes, commit: str) -> None:
        headers = {"X-Repo-Commit": commit, "ETag": f'"{digest(content)}"'}
        if not is_large(file):
            return self._send(200, content, headers, file)
        self.hub.objects[digest(content)] = content
        headers |= {"X-Linked-Etag": headers["ETag"], "X-Linked-Size": str(len(content))}
        elsewhere = self.hub.url.replace("127.0.0.1", "localhost")
        where = f"{elsewhere}/objects/{digest(content)}?{file}"
        return self._send(302, b"", headers | {"Location": where}, file)

    def _object(self, oid: str) -> None:
        if self.command == "PUT":
            assert digest(self._body) == oid
            self.hub.objects[oid] = self._body
            return self._send(200, b"", {"ETag": f'"{oid}"'})
        return self._send(200, self.hub.objects[oid], {}, urlsplit(self.path).query)

    def _send(self, status: int, content: bytes, headers: dict, file: str = "") -> None:
        first = self.headers.get("Range", "").removeprefix("bytes=").rstrip("-")
        size = len(content)
        if first and status == 200:
            status, content = 206, content[int(first) :]
            headers = headers | {"Content-Range": f"bytes {first}-{size - 1}/{size}"}
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "HEAD":
            return
        cuts = self.hub.cuts.get(file, []) if status in (200, 206) else []
        part = content[: cuts.pop(0)] if cuts else content
        self.wfile.write(part)
        if file and status != 302:
            self.hub.sent[file] += len(part)
        if len(part) < len(content):
            self.close_connection = True
            self.wfile.flush()
            self.connection.shutdown(2)

    def _json(self, value: object, status: int = 200) -> None:
        self._send(status, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _refuse(self, status: int, code: str, message: str) -> None:
        headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        self._send(status, json.dumps({"error": message}).encode(), headers)

    # ---- pushes ------------------------------------------------------------------------------

    def _create(self) -> None:
        said = json.loads(self._body)
        name = f"{said.get('organization', 'me')}/{said['name']}"
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if given in ("", "wrong"):
            return self._refuse(401, "", "Invalid credentials in Authorization header")
        if given == "reads":
            return self._refuse(403, "", "You don't have the rights to write")
        if name in self.hub.models:
            return self._json({"url": f"{self.hub.url}/{name}"}, 409)
        is_private = bool(said.get("private")) or said.get("visibility") == "private"
        self.hub.models[name] = FakeModel(private=is_private)
        return self._json({"url": f"{self.hub.url}/{name}"})

    def _preupload(self) -> None:
        files = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if is_large(file["path"]) else "regular",
                "shouldIgnore": False,
            }
            for file in json.loads(self._body)["files"]
        ]
        self._json({"files": files})

    def _batch(self) -> None:
        answer = []
        for item in json.loads(self._body)["objects"]:
            found = {"oid": item["oid"], "size": item["size"]}
            if item["oid"] not in self.hub.objects:
                href = f"{self.hub.url}/objects/{item['oid']}"
                found["actions"] = {"upload": {"href": href}}
            answer.append(found)
        self._json({"transfer": "basic", "objects": answer})

    def _commit(self, name: str, model: FakeModel, revision: str) -> None:
        for line in self._body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "header":
                self.hub.messages.append(value["summary"])
            elif entry["key"] == "file":
                content = base64.b64decode(value["content"])
                model.revisions[revision][value["path"]] = content
            else:
                assert entry["key"] == "lfsFile", entry
                model.revisions[revision][value["path"]] = self.hub.objects[value["oid"]]
        oid = model.commit_of(revision)
        url = f"{self.hub.url}/{name}/commit/{oid}"
        self._json({"commitUrl": url, "commitOid": oid, "hookOutput": ""})


def _entry(file: str, content: bytes) -> dict:
    entry = {"type": "file", "path": file, "size": len(content), "oid": digest(content)[:40]}
    if is_large(file):
        entry["lfs"] = {"oid": digest(content), "size": len(content), "pointerSize": 130}
    return entry


@contextlib.contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """Serve a hub on a free port of this machine."""
    hub = FakeHub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
