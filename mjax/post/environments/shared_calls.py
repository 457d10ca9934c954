"""Calls of environments in a run of several processes: those of a prompt are made by one of them.

All processes ask for the same calls in the same order and get the same turns at the same time, so
they go on alike. Invariants: turns that are there come in the order in which they were asked for.
An error in the environment of one process is raised by all. All stop at a time. A device that errs
makes processes differ in what they ask or end. Each engine step compares digests of that before any
process waits for another's program.
"""

import json
import pickle
import zlib
from collections.abc import Callable, Hashable
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import jax

from mjax.errors import ReplicasDiffer, UserError
from mjax.post.environments.environment import Turn
from mjax.sharding.processes.agreement import said_by_all


class Word(NamedTuple):
    """The word of a process to all: a digest of its calls so far, an error or "", and turns."""

    digest: int
    error: str
    is_stopped: bool
    turns: list[tuple[Hashable, Turn]]


@dataclass
class SharedCalls:
    """A context like the one that `open_own` opens, the environments of this process.

    is_stopped: whether this process wants no more turns. asked: tickets whose turns have not been
    given.
    """

    open_own: Callable[[], Any]
    is_stopped: Callable[[], bool] = lambda: False
    asked: dict[tuple[int, int], None] = field(default_factory=dict)
    _own: Any = None
    _error: str = ""
    _digest: int = 0  # of all calls so far

    def __enter__(self) -> Self:
        self._own = self._tried(lambda: self.open_own().__enter__())
        try:
            self._shared([])
        except UserError:
            self.__exit__()
            raise
        return self

    def __exit__(self, *failure: object) -> None:
        if self._own is not None:
            self._own.__exit__(*failure)

    def submit(self, ticket: tuple[int, int], method: str, *args: Any) -> None:
        """Ask for a call; the number of its prompt says which process makes it."""
        self.asked[ticket] = None
        call = json.dumps([ticket, method, args])
        self._digest = zlib.crc32(call.encode(), self._digest)
        prompt, _ = ticket
        if prompt % jax.process_count() == jax.process_index():
            self._tried(self._own.submit, ticket, method, *args)

    def ready(self, timeout: float = 0) -> list[tuple[Hashable, Turn]]:
        """The turns that are there in any process; all processes call it equally often.

        Raises `UserError` as `open_own`'s does, and `CancelledError` once any process is stopped.
        """
        found = dict(self._shared(self._tried(self._own.ready, timeout) or []))
        tickets = [ticket for ticket in self.asked if ticket in found]
        for ticket in tickets:
            del self.asked[ticket]
        return [(ticket, found[ticket]) for ticket in tickets]

    def _tried(self, action: Callable, *args: Any) -> Any:
        """The result of an action; its `UserError` waits for `_shared`."""
        try:
            return action(*args)
        except UserError as e:
            self._error = self._error or str(e)

    def _shared(self, turns: list[tuple[Hashable, Turn]]) -> list[tuple[Hashable, Turn]]:
        """The turns of all processes. Raises the first error of any, or `ReplicasDiffer`."""
        own = Word(self._digest, self._error, self.is_stopped(), turns)
        words: list[Word] = list(map(pickle.loads, said_by_all(pickle.dumps(own), "turns")))
        if len({word.digest for word in words}) > 1:
            raise ReplicasDiffer(
                "processes have drawn other answers, so a device has erred; start all again to "
                "resume from the newest checkpoint, and run mjax doctor if it recurs"
            )
        if errors := [word.error for word in words if word.error]:
            raise UserError(errors[0])
        if any(word.is_stopped for word in words):
            raise CancelledError
        return [pair for word in words for pair in word.turns]
