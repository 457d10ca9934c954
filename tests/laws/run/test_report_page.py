"""The report of two runs that were really trained, drawn by a real browser."""

import base64
import json
import re
import shutil
import subprocess

import jax
import pytest

from mjax.config import load
from mjax.report import __main__ as cli
from mjax.run.loop import train
from mjax.sharding.mesh import make_mesh
from tests.marks import exhaustive
from tests.processes import start_process
from tests.tiny import TINY

BASE = [*TINY, "train.eval_interval=10", "train.eval_steps=2"]
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"
# Counts what Bokeh drew: its canvases lie in shadow trees, which --dump-dom leaves out.
COUNT = """<script>
function trees(node) {
  const inner = [...node.querySelectorAll("*")].filter(one => one.shadowRoot);
  return [node, ...inner.flatMap(one => trees(one.shadowRoot))];
}
function is_drawn(canvas) {
  const {width, height} = canvas;
  if (!width || !height) return false;
  const ink = canvas.getContext("2d").getImageData(0, 0, width, height).data;
  const colors = new Set();
  for (let i = 0; i < ink.length; i += 4) colors.add(ink.slice(i, i + 4).join());
  return colors.size > 3;
}
function point_at(target) {  // the middle of a chart
    const {left, top, width, height} = target.getBoundingClientRect();
    const options = {bubbles: true, composed: true, pointerType: "mouse", isPrimary: true,
      clientX: left + width / 2, clientY: top + height / 2};
    for (const kind of ["pointerenter", "pointermove"])
      target.dispatchEvent(new PointerEvent(kind, options));
}
setTimeout(() => {
  for (const tree of trees(document)) tree.querySelectorAll(".bk-events").forEach(point_at);
}, 4000);
setTimeout(() => {
  const canvases = trees(document).flatMap(tree => [...tree.querySelectorAll("canvas")]);
  const seen = {
    figures: Bokeh.documents.flatMap(one => one.roots()).length,
    drawn: canvases.filter(is_drawn).length,
    read: document.getElementById("values-loss").textContent,
    hacked: "hacked" in window,
    loaded: performance.getEntriesByType("resource").map(entry => entry.name),
  };
  document.documentElement.dataset.seen = btoa(JSON.stringify(seen));
}, 6000);
</script>"""


def train_tiny(folder, *overrides):
    cfg = load(None, [*BASE, f"run.dir={folder}", *overrides])
    train(cfg, make_mesh(cfg.mesh, jax.devices()[:1]))
    return folder


def browse(browser, folder, page, *options):
    """(what Chromium prints, its log) when it opens a page and has let 10 s of its clock pass."""
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    command += [f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=10000"]
    command += ["--window-size=1360,2400", *options, page.as_uri()]
    process = start_process(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return process.communicate(timeout=300)


def browser_here():
    """The path of a browser; skips the test where there is none."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"needs a browser: none of {', '.join(BROWSERS)} on this machine")
    return browser


@exhaustive
def test_a_browser_draws_every_chart_and_loads_nothing(tmp_path):
    pytest.importorskip("bokeh", reason="needs the extra `report`")
    browser = browser_here()
    one = train_tiny(tmp_path / "one", "train.steps=20")
    train_tiny(one, "train.steps=60")  # resumes
    two = train_tiny(tmp_path / "two", "train.steps=60", "optimizer.weight_decay=0.3")
    with open(two / "metrics.jsonl", "a") as log:
        for event in (HOSTILE, f"rollout: {HOSTILE!r} -> {HOSTILE!r} (reward 1, {HOSTILE})"):
            log.write(json.dumps({"step": 60, "event": event, "time": 1.0}) + "\n")
    report = tmp_path / "report.html"
    assert cli.main([str(one), str(two), "--out", str(report)]) == 0
    text = report.read_text()
    titles = re.findall(r"<h3>(.*?)<", text)
    for title in ("Training loss", "Held-out loss", "Gradient norm", "Throughput", "Events"):
        assert title in titles
    assert "Goodput" in titles and re.search(r"Where the time went.*in repeated steps", text)
    assert text.count("<details>") == 1  # the transcript, and nothing of it
    assert "optimizer.weight_decay" in text and "resumed from" in text

    page = tmp_path / "counted.html"
    page.write_text(text.replace("</body>", COUNT + "</body>"))
    shown, said = browse(browser, tmp_path, page, "--dump-dom")
    found = re.search(r'data-seen="([^"]+)"', shown)
    assert found, said
    seen = json.loads(base64.b64decode(found[1]))
    assert re.match(r"step \d+(4\.\d+){2}$", seen.pop("read"))  # the losses under the pointer
    assert seen == {"figures": len(titles), "drawn": len(titles), "hacked": False, "loaded": []}
    console = [line for line in said.splitlines() if "CONSOLE" in line]
    assert any("document idle" in line for line in console), said
    assert all(":INFO:CONSOLE" in line for line in console), console
    assert "Uncaught" not in said and "Error" not in "".join(console)

    picture = tmp_path / "report.png"
    browse(browser, tmp_path, report, f"--screenshot={picture}")
    assert picture.stat().st_size > 50_000


def backgrounds(page):
    """Colors of the page and of a corner of each chart, as they are painted."""
    corner = "canvas => [...canvas.getContext('2d').getImageData(2, 2, 1, 1).data.slice(0, 3)]"
    canvases = [page.locator(".chart").nth(i).locator("canvas").first for i in range(2)]
    body = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return [body, *(tuple(canvas.evaluate(corner)) for canvas in canvases)]


@exhaustive
def test_page_and_charts_follow_the_theme_of_the_browser_and_print_light(tmp_path):
    pytest.importorskip("bokeh", reason="needs the extra `report`")
    playwright = pytest.importorskip("playwright.sync_api", reason="needs the extra `clients`")
    path = browser_here()
    lines = [{"step": step, "loss": 1.0 / step, "lr": 0.1} for step in range(1, 9)]
    lines.append({"step": 4, "event": "resumed from checkpoints/4"})
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    report = tmp_path / "report.html"
    assert cli.main([str(tmp_path), "--out", str(report)]) == 0
    light = ["rgb(245, 247, 250)", (255, 255, 255), (255, 255, 255)]
    dark = ["rgb(18, 22, 28)", (26, 31, 39), (26, 31, 39)]
    said = []
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=path, args=["--no-sandbox"])
        for theme, colors in {"light": light, "dark": dark}.items():
            page = browser.new_page(color_scheme=theme)
            page.on("console", lambda line: line.type == "error" and said.append(line.text))
            page.on("pageerror", lambda error: said.append(str(error)))
            page.goto(report.as_uri())
            page.wait_for_function("window.Bokeh?.documents[0]?.is_idle")
            assert backgrounds(page) == colors
            page.evaluate("dispatchEvent(new Event('beforeprint'))")
            assert backgrounds(page) == light
            page.evaluate("dispatchEvent(new Event('afterprint'))")
            assert backgrounds(page) == colors
        page.emulate_media(media="print")
        assert backgrounds(page)[0] == light[0]
        page.emulate_media(media="screen", color_scheme="light")
        assert backgrounds(page) == light
        browser.close()
    assert not said
