"""The metrics of a run: speed, peak FLOP/s of the chip, log records and where they go.

A record is one flat dict of a step (training or held-out). Every sink gets the same record, on
process 0 only. Invariant: `metrics.jsonl` holds each step once and in order: on resume, records
after the restored step are dropped before new ones are appended. Speed counts training steps only:
the clock stands still while a run compiles, evaluates or saves.
"""

import json
import math
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import jax
from rich.console import Console

from mjax.config.schema import Config, LogConfig
from mjax.errors import UserError
from mjax.models.flops import flops_per_token

# Dense bf16 tensor-core peak in TFLOP/s (NVIDIA data sheets), by the start of jax's device_kind;
# the first that fits counts.
PEAK_TFLOPS = (
    ("NVIDIA GB300", 2500.0),
    ("NVIDIA B300", 2250.0),
    ("NVIDIA GB200", 2500.0),
    ("NVIDIA B200", 2250.0),
    ("NVIDIA GH200", 989.0),
    ("NVIDIA H200 NVL", 835.0),
    ("NVIDIA H200", 989.0),
    ("NVIDIA H100 PCIe", 756.0),
    ("NVIDIA H100 NVL", 835.0),
    ("NVIDIA H100", 989.0),
    ("NVIDIA A100", 312.0),
    ("NVIDIA L40S", 362.0),
    ("NVIDIA L4", 121.0),
)

Record = dict[str, float | int | str | None]
Sink = Callable[[Record], None]


def peak_tflops(log: LogConfig, device_kind: str) -> float | None:
    """The bf16 peak in TFLOP/s that MFU is measured against; None: unknown.

    It is `log.peak_tflops` if that is set, else the chip's.
    """
    if log.peak_tflops is not None:
        return log.peak_tflops
    for name, peak in PEAK_TFLOPS:
        if re.match(rf"{name}\b", device_kind):
            return peak
    return None


def speed(cfg: Config, tokens: int, seconds: float) -> Record:
    """tok/s, TFLOP/s and MFU per device of `tokens` global tokens trained in `seconds`."""
    rate = tokens / seconds / jax.device_count()
    tflops = rate * flops_per_token(cfg.model, cfg.data.seq_length) / 1e12
    peak = peak_tflops(cfg.log, jax.devices()[0].device_kind)
    mfu = tflops / peak if peak else None
    return {"tokens_per_second": rate, "tflops": tflops, "mfu": mfu}


def peak_memory_gb() -> float | None:
    """The most memory that any of this process's devices has used so far, in 1e9 bytes."""
    peaks = []
    for device in jax.local_devices():
        stats = device.memory_stats() or {}
        if "peak_bytes_in_use" in stats:
            peaks.append(stats["peak_bytes_in_use"])
    return max(peaks) / 1e9 if peaks else None


class Clock:
    """Seconds and tokens of training since the last `lap`, without what `paused` covers."""

    def __init__(self) -> None:
        self._tokens = self._steps = 0
        self._seconds = 0.0
        self._since: float | None = None

    def start(self) -> None:
        self._since = time.perf_counter()

    def stop(self) -> None:
        if self._since is not None:
            self._seconds += time.perf_counter() - self._since
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
    """Fans a record out to the console, `metrics.jsonl` and the sinks that `cfg.log` asks for."""

    def __init__(self, cfg: Config, run_dir: Path, last_step: int, start_step: int) -> None:
        self.sinks: list[Sink] = []
        self._closers: list[Callable[[], None]] = []
        self._console = Console(quiet=jax.process_index() != 0, soft_wrap=True, highlight=False)
        if jax.process_index() != 0:
            return
        self.sinks.append(lambda record: self.say(console_line(record, last_step)))
        self._add(*jsonl_sink(run_dir / "metrics.jsonl", start_step))
        if cfg.log.tensorboard:
            self._add(*tensorboard_sink(run_dir / "tensorboard", start_step))
        if cfg.log.wandb_project:
            self._add(*wandb_sink(cfg, run_dir, start_step))

    def say(self, text: str) -> None:
        """Print a line on the console only."""
        self._console.print(text, markup=False)

    def write(self, record: Record) -> None:
        for sink in self.sinks:
            sink(record)

    def close(self) -> None:
        for close in self._closers:
            close()

    def _add(self, sink: Sink, close: Callable[[], None]) -> None:
        self.sinks.append(sink)
        self._closers.append(close)


def require_sinks(log: LogConfig) -> None:
    """Raise `UserError`, before a run has begun, if a sink that it asks for is not installed."""
    if log.tensorboard and find_spec("tensorboardX") is None:
        raise UserError("log.tensorboard needs tensorboardX; pip install 'mjax[tensorboard]'")
    if log.wandb_project and find_spec("wandb") is None:
        raise UserError("log.wandb_project needs wandb; pip install 'mjax[wandb]'")


def console_line(record: Record, last_step: int) -> str:
    """A record as one readable line; unknown values read 'n/a'."""

    def show(key: str, form: str, scale: float = 1.0) -> str:
        value = record.get(key)
        return "n/a" if value is None else format(value * scale, form)

    step = f"step {record['step']:>{len(str(last_step))}}/{last_step}"
    if "eval_loss" in record:
        return f"{step} | held-out loss {show('eval_loss', '.4f')} | {record['eval_tokens']} tokens"
    return " | ".join(
        (
            step,
            f"loss {show('loss', '.4f')}",
            f"grad norm {show('grad_norm', '.3f')}",
            f"lr {show('lr', '.2e')}",
            f"{show('ms_per_step', ',.1f')} ms/step",
            f"{show('tokens_per_second', ',.0f')} tok/s/device",
            f"{show('tflops', ',.4g')} TFLOP/s",
            f"MFU {show('mfu', '.1f', 100)}{'%' if record.get('mfu') is not None else ''}",
            f"memory {show('memory_gb', '.1f')}{' GB' if record.get('memory_gb') else ''}",
        )
    )


def jsonl_sink(path: Path, start_step: int) -> tuple[Sink, Callable[[], None]]:
    """(a function that appends a record as a line of JSON, a function that closes the file).

    Lines after `start_step` and broken lines are dropped first. Numbers that are not finite are
    written as null, so that every line is standard JSON.
    """
    if path.exists():
        lines = path.read_text().splitlines()
        kept = [line for line in lines if _step_of(line) <= start_step]
        new_file = path.with_suffix(".tmp")
        new_file.write_text("".join(line + "\n" for line in kept))
        os.replace(new_file, path)
    file = path.open("a")

    def write(record: Record) -> None:
        values = {name: _finite_or_none(value) for name, value in record.items()}
        file.write(json.dumps(values) + "\n")
        file.flush()

    return write, file.close


def _finite_or_none(value: float | int | str | None) -> float | int | str | None:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _step_of(line: str) -> float:
    """The step of a record; infinity for a line that was cut off when a process was killed."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf


def tensorboard_sink(folder: Path, start_step: int) -> tuple[Sink, Callable[[], None]]:
    """(a function that writes a record for TensorBoard, a function that closes the file).

    Curves of a killed run after `start_step` are hidden.
    """
    from tensorboardX import SummaryWriter

    writer = SummaryWriter(str(folder), purge_step=start_step + 1)

    def write(record: Record) -> None:
        for name, value in _scalars(record):
            writer.add_scalar(name, value, record["step"])
        writer.flush()

    return write, writer.close


def wandb_sink(cfg: Config, run_dir: Path, start_step: int) -> tuple[Sink, Callable[[], None]]:
    """(a function that sends a record to Weights & Biases, a function that ends the run there).

    A resumed run continues under the id that is kept in the run folder.
    """
    import wandb

    id_file = run_dir / "wandb_id"
    if start_step == 0 or not id_file.exists():
        id_file.write_text(uuid.uuid4().hex)
    run = wandb.init(
        project=cfg.log.wandb_project,
        name=run_dir.name,
        id=id_file.read_text(),
        resume="allow",
        dir=str(run_dir),
        config=cfg.model_dump(mode="json"),
    )

    def write(record: Record) -> None:
        run.log(dict(_scalars(record)), step=record["step"])

    return write, run.finish


def _scalars(record: Record) -> list[tuple[str, float]]:
    """(name, value) of all known values but the step."""
    return [(name, v) for name, v in record.items() if name != "step" and v is not None]
