"""Engines of other processes as one object of an event loop, which makes text of their tokens.

`Engines.generate` yields pieces of text and tokens. Stop strings are found here, so an engine knows
none; a request whose samples have all stopped leaves its engine. Invariant: a request that ends in
any way, its caller's leaving among them, has nothing left in an engine.
"""

import asyncio
import contextlib
import itertools
import secrets
import traceback
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from mjax.data.base.tokenizer import Tokenizer, load_tokenizer
from mjax.errors import UserError, first_line, or_user_error
from mjax.infer.async_engine import EngineDied
from mjax.infer.checks import ids_of
from mjax.infer.requests import Answer, SamplingParams, TokenRules
from mjax.serve.base import wire
from mjax.serve.base.routing import PrefixRouter


@dataclass(slots=True)
class Piece:
    """News of one sample: several tokens where more have come.

    - finish_reason: in its last piece one of stop, length, abort, error.
    - stop_reason: the stop string or token that ended it, or the error.
    - top_logprobs: None unless asked for. processed_logprobs: under what tokens were drawn from.
    - cached_tokens: of the prompt, in a sample's last piece.
    - prompt_logprobs: in the last piece of sample 0, if asked for.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[float]
    top_logprobs: list[dict[int, float]] | None
    weight_versions: list[int]
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    cached_tokens: int = 0
    prompt_logprobs: list[dict[int, float] | None] | None = None
    processed_logprobs: list[float] = field(default_factory=list)


_Parts = dict[int, list[Any]]  # of each sample `SamplePart`s and `OneToken`s, in order


@dataclass(eq=False)
class _Stream:
    """A request on its way: news by sample that its caller has not taken, or its last error."""

    replica: "_Replica"
    parts: _Parts = field(default_factory=dict)
    error: Exception | None = None
    news: asyncio.Future | None = None  # of a caller that waits
    open: set[int] = field(default_factory=set)  # samples of which more will come

    def push(self, part: wire.SamplePart) -> None:
        self.parts.setdefault(part.index, []).append(part)
        if part.finish_reason is not None:
            self.open.discard(part.index)
        self._wake()

    def push_token(self, index: int, token: wire.OneToken) -> None:
        self.parts.setdefault(index, []).append(token)
        self._wake()

    def fail(self, error: Exception) -> None:
        self.error, self.open = error, set()
        self._wake()

    def _wake(self) -> None:
        if self.news is not None and not self.news.done():
            self.news.set_result(None)

    def leave(self, request_id: str, index: int) -> None:
        """End a sample that has stopped here, if its engine goes on with it."""
        if index in self.open:
            self.open.discard(index)
            self.replica.send(wire.Leave(request_id, index))

    async def take(self) -> _Parts:
        """All parts that have come, once there are some. Raises the error after the last part."""
        if not self.parts and self.error is None:
            self.news = asyncio.get_running_loop().create_future()
            await self.news
        parts, self.parts = self.parts, {}
        if not parts and self.error is not None:
            raise self.error
        return parts


@dataclass(eq=False)
class _Replica:
    """The connection to one engine; `sent`: samples given to it since it told its load."""

    number: int
    socket: zmq.asyncio.Socket
    facts: asyncio.Future
    load: int = 0
    sent: int = 0
    error: EngineDied | None = None
    streams: dict[str, _Stream] = field(default_factory=dict)
    results: dict[int, asyncio.Future] = field(default_factory=dict)

    @property
    def known_load(self) -> float:
        """Samples that run or wait, as far as it is known here; infinite: the engine is gone."""
        if self.error is not None:
            return float("inf")
        return self.load + self.sent if self.streams else 0

    def send(self, message: wire.FromClient) -> None:
        if self.error is None and not self.socket.closed:
            self.socket.send(wire.as_message(message))  # at once: the queue has no limit

    def die(self, message: str) -> None:
        """Fail all that waits, once."""
        if self.error is not None:
            return
        self.error = EngineDied(message)
        for stream in self.streams.values():
            stream.fail(self.error)
        for future in (self.facts, *self.results.values()):
            if not future.done():
                future.set_exception(self.error)
                future.exception()  # it counts as seen, as nobody may wait for it


class Engines:
    """One or more engines of one model, in one event loop. Use `async with Engines(addresses)`.

    `facts` and `tokenizer` are there once `ready` has returned.
    """

    facts: wire.ModelFacts
    tokenizer: Tokenizer | None = None

    def __init__(self, addresses: Sequence[str], tokenizer: Tokenizer | None = None):
        """`tokenizer`: None: the one that the facts of the model name."""
        self._addresses, self.tokenizer = addresses, tokenizer
        self._replicas: list[_Replica] = []
        self._router = PrefixRouter(len(addresses))
        self._numbers = itertools.count()
        self._tasks: list[asyncio.Task] = []
        self.is_ready = False

    async def __aenter__(self) -> "Engines":
        self._context = zmq.asyncio.Context()
        for number, address in enumerate(self._addresses):
            socket = self._context.socket(zmq.DEALER)
            for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
                socket.setsockopt(option, 0)
            replica = _Replica(number, socket, asyncio.get_running_loop().create_future())
            self._replicas.append(replica)
            ended = zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED
            monitor = socket.get_monitor_socket(ended)
            work = self._receive(replica), self._watch(replica, monitor)
            self._tasks += map(asyncio.create_task, work)
            socket.connect(address)
            replica.send(wire.Hello())
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for replica in self._replicas:
            replica.die("the connection to the engine is closed")
            with contextlib.suppress(zmq.ZMQError):
                replica.socket.disable_monitor()
        self._context.destroy(linger=200)

    async def ready(self) -> None:
        """Return once all engines take requests. Raises `EngineDied`."""
        await asyncio.gather(*(asyncio.shield(replica.facts) for replica in self._replicas))
        if self.tokenizer is None and self.facts.tokenizer is not None:
            self.tokenizer = await asyncio.to_thread(load_tokenizer, self.facts.tokenizer)
        self.is_ready = True

    @property
    def is_alive(self) -> bool:
        """Whether no engine has ended."""
        return all(replica.error is None for replica in self._replicas)

    # ---- what callers want -----------------------------------------------------------------------

    async def generate(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str,
        text: str | None = None,
        images: Sequence[np.ndarray] = (),
    ) -> AsyncIterator[Piece]:
        """Yield pieces of a request's samples until each has its last one.

        A caller that leaves early aborts it. `images`: fp32 [H, W, C], in order of their tokens.
        Raises `UserError` for a request that cannot be served, `QueueFull` for one that may be
        served later, and `EngineDied`.
        """
        if params.stop and self.tokenizer is None:
            raise UserError("SamplingParams: stop needs a tokenizer, which this model has none of")
        prompt = ids_of(prompt)
        stream = self._start(prompt, params, request_id)
        answers = self._answers(prompt, params)
        firsts: dict[int, wire.SamplePart] = {}
        try:
            tensors = [wire.PlainArray.of(image) for image in images]
            fields = wire.fields_of_params(params) | _TOKENS_ALONE
            if params.seed is None:  # an engine would count, so that replicas draw alike
                fields["seed"] = secrets.randbits(32)
            with or_user_error("a request cannot be read: {reason}", _UNSENDABLE):
                stream.replica.send(wire.Add(request_id, prompt, fields, text, tensors))
            while any(answer.output.finish_reason is None for answer in answers):
                for index, parts in (await stream.take()).items():
                    if answers[index].output.finish_reason is None:
                        if index not in firsts:  # the first one is no single token
                            firsts[index] = parts[0]
                        piece = _piece_of_parts(answers[index], parts, firsts[index])
                        if piece.finish_reason is not None and len(stream.open) > 1:
                            stream.leave(request_id, index)
                        yield piece
        finally:
            del stream.replica.streams[request_id]
            if stream.open:
                stream.replica.send(wire.Leave(request_id))

    async def abort(self, request_id: str) -> None:
        """End a request where it is, also one of another process; its caller gets last pieces."""
        for replica in self._replicas:
            replica.send(wire.Abort(request_id))

    async def command(self, name: str, /, **given: Any) -> dict[str, Any]:
        """Run a command in every engine and return what the first one says.

        Raises the error of one that fails.
        """
        return (await self._commands(name, given))[0]

    async def embed(
        self, prompts: Sequence[Sequence[int]], pooling: str, adapter: str | None = None
    ) -> np.ndarray:
        """The vectors of texts, fp32 [N, D], as `Embedder.embed` makes them."""
        living = [replica for replica in self._replicas if replica.error is None]
        replica = min(living or self._replicas, key=lambda replica: replica.load)
        given = {"prompts": [ids_of(prompt) for prompt in prompts], "pooling": pooling}
        found = await self._command(replica, "embed", given | {"adapter": adapter})
        return wire.PlainArray(*found["vectors"]).array

    async def stats(self) -> list[dict[str, Any]]:
        """Totals and loads, an entry for each engine."""
        return await self._commands("stats", {})

    # ---- parts -----------------------------------------------------------------------------------

    def _start(self, prompt: Sequence[int], params: SamplingParams, request_id: str) -> _Stream:
        """The stream of a new request at the replica that is best for it."""
        if any(request_id in replica.streams for replica in self._replicas):
            raise UserError(f"request {request_id} is running already; give another id")
        gone = [replica.error for replica in self._replicas if replica.error is not None]
        if len(gone) == len(self._replicas):
            raise gone[0]
        loads = [replica.known_load for replica in self._replicas]
        salt = params.cache_salt, params.adapter
        replica = self._replicas[self._router.choose(prompt, loads, salt)]
        if not replica.streams:  # what it told is old
            replica.load = replica.sent = 0
        replica.sent += params.n
        stream = replica.streams[request_id] = _Stream(replica, open={*range(params.n)})
        return stream

    def _answers(self, prompt: Sequence[int], params: SamplingParams) -> list[Answer]:
        """Samples as they are followed here: their text and where it stops."""
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else self.facts.ends)}
        rules = TokenRules(frozenset(ends))
        named = [(params, rules, self.tokenizer, prompt, index) for index in range(params.n)]
        return [Answer(*one) for one in named]

    async def _commands(self, name: str, given: dict[str, Any]) -> list[dict[str, Any]]:
        calls = [self._command(replica, name, given) for replica in self._replicas]
        found = await asyncio.gather(*calls, return_exceptions=True)
        for result in found:
            if isinstance(result, BaseException):
                raise result
        return found

    async def _command(self, replica: _Replica, name: str, given: dict[str, Any]) -> dict[str, Any]:
        if replica.error is not None:
            raise replica.error
        number = next(self._numbers)
        future = replica.results[number] = asyncio.get_running_loop().create_future()
        with or_user_error("a request cannot be read: {reason}", _UNSENDABLE):
            replica.send(wire.Call(number, name, given))
        try:
            return await future
        finally:
            replica.results.pop(number, None)

    async def _receive(self, replica: _Replica) -> None:
        """Give all messages of an engine to those who wait for them."""
        try:
            while True:
                self._take(replica, wire.read_engine(await replica.socket.recv()))
        except Exception as e:  # who waits must not wait for ever
            traceback.print_exc()
            replica.die(f"a message of the engine cannot be read: {first_line(e)}")

    def _take(self, replica: _Replica, message: wire.FromEngine) -> None:
        match message:
            case wire.Step(parts, tokens, load):
                replica.load, replica.sent = load, 0
                for part in parts:
                    if (stream := replica.streams.get(part.id)) is not None:
                        stream.push(part)
                for token in tokens:
                    if (stream := replica.streams.get(token[0])) is not None:
                        stream.push_token(token[1], token)
            case wire.Refused(id, kind, text):
                replica.sent = max(replica.sent - 1, 0)
                if (stream := replica.streams.get(id)) is not None:
                    stream.fail(wire.error_named(kind, text))
            case wire.CallResult(number, value, kind, text):
                future = replica.results.pop(number, None)
                if future is not None and not future.done():
                    if kind:
                        future.set_exception(wire.error_named(kind, text))
                    else:
                        future.set_result(value)
            case wire.FactsNow(facts):
                self.facts = facts
                if not replica.facts.done():
                    replica.facts.set_result(None)
            case wire.Died(text):
                replica.die(text)

    async def _watch(self, replica: _Replica, monitor: zmq.asyncio.Socket) -> None:
        """Notice an engine whose process has ended without a word."""
        while True:
            event = await recv_monitor_message(monitor)
            if event["event"] == zmq.EVENT_DISCONNECTED:
                await asyncio.sleep(0.1)  # its last words may be on the way
                replica.die("the engine's process has ended")
                return


_UNSENDABLE = OverflowError, ValueError, TypeError, RecursionError  # as huge integers
_TOKENS_ALONE = {"stop": (), "detokenize": False}  # text is made here


def _piece_of_parts(answer: Answer, parts: Sequence[Any], first: wire.SamplePart) -> Piece:
    """The piece that parts of a sample add to it, up to where a stop string ends it."""
    output, text = answer.output, ""
    begin = len(output.token_ids)
    for part in parts:
        if isinstance(part, tuple):
            _, _, token, logprob, processed, version = part
            text += answer.push(token, logprob, processed, None, version)
            continue
        tops = part.top or [{}] * len(part.token_ids)
        columns = part.token_ids, part.logprobs, part.processed, tops, part.versions
        for token, logprob, processed, top, version in zip(*columns, strict=True):
            text += answer.push(token, logprob, processed, top, version)
        if part.finish_reason is not None and output.finish_reason is None:
            output.stop_reason = part.stop_reason
            text += answer.finish(part.finish_reason)
    is_last = output.finish_reason is not None
    top = output.top_logprobs
    return Piece(
        index=output.index,
        text=text,
        token_ids=output.token_ids[begin:],
        logprobs=output.logprobs[begin:],
        top_logprobs=None if top is None else top[begin:],
        weight_versions=output.weight_versions[begin:],
        finish_reason=output.finish_reason,
        stop_reason=output.stop_reason,
        cached_tokens=first.cached if is_last else 0,
        prompt_logprobs=first.prompt_logprobs if is_last else None,
        processed_logprobs=output.processed_logprobs[begin:],
    )
