"""`python -m mjax.report RUN... [--out report.html]`: one HTML page on runs, which opens offline.

RUN is the folder of a run, live or ended. The page holds its scripts and loads nothing.
"""

from importlib.util import find_spec
from pathlib import Path

from mjax.config.languages.paths import as_path
from mjax.errors import CommandParser, UserError, or_user_error, run_cli
from mjax.report.runs import read_runs


def main(argv: list[str] | None = None) -> int:
    about = "Write one HTML page with the curves, events and config differences of runs."
    parser = CommandParser("report", description=about)
    parser.add_argument("runs", metavar="RUN", nargs="+", type=as_path, help="folder of a run")
    parser.add_argument("--out", type=as_path, default=Path("report.html"), help="page to write")
    args = parser.parse_args(argv)
    if find_spec("bokeh") is None:
        raise UserError("mjax.report needs bokeh; pip install 'mjax[report]'")
    runs = read_runs(args.runs)

    from mjax.report.page import page

    text = page(runs)
    with or_user_error(f"--out {args.out}: cannot be written ({{reason}})"):
        args.out.write_text(text, encoding="utf-8", errors="replace")
    count = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    print(f"{args.out}: {count}, {len(text) / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    run_cli(main)
