"""An engine behind a socket: requests and commands come in, and a message a step goes out.

One thread reads the socket and makes steps in turn, so nothing waits for another thread. Invariant:
each request of a client that is still there ends with a finished part for each sample, with one
`Refused`, or with `Died`.
"""

import contextlib
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any

import msgspec
import numpy as np
import zmq

from mjax.config.schema.vision import FRAMES
from mjax.data.multimodal.pictures import packed_images, patches_of_frames
from mjax.errors import UserError, first_line
from mjax.infer.engine import Engine
from mjax.infer.records import Request, RequestSample, TokenUpdate
from mjax.infer.whole_prompts import PromptItem
from mjax.models.towers.image_places import PackedImages
from mjax.serve.base import wire
from mjax.serve.base.wire import Abort, Add, Call, Hello, Leave

IDLE = 0.1  # seconds between two looks at what has changed, while nothing is to be done
BetweenSteps = Callable[..., dict[str, Any] | None]  # what a command does between two steps
# A command that reads files first, beside the steps.
SlowCommand = Callable[..., BetweenSteps]


@dataclass(eq=False)
class Served:
    """A request of a client; `sent`: tokens of each sample that it has, -1: all."""

    client: bytes
    request: Request
    sent: list[int] = field(default_factory=list)


@dataclass
class ServedCounts:
    """Totals since the start, as `Engines.stats` names them."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    steps: int = 0


class EngineServer:
    """Serves `engine` at an address of ZeroMQ while `run` runs.

    slow, quick: commands by name, which read files first, or do not.
    `step_time` is the monotonic time of the last step, or of the last moment without work.
    """

    def __init__(
        self,
        address: str,
        engine: Engine,
        facts: wire.ModelFacts,
        on_turn: Callable[[], None] = lambda: None,
    ):
        """`on_turn` is called after each step, and while there is nothing to do."""
        self.address, self.engine, self.facts = address, engine, facts
        self.slow: dict[str, SlowCommand] = {}
        self.quick: dict[str, BetweenSteps] = {
            "stats": self.stats,
            "pause": lambda: self.report(engine.pause()),
            "resume": lambda: engine.resume(),
            "sleep": lambda weights=False: engine.sleep(weights=weights),
            "wake": lambda: engine.wake(),
            "reset_prefix_cache": self.forget_prefixes,
        }
        self.counts, self.step_time = ServedCounts(), time.monotonic()
        self._on_turn = on_turn
        self._served: dict[str, Served] = {}
        self._clients: dict[bytes, None] = {}
        self._prepared: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._stops = threading.Event()

    def stop(self) -> None:
        """End `run` after its step; another thread may call it."""
        self._stops.set()

    def run(self) -> None:
        """Serve until `stop`; an error of the engine is raised after all clients know of it."""
        context = zmq.Context()
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a send says that a client is gone
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 1000)
        try:
            self._socket.bind(self.address)
            message = "the engine is closed"
            while not self._stops.is_set():
                self._turn()
        except BaseException as e:
            message = f"the engine ended by an error: {first_line(e)}"
            raise
        finally:
            for client in list(self._clients):
                self._send(client, wire.Died(message))
            context.destroy()

    def _turn(self) -> None:
        """Read what came, and make a step if there is work."""
        self._obey()
        if self.engine.has_work:
            self.report(self.engine.step())
            self.counts.steps += 1
        self.step_time = time.monotonic()
        self._on_turn()

    def _obey(self) -> None:
        """Take all messages; waits for one a little if there is nothing else to do."""
        wait = 0 if self.engine.has_work or not self._prepared.empty() else int(1000 * IDLE)
        # The state of the socket costs a tenth of `poll`, which each step would pay.
        while self._socket.get(zmq.EVENTS) & zmq.POLLIN or (wait and self._socket.poll(wait)):
            client, message = self._socket.recv_multipart()
            self._clients[client] = None
            try:
                read = wire.read_client(message)
            except (msgspec.DecodeError, RecursionError):  # of no client of ours
                traceback.print_exc()
            else:
                self._take(client, read)
            wait = 0
        while not self._prepared.empty():  # this thread alone takes from it
            self._prepared.get_nowait()()

    def _take(self, client: bytes, message: wire.FromClient) -> None:
        match message:
            case Add():
                self._add(client, message)
            case Leave(id, index):
                served = self._served.get(id)
                if served is not None and served.client == client:
                    if index is None:
                        self._drop(id)
                    else:
                        self._drop_sample(served, index)
            case Abort(id):
                if id in self._served:
                    self.engine.abort(id)
                    self._report_samples(self._served[id].request.samples)
            case Hello():
                self._send(client, wire.FactsNow(self.facts))
            case Call():
                self._call(client, message)

    # ---- requests --------------------------------------------------------------------------------

    def _add(self, client: bytes, asked: Add) -> None:
        """Give a request to the engine; whatever is wrong with it is its client's error alone."""
        try:
            items = {}
            if asked.images:
                items["vision"] = self._images(asked)
            params = wire.params_of_fields(asked.params)
            named = {"request_id": asked.id, "text": asked.text, "items": items}
            request = self.engine.add(asked.prompt, params, **named)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as e:  # libraries in Rust panic with errors that are no Exception
            kind = wire.kind_of(e)
            if not isinstance(e, UserError):
                traceback.print_exc()
            self._send(client, wire.Refused(asked.id, kind, first_line(e)))
            return
        self._served[asked.id] = Served(client, request, [0] * len(request.samples))
        self.counts.prompt_tokens += len(asked.prompt)

    def _images(self, asked: Add) -> PromptItem:
        """The images of a request as the engine takes them."""
        arrays, image = [image.array for image in asked.images], self.facts.image
        if image is None or image.bounds is None:
            return np.stack(arrays)
        vision = self.engine.cfg.vision
        frames = (np.stack([pixels] * FRAMES) for pixels in arrays)
        cut = [patches_of_frames(each, vision, image.mean, image.std) for each in frames]
        return PackedImages(*(a[0] for a in packed_images([asked.prompt], [cut], vision)))

    def _drop(self, id: str) -> None:
        """Abort a request that nobody waits for."""
        served = self._served.pop(id)
        self.engine.abort(id)
        self._count_end(served.request)

    def _drop_sample(self, served: Served, index: int) -> None:
        """End one sample of a request whose others go on."""
        served.sent[index] = -1
        self.engine.abort(served.request.output.request_id, index)
        self._report_samples([served.request.samples[index]])

    def report(self, updates: Iterable[TokenUpdate]) -> None:
        self._report_samples(dict.fromkeys(update.sample for update in updates))

    def _report_samples(self, samples: Iterable[RequestSample]) -> None:
        """Send each client what is new of its samples, in one message."""
        load = sum(lane.load for lane in self.engine.lanes)
        news: dict[bytes, wire.Step] = {}
        for sample in samples:
            output = sample.request.output
            served = self._served.get(output.request_id)
            if served is None or served.request is not sample.request:
                continue
            index = sample.answer.output.index
            if served.sent[index] >= 0:
                if (step := news.get(served.client)) is None:
                    step = news[served.client] = wire.Step([], [], load)
                self._tell(step, served, sample)
            if output.finished and all(count < 0 for count in served.sent):
                del self._served[output.request_id]
                self._count_end(sample.request)
        for client, step in news.items():
            self._send(client, step)

    def _tell(self, step: wire.Step, served: Served, sample: RequestSample) -> None:
        """Add what is new of a sample to its client's message."""
        made = sample.answer.output
        index, tokens = made.index, made.token_ids
        is_one = 0 < served.sent[index] == len(tokens) - 1
        if not is_one or made.finish_reason is not None or made.top_logprobs is not None:
            step.parts.append(self._part(served, sample))
            return
        served.sent[index] += 1
        self.counts.generation_tokens += 1
        numbers = made.logprobs[-1], made.processed_logprobs[-1], made.weight_versions[-1]
        step.tokens.append((served.request.output.request_id, index, tokens[-1], *numbers))

    def _part(self, served: Served, sample: RequestSample) -> wire.SamplePart:
        """The tokens of a sample that its client does not have."""
        made, output = sample.answer.output, served.request.output
        index, first = made.index, served.sent[made.index]
        served.sent[index] = -1 if made.finish_reason else len(made.token_ids)
        self.counts.generation_tokens += len(made.token_ids) - first
        return wire.SamplePart(
            id=output.request_id,
            index=index,
            token_ids=made.token_ids[first:],
            logprobs=made.logprobs[first:],
            processed=made.processed_logprobs[first:],
            top=None if made.top_logprobs is None else made.top_logprobs[first:],
            versions=made.weight_versions[first:],
            finish_reason=made.finish_reason,
            stop_reason=made.stop_reason,
            cached=served.request.samples[0].sequence.hits,
            prompt_logprobs=output.prompt_logprobs if index == first == 0 else None,
        )

    def _count_end(self, request: Request) -> None:
        for sample in request.samples:
            self.counts.prefix_queries += request.given
            self.counts.prefix_hits += sample.sequence.hits
            self.counts.preemptions += max(sample.sequence.admissions - 1, 0)

    def _send(self, client: bytes, message: wire.FromEngine) -> None:
        """Send, or end what a client has that is gone."""
        try:
            self._socket.send_multipart([client, wire.as_message(message)])
        except zmq.ZMQError:
            self._clients.pop(client, None)
            for id in [id for id, served in self._served.items() if served.client == client]:
                self._drop(id)

    # ---- commands --------------------------------------------------------------------------------

    def _call(self, client: bytes, call: Call) -> None:
        """Run a command; one that reads files does so in a thread, beside the steps."""

        def answer(work: BetweenSteps) -> None:
            try:
                result = wire.CallResult(call.number, work() or {})
            except Exception as e:
                if not isinstance(e, UserError):
                    traceback.print_exc()
                result = wire.CallResult(call.number, {}, wire.kind_of(e), first_line(e))
            self._send(client, result)

        def prepare() -> None:
            try:
                work = self.slow[call.name](**call.given)
            except Exception as e:
                work = partial(_raise, e)
            self._prepared.put(partial(answer, work))

        if call.name in self.slow:
            threading.Thread(target=prepare, daemon=True).start()
        elif call.name in self.quick:
            answer(lambda: self.quick[call.name](**call.given))
        else:
            unknown = UserError(f"the engine has no command {call.name}")
            answer(partial(_raise, unknown))

    def forget_prefixes(self) -> None:
        """Let no later request find what is cached now."""
        for lane in self.engine.lanes:
            lane.pool.forget()

    def tell_facts(self, facts: wire.ModelFacts) -> None:
        """Give all clients other facts of the model."""
        self.facts = facts
        for client in list(self._clients):
            self._send(client, wire.FactsNow(facts))

    def stats(self) -> dict[str, Any]:
        """Totals and what is there now."""
        pools = [lane.pool for lane in self.engine.lanes]
        return {
            "running": sum(len(lane.running) for lane in self.engine.lanes),
            "waiting": sum(len(lane.waiting) for lane in self.engine.lanes),
            "pages": sum(pool.pages - 1 for pool in pools),
            "pages_used": sum(pool.used for pool in pools),
            "pages_free": sum(pool.free for pool in pools),
            "pages_cached": sum(pool.cached for pool in pools),
            "requests": len(self.engine.requests),
            "drafts": self.engine.verified,
            "accepted": self.engine.accepted,
            "compiles": len(self.engine.runner.compiled),
            "version": self.engine.version,
            "seconds_since_step": time.monotonic() - self.step_time,
            **vars(self.counts),
        }


def _raise(error: Exception) -> None:
    raise error


@contextlib.contextmanager
def in_thread(
    engine: Engine,
    facts: wire.ModelFacts,
    add_commands: Callable[[EngineServer], object] = lambda server: None,
) -> Iterator[EngineServer]:
    """Serve an engine from a thread of this process; `address` is of the server that it yields."""
    with tempfile.TemporaryDirectory(prefix="mjax") as folder:
        server = EngineServer(f"ipc://{folder}/engine", engine, facts)
        add_commands(server)
        thread = threading.Thread(target=server.run, name="mjax-engine", daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.stop()
            thread.join()
