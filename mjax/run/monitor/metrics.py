"""The metrics of a run: speed, peak FLOP/s of the chip, log records and where they go.

A record is one flat dict of a step (training or held-out). Every sink gets the same record, on
process 0 only. Invariant: `metrics.jsonl` holds each step once and in order: on resume, records
after the restored step are dropped before new ones are appended, once there are any: a start that
trains no step drops nothing. Events are records of a text. Speed counts training steps only: the
clock stands still while a run compiles, evaluates or saves.
"""

import functools
import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import jax

from mjax.config.schema.run import Config, LogConfig
from mjax.errors import or_user_error
from mjax.files import replace_text
from mjax.models.flops import flops_of_run
from mjax.plan.chips import chip_of_kind
from mjax.run.monitor.console import LEGEND, Console
from mjax.run.monitor.log_writer import JsonLines, LogWriter, Sink, close_output, print_line
from mjax.run.monitor.trackers import TrackedRun, tracker_writers

COMPILED = "/jax/core/compile/backend_compile_duration"  # jax's name of such an event

Record = dict[str, float | int | str | list[float] | None]


def peak_tflops(log: LogConfig, device_kind: str) -> float | None:
    """The bf16 peak in TFLOP/s that MFU is measured against; None: unknown.

    It is `log.peak_tflops` if that is set, else the chip's.
    """
    if log.peak_tflops is not None:
        return log.peak_tflops
    chip = chip_of_kind(device_kind)
    return chip.bf16_tflops if chip else None


def speed(cfg: Config, tokens: int, seconds: float) -> Record:
    """tok/s, TFLOP/s and MFU per device of `tokens` global tokens trained in `seconds`."""
    rate = tokens / seconds / jax.device_count()
    tflops = rate * flops_of_run(cfg) / 1e12
    peak = peak_tflops(cfg.log, jax.devices()[0].device_kind)
    mfu = tflops / peak if peak else None
    return {"tokens_per_second": rate, "tflops": tflops, "mfu": mfu}


def peak_memory_gb() -> float | None:
    """The most memory that any of this process's devices has used so far, in 1e9 bytes."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [found["peak_bytes_in_use"] for found in stats if "peak_bytes_in_use" in found]
    return max(peaks) / 1e9 if peaks else None


@functools.cache
def _compiler_seconds() -> dict[int, float]:
    """The seconds that the compiler has taken in each thread since the first call, by thread."""
    found = defaultdict(float)

    def count(event: str, seconds: float, **_: object) -> None:
        if event == COMPILED:
            found[threading.get_ident()] += seconds

    jax.monitoring.register_event_duration_secs_listener(count)
    return found


def compiled_here() -> float:
    """The seconds that the compiler has taken in this thread since anyone first asked."""
    return _compiler_seconds()[threading.get_ident()]


class Clock:
    """Seconds and tokens of training since the last `lap`, without what `paused` covers.

    Seconds of the compiler do not count, whichever program it is given: a batch of more documents
    than any before, or the first one after an evaluation, may need one.
    """

    def __init__(self) -> None:
        self._tokens = self._steps = 0
        self._seconds = self._compiled = 0.0
        self._since: float | None = None

    def start(self) -> None:
        self._since, self._compiled = time.perf_counter(), compiled_here()

    def stop(self) -> None:
        if self._since is not None:
            compiled = compiled_here() - self._compiled
            self._seconds += time.perf_counter() - self._since - compiled
            self._since = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        self.stop()
        try:
            yield
        finally:
            self.start()

    def count(self, tokens: int) -> None:
        """A step of `tokens` tokens has finished; ignored while stopped (the step compiled)."""
        if self._since is not None:
            self._tokens += tokens
            self._steps += 1

    def lap(self) -> tuple[int, int, float]:
        """(steps, tokens, seconds) since the last lap."""
        running = self._since is not None
        self.stop()
        since_last = self._steps, self._tokens, self._seconds
        self._tokens = self._steps = 0
        self._seconds = 0.0
        if running:
            self.start()
        return since_last


class Log:
    """Fans records out to the console, `metrics.jsonl` and the trackers that `cfg.log` asks for.

    Each has a thread of its own (`log_writer.py`). Processes other than process 0 log nothing.
    """

    def __init__(self) -> None:
        self._is_logger = jax.process_index() == 0
        self._console = self._events = None
        self._figures: list[LogWriter] = []
        self._early: list[Record] = []  # events before the first figures
        if self._is_logger:
            self._console = LogWriter("standard output", print_line, close_output)

    def open(self, cfg: Config, run_dir: Path, last_step: int, start_step: int) -> None:
        """Let records of steps after `start_step` go to `run_dir`, from the first figures on."""
        if not self._is_logger:
            return
        self._place = cfg, run_dir, start_step
        self._lines = Console(last_step)
        self.say(LEGEND)

    def _open_sinks(self, cfg: Config, run_dir: Path, start_step: int) -> None:
        """Open the log; trackers are opened by their first record. Raises `UserError`."""
        with or_user_error(
            f"{run_dir}: the log cannot be opened: {{reason}}; free space or mend the folder"
        ):
            self._events = LogWriter("metrics.jsonl", *jsonl_sink(run_dir, start_step))
            self._figures = tracker_writers(TrackedRun(cfg, run_dir, start_step))
        for event in self._early:
            self._events(event)

    def say(self, text: str) -> None:
        """Print a line on the console only."""
        if self._console is not None:
            self._console(text)

    def event(self, step: int, text: str) -> None:
        """Print a line and keep it in `metrics.jsonl`, as something that happened at `step`."""
        self.say(text)
        self.keep_event(step, text)

    def keep_event(self, step: int, text: str) -> None:
        """Keep in `metrics.jsonl` what happened at `step`, without printing it."""
        record = {"step": step, "event": text, "time": time.time()}
        if self._is_logger:
            self._early.append(record) if self._events is None else self._events(record)

    def write(self, record: Record) -> None:
        """Log the figures of a step."""
        if self._is_logger:
            self.say(self._lines.line(record))
            self.keep_figures(record)

    def keep_figures(self, record: Record) -> None:
        """Log figures everywhere but on the console."""
        if not self._is_logger:
            return
        if self._events is None:
            self._open_sinks(*self._place)
        for writer in (self._events, *self._figures):
            writer(record)

    def close(self) -> None:
        """End all logs; what happened in a start without figures is added to an older one."""
        if self._events is None and self._early:
            _, run_dir, start_step = self._place
            path = run_dir / "metrics.jsonl"
            if start_step > 0 or not path.exists():
                self._events = LogWriter("metrics.jsonl", JsonLines(path))
                for event in self._early:
                    self._events(event)
        for writer in filter(None, (*self._figures, self._events, self._console)):
            writer.close()


def jsonl_sink(run_dir: Path, start_step: int) -> tuple[Sink, Callable[[], None]]:
    """(a function that appends a record as a line of JSON, a function that ends it).

    Records after `start_step` and broken lines are dropped first. Events stay, unless the run
    starts over.
    """
    path = run_dir / "metrics.jsonl"
    if path.exists():
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        kept = [line + "\n" for line in lines if _stays(line, start_step)]
        if len(kept) < len(lines):
            replace_text(path, "".join(kept))
    write = JsonLines(path)
    return write, write.flush


def _stays(line: str, start_step: int) -> bool:
    """Whether a line of an earlier start stays; not one that was cut off by a kill."""
    try:
        record = json.loads(line)
        is_old_event = "event" in record and start_step > 0
        return is_old_event or record["step"] <= start_step
    except (ValueError, KeyError, TypeError):
        return False
