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
from mjax.report.charts import Quantity, charts, events_chart, look_of, page_part, shared_steps
from mjax.report.runs import Run, best_held_out, config_differences, last_finite, median, restarts
from mjax.run.monitor.console import duration
from mjax.run.monitor.goodput import LOST, TRAINING

MOST_EVENTS = 200  # of a run in the list
MOST_ANSWERS = 5  # of a run
UNKNOWN = "–"

STYLE = page_part("style.css")


def page(runs: list[Run]) -> str:
    """The whole report as HTML."""
    steps = shared_steps(runs)
    made, events = charts(runs, steps), events_chart(runs, steps)
    figures = {name: chart for name, (_, chart) in made.items()}
    if events is not None:
        figures["events"] = events
    script, divisions = components(figures)
    groups: dict[str, list[str]] = {}
    for name, (quantity, _) in made.items():
        groups.setdefault(quantity.group, []).append(_card(quantity, runs, divisions[name]))
    if events is not None:
        row = Quantity("Loss", "Events", {"events": ""}, "hover for the text")
        groups.setdefault(row.group, []).insert(1, _card(row, [], divisions["events"]))
    title = "mjax: " + ", ".join(run.name for run in runs)
    sections = [
        f"<h1>{_text(title)}</h1>",
        f'<p class="made">made {time.strftime("%Y-%m-%d %H:%M")}</p>',
        _summary(runs),
        _legend(runs),
        *(f'<h2>{_text(g)}</h2><div class="charts">{"".join(c)}</div>' for g, c in groups.items()),
        '<p class="hint">The x axes are steps. Point at a chart to read its curves. Drag to zoom '
        "into all; the tools at its right pan, zoom by wheel, reset and save. Thin lines are the "
        "figures of the log, thick ones their exponential mean over 1 % of a run. Verticals are "
        "events.</p>",
        _drawn_answers(runs),
        _wall_time(runs),
        _differences(runs),
        _events(runs),
    ]
    scripts = Resources(mode="inline", components=["bokeh"]).render_js()
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_text(title)}</title><style>{STYLE}</style>\n{scripts}</head>\n"
        f"<body><main>{''.join(sections)}</main>\n{script}\n"
        f"<script>\n{page_part('follow_theme.js')}</script>\n</body></html>\n"
    )


def _text(value: object) -> str:
    return html.escape(str(value))


def _card(row: Quantity, runs: list[Run], division: str) -> str:
    width = "chart wide" if row.name in ("loss", "events") else "chart"
    unit = f"<span>{_text(row.unit)}</span>" if row.unit else ""
    drawn = {field for run in runs for field in row.drawn(run)}
    key = ""
    for i, (field, what) in enumerate(row.fields.items()):
        if field in drawn and drawn != {row.name}:
            line = f'<span class="swatch" style="border-top-style:{look_of(0, i).dash}"></span>'
            key += f"<span>{line}{_text(what)}</span>"
    values = f'<div class="values" id="values-{_text(row.name)}"></div>'
    key = f'<div class="key">{key}</div>' if key else ""
    heading = f"<h3>{_text(row.title)}{unit}</h3>"
    return f'<section class="{width}">{heading}{values}{key}{division}</section>'


def _run(run: Run, number: int) -> str:
    look = look_of(number)
    style = f"border-top-color:{look.color};border-top-style:{look.dash}"
    return f'<span class="swatch" style="{style}"></span>{_text(run.name)}'


def _legend(runs: list[Run]) -> str:
    names = [f'<span class="run">{_run(run, i)}</span>' for i, run in enumerate(runs)]
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
    return UNKNOWN if value is None else format(value, form)


def _summary(runs: list[Run]) -> str:
    """A table of what came of each run; without the columns that no run knows."""
    names = ["run", "steps", "tokens", "last reward", "best held-out reward", "last loss"]
    names += ["best held-out loss", "median tok/s a device", "median MFU", "peak memory"]
    names += ["restarts", "unreadable lines"]
    rows = []
    for i, run in enumerate(runs):
        steps = max(records["step"].max() for records in (run.training, run.held_out) if records)
        memory = last_finite(run.column("memory_gb")[1])
        mfu = median(run.column("mfu")[1])
        rows.append(
            [
                _run(run, i),
                f"{steps:,.0f}",
                _number(last_finite(run.column("tokens")[1]), ",.0f"),
                _number(last_finite(run.column("reward")[1]), ".4f"),
                _best(run, "eval_reward", -1),
                _number(last_finite(run.column("loss")[1]), ".4f"),
                UNKNOWN if run.knows("eval_reward") else _best(run, "eval_loss", 1),
                _number(median(run.column("tokens_per_second")[1]), ",.0f"),
                UNKNOWN if mfu is None else f"{100 * mfu:.1f} %",
                UNKNOWN if memory is None else f"{memory:.1f} GB",
                str(restarts(run)),
                str(run.bad_lines or UNKNOWN),
            ]
        )
    columns = [column for column in zip(names, *rows, strict=True) if {*column[1:]} != {UNKNOWN}]
    head, *lines = zip(*columns, strict=True)
    return _table(head, lines, numbers=True)


def _best(run: Run, field: str, sign: int) -> str:
    """The least value of a field times `sign`, and its step."""
    found = best_held_out(run, field, sign)
    return UNKNOWN if found is None else f"{found[0]:.4f} at {found[1]:,}"


def _drawn_answers(runs: list[Run]) -> str:
    """The last answers that each run drew, folded."""
    shown = []
    for i, run in enumerate(runs):
        for answer in run.answers[-MOST_ANSWERS:]:
            head = f"{_run(run, i)} step {answer.step:,}"
            head += f", reward {_text(answer.reward)}" if answer.reward else ""
            head += f" ({_text(answer.reason)})" if answer.reason else ""
            text = f"<span>{_text(answer.prompt)}</span>{_text(answer.text)}"
            shown.append(f"<details><summary>{head}</summary><pre>{text}</pre></details>")
    heading = '<h2>Answers drawn last</h2><div class="card answers">'
    hint = '<p class="hint">The end of the prompt in gray, and the answer, as the log has them.</p>'
    return f"{heading}{''.join(shown)}</div>{hint}" if shown else ""


def _wall_time(runs: list[Run]) -> str:
    """A table of where the wall time of each run went, in shares."""
    if not any(run.seconds for run in runs):
        return ""
    head = ["run", "wall time", "goodput", *LOST.values()]
    rows = []
    for i, run in enumerate(runs):
        whole = sum(run.seconds.values())
        shares = [run.seconds[name] / whole if whole else None for name in (TRAINING, *LOST)]
        cells = [UNKNOWN if share is None else f"{100 * share:.1f} %" for share in shares]
        rows.append([_run(run, i), duration(whole) if whole else UNKNOWN, *cells])
    hint = '<p class="hint">Shares of the time since the first start, restarts included.</p>'
    return f"<h2>Where the time went</h2>{_table(head, rows, numbers=True)}{hint}"


def _differences(runs: list[Run]) -> str:
    if len(runs) < 2:
        return ""
    heading = "<h2>What differs between the configs</h2>"
    differ = config_differences(runs)
    if not differ:
        return f'{heading}<p class="hint">No key but run.dir, as far as the runs have configs.</p>'
    head = ["key", *(_run(run, i) for i, run in enumerate(runs))]
    rows = []
    for key, values in differ.items():
        pairs = zip(runs, values, strict=True)
        cells = [_value(value) if run.config else UNKNOWN for run, value in pairs]
        rows.append([f"<code>{_text(key)}</code>", *cells])
    return heading + _table(head, rows, numbers=False)


def _value(value: object) -> str:
    text = shown(value if isinstance(value, str) else json.loads(json.dumps(value, default=str)))
    return f"<code>{_text(text)}</code>"


def _events(runs: list[Run]) -> str:
    rows = []
    for i, run in enumerate(runs):
        for event in run.events[-MOST_EVENTS:]:
            when = UNKNOWN if event.time is None else _when(event.time)
            cells = [_run(run, i), f"{event.step:,}", when, _text(event.text)]
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
        return UNKNOWN
