"""`python -m benchmarks.table`: writes the tables of measurements.jsonl into their pages.

docs/performance.md gets the headlines, benchmarks/README.md all rows and the headlines' commands.
Run it in a git checkout of mjax: a row is marked where the code that it ran has changed since its
commit. `--check` writes nothing and exits with code 1 if a page is not as it would be.
"""

import argparse
from pathlib import Path

from benchmarks import measurements
from mjax.config.languages.paths import as_path
from mjax.errors import or_user_error, run_cli

FILE = Path("benchmarks/measurements.jsonl")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.table", description=__doc__)
    parser.add_argument("--measurements", type=as_path, default=FILE)
    parser.add_argument("--page", type=as_path, default=Path("docs/performance.md"))
    parser.add_argument("--full-page", type=as_path, default=Path("benchmarks/README.md"))
    parser.add_argument("--check", action="store_true", help="only say whether pages are right")
    args = parser.parse_args(argv)
    lines = measurements.read_measurements(args.measurements)
    texts = {}
    for option, page in (("--page", args.page), ("--full-page", args.full_page)):
        with or_user_error(f"{option} {page}: {{reason}}; give the page to write to"):
            texts[page] = page.read_text(encoding="utf-8")
    full = texts[args.full_page]
    new = {
        args.page: measurements.page_of_headlines(texts[args.page], lines),
        args.full_page: measurements.page_of_all(full, lines, measurements.changed_since),
    }
    if args.check:
        return int(new != texts)
    for page, text in new.items():
        page.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    run_cli(main)
