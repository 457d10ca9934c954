"""Contents of a run folder for a report: `metrics.jsonl` as columns, events and config.

Invariant: a damaged log is read as far as it goes. Lines that are no records are counted and left
out, values that are no numbers become NaN; nothing else is guessed.
"""

import ast
import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mjax.config.languages.difference import keys_and_values
from mjax.config.schema.run import Config
from mjax.config.yaml_text import read
from mjax.errors import UserError, or_user_error
from mjax.json_file import read_json
from mjax.run.monitor.goodput import GOODPUT_FILE, account

Column = np.ndarray  # float64 [records]
RESUMED = "resumed from "  # how the event of a restart begins
_LITERAL = r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""  # a text as Python writes it
# The event of a transcript, as `post/rollouts/figures.py: transcript_line` writes it.
ROLLOUT = rf"rollout: {_LITERAL} -> {_LITERAL}(?: \(reward ([^\s,]+?)(?:, (.*))?\))?"

# Colors of drawings of runs: Okabe and Ito's, which the color-blind tell apart, and a gray. Two are
# darker than theirs, so that each is seen on white and on a dark page.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#3B97D3", "#C48200", "#777777")


@dataclass(frozen=True)
class Event:
    """Something that happened; `time` is in seconds since 1970, or None."""

    step: int
    time: float | None
    text: str


@dataclass(frozen=True)
class DrawnAnswer:
    """An answer that a run drew, as far as its log has it.

    reward: "" where there is none. reason: why it ended.
    """

    step: int
    prompt: str
    text: str
    reward: str
    reason: str


@dataclass(frozen=True)
class Run:
    """A run as its folder tells.

    training, held_out: a column for each field of the records, all of one length, in the order of
    steps. config: values by dotted key. bad_lines: lines of the log that could not be read.
    seconds: where the wall time went (`run/monitor/goodput.py`); {} where it is not known.
    answers: answers that it drew, which are no events.
    """

    name: str
    training: dict[str, Column]
    held_out: dict[str, Column]
    events: list[Event]
    config: dict[str, object]
    bad_lines: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    answers: list[DrawnAnswer] = field(default_factory=list)

    def knows(self, name: str) -> bool:
        return len(self.column(name)[0]) > 0

    def column(self, name: str) -> tuple[Column, Column]:
        """(steps, values) of a field, held-out ones included; empty if there is none."""
        records = self.held_out if name.startswith(("eval_", "task/")) else self.training
        if name not in records:
            return np.empty(0), np.empty(0)
        return records["step"], records[name]


def read_runs(folders: list[Path]) -> list[Run]:
    """The runs of folders, with names that differ. Raises `UserError` for one that is no run."""
    return [read_run(folder, name) for folder, name in zip(folders, names_of(folders), strict=True)]


def names_of(folders: list[Path]) -> list[str]:
    """The last part of each path, and as many parts before it as tell them all apart."""
    paths = [folder.absolute().parts for folder in folders]
    for count in range(1, max(map(len, paths)) + 1):
        names = ["/".join(parts[-count:]) for parts in paths]
        if len(set(names)) == len(names):
            return names
    raise UserError("one run is given twice; name each run once")


def records_of(folder: Path) -> list[dict | None]:
    """The records in a run's log, None for a line that is none; raises `UserError` without log."""
    file = folder / "metrics.jsonl"
    if not file.is_file():
        what = "no metrics.jsonl here" if folder.is_dir() else "no such folder"
        raise UserError(f"{folder}: {what}; give the run.dir of a run")
    with or_user_error(f"{file}: cannot be read ({{reason}}); mend its permissions"):
        text = file.read_text(encoding="utf-8", errors="replace")
    return [_record(line) for line in filter(str.strip, text.split("\n"))]


def _record(line: str) -> dict | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    step = record.get("step") if isinstance(record, dict) else None
    return record if type(step) is int and 0 <= step < 2**53 else None


def read_run(folder: Path, name: str) -> Run:
    training, held_out, events, answers, bad_lines = [], [], [], [], 0
    for record in records_of(folder):
        if record is None:
            bad_lines += 1
        elif answer := _drawn_answer(record):
            answers.append(answer)
        elif "event" in record:
            when = record.get("time")
            text = str(record["event"])
            events.append(Event(record["step"], when if _is_number(when) else None, text))
        elif "eval_loss" in record or any(name.startswith("task/") for name in record):
            held_out.append(record)
        elif "loss" in record:  # others are norms by layer, often of steps between
            training.append(record)
    if not training and not held_out:
        raise UserError(f"{folder}/metrics.jsonl: holds no record of a step; train at least one")
    config = _read_config(folder / "config.yaml")
    columns = _columns(training), _columns(held_out)
    seconds = _read_seconds(folder / GOODPUT_FILE)
    return Run(name, *columns, events, config, bad_lines, seconds, answers)


def _drawn_answer(record: dict) -> DrawnAnswer | None:
    """The transcript that a record is an event of; None for all other records."""
    found = re.fullmatch(ROLLOUT, str(record.get("event")), re.DOTALL)
    if found is None:
        return None
    prompt, answer, reward, reason = found.groups("")
    try:
        return DrawnAnswer(record["step"], *map(ast.literal_eval, (prompt, answer)), reward, reason)
    except (ValueError, SyntaxError):
        return None


def _is_number(value: object) -> bool:
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    return is_real and abs(value) < 1e300


def _columns(records: list[dict]) -> dict[str, Column]:
    """A float64 column for each field that has a number; later records of a step win."""
    latest: dict[int, dict] = {}
    for record in records:
        latest.setdefault(record["step"], {}).update(record)
    ordered = [latest[step] for step in sorted(latest)]
    columns = {}
    for name in dict.fromkeys(name for record in ordered for name in record):
        values = [record.get(name) for record in ordered]
        column = np.array([value if _is_number(value) else math.nan for value in values])
        if np.isfinite(column).any():
            columns[name] = column
    return columns


def _read_config(file: Path) -> dict[str, object]:
    """The config's values by dotted key, missing ones by default; {} if it cannot be read."""
    try:
        tree = read(file.read_text(encoding="utf-8"), str(file), {})
        if not isinstance(tree, dict):
            return {}
    except (OSError, ValueError):
        return {}
    defaults = Config().model_dump(mode="json")
    return dict(keys_and_values(defaults)) | dict(keys_and_values(tree))


def _read_seconds(file: Path) -> dict[str, float]:
    """The account of a run's time, {} if it cannot be read."""
    try:
        return account(read_json(file, missing={})).get("seconds", {})
    except ValueError:
        return {}


def config_differences(runs: list[Run]) -> dict[str, list[object]]:
    """The values in each run of the keys that are not equal in all; runs without config: None."""
    known = [run.config for run in runs if run.config]
    keys = dict.fromkeys(key for config in known for key in config)
    keys.pop("run.dir", None)
    differ = {}
    for key in keys:
        if any(config.get(key) != known[0].get(key) for config in known):
            differ[key] = [run.config.get(key) for run in runs]
    return differ


# ---- figures of a run --------------------------------------------------------------------------


def smoothed(values: Column, span: float) -> Column:
    """The exponential mean over about `span` values, unbiased at the start; NaN is passed over."""
    decay = 1 - 2 / (span + 1)
    total = weight = 0.0
    means = np.full(len(values), math.nan)
    for i, value in enumerate(values):
        if math.isfinite(value):
            total = decay * total + (1 - decay) * value
            weight = decay * weight + (1 - decay)
            means[i] = total / weight
    return means


def thinned(values: Column, most: int) -> np.ndarray:
    """Indices of at most about `most` values: the least and the largest of each part of a curve.

    So no spike is lost. A part without a finite value leaves one gap.
    """
    if len(values) <= most:
        return np.arange(len(values))
    kept = {0, len(values) - 1}
    for part in np.array_split(np.arange(len(values)), most // 2):
        finite = part[np.isfinite(values[part])]
        if len(finite) == 0:
            kept.add(int(part[0]))
            continue
        kept.add(int(finite[np.argmin(values[finite])]))
        kept.add(int(finite[np.argmax(values[finite])]))
    return np.array(sorted(kept))


def last_finite(values: Column) -> float | None:
    finite = values[np.isfinite(values)]
    return float(finite[-1]) if len(finite) else None


def median(values: Column) -> float | None:
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if len(finite) else None


def best_held_out(run: Run, name: str = "eval_loss", sign: int = 1) -> tuple[float, int] | None:
    """(the least held-out loss, its step), or of another figure; the largest with sign -1."""
    steps, values = run.column(name)
    if not np.isfinite(values).any():
        return None
    best = int(np.nanargmin(sign * values))
    return float(values[best]), int(steps[best])


def restarts(run: Run) -> int:
    """How often the run went on from a checkpoint, as far as its log says."""
    return sum(event.text.startswith(RESUMED) for event in run.events)
