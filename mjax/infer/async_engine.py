"""The engine in a thread of its own, for callers of asyncio.

The thread alone touches the engine; callers put commands into a queue, and tokens come back through
the event loop. Invariant: each request ends with one update whose output is finished, or with an
error, also where the engine itself fails.
"""

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from mjax.errors import first_line
from mjax.infer.engine import Engine
from mjax.infer.records import TokenUpdate
from mjax.infer.requests import SamplingParams
from mjax.infer.whole_prompts import PromptItem

Stream = tuple[asyncio.AbstractEventLoop, asyncio.Queue]  # of (update or error, whether the last)


class EngineDied(RuntimeError):
    """The engine's thread ended by an error; nothing more is served."""


class AsyncEngine:
    """`generate` as many requests at a time as there are; use it in one event loop."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._streams: dict[str, Stream] = {}
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="mjax-engine", daemon=True)
        self._thread.start()

    async def generate(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str,
        text: str | None = None,
        items: Mapping[str, PromptItem] | None = None,
    ) -> AsyncIterator[TokenUpdate]:
        """Yield the updates of a request; the last one's `request.output` is finished.

        `items` stand in places of the prompt, as `Engine.add` says.
        A caller that leaves early aborts the request. Raises `UserError` for one that cannot be
        served, and `EngineDied`.
        """
        updates: asyncio.Queue = asyncio.Queue()
        stream = asyncio.get_running_loop(), updates

        def add() -> None:
            named = {"request_id": request_id, "text": text, "items": items}
            request = self.engine.add(prompt, params, **named)
            self._streams[request.output.request_id] = stream

        try:
            await self.call(add)
            is_last = False
            while not is_last:
                update, is_last = await updates.get()
                if isinstance(update, BaseException):
                    raise update
                yield update
        finally:
            self._commands.put(lambda: self._leave(request_id, stream))

    async def call(self, function: Callable[[], Any]) -> Any:
        """Run a function in the engine's thread, between two steps, and return its result."""
        loop, future = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

        def command() -> None:
            try:
                result = function()
            except BaseException as e:
                _tell(loop, lambda error=e: future.done() or future.set_exception(error))
            else:
                _tell(loop, lambda: future.done() or future.set_result(result))

        with self._lock:  # after an error nobody reads commands
            if self._error is not None:
                raise self._error
            self._commands.put(command)
        return await future

    async def abort(self, request_id: str) -> None:
        """End a request where it is; who waits for its updates gets its last one."""

        def abort() -> None:
            request = self.engine.requests.get(request_id)
            self.engine.abort(request_id)
            if request is not None:
                self._send([TokenUpdate(request, request.samples[-1], "")])

        await self.call(abort)

    async def pause(self) -> None:
        """Launch nothing more; requests stay where they are until `resume`."""
        await self.call(lambda: self._send(self.engine.pause()))

    async def resume(self) -> None:
        """Go on after `pause`."""
        await self.call(self.engine.resume)

    async def update_weights(self, params: dict, *, donate: bool = False) -> None:
        """Go on with other weights, as `Engine.update_weights` does."""
        await self.call(lambda: self._send(self.engine.update_weights(params, donate=donate)))

    def close(self) -> None:
        """End the thread after its step; requests that run get an error."""
        self._commands.put(None)
        self._thread.join()

    def _leave(self, request_id: str, stream: Stream) -> None:
        if self._streams.get(request_id) is stream:  # not another one of its name
            del self._streams[request_id]
            self.engine.abort(request_id)

    def _work(self) -> None:
        try:
            while self._obey(wait=not self.engine.has_work):
                if self.engine.has_work:
                    self._send(self.engine.step())
            error = EngineDied("the engine is closed")
        except BaseException as e:  # whatever ends the thread, callers must hear of it
            error = EngineDied(f"the engine ended by an error: {first_line(e)}")
            error.__cause__ = e
        with self._lock:
            self._error = error
        while not self._commands.empty():  # of callers that came meanwhile
            command = self._commands.get()
            with contextlib.suppress(Exception):
                command and command()
        for loop, updates in self._streams.values():
            _tell(loop, lambda updates=updates: updates.put_nowait((error, True)))

    def _obey(self, wait: bool) -> bool:
        """Run all commands, waiting for one if there is nothing else to do; False: close."""
        while wait or not self._commands.empty():
            command = self._commands.get()
            if command is None:
                return False
            command()
            wait = False
        return True

    def _send(self, updates: list[TokenUpdate]) -> None:
        """Give updates to their streams, each with whether it is its request's last one."""
        last = {update.request: update for update in updates if update.request.output.finished}
        for update in updates:
            stream = self._streams.get(update.request.output.request_id)
            if stream is not None:
                loop, queue = stream
                entry = update, update is last.get(update.request)
                _tell(loop, lambda queue=queue, entry=entry: queue.put_nowait(entry))


def _tell(loop: asyncio.AbstractEventLoop, function: Callable[[], Any]) -> None:
    """Call a function in an event loop, if it still runs."""
    try:
        loop.call_soon_threadsafe(function)
    except RuntimeError:  # it is closed, and so are its callers
        pass
