"""`python -m benchmarks.host --config X [a.b=c ..]`: a step's work of the engine's thread, by part.

A model of random weights continues random prompts, first by calls of `Engine.step`, then over the
socket that `mjax serve` uses. There a process of its own reads all messages and does no more. Only
steps count in which all streams get a token and nothing else runs:

- `ms`: CPU time of the thread in a step, a mean of the lowest tenth, as other work on the machine
  makes it longer; waits for the device do not count. `parts_us` splits it:
  plan, records (inputs of rows), launch, read (results and what follows from each token), report
  (messages), send (their encoding too), receive, and the rest.
- `step_ms`: from the start of a step to the next one's, median.
- `idle_us`: how long the device waited for a launch, on average; known only with `--device-ms`.

`--device-ms 4,17` puts in the place of the programs a device that takes so long for a step, one
number for each of `--streams`, and draws random tokens. So the host's work shows without a GPU.
"""

import argparse
import contextlib
import multiprocessing
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from mjax.bench.report import model_to_measure, parse_with_config, report, rounded
from mjax.config.schema.model import ModelConfig
from mjax.errors import CommandParser, UserError, or_user_error, read_numbers, run_cli
from mjax.infer.caches.paged import PAGE
from mjax.infer.engine import GREEDY, Engine
from mjax.infer.programs import LayerOutputs
from mjax.infer.records import Records
from mjax.infer.requests import SamplingParams
from mjax.infer.sample import Drawn
from mjax.infer.scheduling.scheduler import Limits, Scheduler
from mjax.infer.step_runner import StepRunner
from mjax.interop.random_weights import random_params
from mjax.models import definition_of

_PARTS: list[tuple[type, str, str]] = [
    (Scheduler, "plan", "plan"),
    (Records, "write", "records"),
    (StepRunner, "decode", "launch"),
    (StepRunner, "draw", "launch"),
    (Engine, "_read", "read"),
    (Engine, "step", "rest"),
]
_OF_SERVER = {"report": "report", "_send": "send", "_obey": "receive", "_turn": "rest"}


def main(argv: list[str]) -> int:
    parser = CommandParser("benchmarks.host", description=__doc__)
    parser.add_argument("--streams", default="1,32,256", help="loads (default 1,32,256)")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt (128)")
    parser.add_argument("--new", type=int, default=200, help="new tokens of each (200)")
    parser.add_argument("--device-ms", help="a step of each load takes so long, on no device")
    kinds = "float32", "bfloat16"
    parser.add_argument("--dtype", choices=kinds, default="bfloat16", help="of the weights")
    args = parse_with_config(parser, argv)
    cfg = model_to_measure(args, "benchmarks.host")
    streams = read_numbers("--streams", args.streams)
    took = [None] * len(streams)
    if args.device_ms is not None:
        took = read_numbers("--device-ms", args.device_ms, float)
    if min(*streams, args.prompt, args.new) < 1 or len(took) != len(streams):
        raise UserError(
            "benchmarks.host: --streams, --prompt and --new are at least 1, and --device-ms has a "
            "number for each of --streams"
        )
    with or_user_error("benchmarks.host needs `pip install 'mjax[serve]'`", ImportError):
        import mjax.serve.engine_server  # noqa: F401
    return report(args, measure_host(cfg, args, streams, took))


def measure_host(
    cfg: ModelConfig, args: argparse.Namespace, streams: Sequence[int], took: Sequence[float | None]
) -> Iterator[dict]:
    """Two records of each load, without and with the socket."""
    definition, length = definition_of(cfg), args.prompt + args.new
    engine = Engine(
        definition,
        random_params(cfg, args.dtype, apart=True),
        cfg,
        dtype=args.dtype,
        limits=Limits(rows=max(streams), length=length),
        pages=None if took[0] is None else 2 + max(streams) * -(-length // PAGE),
        donate=True,
    )
    if took[0] is None:
        engine.warm_up([GREEDY])
    wanted = SamplingParams(max_tokens=args.new, ignore_eos=True)
    prompts = np.random.default_rng(0).integers(0, cfg.vocab_size, (max(streams), args.prompt))
    for count, ms in zip(streams, took, strict=True):
        device = None if ms is None else AbsentDevice(engine, ms / 1e3)
        for is_served in (False, True):
            times = StepTimes(engine, count, device)
            with times.taken(is_served):
                work = serve_load if is_served else run_alone
                work(engine, prompts[:count].tolist(), wanted)
            case = {"layers": cfg.num_hidden_layers, "hidden": cfg.hidden_size, "streams": count}
            case |= {"device_ms": ms, "served": is_served, "prompt": args.prompt, "new": args.new}
            yield {"bench": "host", "case": case} | times.figures()


def run_alone(engine: Engine, prompts: list[list[int]], wanted: SamplingParams) -> None:
    """Serve all prompts by calls of `step`."""
    for prompt in prompts:
        engine.add(prompt, wanted)
    while engine.has_work:
        engine.step()


def serve_load(engine: Engine, prompts: list[list[int]], wanted: SamplingParams) -> None:
    """Serve all prompts to another process. Raises `UserError` if that fails."""
    from mjax.serve.base import wire
    from mjax.serve.engine_server import in_thread

    facts = wire.ModelFacts("bench", None, engine.limits.length, engine.cfg.vocab_size)
    with in_thread(engine, facts) as server:
        given = server.address, prompts, wire.fields_of_params(wanted)
        client = multiprocessing.get_context("spawn").Process(target=ask, args=given)
        client.start()
        client.join()
    if client.exitcode:
        raise UserError("benchmarks.host: the process that reads messages failed, as said above")


def ask(address: str, prompts: list[list[int]], params: dict) -> None:
    """Ask for texts and read all messages, as a worker does that speaks HTTP."""
    import zmq

    from mjax.serve.base import wire

    socket, left = zmq.Context().socket(zmq.DEALER), len(prompts)
    socket.connect(address)
    for number, prompt in enumerate(prompts):
        socket.send(wire.as_message(wire.Add(f"cmpl-{number:032x}", prompt, params)))
    while left:
        message = wire.read_engine(socket.recv())
        if not isinstance(message, wire.Step):
            raise RuntimeError(message)
        left -= sum(part.finish_reason is not None for part in message.parts)


@dataclass
class StepTimes:
    """CPU time of steps in which `count` streams get a token, by part."""

    engine: Engine
    count: int
    device: "AbsentDevice | None"
    steps: list[tuple[float, float, Counter]] = field(default_factory=list)  # begin, idle, parts

    def __post_init__(self) -> None:
        self._now, self._open = Counter[str](), list[tuple[str, int]]()
        self._thread = 0  # that of the steps; another engine's server may run in this process

    @contextlib.contextmanager
    def taken(self, is_served: bool) -> Iterator[None]:
        """Measure meanwhile. The outermost function that is measured is a step."""
        parts, outermost = list(_PARTS), (Engine, "step")
        if is_served:
            from mjax.serve.engine_server import EngineServer

            parts += [(EngineServer, name, part) for name, part in _OF_SERVER.items()]
            outermost = EngineServer, "_turn"
        kept = [(owner, name, getattr(owner, name)) for owner, name, _ in parts]
        for (owner, name, part), (_, _, function) in zip(parts, kept, strict=True):
            timed = self._timed(function, part)
            setattr(owner, name, self._step(timed) if (owner, name) == outermost else timed)
        try:
            yield
        finally:
            for owner, name, function in kept:
                setattr(owner, name, function)

    def _timed(self, function: Callable, part: str) -> Callable:
        def timed(*given: Any, **named: Any) -> Any:
            if threading.get_ident() != self._thread:
                return function(*given, **named)
            now = time.thread_time_ns()
            if self._open:
                outer, began = self._open[-1]
                self._now[outer] += now - began
            self._open.append((part, now))
            try:
                return function(*given, **named)
            finally:
                now = time.thread_time_ns()
                _, began = self._open.pop()
                self._now[part] += now - began
                if self._open:
                    self._open[-1] = self._open[-1][0], now

        return timed

    def _step(self, function: Callable) -> Callable:
        def step(owner: Any) -> Any:
            if getattr(owner, "engine", owner) is not self.engine:
                return function(owner)
            self._thread = threading.get_ident()
            self._now.clear()
            began, before = time.perf_counter(), self.engine.runner.prefills
            rows = [s for lane in self.engine.lanes for s in lane.running.values() if s.sampled]
            idle = self.device.idle if self.device else 0.0
            found = function(owner)
            if len(rows) == self.count and before == self.engine.runner.prefills:
                idle = self.device.idle - idle if self.device else 0.0
                self.steps.append((began, idle, self._now.copy()))
            return found

        return step

    def figures(self) -> dict:
        """Figures of all steps but the first and the last ten. Raises `UserError` without any."""
        steps = self.steps[10:-10]
        if len(steps) < 10:
            raise UserError("benchmarks.host: too few steps count; raise --new to 100 or more")
        lowest = sorted(steps, key=lambda step: sum(step[2].values()))[: -(-len(steps) // 10)]
        us = {part: statistics.mean(own[part] for *_, own in lowest) / 1e3 for part in steps[0][2]}
        gaps = np.diff([began for began, *_ in steps])
        parts = {part: rounded(value) for part, value in us.items()}
        found = {"ms": rounded(sum(us.values()) / 1e3)}
        found["step_ms"] = rounded(1e3 * float(np.median(gaps)))
        if self.device is not None:
            found["idle_us"] = rounded(1e6 * statistics.mean(idle for _, idle, _ in steps))
        return found | {"steps": len(steps), "parts_us": parts}


class AbsentDevice:
    """Takes the place of an engine's programs: each step of layers takes `seconds`, in order.

    idle: seconds that it has waited for a launch. Tokens and their log-probabilities are random.
    """

    def __init__(self, engine: Engine, seconds: float):
        self._seconds, self._vocabulary = seconds, engine.cfg.vocab_size
        self._free = self.idle = 0.0
        self._rng = np.random.default_rng(0)
        own = vars(engine.runner.programs)  # of cached properties
        own["forward"], own["draw"] = _program("_forward", self._run), _program("_draw", self._draw)
        engine.runner.compiled.clear()

    def _run(self, params: Any, caches: Any, last: Any, given: Any, records: Any) -> tuple:
        now = time.perf_counter()
        self.idle += max(now - self._free, 0.0) if self._free else 0.0
        self._free = max(now, self._free) + self._seconds
        return caches, LayerOutputs(np.empty((len(records) * given.places, 1), np.float32))

    def _draw(self, state: Any, logits: Any, *_: Any) -> tuple:
        def later(values: np.ndarray) -> Any:
            return _Later(values, self._free)

        numbers = self._rng.random((2, len(logits)), np.float32)
        token = self._rng.integers(self._vocabulary, size=len(logits), dtype=np.int32)
        return state, Drawn(later(token), *map(later, numbers)), None


def _program(name: str, call: Callable) -> Any:
    """What stands for a jitted function of this name."""
    lowered = SimpleNamespace(compile=lambda **_: call)
    return SimpleNamespace(__name__=name, lower=lambda *_, **__: lowered)


@dataclass
class _Later:
    """An array that is there at a time."""

    values: np.ndarray
    at: float

    def copy_to_host_async(self) -> None:
        """Do nothing: it is on the host."""

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        time.sleep(max(self.at - time.perf_counter(), 0))
        return self.values


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
