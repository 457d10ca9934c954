"""`python -m tools.curves NAME=RUN... [--field F] [--out FILE]`: a field of logs as SVG.

Runs of one NAME, seeds say, share a color. Beside the last points stands the mean of their last
values. It needs no network and no package.
"""

import argparse
from pathlib import Path

import numpy as np

from mjax.config.languages.paths import as_path
from mjax.errors import UserError, or_user_error, run_cli
from mjax.report.runs import COLORS, Run, last_finite, read_run
from tools.svg import text_at

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 560, 220, 52, 34, 190, 30  # pixels
MARKS = 5  # of an axis, about


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.curves",
        description="Draw a field of the logs of runs; runs of one name share a color.",
    )
    parser.add_argument("runs", metavar="NAME=RUN", nargs="+", help="a name and a run's folder")
    parser.add_argument("--field", default="eval_loss", help="of metrics.jsonl (eval_loss)")
    parser.add_argument("--title", help="above the curves; the field unless given")
    parser.add_argument("--out", metavar="FILE", type=as_path, default=Path("curves.svg"))
    args = parser.parse_args(argv)
    runs = [_named_run(argument) for argument in args.runs]
    text = drawing(runs, args.field, args.title or args.field)
    with or_user_error(f"--out {args.out}: cannot be written ({{reason}})"):
        args.out.write_text(text, encoding="utf-8")
    print(f"{args.out}: {args.field} of {len(runs)} runs")
    return 0


def _named_run(argument: str) -> Run:
    name, equals, folder = argument.partition("=")
    if not (name and equals and folder):
        raise UserError(f"{argument}: is not NAME=RUN; give a name and the folder of a run")
    return read_run(as_path(folder), name)


class _Axis:
    """Values as pixels from `first` to `last`."""

    def __init__(self, values: np.ndarray, first: float, last: float):
        finite = values[np.isfinite(values)]
        self.low, self.high = float(finite.min()), float(finite.max())
        self.first, self.scale = first, (last - first) / (self.high - self.low or 1.0)

    def __call__(self, value: np.ndarray | float) -> np.ndarray | float:
        return self.first + (value - self.low) * self.scale

    def marks(self) -> np.ndarray:
        """Round numbers within, 1, 2 or 5 times a power of ten apart."""
        apart = (self.high - self.low or 1.0) / MARKS
        power = 10.0 ** np.floor(np.log10(apart))
        step = next(n * power for n in (1, 2, 5, 10) if n * power >= apart * (1 - 1e-9))
        return step * np.arange(np.ceil(self.low / step), np.floor(self.high / step) + 1)


def drawing(runs: list[Run], field: str, title: str) -> str:
    """The curves as SVG. Raises `UserError` for a run without the field."""
    curves = [run.column(field) for run in runs]
    for run, (steps, _) in zip(runs, curves, strict=True):
        if not len(steps):
            known = ", ".join(sorted(run.training | run.held_out))
            raise UserError(f"--field {field}: the run {run.name} logs {known} alone; name one")
    across = _Axis(np.concatenate([steps for steps, _ in curves]), LEFT, LEFT + WIDTH)
    up = _Axis(np.concatenate([values for _, values in curves]), TOP + HEIGHT, TOP)
    size = f"0 0 {LEFT + WIDTH + RIGHT} {TOP + HEIGHT + BOTTOM}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{size}" font-family="sans-serif" '
        'font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        text_at(LEFT, 20, title),
    ]
    for mark in up.marks():
        parts.append(f'<path d="M{LEFT} {up(mark):.1f}h{WIDTH}" stroke="#e4e7eb"/>')
        parts.append(text_at(LEFT - 6, up(mark) + 4, f"{mark:g}", "end"))
    for mark in across.marks():
        parts.append(text_at(across(mark), TOP + HEIGHT + 18, f"{mark:g}", "middle"))
    last_of_name: dict[str, list[float]] = {}
    for run, (steps, values) in zip(runs, curves, strict=True):
        last_of_name.setdefault(run.name, []).append(last_finite(values))
        color = _color(list(last_of_name).index(run.name))
        drawn = np.isfinite(values)
        places = zip(across(steps[drawn]), up(values[drawn]), strict=True)
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline fill="none" stroke="{color}" points="{points}"/>')
    for i, (name, last) in enumerate(last_of_name.items()):
        said = f"{name}: {np.mean(last):.4g}"
        parts.append(text_at(LEFT + WIDTH + 12, TOP + 16 * (i + 1), said, color=_color(i)))
    return "\n".join([*parts, "</svg>\n"])


def _color(number: int) -> str:
    return COLORS[number % len(COLORS)]


if __name__ == "__main__":
    run_cli(main)
