"""`python -m benchmarks.table`: writes the table of docs/performance.md from measurements.jsonl.

Run it in a git checkout of mjax: a row is marked where the code that it ran has changed since its
commit. `--check` writes nothing and exits with code 1 if the page is not as it would be.
"""

import argparse
from pathlib import Path

from benchmarks import measurements
from mjax.config.languages.paths import as_path
from mjax.errors import or_user_error, run_cli


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.table", description=__doc__)
    parser.add_argument(
        "--measurements", type=as_path, default=Path("benchmarks/measurements.jsonl")
    )
    parser.add_argument("--page", type=as_path, default=Path("docs/performance.md"))
    parser.add_argument("--check", action="store_true", help="only say whether the page is right")
    args = parser.parse_args(argv)
    lines = measurements.read_measurements(args.measurements)
    rows = measurements.table(lines, measurements.changed_since)
    with or_user_error(f"--page {args.page}: {{reason}}; give the page to write to"):
        page = args.page.read_text(encoding="utf-8")
    new = measurements.with_table(page, rows)
    if args.check:
        return int(new != page)
    args.page.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    run_cli(main)
