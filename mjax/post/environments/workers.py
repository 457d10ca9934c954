"""Environments in processes that can be killed, each call under a wall clock.

Invariant: every call that was submitted gives one turn, whatever the environment does: it may hang,
print, raise or die. A process leads a session of its own, so Ctrl-C does not reach it. It and its
children are killed when a call lasts too long, at `close`, and by the kernel when this process
ends, however it ends: the read end of a pipe then asks for SIGKILL (fcntl, F_SETSIG).
"""

import fcntl
import os
import pickle
import select
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, NamedTuple

from mjax.data.base.chat_ids import answer_ends
from mjax.data.base.tokenizer import load_tokenizer
from mjax.errors import UserError
from mjax.post.environments import environment as environments
from mjax.post.environments.chat_tokens import template_beside
from mjax.post.environments.environment import Environment, Turn

START_LIMIT = 300.0  # seconds in which a process has made its environment


class EnvironmentRecipe(NamedTuple):
    """An environment in a form that another process can make.

    tokenizer: its spec, as data.tokenizer; a chat template is looked for beside it. end_ids: of
    answers; None: those of tokenizer and template.
    """

    name: str
    tokenizer: str
    end_ids: Sequence[int] | None
    args: Mapping[str, Any]

    def make(self) -> Environment:
        """The environment. Raises `UserError`."""
        tokenizer, template = load_tokenizer(self.tokenizer), template_beside(self.tokenizer)
        ends = answer_ends(tokenizer, template) if self.end_ids is None else self.end_ids
        make = environments.make_environment
        return make(self.name, tokenizer, ends, template=template, **self.args)


@dataclass
class EnvironmentCall:
    """A call and until when it may last; the first of each process is to make its environment."""

    ticket: Hashable
    method: str
    args: Sequence
    until: float
    is_second: bool = False  # what comes before an answer is tried again once


class EnvironmentWorkers:
    """`count` processes that hold an environment each; 0: in this process, without a clock.

    A context manager, whose exit kills them. `timeout_s`: of a call. Raises `UserError` where the
    environment cannot be made.
    """

    def __init__(
        self,
        name: str,
        tokenizer: str | os.PathLike,
        end_ids: Sequence[int] | None = None,
        args: Mapping[str, Any] | None = None,
        *,
        count: int = 0,
        timeout_s: float = 30.0,
    ):
        self.recipe = EnvironmentRecipe(name, str(tokenizer), end_ids, dict(args or {}))
        self.timeout_s = timeout_s
        self._waiting: deque[EnvironmentCall] = deque()
        self._done: list[tuple[Hashable, Turn]] = []
        self._workers: list[_Worker] = []
        self._own = None if count else self.recipe.make()
        try:
            self._workers += [_Worker(self.recipe) for _ in range(count)]
            while any(worker.call for worker in self._workers):
                self._receive(START_LIMIT)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "EnvironmentWorkers":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill all processes; calls that are not done are lost."""
        while self._workers:
            self._workers.pop().end()
        self._waiting.clear()

    @property
    def pending(self) -> int:
        """How many calls have not been given back by `ready`."""
        calls = [worker.call for worker in self._workers if worker.call]
        asked = sum(call.method != "make" for call in calls)
        return len(self._waiting) + asked + len(self._done)

    def submit(self, ticket: Hashable, method: str, *args: Any) -> None:
        """Ask for `reset(seed, index)` or `step(state, ids)`; `ready` gives its turn."""
        if self._own is not None:
            turn = environments.call_environment(self._own, self.recipe.name, method, args)
            self._done.append((ticket, turn))
            return
        self._waiting.append(EnvironmentCall(ticket, method, args, 0))
        self._assign()

    def ready(self, timeout: float = 0) -> list[tuple[Hashable, Turn]]:
        """Turns with their tickets in order of completion; none after `timeout` seconds, or if
        none is asked for. Raises `UserError` for a prompt that cannot be had."""
        until = time.monotonic() + timeout
        while not self._done and self.pending:
            self._receive(until - time.monotonic())
            if time.monotonic() >= until:
                break
        done, self._done = self._done, []
        return done

    def _assign(self) -> None:
        for worker in self._workers:
            if worker.call is None and self._waiting:
                worker.call = self._waiting.popleft()
                worker.call.until = time.monotonic() + self.timeout_s
                with suppress(OSError):  # what is gone is noticed by who receives
                    worker.connection.send((worker.call.method, worker.call.args))

    def _receive(self, timeout: float) -> None:
        """Take what processes send within `timeout` seconds, and kill those that are overdue."""
        self._assign()
        busy = {worker.connection: worker for worker in self._workers if worker.call}
        first = min(worker.call.until for worker in busy.values()) - time.monotonic()
        for connection in wait(list(busy), max(min(first, timeout), 0)):
            worker = busy.pop(connection)
            try:
                self._take(worker, connection.recv())
            except (EOFError, OSError, pickle.UnpicklingError):
                self._replace(worker)
        for worker in busy.values():
            if time.monotonic() > worker.call.until:
                self._replace(worker, "time limit")

    def _take(self, worker: "_Worker", answer: Turn | UserError | None) -> None:
        call, worker.call = worker.call, None
        if isinstance(answer, UserError):
            raise answer
        if call.method != "make":
            self._done.append((call.ticket, answer))

    def _replace(self, worker: "_Worker", reason: str = "") -> None:
        """End a process, say what becomes of its call, and start another one."""
        self._workers.remove(worker)
        ended = worker.end()
        call, reason = worker.call, reason or f"the process ended by {ended}"
        if call.method != "step" and call.is_second:
            asked = f"{call.method}{tuple(call.args)}, twice"
            problem = f"environment {self.recipe.name}: {asked}: {reason}"
            raise UserError(f"{problem}; mend it or allow more time")
        self._workers.append(_Worker(self.recipe, is_second=call.method == "make"))
        if call.method == "reset":
            call.is_second = True
            self._waiting.appendleft(call)
        elif call.method == "step":
            self._done.append((call.ticket, Turn((), None, 0.0, {}, reason)))


class _Worker:
    """A process, the pipe to it, and its call; None: it waits for one."""

    def __init__(self, recipe: EnvironmentRecipe, is_second: bool = False):
        until = time.monotonic() + START_LIMIT
        self.call: EnvironmentCall | None = EnvironmentCall(None, "make", (), until, is_second)
        self.connection, its = Pipe()
        life, self.life = os.pipe()
        numbers = its.fileno(), life
        env = {"OMP_NUM_THREADS": "1"} | os.environ
        env |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        env |= {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}  # devices are the trainer's
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mjax.post.environments.workers", *map(str, numbers)],
            pass_fds=numbers,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=2,  # what it prints is for people
            start_new_session=True,
        )
        its.close()
        os.close(life)
        self.connection.send(recipe)

    def end(self) -> str:
        """Kill the process and its group, if they are there, and say how it has ended."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        code = self.process.wait()
        self.connection.close()
        os.close(self.life)
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def main(pipe: int, life: int) -> None:
    """Make the environment of a recipe and answer calls until the pipe is closed."""
    fcntl.fcntl(life, fcntl.F_SETOWN, -os.getpid())  # the group
    fcntl.fcntl(life, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(life, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    if select.select([life], [], [], 0)[0]:
        return  # the parent has ended before
    with suppress(EOFError, OSError), Connection(pipe) as connection:
        recipe = connection.recv()
        environment = _answer(connection, recipe.make)
        while True:
            call = connection.recv()
            _answer(connection, environments.call_environment, environment, recipe.name, *call)


def _answer(connection: Connection, function: Any, *args: Any) -> Any:
    """Send the turn that a function gives, None for anything else, or its `UserError`."""
    try:
        given = function(*args)
    except UserError as e:
        given = e
    connection.send(given if isinstance(given, Turn | UserError) else None)
    return given


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
