"""The charts of a report, as figures of Bokeh that share one axis of steps.

The table `charts.yaml` says which. A run has one color in all charts. The colors are those of Okabe
and Ito, which people with any common color vision tell apart. Lines are dashed where a run has
several in a chart, or where there are more runs than colors.
"""

import fnmatch
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import yaml
from bokeh.models import (
    BoxZoomTool,
    ColumnDataSource,
    CustomJS,
    DataRange1d,
    GlyphRenderer,
    HoverTool,
    NumeralTickFormatter,
    PanTool,
    Range1d,
    ResetTool,
    SaveTool,
    WheelZoomTool,
)
from bokeh.plotting import figure

from mjax.report.runs import COLORS, Run, smoothed, thinned

DASHES = ("solid", "dashed", "dotted")
MOST_POINTS = 1200  # of a curve
MOST_OTHERS = 12  # charts of fields that a row with a * stands for
SPAN = 0.01  # of a run's records, over which a curve is smoothed
TIP_STYLE = "font: 12px system-ui, sans-serif; max-width: 40em"


@dataclass(frozen=True)
class Quantity:
    """A row of `charts.yaml`, which says what its fields are; `group` is the heading over it."""

    group: str
    title: str
    fields: dict[str, str]
    unit: str = ""
    axis: str = "linear"
    scale: float = 1.0
    smooth: bool = False
    ticks: str | None = None
    unless: str = ""
    rare: bool = False

    @property
    def name(self) -> str:
        return next(iter(self.fields))

    def drawn(self, run: Run) -> list[str]:
        """The fields that a run has curves of."""
        if run.knows(self.unless):
            return []
        known = filter(run.knows, self.fields)
        return [name for name in known if not self.rare or run.column(name)[1].any()]

    def of(self, name: str) -> "Quantity":
        """The chart of a field that this row's first one, which has a *, stands for."""
        part = name.removeprefix(self.name.removesuffix("*"))
        fields = {field.replace("*", part): what for field, what in self.fields.items()}
        return replace(self, title=part[:1].upper() + part[1:].replace("_", " "), fields=fields)


def chart_table() -> tuple[list[Quantity], list[str]]:
    """Returns the rows of `charts.yaml`, and the fields that are not drawn."""
    groups = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    hidden = groups.pop("not drawn")
    return [Quantity(group, **row) for group, rows in groups.items() for row in rows], hidden


def quantities(runs: list[Run]) -> Iterator[Quantity]:
    """Yield the charts of runs: the rows, and what rows with a * stand for."""
    rows, hidden = chart_table()
    named = {*hidden, *(field for row in rows for field in row.fields)}
    found = [name for run in runs for name in (*run.training, *run.held_out) if name not in named]
    free = dict.fromkeys(name.removeprefix("eval_") for name in found)
    for row in rows:
        others = fnmatch.filter(free, row.name) if "*" in row.name else []
        yield from map(row.of, others[:MOST_OTHERS]) if others else [row]
        for name in others:
            del free[name]


@dataclass(frozen=True)
class Look:
    """How a run is drawn."""

    color: str
    dash: str


def look_of(number: int, curve: int = 0) -> Look:
    """The look of a run's curve in a chart; with several curves a run, dashes are theirs."""
    dash = curve or number // len(COLORS)
    return Look(COLORS[number % len(COLORS)], DASHES[dash % len(DASHES)])


def page_part(name: str) -> str:
    """The text of a file of `page_parts`."""
    return (Path(__file__).parent / "page_parts" / name).read_text(encoding="utf-8")


READ_OUT = page_part("read_out.js")  # writes values under the pointer into a chart's heading


def charts(runs: list[Run], steps: Range1d) -> dict[str, tuple[Quantity, figure]]:
    """A figure for each quantity that any run knows, by its first field."""
    known = [row for row in quantities(runs) if any(map(row.drawn, runs))]
    return {row.name: (row, chart(row, runs, steps)) for row in known}


def shared_steps(runs: list[Run]) -> Range1d:
    """The range of steps that all figures show, and zoom into together."""
    columns = [run.column(field)[0] for run in runs for field in ("loss", "eval_loss")]
    seen = np.concatenate(columns)
    least, most = 0.0, 1.0
    if len(seen):
        least = float(seen.min())
        most = float(seen.max())
    margin = max(most - least, 1.0) * 0.01
    return Range1d(least - margin, most + margin)


def chart(quantity: Quantity, runs: list[Run], steps: Range1d) -> figure:
    """The curves of a quantity over the steps, one a run and field."""
    made = _empty(quantity.axis, steps, height=340 if quantity.name == "loss" else 250)
    if quantity.ticks is not None:
        made.yaxis.formatter = NumeralTickFormatter(format=quantity.ticks)
    drawn = []
    for number, run in enumerate(runs):
        for field in quantity.drawn(run):
            look = look_of(number, list(quantity.fields).index(field))
            x, y = run.column(field)
            name = f"{run.name} {quantity.fields[field]}"
            drawn.append((name, look, *_draw(made, quantity, look, x, y * quantity.scale)))
        if quantity.name == "loss" and run.events:
            at = sorted({event.step for event in run.events})
            made.vspan(x=at, line_color=look_of(number).color, line_alpha=0.4)
    names, looks, lines, sources = map(list, zip(*drawn, strict=True))
    arguments = {
        "field": quantity.name,
        "names": names,
        "colors": [look.color for look in looks],
        "dashes": [look.dash for look in looks],
        "sources": sources,
    }
    read_out = CustomJS(args=arguments, code=READ_OUT)
    made.add_tools(
        HoverTool(renderers=lines, mode="vline", tooltips=None, visible=False, callback=read_out)
    )
    return made


def _draw(
    made: figure, quantity: Quantity, look: Look, x: np.ndarray, y: np.ndarray
) -> tuple[GlyphRenderer, ColumnDataSource]:
    """Draw a curve; returns its line and its points."""
    if quantity.axis == "log":
        kept = y != 0 if y.any() else slice(None)
        x, y = x[kept], np.where(y > 0, y, math.nan)[kept]
    chosen = thinned(y, MOST_POINTS)
    span = max(SPAN * len(y), 1.0)
    data = {"step": x[chosen], "value": y[chosen].astype(np.float32)}
    is_smooth = quantity.smooth and span > 1
    if is_smooth:
        data["mean"] = smoothed(y, span)[chosen].astype(np.float32)
    source = ColumnDataSource(data)
    line = partial(made.line, x="step", source=source, color=look.color, line_dash=look.dash)
    if is_smooth:
        line(y="value", line_alpha=0.3, line_width=1)
        shown = line(y="mean", line_width=2)
    else:
        shown = line(y="value", line_width=1.8)
    if len(x) <= 40:
        made.scatter(x="step", y="value", source=source, color=look.color, size=4)
    return shown, source


def events_chart(runs: list[Run], steps: Range1d) -> figure | None:
    """A row of marks for each run at the steps where something happened; None: nothing did."""
    if not any(run.events for run in runs):
        return None
    made = _empty("linear", steps, height=44 + 22 * len(runs))
    made.y_range = Range1d(len(runs) - 0.4, -0.6)
    made.yaxis.visible = False
    made.ygrid.visible = False
    for number, run in enumerate(runs):
        look = look_of(number)
        at = [event.step for event in run.events]
        data = {"step": at, "row": [number] * len(at), "text": [e.text for e in run.events]}
        marks = made.scatter(
            x="step",
            y="row",
            source=ColumnDataSource(data),
            marker="diamond",
            size=11,
            color=look.color,
            fill_alpha=0.7,
        )
        # Bokeh escapes what it puts in for "@text".
        tip = f'<div style="{TIP_STYLE}">step @step{{0,0}}: @text</div>'
        made.add_tools(HoverTool(renderers=[marks], visible=False, tooltips=tip))
    return made


def _empty(axis: str, steps: Range1d, height: int) -> figure:
    tools = [BoxZoomTool(), PanTool(), WheelZoomTool(dimensions="width"), ResetTool(), SaveTool()]
    made = figure(
        height=height,
        sizing_mode="stretch_width",
        x_range=steps,
        y_range=DataRange1d(start=0) if axis == "zero" else DataRange1d(),
        y_axis_type="log" if axis == "log" else "linear",
        tools=tools,
        active_drag=tools[0],
        outline_line_color=None,
        min_border_left=64,
        min_border_right=18,
    )
    made.toolbar.logo = None
    made.toolbar.autohide = True
    made.xaxis.formatter = NumeralTickFormatter(format="0,0")
    made.axis.minor_tick_line_color = None
    made.axis.major_label_text_font_size = "12px"
    return made
