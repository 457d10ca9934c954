"""Goodput: the share of the wall time of a job, since its first start, that trained.

Every second of a run is counted under one name, and so is the time between the end of a process
and the start of the next one. Steps that a restart does again have trained nothing: their seconds
move to `repeated`. Invariant: the seconds of all names add up to the wall time since the first
start, whatever was killed in between. The account is in RUN/goodput.json, which process 0 writes
every few seconds. After Google's ML Goodput Measurement.
"""

import contextlib
import json
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

from mjax.files import replace_text
from mjax.json_file import read_json
from mjax.run.monitor.console import duration
from mjax.run.monitor.log_writer import LogWriter, warn
from mjax.run.monitor.spans import Spans

GOODPUT_FILE = "goodput.json"
TRAINING = "training"
# What else a second can have gone to, with its words in messages.
LOST = {
    "start": "starting",
    "compile": "compiling",
    "data_wait": "waiting for data",
    "checkpoint": "saving",
    "evaluation": "evaluating",
    "restart": "between restarts",
    "repeated": "in repeated steps",
}
PERIOD = 10.0  # seconds between two writes of the account
MOST_MARKS = 512  # steps whose time is remembered
SHOWN_FROM = 0.005  # share of the wall time from which a loss is worth a place in a line


class WallTime:
    """Counts the seconds of a job, those of earlier processes included.

    Each `spent` on something is also a span. `clock` gives seconds since 1970.
    """

    def __init__(self, spans: Spans | None = None, clock: Callable[[], float] = time.time) -> None:
        self._spans = spans or Spans(None)
        self._clock = clock
        self._began = clock()
        self._seconds = {name: 0.0 for name in (TRAINING, *LOST)}
        self._doing, self._since = "start", time.perf_counter()
        self._marks: list[tuple[int, float]] = [(0, 0.0)]  # steps, and the training until then
        self._writer: LogWriter | None = None
        self._file: Path | None = None
        self._written = 0.0
        self._is_over = False
        self.idle = DeviceIdle()

    def go_on(self, file: Path, step: int) -> None:
        """Add what earlier processes of the job have spent; this one goes on from `step`."""
        try:
            found = account(read_json(file, missing={}))
        except ValueError as e:
            warn(f"{file} is damaged ({e}); goodput counts from this start")
            return
        if not found:
            return
        for name, seconds in found["seconds"].items():
            self._seconds[name] += seconds
        trained = trained_until(found["steps"], step)
        self._seconds["repeated"] += self._seconds[TRAINING] - trained
        self._seconds[TRAINING] = trained
        earlier = [mark for mark in found["steps"] if mark[0] < step]
        self._marks = [*earlier, (step, trained)]
        if not found["ended"]:
            gap = max(0.0, self._began - found["as_of"])
            self._seconds["restart"] += gap
            self._spans.add("restart", gap, ended=self._began, step=step)

    def write_to(self, file: Path) -> None:
        """Keep the account in `file` from now on."""
        self._file = file
        self._writer = LogWriter(file.name, lambda text: replace_text(file, text))

    def switch(self, doing: str) -> None:
        """From now on, seconds go to this."""
        now = time.perf_counter()
        self._seconds[self._doing] += now - self._since
        self._doing, self._since = doing, now

    @contextlib.contextmanager
    def spent(self, doing: str, **attributes: int | str) -> Iterator[None]:
        """A block whose seconds go to this."""
        before, began = self._doing, time.perf_counter()
        self.switch(doing)
        try:
            yield
        finally:
            self.switch(before)
            self._spans.add(doing, time.perf_counter() - began, **attributes)

    def waiting(self, batches: Iterator) -> Iterator:
        """`batches`; the time in which the device had nothing to do for want of one is lost."""
        while True:
            began = time.perf_counter()
            batch = next(batches, None)
            if batch is None:
                return
            waited = self.idle.seconds_since(began)
            if waited and self._doing == TRAINING:
                self._seconds[TRAINING] -= waited
                self._seconds["data_wait"] += waited
                self._spans.add("data_wait", waited)
            yield batch

    def trained(self, step: int) -> None:
        """A step has ended; the account is written if that is due."""
        self.switch(self._doing)
        last, seconds = self._marks[-1][1], self._seconds[TRAINING]
        self._spans.add("step", seconds - last, step=step)
        if len(self._marks) >= MOST_MARKS:
            self._marks = self._marks[::2]
        self._marks.append((step, seconds))
        if time.monotonic() - self._written > PERIOD:
            self.write()

    def write(self) -> None:
        """Write the account, in a thread."""
        if self._writer is None:
            return
        self._written = time.monotonic()
        self.switch(self._doing)
        record = {"as_of": self._clock(), "ended": self._is_over, "seconds": self._seconds}
        self._writer(json.dumps(record | {"steps": self._marks}))

    def end(self) -> None:
        """The run has reached its last step: what follows it is not lost."""
        self._is_over = True

    def close(self) -> None:
        """Write the account for the last time."""
        self.idle.close()
        self.write()
        if self._writer is not None:
            self._writer.close()
        self._spans.close()

    def goodput(self) -> float:
        """The share of the time since the first start that trained, 0 to 1."""
        self.switch(self._doing)
        return self._seconds[TRAINING] / max(sum(self._seconds.values()), 1e-9)

    def line(self) -> str:
        """The account in a line."""
        self.switch(self._doing)
        return goodput_line(self._seconds)


class DeviceIdle:
    """Knows since when the device has had nothing to do.

    A thread waits for the result of each step. The loop itself looks at results later.
    """

    def __init__(self) -> None:
        self._results: queue.Queue = queue.Queue()
        self._dispatched = self._done = 0
        self._since = 0.0
        threading.Thread(target=self._watch, name="device idle", daemon=True).start()

    def dispatched(self, result: jax.Array) -> None:
        """The device goes on to compute `result`."""
        self._dispatched += 1
        self._results.put(result)

    def seconds_since(self, began: float) -> float:
        """The seconds after `began` (perf_counter) in which the device was idle until now."""
        if self._done < self._dispatched:
            return 0.0
        return max(0.0, time.perf_counter() - max(began, self._since))

    def close(self) -> None:
        self._results.put(None)

    def _watch(self) -> None:
        while (result := self._results.get()) is not None:
            with contextlib.suppress(Exception):  # the loop meets it, too
                jax.block_until_ready(result)
            self._since = time.perf_counter()
            self._done += 1


def account(record: object) -> dict:
    """A job's account as `WallTime` writes it, {} for none. Raises `ValueError` for another."""
    if record == {}:
        return {}
    try:
        seconds = {name: float(record["seconds"].get(name, 0.0)) for name in (TRAINING, *LOST)}
        steps = [(int(step), float(trained)) for step, trained in record["steps"]]
        found = {"as_of": float(record["as_of"]), "ended": bool(record["ended"])}
    except (KeyError, TypeError, AttributeError) as e:
        raise ValueError(f"no account of a run: {e}") from None
    numbers = [found["as_of"], *seconds.values(), *(trained for _, trained in steps)]
    if not all(math.isfinite(number) and number >= 0 for number in numbers) or not steps:
        raise ValueError("times that cannot be")
    return found | {"seconds": seconds, "steps": steps}


def trained_until(marks: list[tuple[int, float]], step: int) -> float:
    """The seconds of training up to a step, from those that are known; between them, in proportion.

    A step after the last mark is not known to have taken any.
    """
    before = [mark for mark in marks if mark[0] <= step] or [(0, 0.0)]
    after = [mark for mark in marks if mark[0] > step]
    first, trained = before[-1]
    if not after:
        return trained
    last, then = after[0]
    return trained + (then - trained) * (step - first) / (last - first)


def goodput_line(seconds: dict[str, float]) -> str:
    """An account in words: goodput, and the losses that matter, the largest first."""
    whole = max(sum(seconds.values()), 1e-9)
    lost = sorted(((value, name) for name, value in seconds.items() if name in LOST))[::-1]
    parts = [
        f"{LOST[name]} {duration(value)}" for value, name in lost if value > SHOWN_FROM * whole
    ]
    share = f"goodput {seconds[TRAINING] / whole:.1%} of {duration(whole)} since the first start"
    return f"{share}; lost {', '.join(parts)}" if parts else share
