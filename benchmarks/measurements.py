"""Measurements kept in a file of JSON lines, and the table of them in docs/performance.md.

A line holds what is known of one measurement and leaves out the rest: `workload`, `bench`, `gpus`,
`machine`, `command`, `tokens_per_second_per_gpu`, `tflops_per_gpu`, `mfu`, `gb` (the peak of a
device), `ms` (of a step or of one run), `other`, `best_public` and its link, `date`, `commit`, and
`page`, the page of docs that tells it if that is not performance.md. Lines are only ever added.
Invariant: the table is a function of the file and of the code's history. It shows the newest line
of each workload and number of GPUs, and marks it where the code that it ran has changed since.
"""

import json
import shlex
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from mjax.bench.report import own_commit
from mjax.errors import UNREADABLE, UserError, or_user_error

PACKAGE = Path(__file__).parents[1] / "mjax"
BEGIN, END = "<!-- measurements: begin -->", "<!-- measurements: end -->"
STALE = " †"

# What the workload of each benchmark runs, as folders of the package.
CODE = {
    "train": ("models", "objectives", "kernels", "pipeline", "train", "plan", "optim", "sharding"),
    "kernel": ("kernels",),
    "decode": ("models", "kernels", "infer", "sharding"),
    "collective": ("sharding",),
    "data": ("data",),
}


def line_of(record: dict, workload: str, argv: Sequence[str]) -> dict:
    """The line of a record of `mjax.bench train`, run with these arguments."""
    figures = {
        "tokens_per_second_per_gpu": round(record["tokens_per_second"]),
        "tflops_per_gpu": round(record["tflops"], 1),
        "mfu": record["mfu"] and round(record["mfu"], 3),
        "gb": record["memory_gb"] and round(record["memory_gb"], 1),
        "ms": record["ms"],
    }
    line = {
        "workload": workload,
        "bench": record["bench"],
        "gpus": record["case"]["devices"],
        "machine": record["device"],
        "command": f"python -m mjax.bench {record['bench']} {shlex.join(argv)}".strip(),
        **figures,
        "date": record["date"],
        "commit": record["commit"],
    }
    return {name: value for name, value in line.items() if value is not None}


def append(path: Path, line: dict) -> None:
    """Add a line. It takes over the best public figure of the workload's earlier lines."""
    earlier = read_measurements(path) if path.exists() else []
    for old in earlier:
        if old["workload"] == line["workload"] and "best_public" in old:
            public = {name: old[name] for name in ("best_public", "best_public_link")}
            line = line | public
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line, ensure_ascii=False) + "\n")


def read_measurements(path: Path) -> list[dict]:
    """The lines of a file. Raises `UserError` where it is not what it should be."""
    with or_user_error(
        f"{path}: {{reason}}; give a file of JSON lines, such as benchmarks/measurements.jsonl",
        UNREADABLE,
    ):
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for number, line in enumerate(lines, 1):
        missing = {"workload", "bench", "gpus", "date"} - set(line)
        if missing:
            raise UserError(f"{path}:{number}: lacks {', '.join(sorted(missing))}; add it")
    return lines


def newest(lines: Sequence[dict]) -> list[dict]:
    """The lines for performance.md: of each workload and number of GPUs the newest."""
    found: dict[tuple, dict] = {}
    for line in lines:
        if "page" in line:
            continue
        key = line["workload"], line["gpus"]
        if key not in found or line["date"] >= found[key]["date"]:
            found[key] = line
    return list(found.values())


def table(lines: Sequence[dict], is_stale: Callable[[dict], bool]) -> list[str]:
    """The rows of the table in Markdown."""
    found = [_cells(line, STALE if is_stale(line) else "") for line in newest(lines)]
    headings = list(found[0]) if found else []
    rows = [headings, ["---"] * len(headings), *(cells.values() for cells in found)]
    return ["| " + " | ".join(row) + " |" for row in rows]


def _cells(line: dict, mark: str) -> dict[str, str]:
    """The cells of a row by their headings."""

    def number(name: str, form: str) -> str:
        return format(line[name], form) if name in line else ""

    public = line.get("best_public", "")
    if "best_public_link" in line:
        public = f"[{public}]({line['best_public_link']})"
    commit = f", {line['commit']}" if "commit" in line else ""
    return {
        "workload": line["workload"],
        "GPUs": str(line["gpus"]),
        "tok/s a GPU": number("tokens_per_second_per_gpu", ",.0f"),
        "TFLOP/s a GPU": number("tflops_per_gpu", ",.0f"),
        "MFU": number("mfu", ".1%"),
        "GB": number("gb", ".4g"),
        "ms": number("ms", ",.5g"),
        "besides": line.get("other", ""),
        "best public": public,
        "measured": f"{line['date']}{commit}{mark}",
    }


def changed_since(line: dict) -> bool:
    """Whether the code that a line ran has changed since its commit, or that is not known.

    Raises `UserError` outside of a git checkout of mjax.
    """
    if own_commit() is None:
        raise UserError(f"{PACKAGE} is not in a git checkout of mjax; run this in one")
    commit = line.get("commit", "")
    if not commit or commit.endswith("+"):  # changes that no commit holds
        return True
    code = [str(PACKAGE / folder) for folder in CODE[line["bench"]]]
    command = ["git", "-C", str(PACKAGE), "diff", "--quiet", commit, "--", *code]
    return subprocess.run(command, capture_output=True, timeout=60).returncode != 0


def with_table(page: str, rows: Sequence[str]) -> str:
    """The text of a page with these rows between its two marks."""
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise UserError(f"--page: it must hold one line {BEGIN!r} and one line {END!r}; add them")
    head, rest = page.split(BEGIN)
    _, tail = rest.split(END)
    return "\n".join([head + BEGIN, *rows, END + tail])
