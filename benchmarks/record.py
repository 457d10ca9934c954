"""`python -m benchmarks.record --to FILE [--workload NAME] train ...`: keep a measurement.

What follows the options is a command line of `python -m mjax.bench`: it runs, and each of its
records becomes a line of FILE, benchmarks/measurements.jsonl say, together with the command.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from benchmarks import measurements
from mjax.config.languages.paths import as_path
from mjax.errors import UserError, run_cli


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.record", description=__doc__)
    parser.add_argument(
        "--to", metavar="FILE", type=as_path, default=Path("benchmarks/measurements.jsonl")
    )
    parser.add_argument("--workload", help="its name there; without it, the command's arguments")
    parser.add_argument("bench", nargs=argparse.REMAINDER, metavar="train ...")
    args = parser.parse_args(argv)
    if not args.bench:
        raise UserError("no benchmark; give what follows `python -m mjax.bench`, such as train")
    if not args.to.absolute().parent.is_dir():
        raise UserError(f"{args.to}: its folder does not exist; make it first")
    command = [sys.executable, "-m", "mjax.bench", *args.bench]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    print(done.stdout, end="")
    if done.returncode:
        return done.returncode
    workload = args.workload or " ".join(args.bench[1:])
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            record = json.loads(line)
            measurements.append(args.to, measurements.line_of(record, workload, args.bench[1:]))
    return 0


if __name__ == "__main__":
    run_cli(main)
