"""`python -m benchmarks.battery FILE --out DIR`: many measurements in one go, and a table of them.

The jobs of a YAML file run one after the other, each with a limit of time and a log of its own,
DIR/NAME.log. A training loop may run into its limit: its figures are in its log by then. Files are
in benchmarks/batteries. A job has

- run: lines of bash; $OUT is DIR, $BATTERY the folder of what `prepare` left.
- seconds: the limit. Then the job and its process group are killed, and save nothing.
- figures: by name, a regular expression with one group. A figure is the median of the last half of
  the numbers that it finds in the log.

`prepare` are lines of bash that run first. `variables` go to the environment of all, and `--set`
gives them other values. All run where the command was given.
"""

import argparse
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from mjax.config.languages.paths import as_path
from mjax.config.schema.keys import checked
from mjax.errors import UserError, or_user_error, run_cli

LIMITED = 124  # the exit code of a job that ran into its limit, as of `timeout`
GROUP = ConfigDict(extra="forbid", coerce_numbers_to_str=True)
Name = Annotated[str, Field(pattern=r"^\w[\w.-]*$")]  # of a file


def has_one_group(pattern: str) -> str:
    """The pattern. Raises `ValueError` for another one."""
    with suppress(re.error):
        if re.compile(pattern).groups == 1:
            return pattern
    raise ValueError("give a regular expression with one group")


class Job(BaseModel):
    """A job of the module's docstring."""

    model_config = GROUP
    run: str
    seconds: Annotated[float, Field(gt=0)]
    figures: dict[str, Annotated[str, AfterValidator(has_one_group)]] = {}


class Battery(BaseModel):
    """What a file holds."""

    model_config = GROUP
    variables: dict[str, str] = {}
    prepare: str = ""
    jobs: Annotated[dict[Name, Job], Field(min_length=1)]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.battery", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("file", type=as_path, metavar="FILE")
    parser.add_argument("--out", type=as_path, required=True, metavar="DIR")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="run these jobs alone")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="variables")
    about = "start no job that many seconds after the first"
    parser.add_argument("--start-within", type=float, metavar="S", help=about)
    args = parser.parse_args(argv)
    battery = read_battery(args.file)
    for name in args.only or ():
        if name not in battery.jobs:
            raise UserError(f"--only {name}: {args.file} has {', '.join(battery.jobs)}")
    chosen = dict(text.partition("=")[::2] for text in args.set)
    if unknown := chosen.keys() - battery.variables.keys():
        raise UserError(f"--set {min(unknown)}: {args.file} has no such variable")
    out = args.out.absolute()
    prepared = out / "prepared"
    prepared.mkdir(parents=True, exist_ok=True)
    given = {"OUT": str(out), "BATTERY": str(prepared)}
    env = dict(os.environ) | battery.variables | chosen | given
    if run_job(battery.prepare, 600.0, env, prepared / "log"):
        raise UserError(f"{args.file}: prepare failed; see {prepared / 'log'}")
    began = time.monotonic()
    rows = ["| job | exit | s | figures |", "|---|---|---|---|"]
    for name in args.only or battery.jobs:
        if args.start_within is not None and time.monotonic() - began > args.start_within:
            rows.append(f"| {name} | not run | | |")
            continue
        start, job, log = time.monotonic(), battery.jobs[name], out / f"{name}.log"
        code = run_job(job.run, job.seconds, env, log)
        found = figures_of(log, job.figures)
        figures = ", ".join(f"{key} {value:,.6g}" for key, value in found.items())
        rows.append(f"| {name} | {code} | {time.monotonic() - start:.0f} | {figures} |")
        print(rows[-1], file=sys.stderr, flush=True)
    print("\n".join(rows))
    return 0


def read_battery(path: Path) -> Battery:
    """The jobs of a file. Raises `UserError` for what is no battery."""
    kinds = OSError, yaml.YAMLError, UnicodeError
    with or_user_error(f"{path}: no battery of jobs: {{reason}}", kinds):
        found = yaml.safe_load(path.read_text())
    if not isinstance(found, dict):
        raise UserError(f"{path}: no battery of jobs: give `jobs`")
    return checked(Battery, found, f"{path}: {{key}}: {{why}}")


def run_job(lines: str, limit: float, env: dict[str, str], log: Path) -> int:
    """The exit code of some lines of bash, whose output goes to a file."""
    with open(log, "w") as file:
        process = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", lines],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,
        )
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            return LIMITED
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def figures_of(log: Path, patterns: dict[str, str]) -> dict[str, float]:
    """Each figure whose pattern finds a number in a log."""
    text, figures = log.read_text(errors="replace"), {}
    for name, pattern in patterns.items():
        found = []
        for match in re.finditer(pattern, text):
            with suppress(ValueError):
                found.append(number_of(match[1]))
        if found:
            figures[name] = statistics.median(found[len(found) // 2 :])
    return figures


def number_of(text: str) -> float:
    """12,345 and 39.8k as numbers."""
    unit = {"k": 1e3, "M": 1e6}.get(text[-1:], 1.0)
    return unit * float(text.rstrip("kM").replace(",", ""))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends a job, too
    run_cli(main)
