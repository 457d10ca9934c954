"""The charts of a report, as figures of Bokeh that share one axis of steps.

A run has one color in all of them. The colors are those of Okabe and Ito, which people with any
common color vision tell apart; lines are dashed where there are more runs than colors.
"""

import math
from dataclasses import dataclass
from functools import partial

import numpy as np
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
SPAN = 0.01  # of a run's records, over which a curve is smoothed
TIP_STYLE = "font: 12px system-ui, sans-serif; max-width: 40em"


@dataclass(frozen=True)
class Quantity:
    """A field of the log and how it is drawn; `scale` takes it to `unit`.

    axis: "linear" (the range of the values), "zero" (from zero) or "log". smooth: draw its mean
    over the raw curve. ticks: a number format of Bokeh.
    """

    field: str
    title: str
    unit: str
    axis: str = "linear"
    scale: float = 1.0
    smooth: bool = False
    ticks: str | None = None


QUANTITIES = (
    Quantity("loss", "Training loss", "nats a token", smooth=True),
    Quantity("eval_loss", "Held-out loss", "nats a token"),
    Quantity("eval_accuracy", "Held-out accuracy", "% told right", "zero", 100.0),
    Quantity("grad_norm", "Gradient norm", "before clipping", "log", smooth=True),
    Quantity("lr", "Learning rate", "", "zero"),
    Quantity("tokens_per_second", "Throughput", "tokens/s a device", "zero", ticks="0,0"),
    Quantity("mfu", "Model FLOP/s utilization", "% of the bf16 peak", "zero", 100.0),
    Quantity("tflops", "Model FLOP/s", "TFLOP/s a device", "zero"),
    Quantity("ms_per_step", "Time of a step", "ms", "zero", ticks="0,0.[000]"),
    Quantity("memory_gb", "Peak device memory", "GB, the fullest device", "zero"),
    Quantity("data_wait", "Waiting for data", "% of a step", "zero", 100.0),
    Quantity("goodput", "Goodput", "% of the wall time", "zero", 100.0),
    Quantity("slowest_host_ms", "Slowest host", "ms a step", "zero", smooth=True),
)

# Writes the values of all curves at the step under the pointer into the chart's heading.
READ_OUT = """
const heading = document.getElementById(`values-${field}`)
if (heading == null) return
const step = cb_data.geometry.x
const shown = value => Math.abs(value) >= 9999.5
  ? value.toLocaleString("en", {maximumFractionDigits: 0}) : `${Number(value.toPrecision(4))}`
const parts = sources.map((source, i) => {
  const steps = source.data.step
  let at = steps.findIndex(one => one >= step)
  if (at < 0) at = steps.length - 1
  if (at > 0 && step - steps[at - 1] < steps[at] - step) at -= 1
  const value = (source.data.mean ?? source.data.value)[at]
  const part = document.createElement("span")
  part.style.borderColor = colors[i]
  const is_known = Number.isFinite(value) && step >= steps[0] - 1 && step <= steps.at(-1) + 1
  part.textContent = is_known ? shown(value) : "\u2013"
  part.title = names[i]
  return [steps[at], part]
})
const nearest = parts.map(([at]) => at).sort((a, b) => Math.abs(a - step) - Math.abs(b - step))[0]
const label = document.createElement("span")
label.textContent = `step ${nearest.toLocaleString("en")}`
heading.replaceChildren(label, ...parts.map(([, part]) => part))
"""


@dataclass(frozen=True)
class Look:
    """How a run is drawn."""

    color: str
    dash: str


def look_of(number: int) -> Look:
    return Look(COLORS[number % len(COLORS)], DASHES[number // len(COLORS) % len(DASHES)])


def charts(runs: list[Run], steps: Range1d) -> dict[str, tuple[Quantity, figure]]:
    """A figure for each quantity that any run knows, by field."""
    made = {}
    for quantity in (*QUANTITIES, *other_losses(runs)):
        known = {run.name for run in runs if len(run.column(quantity.field)[0])}
        has_mfu = quantity.field == "tflops" and "mfu" in made  # the same curve
        if known and not has_mfu:
            made[quantity.field] = quantity, chart(quantity, runs, steps)
    return made


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


def is_loss(name: str) -> bool:
    """Whether a field of a record is a loss."""
    return name.endswith("loss") or name.startswith("eval_loss/")


def other_losses(runs: list[Run]) -> list[Quantity]:
    """Returns losses of other sets, and terms of the loss such as `aux_loss`."""
    names = dict.fromkeys(name for run in runs for name in (*run.training, *run.held_out))
    known = {quantity.field for quantity in QUANTITIES}
    others = [name for name in names if is_loss(name) and name not in known]
    return [Quantity(name, name.replace("_", " "), "", smooth=True) for name in others[:6]]


def chart(quantity: Quantity, runs: list[Run], steps: Range1d) -> figure:
    """The curves of a quantity over the steps, one a run."""
    made = _empty(quantity.axis, steps, height=340 if quantity.field == "loss" else 250)
    if quantity.ticks is not None:
        made.yaxis.formatter = NumeralTickFormatter(format=quantity.ticks)
    drawn = []
    for number, run in enumerate(runs):
        x, y = run.column(quantity.field)
        look = look_of(number)
        if len(x):
            drawn.append((run.name, look, *_draw(made, quantity, look, x, y * quantity.scale)))
        if quantity.field == "loss" and run.events:
            at = sorted({event.step for event in run.events})
            made.vspan(x=at, line_color=look.color, line_alpha=0.4)
    names, looks, lines, sources = map(list, zip(*drawn, strict=True))
    arguments = {
        "field": quantity.field,
        "names": names,
        "colors": [look.color for look in looks],
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
        y = np.where(y > 0, y, math.nan)
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
