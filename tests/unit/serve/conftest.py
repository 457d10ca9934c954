"""One tiny engine behind the whole application, on a port of this machine."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from mjax.data.base.tokenizer import load_tokenizer
from mjax.infer.engine import Engine
from mjax.infer.sample import Draws
from mjax.infer.scheduling.scheduler import Limits
from mjax.serve.api.limits import ApiOptions
from mjax.serve.app import make_app
from mjax.serve.base import wire
from mjax.serve.base.engines import Engines
from mjax.serve.engine_server import EngineServer, in_thread
from tests.chats import END, write_tokenizer
from tests.laws.serving.kinds import make_engine

LENGTH, QUEUED = 128, 16
TEMPLATE = (
    "{% if tools %}{{ tools | length }}<tool_call>{% endif %}{% for m in messages %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{{ word }}"
)


@dataclass(frozen=True)
class Live:
    """A served application: its address, its engine, and a way into its event loop."""

    url: str
    engine: Engine
    engines: Any
    loop: asyncio.AbstractEventLoop
    app: Any

    def run(self, function: Callable) -> Any:
        """The result of an asynchronous function in the server's loop."""
        return asyncio.run_coroutine_threadsafe(function, self.loop).result(60)

    def at_rest(self) -> None:
        """Wait until nothing is left in the engine."""
        for _ in range(200):
            pools = [lane.pool for lane in self.engine.lanes]
            if not self.engine.requests and not any(pool.used for pool in pools):
                return
            time.sleep(0.05)
        raise AssertionError(f"left in the engine: {list(self.engine.requests)}")


@pytest.fixture(scope="session")
def tiny_engine(tmp_path_factory) -> Engine:
    folder = write_tokenizer(tmp_path_factory.mktemp("served") / "tokenizer", TEMPLATE, bos=False)
    tokenizer = load_tokenizer(folder)
    limits = Limits(rows=4, chunk=64, length=LENGTH, queued=QUEUED)
    ends = (tokenizer.id_of(END),)
    made = make_engine("bytes", pages=40, limits=limits, tokenizer=tokenizer, eos=ends)
    made.folder = folder
    made.warm_up([Draws(random=True, limited=True, top=20)])
    return made


@contextlib.contextmanager
def behind_socket(engine: Engine) -> Iterator[EngineServer]:
    """An engine's own thread. It has no second: two would take each other's tokens."""
    folder = Path(engine.folder)
    facts = wire.ModelFacts(
        "tiny", folder, engine.limits.length, 260, created=1, ends=engine.eos, tokenizer=str(folder)
    )
    with in_thread(engine, facts) as server:
        yield server


@pytest.fixture(scope="session")
def tiny_server(tiny_engine) -> Iterator[EngineServer]:
    with behind_socket(tiny_engine) as server:
        yield server


@contextlib.contextmanager
def served(behind: EngineServer, **options) -> Iterator[Live]:
    """An application of its own in front of an engine that others may use too."""
    engine, found, is_up, ends = behind.engine, [], threading.Event(), []

    async def serve(address: str) -> None:
        async with Engines([address], engine.tokenizer) as engines:
            await engines.ready()
            app = make_app(engines, ApiOptions(**options))
            config = uvicorn.Config(app, port=0, log_level="error", lifespan="off")
            server = uvicorn.Server(config)
            task = asyncio.ensure_future(server.serve())
            while not server.started:
                await asyncio.sleep(0.01)
            port = server.servers[0].sockets[0].getsockname()[1]
            loop = asyncio.get_running_loop()
            found.append(Live(f"http://127.0.0.1:{port}", engine, engines, loop, app))
            ends.append(server)
            is_up.set()
            await task

    thread = threading.Thread(target=lambda: asyncio.run(serve(behind.address)), daemon=True)
    thread.start()
    assert is_up.wait(30)
    try:
        yield found[0]
    finally:
        ends[0].should_exit = True
        thread.join(20)


@pytest.fixture(scope="session")
def live(tiny_server) -> Iterator[Live]:
    """The application with its usual options and an administrator's key."""
    with served(tiny_server, admin_keys=("admin",), slow_seconds=1.0) as given:
        yield given
