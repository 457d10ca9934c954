"""The stamp of every benchmark's record, its printing, and its comparison with a baseline.

A record is one JSON line: `bench` and `case` say what ran, `ms` how long one run of it took, other
fields what follows from that; the stamp says on what. Invariant: two records compare if and only if
bench, case and device are equal, and the compared figure is `ms`.
"""

import argparse
import datetime
import functools
import importlib.metadata
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import jax
from rich.console import Console
from rich.table import Table

from mjax.config import load
from mjax.config.languages.paths import path_text
from mjax.config.schema.model import ModelConfig
from mjax.errors import UNREADABLE, UserError, or_user_error

_NOT_OF_MODELS = "mesh", "precision", "lora"
_LIBRARIES = "jaxlib", "nvidia-cudnn-cu13", "nvidia-cublas", "nvidia-nccl-cu13"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--table", action="store_true", help="a table of the records on stderr")
    parser.add_argument(
        "--baseline", type=path_text, metavar="JSONL", help="records of an earlier run"
    )
    parser.add_argument("--tolerance", type=float, default=0.03, help="slowdown that is let pass")


def parse_with_config(parser: argparse.ArgumentParser, argv: list[str]) -> argparse.Namespace:
    """The arguments of a benchmark that takes `--config X [a.b=c ...]` besides its own options."""
    parser.add_argument("--config", type=path_text, metavar="YAML", help="config of the model")
    add_arguments(parser)
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="override a config key")
    return parser.parse_intermixed_args(argv)


def model_to_measure(args: argparse.Namespace, command: str) -> ModelConfig:
    """The model of `--config` and overrides, for a benchmark that reads no other part of a config.

    Raises `UserError` where there is none, and for overrides that ask for what it would not do.
    """
    if args.config is None and not args.overrides:
        raise UserError(f"{command}: no model; give --config configs/models/llama3_8b.yaml")
    for override in args.overrides:
        if override.partition("=")[0].partition(".")[0] in _NOT_OF_MODELS:
            raise UserError(f"{command}: {override} has no effect here; --help names what has")
    return load(args.config, args.overrides).model


def report(args: argparse.Namespace, records: Iterable[dict]) -> int:
    """Print records as they come; with --baseline, exit code 1 if one is slower than it may be."""
    old = None if args.baseline is None else read_baseline(args.baseline)
    done = []
    for record in records:
        done.append(record | stamp())
        if jax.process_index() == 0:
            print(json.dumps(done[-1]), flush=True)
    if jax.process_index() != 0:
        return 0
    if args.table:
        show_table(summary(done))
    if old is None:
        return 0
    rows = compare_records(done, old, args.tolerance)
    show_table(rows)
    return int(any(row["verdict"] == "SLOWER" for row in rows))


def compare_records(new: Sequence[dict], old: Sequence[dict], tolerance: float) -> list[dict]:
    """Rows of case, old and new ms, their ratio and a verdict; SLOWER beyond 1 + `tolerance`.

    The last of several equal cases of `old` counts. Raises `UserError` if no case is in both.
    """
    before = {_key(record): record["ms"] for record in old}
    rows = []
    for record in new:
        row = {"case": name(record), "new ms": record["ms"]}
        if (ms := before.get(_key(record))) is None:
            rows.append(row | {"verdict": "not in the baseline"})
            continue
        ratio = record["ms"] / ms
        verdict = "SLOWER" if ratio > 1 + tolerance else "faster" if ratio < 1 - tolerance else "ok"
        rows.append(row | {"old ms": ms, "ratio": round(ratio, 4), "verdict": verdict})
    if not any("ratio" in row for row in rows):
        raise UserError(
            "--baseline: it has no record of the same bench, case and device as this run; "
            "run the same command on the same kind of device, or make a new baseline"
        )
    return rows


def read_baseline(path: str) -> list[dict]:
    """The records of a JSON-lines file that have a time."""
    wrong = f"--baseline {path}: {{reason}}; give the JSON lines of an earlier run"
    with or_user_error(wrong, UNREADABLE):
        lines = Path(path).read_text().splitlines()
        records = [json.loads(line) for line in lines if line.startswith("{")]
    return [record for record in records if {"bench", "case", "ms"} <= record.keys()]


def _key(record: dict) -> str:
    return json.dumps([record["bench"], record["case"], record["device"]], sort_keys=True)


def name(record: dict) -> str:
    return " ".join([record["bench"], *(f"{k}={_brief(v)}" for k, v in record["case"].items())])


def _brief(value: object) -> str:
    if isinstance(value, dict):
        return ",".join(f"{k}{v}" for k, v in value.items()) or "-"
    return "x".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def summary(records: Sequence[dict]) -> list[dict]:
    """Case and plain figures of each record, without the stamp."""
    hidden = {"bench", "case", *stamp()}
    plain = [
        {k: v for k, v in r.items() if k not in hidden and not isinstance(v, dict | list)}
        for r in records
    ]
    return [{"case": name(r), **row} for r, row in zip(records, plain, strict=True)]


def show_table(rows: Sequence[dict], title: str | None = None) -> None:
    """A table on stderr; columns in order of first appearance."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    table = Table(*columns, title=title, title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        cells = [row.get(column, "") for column in columns]
        table.add_row(*(f"{x:,.4g}" if isinstance(x, float) else str(x) for x in cells))
    width = None if sys.stderr.isatty() else 200
    console = Console(stderr=True, width=width, highlight=False)
    console.print(table)


@functools.cache
def stamp() -> dict:
    """Date, commit, versions, device and driver; None where unknown."""
    versions = {package.removeprefix("nvidia-"): _version(package) for package in _LIBRARIES}
    query = "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"
    gpu = jax.default_backend() == "gpu"
    return {
        "device": jax.devices()[0].device_kind,
        "date": datetime.date.today().isoformat(),
        "commit": own_commit(),
        "jax": jax.__version__,
        **versions,
        "driver": _output(*query) if gpu else None,
    }


@functools.cache
def own_commit() -> str | None:
    """The commit of mjax that runs, with "+" where files differ from it.

    None where no repository tracks this file: an installed copy may lie within the repository of
    something else.
    """
    folder, file = str(Path(__file__).parent), Path(__file__).name
    if _output("git", "-C", folder, "ls-files", "--", file) != file:
        return None
    commit = _output("git", "-C", folder, "rev-parse", "--short", "HEAD")
    package = str(Path(__file__).parents[1])
    changes = _output("git", "-C", folder, "status", "--porcelain", "-uno", "--", package)
    return f"{commit}+" if changes else commit


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def process_seconds() -> float | None:
    """Seconds since this process started; None where /proc does not say."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return None
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def rounded(x: float) -> float:
    """To four significant digits."""
    return float(f"{x:.4g}")


def launch_ms(run: Callable[[], object], samples: int = 20, sample_ms: float = 30.0) -> float:
    """Median milliseconds of `run()`, which launches work and returns its arrays.

    A sample launches it as often as fills `sample_ms`, back to back, and waits once at the end:
    what the host does hides behind the device. Inputs that fit in the L2 cache (50 MB) stay in it.
    On CPUs every launch is waited for: there collectives of two programs can block one another.
    """
    queue = jax.default_backend() != "cpu"
    for _ in range(2):
        jax.block_until_ready(run())
    count, times = 1, []
    while len(times) < samples:
        began = time.perf_counter()
        for _ in range(count - 1):
            out = run()
            if not queue:
                jax.block_until_ready(out)
        jax.block_until_ready(run())
        ms = 1e3 * (time.perf_counter() - began)
        if not times and ms < sample_ms and count < 1000:
            count = min(1000, max(2 * count, int(count * sample_ms / max(ms, 1e-3))))
            continue
        times.append(ms / count)
    times.sort()
    return (times[(samples - 1) // 2] + times[samples // 2]) / 2
