"""The engine in a thread of its own, for callers of asyncio.

The thread alone touches the engine; callers put commands into a queue, and tokens come back through
the event loop. Invariant: each request ends with one update whose output is finished, or with an
error, also where the engine itself fails.
"""

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from mjax.errors import first_line
from mjax.infer.engine import Engine, Update
from mjax.infer.requests import SamplingParams


class EngineDied(RuntimeError):
    """The engine's thread ended by an error; nothing more is served."""


class AsyncEngine:
    """`generate` as many requests at a time as there are; use it in one event loop."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._streams: dict[str, tuple[asyncio.AbstractEventLoop, asyncio.Queue]] = {}
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
    ) -> AsyncIterator[Update]:
        """Yield the updates of a request; the last one's `request.output` is finished.

        A caller that leaves early aborts the request. Raises `UserError` for one that cannot be
        served, and `EngineDied`.
        """
        updates: asyncio.Queue = asyncio.Queue()
        stream = asyncio.get_running_loop(), updates

        def add() -> None:
            request = self.engine.add(prompt, params, request_id=request_id, text=text)
            self._streams[request.output.request_id] = stream

        await self.call(add)
        try:
            while True:
                update = await updates.get()
                if isinstance(update, BaseException):
                    raise update
                yield update
                if update.request.output.finished and updates.empty():
                    return
        finally:
            self._commands.put(lambda: self._leave(request_id))

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

        self._raise_error()
        self._commands.put(command)
        return await future

    def close(self) -> None:
        """End the thread after its step; requests that run get an error."""
        self._commands.put(None)
        self._thread.join()

    def _leave(self, request_id: str) -> None:
        if self._streams.pop(request_id, None) is not None:
            self.engine.abort(request_id)

    def _work(self) -> None:
        try:
            while self._obey(wait=not self.engine.has_work):
                if self.engine.has_work:
                    self._send(self.engine.step())
            self._error = EngineDied("the engine is closed")
        except BaseException as e:  # whatever ends the thread, callers must hear of it
            self._error = EngineDied(f"the engine ended by an error: {first_line(e)}")
            self._error.__cause__ = e
        for loop, updates in self._streams.values():
            _tell(loop, lambda updates=updates: updates.put_nowait(self._error))
        while self._obey(wait=False):  # callers that came meanwhile
            if self._commands.empty():
                break

    def _obey(self, wait: bool) -> bool:
        """Run all commands, waiting for one if there is nothing else to do; False: close."""
        while wait or not self._commands.empty():
            command = self._commands.get()
            if command is None:
                return False
            command()
            wait = False
        return True

    def _send(self, updates: list[Update]) -> None:
        for update in updates:
            stream = self._streams.get(update.request.output.request_id)
            if stream is not None:
                loop, queue = stream
                _tell(loop, lambda queue=queue, update=update: queue.put_nowait(update))

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error


def _tell(loop: asyncio.AbstractEventLoop, function: Callable[[], Any]) -> None:
    """Call a function in an event loop, if it still runs."""
    try:
        loop.call_soon_threadsafe(function)
    except RuntimeError:  # it is closed, and so are its callers
        pass
