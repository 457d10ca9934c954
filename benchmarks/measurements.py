"""Measurements kept in a file of JSON lines, and the tables of them in two pages.

docs/performance.md shows the headlines: a few workloads, a figure each. benchmarks/README.md shows
all workloads, and the commands of the headlines.

A line holds what is known of one measurement and leaves out the rest: `workload`, `bench`, `gpus`,
`machine`, `command`, `tokens_per_second_per_gpu`, `tflops_per_gpu`, `mfu`, `gb` (the peak of a
device), `ms` (of a step or of one run), `other`, `best_public` and its link, `date`, `commit`, and
`page`, the page of docs that tells it if it is in no table. Lines are only ever added.
Invariant: the tables are functions of the file and of the code's history. They show the newest line
of each workload and number of GPUs. The full one marks it where its code has changed since.
"""

import json
import re
import shlex
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from mjax.bench.report import own_commit
from mjax.errors import UNREADABLE, UserError, or_user_error

PACKAGE = Path(__file__).parents[1] / "mjax"
BEGIN, END = "<!-- measurements: begin -->", "<!-- measurements: end -->"
COMMANDS_BEGIN, COMMANDS_END = "<!-- commands: begin -->", "<!-- commands: end -->"
STALE = " †"

# What the workload of each benchmark runs, as folders of the package.
CODE = {
    "train": ("models", "objectives", "kernels", "pipeline", "train", "plan", "optim", "sharding"),
    "kernel": ("kernels",),
    "decode": ("models", "kernels", "infer", "sharding"),
    "collective": ("sharding",),
    "data": ("data",),
}


class Headline(NamedTuple):
    """A row of docs/performance.md."""

    what: str
    workload: str
    gpus: int
    form: str
    """How its figure is printed; FIELDS says which one it is, by default `ms`."""
    public: str = ""
    """The best public figure, unless the line has one."""


SPEED, TFLOPS = "{:,.0f} tok/s a GPU", "{:,.0f} TFLOP/s a GPU"
FIELDS = {SPEED: "tokens_per_second_per_gpu", TFLOPS: "tflops_per_gpu"}
HEADLINES = (
    Headline(
        "Llama-3-8B, 8k tokens, bf16, 4 H200s",
        "P1: Llama-3-8B, s8192, bf16, ZeRO-1, 64 sequences",
        4,
        SPEED,
    ),
    Headline(
        "Llama-3-8B, 8k tokens, FP8, 4 H200s",
        "P2: Llama-3-8B, s8192, FP8 (delayed), ZeRO-1, 64 sequences",
        4,
        SPEED,
    ),
    Headline(
        "Llama-3-8B, 32k tokens, cp 4, bf16, 4 H200s",
        "P6: Llama-3-8B, s32768, cp4, 4 sequences, `dots*3,none`",
        4,
        TFLOPS,
    ),
    Headline(
        "Llama-3-8B, 8 layers, bf16, 1 H200",
        "P3: 8 Llama-3-8B layers and head, 4 micro-batches of 2",
        1,
        TFLOPS,
    ),
    Headline(
        "Llama-3-8B, 8 layers, FP8, 1 H200",
        "P3: 8 Llama-3-8B layers and head, 4 micro-batches of 2, FP8 (delayed)",
        1,
        TFLOPS,
        "777 TFLOP/s, Megatron-core with Transformer Engine, on another H200",
    ),
    Headline("GPT 1.3B, 2k tokens, bf16, 1 H200", "P4: GPT 1.3B, s2048, batch 8 a GPU", 1, SPEED),
    Headline(
        "GPT-2 124M, 1k tokens, bf16, 1 H100",
        "P5: GPT-2 124M, s1024, batch 32, one H100",
        1,
        SPEED,
    ),
    Headline(
        "Mixtral-8x7B, 3 layers, bf16, 1 H200",
        "P8: Mixtral-8x7B layers (3) and head, s4096, 4 micro-batches of 2",
        1,
        TFLOPS,
        "476 TFLOP/s, Megatron-core on an H200, layers alone",
    ),
    Headline(
        "Qwen3-30B-A3B, ep 4, bf16, balanced router, 4 H200s",
        "P7: Qwen3-30B-A3B, whole, s4096, ep4, 128 sequences, moments in bf16, `dots`, "
        "force-balanced",
        4,
        SPEED,
    ),
    Headline(
        "BERT-large, 512 tokens, bf16, 1 H100",
        "P12: BERT-large, 64 sequences of 512, one H100",
        1,
        "{:,.1f} ms a step",
        "173.2 ms, torch 2.11 compiled, on an H100",
    ),
)


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
        "also": line.get("other", ""),
        "best public": public,
        "measured": f"{line['date']}{commit}{mark}",
    }


def line_of_headline(lines: Sequence[dict], headline: Headline) -> dict:
    """The newest line that a headline shows."""
    for line in reversed(lines):
        if (line["workload"], line["gpus"]) == (headline.workload, headline.gpus):
            return line
    raise UserError(f"no line of {headline.workload!r} on {headline.gpus} GPUs; measure it")


def headline_table(lines: Sequence[dict]) -> list[str]:
    """The rows of the table of headlines in Markdown."""
    rows = ["| what | figure | best public figure | measured |", "|---|---|---|---|"]
    for headline in HEADLINES:
        line = line_of_headline(lines, headline)
        figure = headline.form.format(line[FIELDS.get(headline.form, "ms")])
        public = headline.public
        if "best_public" in line:
            public = f"[{line['best_public']}]({line['best_public_link']})"
        anchor = re.sub(r"[^\w\- ]", "", headline.what.lower()).replace(" ", "-")
        measured = f"[{line['date']}](../benchmarks/README.md#{anchor})"
        rows.append(f"| {headline.what} | {figure} | {public} | {measured} |")
    return rows


def headline_commands(lines: Sequence[dict]) -> list[str]:
    """A section for each headline: what ran, where, and the command that repeats it."""
    found = []
    for headline in HEADLINES:
        line = line_of_headline(lines, headline)
        where = f"{line['date']}, {line['commit']}, {line['gpus']} x {line['machine']}:"
        found += [f"### {headline.what}", "", where, ""]
        found += ["```bash", line["command"], "```", ""]
    return found[:-1]


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


def with_lines(page: str, lines: Sequence[str], begin: str = BEGIN, end: str = END) -> str:
    """The text of a page with these lines between two marks."""
    if page.count(begin) != 1 or page.count(end) != 1:
        raise UserError(f"--page: it must hold one line {begin!r} and one line {end!r}; add them")
    head, rest = page.split(begin)
    _, tail = rest.split(end)
    return "\n".join([head + begin, *lines, end + tail])


def page_of_headlines(page: str, lines: Sequence[dict]) -> str:
    """The text of docs/performance.md with its table made anew."""
    return with_lines(page, headline_table(lines))


def page_of_all(page: str, lines: Sequence[dict], is_stale: Callable[[dict], bool]) -> str:
    """The text of benchmarks/README.md with its table and commands made anew."""
    page = with_lines(page, table(lines, is_stale))
    return with_lines(page, headline_commands(lines), COMMANDS_BEGIN, COMMANDS_END)
