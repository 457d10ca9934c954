"""The page of a report: one HTML file that holds its scripts and opens without a network.

Invariant: whatever comes from files (names, events, config values) is escaped.
"""

import html
import json
import time
from collections.abc import Iterable, Sequence

from bokeh.embed import components
from bokeh.resources import Resources

from mjax.config.languages.difference import shown
from mjax.report.charts import Look, charts, events_chart, look_of, shared_steps
from mjax.report.runs import Run, best_held_out, config_differences, last_finite, median, restarts
from mjax.run.monitor.console import duration
from mjax.run.monitor.goodput import LOST, TRAINING

MOST_EVENTS = 200  # of a run in the list

# The names and colors of the page of `mjax serve`. Bokeh draws axes in the colors of `--bk-` names;
# it understands no `light-dark()`.

STYLE = """
:root { color-scheme: light;
  --page: #f5f7fa; --card: #ffffff; --line: #dfe4ea; --text: #1f2933; --soft: #586574; }
@media screen and (prefers-color-scheme: dark) { :root:not([data-theme="light"]) {
  color-scheme: dark;
  --page: #12161c; --card: #1a1f27; --line: #2b333e; --text: #e4e9ef; --soft: #9aa7b6; } }
:root { --bk-background-fill-color: var(--card); --bk-border-fill-color: var(--card);
  --bk-grid-line-color: var(--line); --bk-axis-line-color: var(--soft);
  --bk-major-tick-line-color: var(--soft); --bk-major-label-text-color: var(--text);
  --bk-fill-color: var(--soft); --bk-line-color: var(--text); --bokeh-icon-color: var(--soft); }
.bk-Tooltip { --tooltip-color: var(--card); --tooltip-text: var(--text); }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
main { max-width: 1320px; margin: 0 auto; padding: 28px 24px 48px; }
h1 { font-size: 24px; font-weight: 650; margin: 0; letter-spacing: -0.01em; }
h2 { font-size: 17px; font-weight: 650; margin: 34px 0 10px; }
.made { color: var(--soft); margin: 2px 0 18px; font-size: 13px; }
.card, .chart { background: var(--card); border: 1px solid var(--line); border-radius: 8px; }
.card { overflow-x: auto; } .wide { grid-column: 1 / -1; }
.charts { display: grid; gap: 16px; grid-template-columns: repeat(2, minmax(0, 1fr)); }
.chart { position: relative; padding: 12px 12px 4px; break-inside: avoid; }
.values { position: absolute; top: 12px; right: 28px; font-size: 13px; font-weight: 600;
  font-variant-numeric: tabular-nums; }
.values span { margin-left: 14px; border: 0 solid; }
.values span:first-child { color: var(--soft); font-weight: 400; }
.values span + span { border-bottom-width: 3px; }
.chart h3 { font-size: 14px; font-weight: 650; margin: 0 0 4px 4px; }
.chart h3 span { color: var(--soft); font-weight: 400; margin-left: 6px; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; }
th, td { text-align: left; padding: 7px 14px; border-bottom: 1px solid var(--line);
  vertical-align: top; }
tr:last-child td { border-bottom: 0; }
th { color: var(--soft); font-weight: 550; font-size: 12.5px; white-space: nowrap; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.text { overflow-wrap: anywhere; } .run { white-space: nowrap; font-weight: 550; }
.swatch { display: inline-block; width: 18px; height: 0; border-top: 3px solid; margin-right: 8px;
  vertical-align: middle; }
code { font: 12.5px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
.hint { color: var(--soft); font-size: 13px; margin: 8px 0 0; }
.legend.card { position: sticky; top: 0; z-index: 5; margin: 16px 0; padding: 7px 14px;
  display: flex; flex-wrap: wrap; gap: 4px 22px; font-size: 13.5px; }
@page { size: 1360px 1920px; margin: 0; }
@media screen and (max-width: 900px) { .charts { grid-template-columns: minmax(0, 1fr); } }
"""

# Bokeh's canvases keep the colors that they were painted in. A print does not wait, and is light.
# Chromium prints a layer that was only cleared as white over the others, so one is painted.
FOLLOW_THEME = """<script>
const repaint = () => Bokeh.index.roots.forEach(view => { // one is no figure
  view.request_paint?.(view.model.renderers[0]) // and with it all of its layer
  view.repaint?.()
})
const show = theme => () => { document.documentElement.dataset.theme = theme; repaint() }
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint)
addEventListener("beforeprint", show("light"))
addEventListener("afterprint", show("browser"))
</script>"""


def page(runs: list[Run]) -> str:
    """The whole report as HTML."""
    steps = shared_steps(runs)
    made, events = charts(runs, steps), events_chart(runs, steps)
    figures = {field: chart for field, (_, chart) in made.items()}
    if events is not None:
        figures["events"] = events
    script, divisions = components(figures)
    cards = {field: (quantity.title, quantity.unit) for field, (quantity, _) in made.items()}
    cards["events"] = ("Events", "hover for the text")
    order = ["loss", "events", *(field for field in figures if field not in ("loss", "events"))]
    drawn = [_card(*cards[name], divisions[name], name) for name in order if name in figures]
    title = "mjax: " + ", ".join(run.name for run in runs)
    sections = [
        f"<h1>{_text(title)}</h1>",
        f'<p class="made">made {time.strftime("%Y-%m-%d %H:%M")}</p>',
        _summary(runs),
        _legend(runs),
        f'<div class="charts">{"".join(drawn)}</div>',
        '<p class="hint">The x axes are steps. Point at a chart to read its curves. Drag to zoom '
        "into all; the tools at its right pan, zoom by wheel, reset and save. Thin lines are the "
        "figures of the log, thick ones their exponential mean over 1 % of a run. Verticals are "
        "events.</p>",
        _wall_time(runs),
        _differences(runs),
        _events(runs),
    ]
    scripts = Resources(mode="inline", components=["bokeh"]).render_js()
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_text(title)}</title><style>{STYLE}</style>\n{scripts}</head>\n"
        f"<body><main>{''.join(sections)}</main>\n{script}\n{FOLLOW_THEME}\n</body></html>\n"
    )


def _text(value: object) -> str:
    return html.escape(str(value))


def _card(title: str, unit: str, division: str, name: str) -> str:
    width = "chart wide" if name in ("loss", "events") else "chart"
    unit = f"<span>{_text(unit)}</span>" if unit else ""
    values = f'<div class="values" id="values-{_text(name)}"></div>'
    return f'<section class="{width}"><h3>{_text(title)}{unit}</h3>{values}{division}</section>'


def _run(run: Run, look: Look) -> str:
    style = f"border-top-color:{look.color};border-top-style:{look.dash}"
    return f'<span class="swatch" style="{style}"></span>{_text(run.name)}'


def _legend(runs: list[Run]) -> str:
    names = [f'<span class="run">{_run(run, look_of(i))}</span>' for i, run in enumerate(runs)]
    return f'<div class="legend card">{"".join(names)}</div>'


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: bool) -> str:
    """A table of cells that are HTML already; the first column is text."""
    kind = "number" if numbers else "text"
    first = "".join(f'<th class="{kind if i else ""}">{cell}</th>' for i, cell in enumerate(head))
    lines = []
    for row in rows:
        cells = [f'<td class="{kind if i else "run"}">{cell}</td>' for i, cell in enumerate(row)]
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return f'<div class="card"><table><tr>{first}</tr>{"".join(lines)}</table></div>'


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _summary(runs: list[Run]) -> str:
    head = ["run", "steps", "tokens", "last loss", "best held-out loss", "median tok/s a device"]
    head += ["median MFU", "peak memory", "restarts", "unreadable lines"]
    rows = []
    for i, run in enumerate(runs):
        best = best_held_out(run)
        steps = max(records["step"].max() for records in (run.training, run.held_out) if records)
        memory = last_finite(run.column("memory_gb")[1])
        mfu = median(run.column("mfu")[1])
        rows.append(
            [
                _run(run, look_of(i)),
                f"{steps:,.0f}",
                _number(last_finite(run.column("tokens")[1]), ",.0f"),
                _number(last_finite(run.column("loss")[1]), ".4f"),
                "–" if best is None else f"{best[0]:.4f} at {best[1]:,}",
                _number(median(run.column("tokens_per_second")[1]), ",.0f"),
                "–" if mfu is None else f"{100 * mfu:.1f} %",
                "–" if memory is None else f"{memory:.1f} GB",
                str(restarts(run)),
                str(run.bad_lines),
            ]
        )
    if not any(run.bad_lines for run in runs):
        head, rows = head[:-1], [row[:-1] for row in rows]
    return _table(head, rows, numbers=True)


def _wall_time(runs: list[Run]) -> str:
    """A table of where the wall time of each run went, in shares."""
    if not any(run.seconds for run in runs):
        return ""
    head = ["run", "wall time", "goodput", *LOST.values()]
    rows = []
    for i, run in enumerate(runs):
        whole = sum(run.seconds.values())
        shares = [run.seconds[name] / whole if whole else None for name in (TRAINING, *LOST)]
        cells = ["–" if share is None else f"{100 * share:.1f} %" for share in shares]
        rows.append([_run(run, look_of(i)), duration(whole) if whole else "–", *cells])
    hint = '<p class="hint">Shares of the time since the first start, restarts included.</p>'
    return f"<h2>Where the time went</h2>{_table(head, rows, numbers=True)}{hint}"


def _differences(runs: list[Run]) -> str:
    if len(runs) < 2:
        return ""
    heading = "<h2>What differs between the configs</h2>"
    differ = config_differences(runs)
    if not differ:
        return f'{heading}<p class="hint">No key but run.dir, as far as the runs have configs.</p>'
    head = ["key", *(_run(run, look_of(i)) for i, run in enumerate(runs))]
    rows = []
    for key, values in differ.items():
        cells = ["–" if not run.config else _value(v) for run, v in zip(runs, values, strict=True)]
        rows.append([f"<code>{_text(key)}</code>", *cells])
    return heading + _table(head, rows, numbers=False)


def _value(value: object) -> str:
    text = shown(value if isinstance(value, str) else json.loads(json.dumps(value, default=str)))
    return f"<code>{_text(text)}</code>"


def _events(runs: list[Run]) -> str:
    rows = []
    for i, run in enumerate(runs):
        for event in run.events[-MOST_EVENTS:]:
            when = "–" if event.time is None else _when(event.time)
            cells = [_run(run, look_of(i)), f"{event.step:,}", when, _text(event.text)]
            rows.append(cells)
    heading = "<h2>Events</h2>"
    if not rows:
        return f'{heading}<p class="hint">None in the logs.</p>'
    left_out = sum(max(0, len(run.events) - MOST_EVENTS) for run in runs)
    note = f'<p class="hint">{left_out:,} earlier ones are left out.</p>' if left_out else ""
    return heading + _table(["run", "step", "time", "event"], rows, numbers=False) + note


def _when(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return "–"
