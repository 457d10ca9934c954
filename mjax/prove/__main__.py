"""`python -m mjax.prove`: the table of docs/invariance.md, every feature on every mesh.

Each (number of devices, feature, batch size) runs in a process of its own. Exit code 1 if any cell
is above the bounds.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax

from mjax.bench.report import own_commit
from mjax.config.languages.paths import as_path
from mjax.errors import CommandParser, UserError, at_least, run_cli
from mjax.prove import BOUND, CURVE_BOUND, cells, compare, holds
from mjax.prove.features import FEATURES, NAMES, ROWS, STEPS
from mjax.sharding.processes.fake_devices import fake_devices


def print_cells(devices: int, feature: str, rows: int, done: set[str]) -> None:
    """A JSON line for every cell of a feature's row that has batches of `rows` sequences.

    Cells in `done` are left out.
    """
    for cell in cells(devices, feature):
        if cell.rows == rows and str(cell) not in done:
            start = time.time()
            record = {"feature": feature, "devices": devices, "cell": str(cell)}
            record |= compare(feature, cell)
            record |= {"s": round(time.time() - start, 1), "jax": jax.__version__}
            print(json.dumps(record | {"commit": own_commit()}), flush=True)


def prove(devices: list[int], features: list[str], jobs: int, file: Path) -> list[dict]:
    """Measure each (device count, feature, batch size) in a process of its own, `jobs` at a time.

    Records are appended to `file` as they come. Cells that it has are not run again. Returns the
    records of all cells asked for, in order.
    """
    before = read_records(file)
    lock = threading.Lock()

    def one(task: tuple[int, str, int]) -> None:
        size, feature, _ = task
        wanted = [cell for cell in cells(size, feature) if cell.rows == task[2]]
        done = [str(cell) for cell in wanted if (feature, size, str(cell)) in before]
        if len(done) == len(wanted):
            return
        flags = f"{os.environ.get('XLA_FLAGS', '')} {fake_devices(size)}"
        env = os.environ | {"XLA_FLAGS": flags.strip(), "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, "-m", "mjax.prove", "--cells", *map(str, task), *done]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
            for line in process.stdout:
                print(line, end="", flush=True)
                with lock, file.open("a", encoding="utf-8") as records:
                    records.write(line)
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command)

    tasks = list(itertools.product(devices, features, ROWS))
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, tasks))
    found, rows = read_records(file), itertools.product(devices, features)
    wanted = ((name, size, str(cell)) for size, name in rows for cell in cells(size, name))
    return [found[key] for key in wanted]


def read_records(file: Path) -> dict[tuple[str, int, str], dict]:
    """The records of a file by feature, devices and cell; the last of each counts."""
    if not file.exists():
        return {}
    records = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    return {(r["feature"], r["devices"], r["cell"]): r for r in records}


def invariance_page(records: list[dict]) -> str:
    """The published table."""
    lines, devices = [], sorted({r["devices"] for r in records})
    for feature in dict.fromkeys(r["feature"] for r in records):
        row = [r for r in records if r["feature"] == feature]
        worst = {key: max(row, key=lambda r: r[key]) for key in ("gradient", "curve")}  # noqa: B023
        shown = [f"{r[key]:.1e} at {r['cell']}" for key, r in worst.items()]
        same = sum(r["replicas"] for r in row)
        lines.append(f"| {NAMES[feature]} | {len(row)} | {' | '.join(shown)} | {same} |")
    return TEXT.format(
        devices=" or ".join(map(str, devices)),
        command=f"python -m mjax.prove --devices {' '.join(map(str, devices))}",
        jax=", ".join(sorted({r.get("jax", jax.__version__) for r in records})),
        commits=", ".join(dict.fromkeys(r.get("commit") or "unknown" for r in records)),
        cells=len(records),
        held=sum(map(holds, records)),
        lines="\n".join(lines),
    )


TEXT = f"""# Every mesh, same answer

Each feature is trained on every way to split {{devices}} devices into pp, dp, ep, cp and tp.
Each run is compared with one device and one micro-batch. Devices are fake ones on a CPU, in fp32.
ZeRO stages 0 to 3, 1 to 8 micro-batches and the exchange of keys over cp take turns.

- gradient: the largest relative deviation of loss, gradient norm or any gradient in the first
  step. A gradient's deviation is relative to its largest entry. The bound is {BOUND:.0e}.
- curve: the largest relative deviation of the loss in {STEPS} steps; the bound is
  {CURVE_BOUND:.0e}.
- replicas: the number of runs at whose end all copies of parameters and moments have equal bits.

{{held}} of {{cells}} runs hold all three. Six devices do not divide the sizes of images and sounds
in a text, so those rows have 50 runs. Rows of fewer are samples, which `--records` completes.
`mjax/prove/features.py` lists the keys of each feature.

| feature | runs | gradient | curve | replicas |
|---|---|---|---|---|
{{lines}}

Written by `{{command}}` with jax {{jax}}, code of `{{commits}}`.
"""


def main() -> int:
    parser = CommandParser("prove", description=__doc__)
    parser.add_argument("--devices", type=at_least(1), nargs="+", default=[8], help="fake devices")
    parser.add_argument("--out", type=as_path, default=Path("docs/invariance.md"), help="the page")
    about = f"default: all, of {', '.join(map(repr, FEATURES))}"
    keys = {"nargs": "+", "choices": list(FEATURES), "default": list(FEATURES), "help": about}
    parser.add_argument("--features", metavar="NAME", **keys)
    parser.add_argument(
        "--jobs", type=at_least(1), default=os.cpu_count(), help="processes at once"
    )
    kept = "JSON lines to add to; cells that it has, of whatever code, are not run again"
    parser.add_argument("--records", type=as_path, help=kept)
    parser.add_argument("--cells", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cells:
        devices, feature, rows, *done = args.cells
        print_cells(int(devices), feature, int(rows), set(done))
        return 0
    for option, path in (("--out", args.out), ("--records", args.records or args.out)):
        if not path.absolute().parent.is_dir():
            raise UserError(f"{option} {path}: no such folder; create it or name another file")
    with tempfile.TemporaryDirectory() as folder:
        file = args.records or Path(folder) / "records.jsonl"
        records = prove(args.devices, args.features, args.jobs, file)
    args.out.write_text(invariance_page(records), encoding="utf-8")
    return 0 if all(map(holds, records)) else 1


if __name__ == "__main__":
    run_cli(main)
