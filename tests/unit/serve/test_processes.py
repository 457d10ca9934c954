"""`mjax serve` as a user starts it: it is ready, drains, says in a line what is wrong, and ends."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from mjax.checkpoint.base.source import array_source
from mjax.errors import UserError
from mjax.interop.huggingface.families.engine import config_to_hf, slots
from mjax.interop.huggingface.files import export
from mjax.serve.options import ServeOptions, read_options
from mjax.serve.processes import Pulse, Server, listening_socket, own_devices
from tests.laws.serving.tiny import tiny_model
from tests.marks import slow
from tests.processes import start_process

SMALL = ["--tokenizer=byte", "--max-num-seqs=4", "--max-num-batched-tokens=64", "--no-warm-up"]
LONG = {"model": "toy", "prompt": "abc", "max_tokens": 100, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    """A Hugging Face folder of a tiny model for bytes."""
    model = tiny_model("keys and values", vocab_size=260)
    cfg, specs = model.cfg, model.definition.specs
    folder = tmp_path_factory.mktemp("serve") / "toy"
    config = {"config.json": json.dumps(config_to_hf(cfg)).encode()}
    read = array_source(cfg, model.params).read
    export(read, cfg, specs, slots(cfg, specs), folder, "float32", extras=config)
    return folder


class Started:
    """A server that a command started; `lines`: of its standard error so far."""

    def __init__(self, *arguments: object):
        command = [sys.executable, "-m", "mjax.cli", "serve", *map(str, arguments)]
        pipe = {"stderr": subprocess.PIPE, "text": True}
        self.process = start_process(command, **pipe)
        self.lines: list[str] = []
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        with contextlib.suppress(ValueError):
            self.lines += iter(self.process.stderr.readline, "")

    def ready(self, seconds: float = 120) -> str:
        """The address, once it is served."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and self.process.poll() is None:
            for line in self.lines:
                if found := re.search(r"is served at (http://\S+)", line):
                    return found[1]
            time.sleep(0.05)
        raise AssertionError(f"not ready: {self.lines}")

    def children(self) -> list[int]:
        """Ids of the processes that it has started."""
        path = f"/proc/{self.process.pid}/task/{self.process.pid}/children"
        return list(map(int, Path(path).read_text().split()))

    def code(self, seconds: float = 60) -> int:
        return self.process.wait(seconds)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


def assert_gone(pids: list[int]) -> None:
    until = time.monotonic() + 10
    while any(map(is_alive, pids)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not list(filter(is_alive, pids))


def streamed(url: str, on_first=lambda: None) -> list[str]:
    """The events of a long reply; `on_first` is called after the first one."""
    events = []
    ask = {"url": f"{url}/v1/completions", "json": LONG, "timeout": 60}
    with contextlib.suppress(httpx.TransportError), httpx.stream("POST", **ask) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: "):
                events.append(line.removeprefix("data: "))
                if len(events) == 1:
                    on_first()
    return events


@slow
def test_what_runs_ends_after_sigterm_and_nothing_new_is_taken(toy):
    server = Started(toy, *SMALL, "--port=0")
    url = server.ready()
    assert server.lines[0].startswith("mjax: loading ")
    assert httpx.get(f"{url}/ready", timeout=30).status_code == 200
    children = server.children()
    events = streamed(url, server.process.terminate)
    texts = [json.loads(event)["choices"] for event in events[:-1]]
    assert events[-1] == "[DONE]" and texts[-1][0]["finish_reason"] == "length"
    assert server.code() == 0
    assert len(children) == 2
    assert_gone(children)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")
    assert [line for line in server.lines if "Traceback" in line] == []


@slow
def test_no_process_is_left_however_the_server_ends(toy):
    more = "--admin-key=k", "--port=0"
    for end, code in ((None, -signal.SIGKILL), ("engine", 1), ("twice", 130)):
        several = ("--data-parallel-size=2", "--api-server-count=2") if end is None else ()
        server = Started(toy, *SMALL, *more, *several)
        url = server.ready()
        children = server.children()
        roles = dict(zip(("engine", "worker"), children, strict=False))
        assert len(children) == (4 if several else 2) and streamed(url)[-1] == "[DONE]"
        if end is None:
            server.process.kill()
        elif end == "twice":
            admin = {"Authorization": "Bearer k"}
            assert httpx.post(f"{url}/pause", headers=admin, timeout=60).status_code == 200
            asks = threading.Thread(target=streamed, args=(url,), daemon=True)
            asks.start()
            time.sleep(1)
            for _ in range(2):
                server.process.terminate()
                time.sleep(0.5)
            assert server.code(5) == code
        else:
            os.kill(roles[end], signal.SIGKILL)
        assert server.code() == code
        assert_gone(children)
        if end in roles:
            said = [line for line in server.lines if "died of SIGKILL" in line]
            assert said == [f"mjax: {end} 0 died of SIGKILL: the server ends\n"]


@slow
def test_mistakes_are_one_line(toy, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cases = [
            ((toy, f"--port={port}"), f"--port {port}: Address already in use; give another"),
            ((tmp_path / "none", "--port=0"), "none"),
            ((toy, "--port=0", "--lora-modules", "a"), "NAME=PATH"),
            ((toy, "--port=0", "--tensor-parallel-size=64"), "there are"),
        ]
        for arguments, message in cases:
            server = Started(*arguments)
            assert server.code(90) == 2, server.lines
            server.reader.join(60)
            last = [line for line in server.lines if not line.startswith("mjax: loading")]
            assert len(last) == 1 and message in last[0]


def test_options_are_read(monkeypatch):
    monkeypatch.setenv("MJAX_API_KEY", "a,b")
    found = read_options(["./runs/x@best", "--lora-modules", "n=~/p", "--max-model-len", "99"])
    assert found.name == "x@best" and found.api["api_keys"] == ("a", "b")
    assert found.engine["adapters"] == {"n": os.path.expanduser("~/p")}
    assert found.engine["max_loras"] == 1 and found.engine["max_model_len"] == 99
    assert read_options(["x", "--api-key", "k", "--api-key", "l"]).api["api_keys"] == ("k", "l")
    assert read_options(["x"]).engine["max_loras"] is None
    for arguments, message in (
        (["--lora-modules", "a=b", "a=c"], "one name"),
        (["--data-parallel-size", "0"], "--data-parallel-size 0"),
    ):
        with pytest.raises(UserError, match=message):
            read_options(["x", *arguments])


def test_a_port_in_use_and_a_port_that_is_none():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"--port {port}: Address already in use"):
            listening_socket("127.0.0.1", port)
    for host, port in (("127.0.0.1", 2**17), ("no host", 0)):
        with pytest.raises(UserError, match=f"--host {host} --port {port}"):
            listening_socket(host, port)


def test_replicas_have_devices_of_their_own():
    assert [own_devices({}, n, 2) for n in range(2)] == ["0,1", "2,3"]
    given = {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    assert [own_devices(given, n, 2) for n in range(2)] == ["4,5", "6,7"]
    with pytest.raises(UserError, match="replica 2 .* 4 devices"):
        own_devices(given, 2, 2)


def test_a_pulse_is_never_seen_half_written(tmp_path):
    """A parent that reads while a child writes must not take a moment for years."""
    script = "import sys; from pathlib import Path; from mjax.serve.processes import Pulse\n"
    script += "pulse = Pulse(Path(sys.argv[1]))\nwhile True: pulse.beat()"
    child = start_process([sys.executable, "-c", script, str(tmp_path / "a")])
    try:
        pulse, until = Pulse(tmp_path / "a"), time.monotonic() + 60
        while not pulse.last:
            assert time.monotonic() < until and child.poll() is None
        begin = time.monotonic()
        seen = [pulse.last for _ in range(200_000)]
    finally:
        child.kill()
    assert min(seen) > begin - 30 and max(seen) <= time.monotonic()


def test_an_engine_without_a_step_is_noticed(tmp_path, capsys, monkeypatch):
    server = Server(ServeOptions("toy", "toy", stuck_seconds=5.0))
    server._engine_pulses = [Pulse(tmp_path / "a"), Pulse(tmp_path / "b")]
    assert not server._is_stuck(), "engines that load have no pulse yet"
    for pulse in server._engine_pulses:
        Pulse(tmp_path / "b").beat()
        pulse.beat()
    assert not server._is_stuck()
    now = time.monotonic()
    monkeypatch.setattr("time.monotonic", lambda: now + 4)
    Pulse(tmp_path / "a").beat()
    monkeypatch.setattr("time.monotonic", lambda: now + 6)
    assert server._is_stuck()
    assert "engine 1 has made no step for 5 s: the server ends" in capsys.readouterr().err
