"""`python -m tests.soak --requests 10000 --seed 7`: `mjax serve` under callers of every kind.

A tiny model is served by the processes of `mjax serve`, and stopped at the end while it streams.
`tests/laws/serving/test_soak.py` has less of it, in threads of one process. Callers ask for texts,
chats and tokens of random lengths, with adapters, samples, forms and stop strings. Some leave
before the first token or within a stream, read slowly or not at all, send half a body, no JSON,
wrong fields, too much, or no HTTP. Meanwhile an administrator pauses, aborts, forgets caches, loads
weights and adapters. What must hold then:

- every request ends within `LONGEST` seconds, a stream with [DONE] or an error as its last event;
- every error is one JSON object of OpenAI's form, and none has the status 500;
- greedy probes always get the same text;
- at rest no request is left, and free + cached pages are all pages;
- nothing was compiled since the start;
- memory after the second half is at most `MOST_MB` above that after the first.
"""

import argparse
import asyncio
import contextlib
import gc
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

LONGEST, MOST_MB = 30.0, 32
AT_A_TIME = 24
ADMIN = {"authorization": "Bearer admin"}
FINE = {200, 503}  # a full queue is fine
LETTERS = "abcdefgh ijklmnop\n"
HAS_FORMS = find_spec("llguidance") is not None


class Broken(AssertionError):
    """A promise of the server that did not hold."""


@dataclass
class Reply:
    """What came of a request: 0 is the status where the caller did not wait for one."""

    status: int = 0
    body: bytes = b""


@dataclass
class Caller:
    """Asks a server at a port; `counts` are by kind of request and what came of it."""

    port: int
    rng: random.Random
    adapters: tuple[str, ...] = ()
    counts: Counter = field(default_factory=Counter)
    administrator: asyncio.Lock | None = None  # one command at a time
    probes: dict[str, str] = field(default_factory=dict)
    home: Path | None = None  # with base/, a model, and adapters, that an administrator loads

    # ---- requests --------------------------------------------------------------------------------

    def words(self, most: int) -> str:
        return "".join(self.rng.choices(LETTERS, k=self.rng.randint(1, most)))

    def sampling(self) -> dict:
        """Fields that all routes for text share."""
        rng = self.rng
        found = {"max_tokens": rng.choice((1, 2, 5, 10, 20, 40)), "stream": rng.random() < 0.6}
        more = (
            {"temperature": 1.3, "seed": rng.randrange(9)},
            {"n": rng.randint(2, 3), "temperature": 0.7},
            {"stop": [self.words(2), "q"]},
            {"ignore_eos": True, "min_tokens": 1},
            {"top_p": 0.5, "top_k": 5},
            {"logit_bias": {"5": -100}, "presence_penalty": 0.5},
            {"bad_words": ["ab"]},
            {"model": rng.choice(self.adapters)} if self.adapters else {},
            {"priority": rng.randint(-2, 2), "user": "someone"},
        )
        for fields in more:
            if rng.random() < 0.15:
                found |= fields
        if HAS_FORMS and rng.random() < 0.1:
            found = {name: found[name] for name in ("max_tokens", "stream")}
            found |= {"structured_outputs": {"regex": "[ab]{2,9}"}}
        if found["stream"] and rng.random() < 0.5:
            found["stream_options"] = {"include_usage": True}
        return found

    def asked(self) -> tuple[str, dict]:
        """A route and a body that are fine."""
        rng, fields = self.rng, self.sampling()
        shared = "A beginning that several prompts share. " * rng.randint(0, 1)
        route = rng.choice(("completions", "completions", "chat", "generate"))
        if route == "chat":
            turns = [{"role": "user", "content": shared + self.words(20)}]
            return "/v1/chat/completions", {"messages": turns, **fields}
        if route == "generate":
            plain = {k: v for k, v in fields.items() if k in ("stream", "model", "priority")}
            own = {
                k: v for k, v in fields.items() if k in ("max_tokens", "temperature", "n", "stop")
            }
            ids = [rng.randrange(250) for _ in range(rng.randint(1, 60))]
            return "/inference/v1/generate", {"token_ids": ids, "sampling_params": own, **plain}
        if rng.random() < 0.3:
            fields |= {"logprobs": rng.randint(0, 5), "echo": rng.random() < 0.5}
        prompt = rng.choice((shared + self.words(30), [[1, 2, 3], [*range(1, 30)]], ["a", "b c"]))
        return "/v1/completions", {"prompt": prompt, **fields}

    async def fine(self) -> str:
        route, body = self.asked()
        if self.rng.random() < 0.03:
            body["timeout"] = 0.001
            return self.checked(await self.post(route, body), FINE | {504})
        return self.checked(await self.post(route, body), FINE)

    async def probe(self) -> str:
        """A greedy text, which is always the same."""
        model = self.rng.choice((*self.adapters, None))
        body = {
            "prompt": "Now tell me " * 4,
            "max_tokens": 12,
            "temperature": 0,
            "ignore_eos": True,
        }
        reply = await self.post("/v1/completions", body | ({"model": model} if model else {}))
        if reply.status == 200:
            choice = json.loads(reply.body)["choices"][0]
            if choice["finish_reason"] == "length":  # not ended by an administrator
                known = self.probes.setdefault(model or "", choice["text"])
                if known != choice["text"]:
                    raise Broken(f"a probe of {model} gave {choice['text']!r}, not {known!r}")
        return self.checked(reply, FINE)

    async def leaves(self) -> str:
        """Hangs up some time after it asked."""
        route, body = self.asked()
        return await self.post(route, body, seconds=self.rng.uniform(0, 0.1)) and "left"

    async def leaves_a_stream(self) -> str:
        route, body = self.asked()
        body |= {"stream": True}
        return await self.post(route, body, events=self.rng.randint(0, 4)) and "left"

    async def reads_slowly(self) -> str:
        route, body = self.asked()
        return self.checked(await self.post(route, body, slowly=True), FINE)

    async def reads_nothing(self) -> str:
        """Lets the server write into a full window for longer than it waits."""
        body = {"prompt": "x", "n": 4, "max_tokens": 60, "logprobs": 20, "stream": True}
        request = packed("/v1/completions", body | {"ignore_eos": True})
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            slow.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(slow, ("127.0.0.1", self.port))
            await loop.sock_sendall(slow, request)
            await asyncio.sleep(2.5)
        return "left"

    async def half_a_body(self) -> str:
        request = packed(*self.asked())
        request = request[: self.rng.randint(20, len(request) - 1)]
        await self.send(request, seconds=self.rng.uniform(0, 0.2))
        return "left"

    async def malformed(self) -> str:
        rng, (route, body) = self.rng, self.asked()
        data = rng.choice(
            (
                b"",
                b"[]",
                b"{",
                b"null",
                b'{"prompt": "a", "temperature": NaN}',
                b'{"prompt": "\\ud800"}',
                b'{"prompt": "\xff"}',
                b"[" * 5000,
                b'{"a":' * 5000,
                json.dumps(body | {"max_tokens": "many"}).encode(),
                json.dumps(body | {"max_tokens": -1}).encode(),
                json.dumps(body | {"max_tokens": 10**30}).encode(),
                json.dumps(body | {"no_such_field": 1}).encode(),
                json.dumps(body | {"model": "no such model"}).encode(),
                json.dumps(body | {"stream_options": 3}).encode(),
            )
        )
        return self.checked(await self.post(route, data), {400, 404, 503})

    async def wrong_values(self) -> str:
        wrong = self.rng.choice(
            (
                {"temperature": -1},
                {"top_p": 0},
                {"n": 0},
                {"n": 10**6},
                {"logit_bias": {"100000": 1}},
                {"logit_bias": {"a": 1}},
                {"stop": ["x"] * 10_000},
                {"prompt_logprobs": -1},
                {"structured_outputs": {"regex": "("}},
                {"structured_outputs": {"json": {"type": 3}}},
                {"response_format": {"type": "xml"}},
                {"allowed_token_ids": []},
                {"min_tokens": 50, "max_tokens": 1},
                {"prompt": []},
                {"prompt": [260]},
                {"prompt": [-1]},
                {"prompt": [2**70]},
                {"prompt": [[]]},
                {"prompt": "x" * 1000},
                {"prompt": "x" * 100_000},
                {"prompt": ["a"] * 2000},
                {"seed": 2**80},
            )
        )
        return self.checked(await self.post("/v1/completions", {"prompt": "a"} | wrong), {400, 503})

    async def too_large(self) -> str:
        size = 2**20 + 1
        if self.rng.random() < 0.5:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n"
            head += "Content-Type: application/json\r\n\r\n"
            return self.checked(await self.send(head.encode() + b"{" * 1000), {413})
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
        head += b"Content-Type: application/json\r\n\r\n"
        chunk = b"10000\r\n" + b" " * 2**16 + b"\r\n"
        return self.checked(await self.send(head + 17 * chunk), {413})

    async def never_ends_its_body(self) -> str:
        request = packed(*self.asked())
        return self.checked(await self.send(request[:-1]), {408})

    async def other_routes(self) -> str:
        method, path, statuses = self.rng.choice(
            (
                ("GET", "/v1/models", {200}),
                ("GET", "/v1/models/no/such", {404}),
                ("GET", "/health", {200}),
                ("GET", "/ready", {200, 503}),
                ("GET", "/metrics", {200}),
                ("GET", "/nowhere", {404}),
                ("GET", "/v1/completions", {405}),
                ("POST", "/pause", {401}),
                ("DELETE", "/v1/models", {405}),
            )
        )
        request = f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        return self.checked(await self.send(request.encode()), statuses)

    async def tokens(self) -> str:
        if self.rng.random() < 0.5:
            reply = await self.post("/tokenize", {"prompt": self.words(50)})
        else:
            reply = await self.post("/detokenize", {"tokens": [self.rng.randrange(250)] * 9})
        return self.checked(reply, {200})

    async def no_http(self) -> str:
        await self.send(self.rng.randbytes(200) + b"\r\n\r\n", seconds=0.5)
        return "left"

    # ---- an administrator ------------------------------------------------------------------------

    async def administrate(self, number: int) -> str:
        """One command after another; each is undone at once."""
        commands = [("reset_prefix_cache", b""), ("pause", b"")]
        commands += [("abort_requests", {"abort_all": True})]
        if self.home is not None:
            own = {"name": "three", "path": str(self.home / "three")}
            commands += [("reload_weights", {"path": str(self.home / "base")})]
            commands += [
                ("v1/load_adapter", own),
                ("v1/unload_lora_adapter", {"lora_name": "three"}),
            ]
        name, body = commands[number % len(commands)]
        async with self.administrator:
            reply = await self.post(f"/{name}", body, head=ADMIN)
            if name == "pause":
                await asyncio.sleep(0.05)
                self.checked(await self.post("/resume", b"", head=ADMIN), {200})
            if name == "v1/load_adapter":
                with_it = {"prompt": self.words(20), "max_tokens": 5, "model": "three"}
                self.checked(await self.post("/v1/completions", with_it), FINE)
        return f"{name}: {self.checked(reply, {200})}"

    # ---- HTTP ------------------------------------------------------------------------------------

    async def get(self, path: str) -> Reply:
        request = f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        return await self.send(request.encode())

    async def post(self, route: str, body: dict | bytes, **how) -> Reply:
        return await self.send(packed(route, body, how.pop("head", {})), **how)

    async def send(
        self,
        request: bytes,
        seconds: float | None = None,
        events: int | None = None,
        slowly: bool = False,
    ) -> Reply:
        """Send bytes and read until the server closes, or so many seconds or events."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        data = bytearray()
        try:
            async with asyncio.timeout(seconds):
                writer.write(request)
                while piece := await reader.read(300 if slowly else 2**16):
                    data += piece
                    if events is not None and data.count(b"\ndata: ") >= events:
                        return Reply()
                    if slowly:
                        await asyncio.sleep(0.02)
        except TimeoutError:
            return Reply()
        except ConnectionError:
            if not data:  # a server may refuse a body before it has read it
                return Reply()
        finally:
            if self.rng.random() < 0.5:
                writer.transport.abort()
            writer.close()
        return parsed(bytes(data))

    def checked(self, reply: Reply, statuses: set[int]) -> str:
        """What came, in a word. Raises `Broken` for what may not come."""
        text = reply.body[:300]
        if reply.status >= 400:
            self.check_error(reply.body)
        if reply.status not in statuses:
            raise Broken(f"status {reply.status}, not one of {statuses}: {text!r}")
        if reply.body.startswith(b"data: "):
            *events, last = [one for one in reply.body.split(b"\n\n") if one]
            if last != b"data: [DONE]":
                self.check_error(last.removeprefix(b"data: "))
                return "200, then an error"
            if not events or not all("choices" in json.loads(one[6:]) for one in events):
                raise Broken(f"a stream of other events: {text!r}")
            return "200, a stream"
        return str(reply.status)

    def check_error(self, body: bytes) -> None:
        try:
            error = json.loads(body)
        except ValueError:
            raise Broken(f"an error that is no JSON: {body[:300]!r}") from None
        if set(error) != {"error"} or set(error["error"]) != {"message", "type", "param", "code"}:
            raise Broken(f"an error of another form: {error}")


def packed(route: str, body: dict | bytes, head: dict | None = None) -> bytes:
    """A request as bytes."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"POST {route} HTTP/1.1", "Host: x", "Connection: close"]
    lines += ["Content-Type: application/json", f"Content-Length: {len(data)}"]
    lines += [f"{name}: {value}" for name, value in (head or {}).items()]
    return "\r\n".join([*lines, "", ""]).encode() + data


def parsed(data: bytes) -> Reply:
    """A reply of bytes. Raises `Broken` for one that is not complete."""
    head, _, body = data.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 "):
        raise Broken(f"no HTTP: {data[:200]!r}")
    lines = head.lower()
    if b"transfer-encoding: chunked" in lines:
        pieces, rest = [], body
        while True:
            size, _, rest = rest.partition(b"\r\n")
            if not size or len(rest) < int(size, 16):
                raise Broken(f"a reply breaks off: {data[-200:]!r}")
            if int(size, 16) == 0:
                break
            pieces.append(rest[: int(size, 16)])
            rest = rest[int(size, 16) + 2 :]
        body = b"".join(pieces)
    return Reply(int(head[9:12]), body)


KINDS: dict[str, int] = {  # weights
    "fine": 40,
    "probe": 8,
    "leaves": 10,
    "leaves_a_stream": 10,
    "reads_slowly": 3,
    "half_a_body": 4,
    "malformed": 8,
    "wrong_values": 8,
    "too_large": 3,
    "other_routes": 3,
    "tokens": 3,
    "no_http": 1,
}
RARE = ("reads_nothing", "never_ends_its_body")  # each takes seconds


async def run(caller: Caller, count: int) -> None:
    """So many requests, `AT_A_TIME` at a time, and a command of an administrator for each 25."""
    names = caller.rng.choices([*KINDS], [*KINDS.values()], k=count)
    names[:: max(count // 4, 1)] = [RARE[i % 2] for i in range(len(names[:: max(count // 4, 1)]))]
    names[20::25] = ["administrate"] * len(names[20::25])
    left, turns = iter(names), iter(range(count))
    caller.administrator = asyncio.Lock()

    async def work() -> None:
        for name in left:
            asks: Callable[..., Awaitable[str]] = getattr(caller, name)
            given = (next(turns),) if name == "administrate" else ()
            try:
                async with asyncio.timeout(LONGEST):
                    outcome = await asks(*given)
            except TimeoutError:
                outcome = f"BROKEN: did not end within {LONGEST} s"
            except Broken as e:
                outcome = f"BROKEN: {e}"
            caller.counts[name, outcome] += 1

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_A_TIME):
            group.create_task(work())


def resident_mb(pid: int | str = "self") -> float:
    """Memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def soak(
    caller: Caller, count: int, at_rest: Callable[[], None], memory: Callable[[], float]
) -> Counter:
    """Two halves of a load; `at_rest` raises unless nothing is left. Returns the counts."""
    sizes = []
    for _ in range(2):
        asyncio.run(run(caller, count // 2))
        at_rest()
        gc.collect()
        sizes.append(memory())
    for (name, outcome), number in sorted(caller.counts.items()):
        print(f"{name:20} {outcome:24} {number}")
    print(f"memory after each half: {sizes[0]:.0f} and {sizes[1]:.0f} MB")
    broken = [f"{name}: {outcome}" for name, outcome in caller.counts if outcome[:6] == "BROKEN"]
    if broken:
        raise Broken("\n".join([f"{len(broken)} kinds of:", *broken[:20]]))
    if sizes[1] > sizes[0] + MOST_MB:
        raise Broken(f"memory grew from {sizes[0]:.0f} to {sizes[1]:.0f} MB in the second half")
    return caller.counts


# ---- the program: a server of several processes --------------------------------------------------

NAMES = "one", "two", "three"
START = """
import json, sys
from mjax.serve.options import ServeOptions
from mjax.serve.processes import Server
sys.exit(Server(ServeOptions(**json.loads(sys.argv[1]))).run())
"""


def write_home(home: Path) -> None:
    """Write a Hugging Face model base/ with a tokenizer and a template, and adapters of it."""
    from mjax.checkpoint.base.source import array_source
    from mjax.interop.huggingface.families.engine import config_to_hf, slots
    from mjax.interop.huggingface.files import export
    from mjax.interop.peft.adapter_writer import write_adapter
    from tests.adapters import drawn_adapters
    from tests.chats import write_tokenizer
    from tests.laws.serving.kinds import BYTES
    from tests.laws.serving.tiny import tiny_model

    model = tiny_model("keys and values", **BYTES)
    cfg, specs = model.cfg, model.definition.specs
    config = {"config.json": json.dumps(config_to_hf(cfg)).encode()}
    read = array_source(cfg, model.params).read
    export(read, cfg, specs, slots(cfg, specs), home / "base", "float32", extras=config)
    write_tokenizer(home / "base", bos=False)
    for rank, name in enumerate(NAMES, 2):
        write_adapter(home / name, cfg, specs, drawn_adapters(specs, rank=rank, scale=float(rank)))


@contextlib.contextmanager
def started(home: Path, workers: int) -> Iterator[tuple[int, subprocess.Popen]]:
    """Serve the model of `write_home`; the port, and the parent of the server's processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    engine = {"max_model_len": 128, "max_num_seqs": 8, "max_num_prefill_tokens": 64}
    engine |= {"max_queued": 32, "max_loras": 3, "dtype": "float32"}
    engine |= {"adapters": {name: str(home / name) for name in NAMES[:2]}}
    api = {"admin_keys": ["admin"], "slow_seconds": 1.0, "body_seconds": 5.0, "most_body": 2**20}
    options = {"model": str(home / "base"), "name": "tiny", "port": port, "workers": workers}
    options |= {"engine": engine, "api": api}
    environment = dict(os.environ) | {"JAX_PLATFORMS": "cpu", "TMPDIR": str(home)}
    command = [sys.executable, "-c", START, json.dumps(options)]
    parent = subprocess.Popen(command, env=environment)
    try:
        yield port, parent
    finally:
        parent.terminate()
        parent.wait(60)


async def until_ready(caller: Caller, parent: subprocess.Popen) -> None:
    for _ in range(3000):
        if parent.poll() is not None:
            break
        with contextlib.suppress(OSError):
            if (await caller.get("/ready")).status == 200:
                return
        await asyncio.sleep(0.1)
    raise Broken(f"the server was not ready within five minutes; exit code {parent.poll()}")


async def stats_of(home: Path) -> dict:
    """The engine's own numbers, through its socket."""
    from mjax.serve.base.engines import Engines

    (address,) = home.glob("mjax-*/engine0")
    async with Engines([f"ipc://{address}"]) as engines:
        await engines.ready()
        return (await engines.stats())[0]


def drained(caller: Caller, parent: subprocess.Popen, home: Path) -> None:
    """Stop a server that streams: what runs ends well, and nobody new gets in."""
    body = {"prompt": "x", "max_tokens": 100, "ignore_eos": True, "stream": True}

    async def stop() -> list[str]:
        tasks = [asyncio.create_task(caller.post("/v1/completions", body)) for _ in range(16)]
        while sum(task.done() for task in tasks) + (await stats_of(home))["requests"] < len(tasks):
            await asyncio.sleep(0.02)  # a connection that nobody has accepted may be reset
        parent.send_signal(signal.SIGTERM)
        with contextlib.suppress(OSError):  # from then on nobody gets in
            while True:
                await caller.get("/health")
                await asyncio.sleep(0.1)
        replies = await asyncio.gather(*tasks)
        return [caller.checked(reply, FINE) for reply in replies]

    found = Counter(asyncio.run(asyncio.wait_for(stop(), LONGEST)))
    print(f"streams at the time of SIGTERM: {dict(found)}; exit code {parent.wait(LONGEST)}")
    if set(found) != {"200, a stream"} or parent.returncode:
        raise Broken("a drain that was not graceful")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--workers", type=int, default=1, help="processes that speak HTTP")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        write_home(home)
        with started(home, args.workers) as (port, parent):
            caller = Caller(port, random.Random(args.seed), NAMES[:2], home=home)
            asyncio.run(until_ready(caller, parent))
            children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
            before = asyncio.run(stats_of(home))

            def at_rest() -> None:
                for _ in range(200):
                    found = asyncio.run(stats_of(home))
                    if found["requests"] == found["pages_used"] == 0:
                        break
                    time.sleep(0.1)
                print({name: found[name] for name in sorted(found)})
                left = {name: found[name] for name in ("requests", "running", "waiting")}
                if any(left.values()) or found["pages_used"]:
                    raise Broken(f"left in the engine: {left}, {found['pages_used']} pages")
                if found["pages_free"] + found["pages_cached"] != found["pages"]:
                    raise Broken(f"pages are lost: {found}")
                if found["compiles"] != before["compiles"]:
                    raise Broken(f"{found['compiles'] - before['compiles']} compiled under load")

            began = time.perf_counter()
            soak(caller, args.requests, at_rest, lambda: sum(map(resident_mb, children)))
            print(f"{args.requests} requests in {time.perf_counter() - began:.0f} s")
            drained(caller, parent, home)


if __name__ == "__main__":
    main()
