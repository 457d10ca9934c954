"""Laws of the report: a damaged log is read as far as it goes, no spike is lost, nothing is loaded
from the network, and what comes from files cannot become a part of the page."""

import importlib.util
import json
import math
import re
from itertools import takewhile
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from mjax.config.schema.reinforce import PolicyLoss
from mjax.data.base.tokenizer import load_tokenizer
from mjax.errors import UserError
from mjax.post.policy.policy_losses import CORRECTION_MEAN, DIFFERENCE, MISMATCH, clip_figures
from mjax.post.rollouts.figures import reward_figures, time_figures, transcript_line
from mjax.post.rollouts.transcript import Transcript
from mjax.report import __main__ as cli
from mjax.report.runs import (
    COLORS,
    DrawnAnswer,
    best_held_out,
    config_differences,
    last_finite,
    names_of,
    read_run,
    read_runs,
    restarts,
    smoothed,
    thinned,
)
from tests.marks import slow

needs_bokeh = pytest.mark.skipif(
    importlib.util.find_spec("bokeh") is None, reason="needs the extra `report` (bokeh)"
)
HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"


def write(folder, lines, config="train: {steps: 9}\n"):
    folder.mkdir(parents=True, exist_ok=True)
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    (folder / "metrics.jsonl").write_text("\n".join(texts))
    if config is not None:
        (folder / "config.yaml").write_text(config)
    return folder


def record(step, **fields):
    return {"step": step, "loss": 3.0 - 0.01 * step, "grad_norm": 1.0, "lr": 1e-4} | fields


def test_a_damaged_log_is_read_as_far_as_it_goes(tmp_path):
    folder = write(
        tmp_path / "run",
        [
            record(1, loss=None),
            record(2, tokens_per_second=10.0, mfu=None),
            "",
            '{"step": 3, "lo',
            "[1, 2]",
            '{"loss": 1.0}',
            '{"step": true, "loss": 1.0}',
            '{"step": 4, "loss": NaN, "grad_norm": Infinity, "lr": "fast"}',
            {"step": 4, "event": 17, "time": "noon"},
            {"step": 4, "event": "resumed from checkpoints/4", "time": 1e9},
            {"step": 4, "eval_loss": 2.5, "eval_tokens": 64},
            {"step": 8, "eval_loss": 2.75, "eval_tokens": 64},
            record(6),
            record(5),
            "[" * 100_000,
        ],
    )
    run = read_run(folder, "run")
    assert run.bad_lines == 5
    steps, losses = run.column("loss")
    assert steps.tolist() == [1, 2, 4, 5, 6]
    assert np.isnan(losses).tolist() == [True, False, True, False, False]
    assert "mfu" not in run.training and run.column("mfu")[0].size == 0
    assert [event.text for event in run.events] == ["17", "resumed from checkpoints/4"]
    assert restarts(run) == 1 and best_held_out(run) == (2.5, 4)
    assert last_finite(losses) == pytest.approx(2.94)


def test_records_of_norms_leave_no_gap_in_the_curves(tmp_path):
    norms = [{"step": step, "grad_norm/head": 0.5, "time": 1.0} for step in (1, 2, 3)]
    lines = [norms[0], record(1), norms[1], record(3), norms[2]]
    steps, losses = read_run(write(tmp_path, lines), "a").column("loss")
    assert steps.tolist() == [1, 3] and losses.tolist() == [2.99, 2.97]


def test_inputs_that_are_no_runs_end_in_one_line(tmp_path):
    empty = write(tmp_path / "empty", [])
    only_events = write(tmp_path / "events", [{"step": 0, "event": "began"}])
    bare = tmp_path / "bare"
    bare.mkdir()
    file = tmp_path / "file"
    file.write_text("x")
    for folder, words in (
        (tmp_path / "nowhere", "no such folder"),
        (file, "no such folder"),
        (bare, "no metrics.jsonl here"),
        (empty, "holds no record of a step"),
        (only_events, "holds no record of a step"),
    ):
        with pytest.raises(UserError, match=words) as raised:
            read_runs([folder])
        assert str(folder) in str(raised.value) and "\n" not in str(raised.value)
    good = write(tmp_path / "good", [record(1)])
    with pytest.raises(UserError, match="given twice"):
        read_runs([good, good])


def test_runs_of_one_name_are_told_apart(tmp_path):
    assert names_of([tmp_path / "a" / "run", tmp_path / "b" / "run"]) == ["a/run", "b/run"]
    assert names_of([tmp_path / "a", tmp_path / "b"]) == ["a", "b"]


def test_thinning_keeps_least_and_largest_ends_and_gaps():
    rng = np.random.default_rng(0)
    values = rng.normal(size=50_000)
    values[31_234], values[7] = 1e6, -1e6
    values[20_000:25_000] = math.nan
    chosen = thinned(values, 2000)
    assert len(chosen) <= 2002 and (np.diff(chosen) > 0).all()
    assert {0, 7, 31_234, 49_999} <= set(chosen.tolist())
    assert np.isnan(values[chosen]).any()
    assert thinned(values[:100], 2000).tolist() == list(range(100))


def test_a_smoothed_curve_is_the_mean_of_a_constant_and_passes_over_gaps():
    assert smoothed(np.full(50, 3.5), 10) == pytest.approx(3.5)
    noisy = smoothed(np.array([1.0, math.nan, 1.0]), 5)
    assert noisy[0] == noisy[2] == 1 and math.isnan(noisy[1])


def test_differences_of_configs_are_those_of_values_not_of_spelling(tmp_path):
    runs = read_runs(
        [
            write(tmp_path / "a", [record(1)], "run: {dir: a}\ntrain: {steps: 9}\n"),
            write(tmp_path / "b", [record(1)], "model: {attention: {head_dim: 7}}\n"),
            write(tmp_path / "c", [record(1)], None),
            write(tmp_path / "d", [record(1)], "train: [unreadable"),
        ]
    )
    differ = config_differences(runs)
    assert set(differ) == {"train.steps", "model.attention.head_dim"}
    assert differ["train.steps"][0] == 9 and differ["train.steps"][2:] == [None, None]
    assert differ["model.attention.head_dim"][1] == 7


@needs_bokeh
def test_the_page_loads_nothing_and_escapes_everything(tmp_path, capsys):
    folder = write(
        tmp_path / "<b>run&",
        [record(1), record(2), {"step": 2, "event": HOSTILE, "time": 1.0}],
        f"run: {{name: {json.dumps(HOSTILE)}}}\n",
    )
    other = write(tmp_path / "other", [record(1), {"step": 3, "eval_loss": 2.0}])
    out = tmp_path / "report.html"
    assert cli.main([str(folder), str(other), "--out", str(out)]) == 0
    assert "2 runs" in capsys.readouterr().out
    text = out.read_text()
    assert len(text) < 2_000_000
    assert HOSTILE not in text and "<script>window.hacked" not in text and "<b>run&" not in text
    assert "&lt;b&gt;run&amp;" in text
    assert not re.search(r"<(script|img|link|iframe)[^>]*\s(src|href)\s*=", text)
    assert "@import" not in text.split("</style>")[0] and "url(" not in text.split("</style>")[0]


@needs_bokeh
def test_logs_of_one_record_or_without_numbers_make_a_page(tmp_path):
    one = write(tmp_path / "one", [record(1)], None)
    none = write(tmp_path / "none", [{"step": 0, "loss": None}], None)
    zero = write(tmp_path / "zero", [record(s, grad_norm=0.0) for s in range(5)], None)
    out = tmp_path / "page.html"
    assert cli.main([*map(str, (one, none, zero)), "--out", str(out)]) == 0
    assert "Training loss" in out.read_text()


@needs_bokeh
def test_a_page_of_a_long_run_stays_small(tmp_path):
    lines = [record(step, tokens_per_second=1e4, ms_per_step=3.0) for step in range(30_000)]
    long = write(tmp_path / "long", lines)
    out = tmp_path / "page.html"
    cli.main([str(long), "--out", str(out)])
    assert out.stat().st_size < 2_000_000


@needs_bokeh
def test_a_page_that_cannot_be_written_is_a_line(tmp_path):
    folder = write(tmp_path / "run", [record(1)])
    with pytest.raises(UserError, match="--out .*cannot be written"):
        cli.main([str(folder), "--out", str(tmp_path / "no" / "such" / "folder.html")])


def test_without_the_library_a_line_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setattr(cli, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'mjax\[report\]'"):
        cli.main([str(tmp_path)])


def transcript(prompt, answer, reason="answered"):
    ids = np.frombuffer((prompt + answer).encode(), np.uint8).astype(np.int32)
    is_sampled = np.arange(len(ids)) >= len(prompt)
    fields = 0 * ids.astype(np.float32), is_sampled, np.where(is_sampled, 0, -1)
    return Transcript(0, 0, ids, *fields, 1.0, {"right": 1.0}, reason)


def rollout(step, prompt, answer, end="(reward 0.5, answered)"):
    return {"step": step, "event": f"rollout: {prompt!r} -> {answer!r} {end}", "time": 1.0}


def test_transcripts_are_read_as_they_were_drawn_and_are_no_events(tmp_path):
    texts = "1+1=", '2\' -> "3" (reward 9)\n\\'
    drawn = transcript(*texts, reason="so (or so), by\nits end")
    line = transcript_line(drawn, load_tokenizer("byte"))
    lines = [record(1), {"step": 1, "event": line}, rollout(2, "a", 'it\'s "b"', "(reward -1e-05)")]
    lines += [{"step": 3, "event": "rollout: 'a' -> 'of a student'"}]
    broken = [
        "rollout: 'a' -> 'b' (",
        "rollout: '\\x' -> 'b' (reward 1)",
        "rollout: 'a\nb' -> '' (reward 1)",
    ]
    run = read_run(write(tmp_path, lines + [{"step": 2, "event": text} for text in broken]), "a")
    assert run.answers == [
        DrawnAnswer(1, *texts, "1", "so (or so), by\nits end"),
        DrawnAnswer(2, "a", 'it\'s "b"', "-1e-05", ""),
        DrawnAnswer(3, "a", "of a student", "", ""),
    ]
    assert [event.text for event in run.events] == broken


@needs_bokeh
def test_transcripts_are_folded_and_cannot_become_a_part_of_the_page(tmp_path):
    ends = f"(reward 1, {HOSTILE})", f"(reward <b>{HOSTILE.replace(' ', '').replace(',', '')})"
    lines = [record(1), *(rollout(step, "left out", "x") for step in range(9))]
    lines += [rollout(9, HOSTILE, HOSTILE, end) for end in ends]
    lines += [rollout(10, "\ud800", "<script>")]  # a half of a character, which UTF-8 does not have
    out = tmp_path / "page.html"
    assert cli.main([str(write(tmp_path / "run", lines)), "--out", str(out)]) == 0
    text = out.read_text()
    assert text.count("<details><summary>") == 5 and text.count("left out") == 2
    assert "<pre><span>?</span>&lt;script&gt;</pre>" in text and "step 9, reward 1" in text
    assert HOSTILE not in text and "<script>window" not in text and "<img src" not in text
    assert "reward <b>" not in text and "reward &lt;b&gt;" in text


def titles(folder, *others):
    """{heading: titles of its charts} of a page on runs."""
    cli.main([*map(str, (folder, *others)), "--out", str(folder / "page.html")])
    parts = re.split("<h2>", (folder / "page.html").read_text())[1:]
    found = {part.split("<")[0]: re.findall(r"<h3>(.*?)<", part) for part in parts}
    return {heading: names for heading, names in found.items() if names}


@slow
@needs_bokeh
def test_a_chart_is_there_where_a_run_has_its_field(tmp_path):
    plain = write(tmp_path / "plain", [record(1, mfu=0.5, tflops=3.0), {"step": 1, "eval_loss": 2}])
    shown = {"Loss": ["Training loss", "Held-out loss", "Gradient norm", "Learning rate"]}
    shown |= {"Speed": ["Model FLOP/s utilization"]}  # and not the same curve in TFLOP/s
    assert titles(plain) == shown
    drawn = {"reward": 0.5, "groups_dropped": 0, "prompts_skipped": 0, "environment/is_right": 1}
    held_out = {"step": 1, "eval_loss": -0.5, "eval_reward": 0.5, "eval_of_mine": 1.0}
    policy = write(tmp_path / "policy", [record(1, kl=0.1, **drawn), held_out])
    shown = {
        "Rewards and answers": ["Reward", "Is right"],
        "Policy": ["Divergence from the reference"],
    }
    shown |= {
        "Loss": ["Training loss", "Gradient norm", "Learning rate"],
        "Other figures": ["Of mine"],
    }
    assert titles(policy) == shown  # a held-out loss would be the reward with another sign
    text = (policy / "page.html").read_text()
    assert "best held-out reward" in text and "best held-out loss" not in text
    dash = '<span class="swatch" style="border-top-style:dashed"></span>'
    assert text.count(f"{dash}held-out, likeliest answers") == 1
    both = titles(policy, plain)
    assert "Held-out loss" in both["Loss"] and both["Other figures"] == ["Of mine"]


@needs_bokeh
def test_scores_of_tasks_stand_beside_a_held_out_loss_of_the_same_step(tmp_path):
    lines = [record(1), {"step": 1, "eval_loss": 2.5}, {"step": 1, "task/quiz/acc": 0.25}]
    folder = write(tmp_path / "run", lines)
    run = read_run(folder, "run")
    for name, value in (("eval_loss", 2.5), ("task/quiz/acc", 0.25)):
        assert [column.tolist() for column in run.column(name)] == [[1.0], [value]]
    assert titles(folder)["Tasks"] == ["Quiz/acc"]


def test_a_part_of_every_second_step_is_one_line_on_a_logarithmic_axis(tmp_path):
    from mjax.report.charts import charts, shared_steps

    lines = [record(step, **{"seconds/rollout": 0.5 * (step % 2)}) for step in range(1, 6)]
    lines[2]["seconds/rollout"] = None  # not known, which leaves a gap
    lines[4]["seconds/update"] = 1.0
    runs = read_runs([write(tmp_path, lines)])
    _, figure = charts(runs, shared_steps(runs))["seconds/rollout"]
    curves = [line.data_source.data["step"].tolist() for line in figure.renderers[::2]]
    assert curves == [[1, 3, 5], [1, 2, 3, 4, 5]]
    assert [line.glyph.line_dash for line in figure.renderers[::2]] == [[], [6]]


def named_in(page):
    """The figures that the tables of a page of docs/train name in rows after `| name |`."""
    lines = (Path(__file__).parents[3] / "docs" / "train" / page).read_text().split("\n")
    begins = [i for i, line in enumerate(lines) if line.startswith("| name |")]
    rows = [row for i in begins for row in takewhile(lambda x: x.startswith("|"), lines[i + 2 :])]
    return {name for row in rows for name in re.findall("`(.*?)`", row.split("|")[1])}


@needs_bokeh
def test_what_trainers_log_after_pretraining_has_a_chart():
    kept = {name for kind in get_args(PolicyLoss) for name in clip_figures(kind)}
    kept |= {DIFFERENCE, MISMATCH, CORRECTION_MEAN, "value/explained_variance", "value/grad_norm"}
    kept |= reward_figures([[transcript("1=", "1")]], 4, 0).keys() - {"environment/right"}
    parts = "rollout", "rewards", "log_probs", "update", "hand_over", "waiting", "critic"
    kept |= time_figures(dict.fromkeys(parts, 1.0)).keys()
    kept |= named_in("policy-losses.md") | named_in("preferences.md")
    kept |= {"accuracy", "margin", "mean_reward", "center", "divergence", "nll", "hidden"}
    from mjax.report.charts import chart_table

    assert {"entropy", "rewards/margins", "logps/chosen", "seconds/rollout", "reward"} <= kept
    rows, hidden = chart_table()
    named = [field for row in rows for field in row.fields]
    assert kept <= {*named, *hidden}
    assert len(named) == len({*named}) and not {*named} & {*hidden}


@needs_bokeh
def test_rows_of_charts_can_be_drawn():
    from mjax.report.charts import chart_table

    for row in chart_table()[0]:
        assert row.title and row.axis in ("linear", "zero", "log"), row
        assert 1 <= len(row.fields) <= 3, "a chart has three kinds of lines"
        assert len(row.fields) == 1 or all(row.fields.values()), "curves need a word each"


COLOR = r"#[0-9a-fA-F]{3,8}\b|\b(?:rgb|hsl)a?\("
NAMED = COLOR + r"|\b(?:white|black|gr[ae]y|red|blue|green)\b(?!-)"


def themes():
    """({variable: color} of the light theme, of the dark one, the rest of the page's style)."""
    from mjax.report.page import STYLE

    blocks = re.findall(r":root\S* \{\s*color-scheme: (\w+);(.*?)\}", STYLE, re.S)
    assert [name for name, _ in blocks] == ["light", "dark"]
    rest = STYLE
    for _, body in blocks:
        rest = rest.replace(body, "")
    return *(dict(re.findall(r"--([\w-]+): (#\w{6});", body)) for _, body in blocks), rest


def luminance(color):
    """The relative luminance of WCAG 2, of a color such as #1f2933."""
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@needs_bokeh
def test_both_themes_have_the_same_names_and_no_color_lies_outside(tmp_path):
    light, dark, rest = themes()
    assert light.keys() == dark.keys() and all(light[name] != dark[name] for name in light)
    assert not re.findall(NAMED, rest)
    assert set(re.findall(r"var\(--([\w-]+)\)", rest)) == light.keys()  # all known, all used
    folder = write(tmp_path / "run", [record(1), record(2), {"step": 2, "event": "ended"}])
    cli.main([str(folder), "--out", str(tmp_path / "page.html")])
    _, body = (tmp_path / "page.html").read_text().split("</head>")
    assert set(re.findall(COLOR, body)) == {COLORS[0]}  # of the run; names are Bokeh's own


@needs_bokeh
def test_text_and_curves_stand_out_in_both_themes():
    for theme in themes()[:2]:
        for text in (theme["text"], theme["soft"]):
            assert min(contrast(text, theme[back]) for back in ("page", "card")) >= 4.5
        assert min(contrast(color, theme["card"]) for color in COLORS) >= 3
