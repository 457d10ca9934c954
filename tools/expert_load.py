"""`python -m tools.expert_load RUN [--out FILE]`: the load of each expert over a run, as SVG.

A panel for each layer with experts: steps from left to right, experts from top to bottom, colors by
the load over the mean of the layer. It needs records of the run's `log.diagnostics_interval`, no
network and no package. The largest load over the mean stands beside each panel.
"""

import argparse
import math
from pathlib import Path

from mjax.config.languages.paths import as_path
from mjax.errors import UserError, or_user_error, run_cli
from mjax.report.runs import records_of
from tools.svg import text_at

_FIELD = "expert_load/layers."
WIDTH, ROOM, GAP, LEFT, RIGHT, TOP = 640, 96, 14, 64, 110, 44  # pixels
MOST = 200  # records drawn; of more, every n-th
FULL = 4.0  # loads from here on, or from 1 / 4 down, have the last color
# White is the mean, blue less and orange more: colors of Okabe and Ito.
_LESS, _MORE = (0, 114, 178), (213, 94, 0)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.expert_load",
        description="Draw the load of each expert over a run.",
    )
    parser.add_argument("run", metavar="RUN", type=as_path, help="folder of a run")
    parser.add_argument("--out", metavar="FILE", type=as_path, default=Path("expert_load.svg"))
    args = parser.parse_args(argv)
    loads = read_loads(args.run)
    with or_user_error(f"--out {args.out}: cannot be written ({{reason}})"):
        args.out.write_text(drawing(loads), encoding="utf-8")
    steps = sorted({step for of_layer in loads.values() for step in of_layer})
    print(f"{args.out}: {len(loads)} layers, {len(steps)} records to step {steps[-1]}")
    return 0


# Loads of a layer's experts over their mean, by step.
Loads = dict[int, list[float]]


def read_loads(run: Path) -> dict[int, Loads]:
    """The loads in a run's log by layer; lines that are no records are passed over."""
    found: dict[int, Loads] = {}
    for record in filter(None, records_of(run)):
        for name, values in record.items():
            if name.startswith(_FIELD):
                of_layer = found.setdefault(int(name.removeprefix(_FIELD)), {})
                of_layer[record["step"]] = values
    if not found:
        raise UserError(
            f"{run}/metrics.jsonl: has no loads of experts; train a model with experts and "
            "log.diagnostics_interval=N"
        )
    return dict(sorted(found.items()))


def drawing(loads: dict[int, Loads]) -> str:
    """The panels as SVG."""
    height = TOP + len(loads) * (ROOM + GAP) + 30
    width = LEFT + WIDTH + RIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        *_legend(),
    ]
    top = TOP
    for layer, of_layer in loads.items():
        parts += _panel(layer, of_layer, top)
        top += ROOM + GAP
    steps = [step for of_layer in loads.values() for step in of_layer]
    parts += [
        text_at(LEFT, top + 6, f"step {min(steps):,}"),
        text_at(LEFT + WIDTH, top + 6, f"step {max(steps):,}", "end"),
        "</svg>\n",
    ]
    return "\n".join(parts)


def _panel(layer: int, of_layer: Loads, top: float) -> list[str]:
    """One layer: a rectangle for each expert of each record."""
    steps = sorted(of_layer)
    steps = steps[:: math.ceil(len(steps) / MOST)]
    experts = len(of_layer[steps[0]])
    wide, high = WIDTH / len(steps), ROOM / experts
    last = of_layer[steps[-1]]
    parts = [
        text_at(LEFT - 8, top + ROOM / 2 + 4, f"layer {layer}", "end"),
        text_at(LEFT + WIDTH + 8, top + 16, f"{experts} experts"),
        text_at(LEFT + WIDTH + 8, top + 34, f"first {max(of_layer[steps[0]]):.2f}"),
        text_at(LEFT + WIDTH + 8, top + 52, f"last {max(last):.2f}"),
        f'<g shape-rendering="crispEdges" transform="translate({LEFT} {top})">',
    ]
    for column, step in enumerate(steps):
        for row, load in enumerate(of_layer[step]):
            place = f'x="{column * wide:.2f}" y="{row * high:.2f}"'
            size = f'width="{wide:.2f}" height="{high:.2f}"'
            parts.append(f'<rect {place} {size} fill="{color_of(load)}"/>')
    frame = f'width="{WIDTH}" height="{ROOM}" fill="none" stroke="#9aa5b1"'
    return [*parts, f"<rect {frame}/>", "</g>"]


def color_of(load: float) -> str:
    """The color of a load over the mean: white at 1, full where it is 4 or 1/4."""
    strength = math.log(max(load, 1e-9)) / math.log(FULL)
    end = _MORE if strength > 0 else _LESS
    share = min(abs(strength), 1.0)
    channels = [round(255 + share * (channel - 255)) for channel in end]
    return "#" + "".join(f"{channel:02x}" for channel in channels)


def _legend() -> list[str]:
    parts = [
        text_at(LEFT, 18, "Load of each expert over the mean of its layer; right: the fullest")
    ]
    for i, load in enumerate((0.25, 0.5, 1.0, 2.0, 4.0)):
        x = LEFT + WIDTH - 250 + 50 * i
        parts.append(f'<rect x="{x}" y="24" width="50" height="12" fill="{color_of(load)}"/>')
        parts.append(text_at(x + 25, 34, f"{load:g}", "middle"))
    return parts


if __name__ == "__main__":
    run_cli(main)
