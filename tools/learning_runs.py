"""Runs of mjax for a figure: commands in processes of their own, then curves and a table.

Several may run at once (`Trainings`). What a folder holds already is not done again, so that a
command which was cut short goes on.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mjax.config.languages.paths import as_path
from mjax.errors import UserError
from mjax.report.runs import Run
from tools.curves import drawing

Curve = Mapping[int, float]  # a value by step
_GRACE, _POLL = 5.0, 0.2  # seconds until a process that was asked to end is killed; between looks


def train_once(command: str, run: Path, steps: int, *arguments: object) -> None:
    """Train in the folder `run`, unless it holds the last step already."""
    if not (run / "checkpoints" / str(steps)).is_dir():
        run_mjax(command, *arguments, f"train.steps={steps}", f"run.dir={run}")


def run_mjax(*arguments: object) -> None:
    """Run a command of mjax; its output goes nowhere unless it fails."""
    command = [sys.executable, "-m", "mjax.cli", *map(str, arguments)]
    print("mjax", *arguments, flush=True)
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise UserError(f"mjax {arguments[0]} failed:\n{done.stdout[-2000:]}")


# ---- several at once -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Training:
    """A run: its name, which is its folder's, its steps, a command of mjax and its arguments.

    after: the name of the run whose weights it starts from; "": it starts from none.
    """

    name: str
    steps: int
    arguments: tuple[str, ...]
    after: str = ""


@dataclass
class Trainings:
    """Runs in the folder `out`, `at_once` at a time on one device, in the order that they are in.

    variables: of the environment of each. seconds: a run's limit. until: `time.monotonic()` at
    which all are ended. Each writes NAME.log. A run that fails or is ended stops no other, but
    those that start from it.
    """

    out: Path
    at_once: int
    seconds: float
    until: float
    variables: Mapping[str, str] = field(default_factory=dict)
    _running: dict[str, tuple[subprocess.Popen, float]] = field(default_factory=dict)

    def is_done(self, training: Training) -> bool:
        return (self.out / training.name / "checkpoints" / str(training.steps)).is_dir()

    def run(self, trainings: Sequence[Training]) -> None:
        """Run all that are not done yet, as far as the time allows."""
        by_name = {training.name: training for training in trainings}
        waiting = [training for training in trainings if not self.is_done(training)]
        began = time.monotonic()
        before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        try:
            while (waiting or self._running) and time.monotonic() < self.until:
                self._look(began)
                for training in list(waiting):
                    start = by_name.get(training.after)
                    if start is not None and not self.is_done(start):
                        continue
                    if len(self._running) == self.at_once:
                        break
                    waiting.remove(training)
                    self._start(training)
                if not self._running:  # all that wait would start from what failed
                    break
                time.sleep(_POLL)
        finally:
            end_processes([process for process, _ in self._running.values()])
            for name, (_, start) in self._running.items():
                print(f"{name}: cut off after {time.monotonic() - start:.0f} s", flush=True)
            self._running.clear()
            signal.signal(signal.SIGTERM, before)

    def _look(self, began: float) -> None:
        """Take note of runs that have ended, and end those beyond their limit."""
        for name, (process, start) in list(self._running.items()):
            now = time.monotonic()
            if process.poll() is None and now - start < self.seconds:
                continue
            end_processes([process])
            del self._running[name]
            code = process.returncode
            said = f"{name}: exit {code} after {now - start:.0f} s, at {now - began:.0f} s"
            if code:
                lines = (self.out / f"{name}.log").read_text(errors="replace").splitlines()
                said = "\n    ".join([said, *lines[-8:]])
            print(said, flush=True)

    def _start(self, training: Training) -> None:
        keys = f"train.steps={training.steps}", f"run.dir={self.out / training.name}"
        command = [sys.executable, "-m", "mjax.cli", *training.arguments, *keys]
        with (self.out / f"{training.name}.log").open("wb") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.variables},
                start_new_session=True,
            )
        self._running[training.name] = process, time.monotonic()


def end_processes(processes: Sequence[subprocess.Popen]) -> None:
    """End processes that lead sessions, with all their children."""
    until = time.monotonic() + _GRACE
    for number in (signal.SIGTERM, signal.SIGKILL):
        left = [process for process in processes if process.poll() is None]
        for process in left:
            os.killpg(process.pid, number)
        for process in left:
            try:
                process.wait(max(until - time.monotonic(), 0.01))
            except subprocess.TimeoutExpired:
                continue


def variables_of(device: str, out: Path, at_once: int) -> dict[str, str]:
    """The environment of several runs that share a device: no memory taken beforehand, and one
    folder of compiled programs, which JAX keeps on GPUs alone.
    """
    if device == "cpu":
        return {"JAX_PLATFORMS": "cpu"}
    return {
        "JAX_PLATFORMS": "cuda",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{0.9 / at_once:.3f}",
        "JAX_COMPILATION_CACHE_DIR": str(out.absolute() / "programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }


def parser_of_trainings(description: str, seeds: int) -> argparse.ArgumentParser:
    """The options of a command that runs several trainings, `seeds` of each."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=as_path, required=True, metavar="DIR")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--minutes", type=float, default=600, help="for all runs (600)")
    parser.add_argument("--seconds", type=float, default=3600, help="for one run (3600)")
    parser.add_argument("--seeds", type=int, default=seeds, help=f"at most ({seeds})")
    parser.add_argument("--steps", type=int, help="of each run at most, to try the commands")
    parser.add_argument("--draw", action="store_true", help="run nothing")
    parser.add_argument("keys", nargs="*", metavar="KEY=VALUE", help="of all runs")
    return parser


def trainings_of(args: argparse.Namespace, began: float) -> Trainings:
    """What runs trainings as the options say; `began` is `time.monotonic()` of the command."""
    if args.jobs < 1 or args.minutes <= 0 or args.seconds <= 0:
        raise UserError("--jobs is at least 1; --minutes and --seconds are above 0")
    variables = variables_of(args.device, args.out, args.jobs)
    until = began + 60 * args.minutes
    return Trainings(args.out, args.jobs, args.seconds, until, variables)


# ---- figures and tables --------------------------------------------------------------------------


def draw_curves(curves: Mapping[str, list[Curve]], field: str, title: str, file: Path) -> None:
    """Draw curves of several seeds by name as SVG."""
    runs = []
    for name, of_seeds in curves.items():
        for curve in filter(None, of_seeds):
            steps, values = np.array(list(curve)), np.array(list(curve.values()))
            runs.append(Run(name, {"step": steps, field: values}, {}, [], {}))
    file.write_text(drawing(runs, field, title), encoding="utf-8")


def table_head(*columns: str) -> list[str]:
    """An empty line, and the first two of a Markdown table."""
    return ["", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]


def spread(values: list[float]) -> str:
    """The mean of values, and the lowest and the highest."""
    return f"{np.mean(values):.3f} ({min(values):.3f} to {max(values):.3f})"
