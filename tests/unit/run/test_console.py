"""Laws of the console lines: they fit 100 columns, leave out what is unknown, say what is left."""

import itertools
import math

import pytest

from mjax.run.monitor.console import COLUMNS, LEGEND, Console, duration

RECORD = {
    "step": 20, "loss": 2.5, "grad_norm": 0.25, "lr": 3e-4, "ms_per_step": 1234.5,
    "tokens_per_second": 9087.0, "tflops": 467.7, "mfu": 0.473, "memory_gb": 61.2,
}  # fmt: skip


def console(last_step: int, seconds_a_line: float = 1.0) -> Console:
    return Console(last_step, itertools.count(0.0, seconds_a_line).__next__)


def test_a_line_has_every_known_figure():
    lines = console(1000, seconds_a_line=3600)
    lines.line({"step": 1, "loss": 3.0, "grad_norm": 1.0, "lr": 0.0})
    assert lines.line({**RECORD, "step": 601}) == (
        "step  601/1000 loss 2.5000 norm 0.250 lr 3e-4 1234 ms 9087 tok/s MFU 47.3% 61 GB "
        "ETA 39m54s"
    )


def test_what_is_not_known_is_left_out():
    record = {"step": 1, "loss": 2.5, "grad_norm": 0.25, "lr": 0.0, "mfu": None, "memory_gb": None}
    assert console(10).line(record) == "step  1/10  loss 2.5000  norm 0.250  lr 0"
    assert "467 TFLOP/s" not in console(10).line(RECORD)
    assert "468 TFLOP/s" in console(10).line({**RECORD, "mfu": None})
    assert "data" not in console(10).line({**RECORD, "data_wait": 0.02})
    assert "data 43%" in console(10).line({**RECORD, "data_wait": 0.43})


@pytest.mark.parametrize("last", [9, 1000, 9_999_999, 10**12])
@pytest.mark.parametrize("scale", [1e-9, 1e-3, 1.0, 9.9999, 1e3, 1e7, 1e15, math.inf, math.nan])
@pytest.mark.parametrize("wait", [None, 0.999])
def test_every_line_fits_a_hundred_columns(last, scale, wait):
    lines = console(last, seconds_a_line=123456.7)
    shown = {name: value * scale for name, value in RECORD.items() if name != "step"}
    for step in (last // 2, last - 1, last):
        for mfu in (None, 0.4567):
            line = lines.line({**shown, "step": step, "mfu": mfu, "data_wait": wait})
            assert len(line) <= COLUMNS, line
    evaluation = {"step": last, "eval_loss": 1234567.8 * scale, "eval_tokens": 10**12}
    assert len(lines.line(evaluation)) <= COLUMNS
    assert len(LEGEND) <= COLUMNS


def test_what_does_not_fit_is_left_out_whole():
    names = ("logps/chosen", "logps/rejected", "rewards/accuracies", "rewards/chosen")
    line = console(10).line(
        {"step": 10, "eval_loss": 0.5, "eval_tokens": 40} | {f"eval_{name}": -9.5 for name in names}
    )
    assert line.endswith("40 tokens  logps/chosen -9.5000  logps/rejected -9.5000")


@pytest.mark.parametrize("last", [10, 900, 20_000, 9_999_999])
def test_lines_of_a_run_have_one_separator_as_numbers_grow(last):
    lines = console(last, seconds_a_line=1e4)
    small = {"loss": 1.0, "grad_norm": 0.1, "lr": 0.0, "ms_per_step": 1.0, "mfu": 0.1}
    records = [
        {"loss": 3.0, "grad_norm": 1.0, "lr": 0.0},
        small | {"tokens_per_second": 1.0, "memory_gb": 1.0},
        RECORD,
        {**RECORD, "data_wait": 0.5, "loss": 123456.0, "grad_norm": 2.34e5, "lr": 3.14e-5},
        {"eval_loss": 2.5, "eval_tokens": 4096, "eval_accuracy": 0.5},
        small,
    ]
    found = {
        lines.line({**record, "step": i + 1}).count("  loss")
        for i, record in enumerate(records)
        if "loss" in record
    }
    assert len(found) == 1


def test_millions_of_steps_and_every_figure_fit():
    lines = console(9_999_999, seconds_a_line=1e4)
    large = {
        "loss": 12.34567, "grad_norm": 123456.0, "lr": 3.14e-4, "ms_per_step": 12345.6,
        "tokens_per_second": 123456.0, "mfu": 0.473, "tflops": 467.7, "memory_gb": 139.4,
    }  # fmt: skip
    lines.line({**large, "step": 9_000_000})
    line = lines.line({**large, "step": 9_100_000})
    assert line == (
        "step 9100000/9999999 loss 12.3457 norm 1.23e5 lr 3.1e-4 12.3 s 123k tok/s MFU 47.3% "
        "139 GB ETA 1d01h"
    )


def test_the_time_left_follows_the_records_and_counts_what_lies_between_them():
    clock = iter([100.0, 110.0, 190.0, 200.0])
    lines = Console(40, lambda: next(clock))
    assert "ETA" not in lines.line({**RECORD, "step": 10})
    assert lines.line({**RECORD, "step": 20}).endswith("ETA 20s")
    assert lines.line({**RECORD, "step": 30}).endswith("ETA 45s")  # an evaluation of 70 s too
    assert "ETA" not in lines.line({**RECORD, "step": 40})


def test_time_spans():
    spans = [8.4, 59.6, 3599, 3600, 90061, 86400 * 12.3]
    assert list(map(duration, spans)) == ["8s", "1m00s", "59m59s", "1h00m", "1d01h", "12d"]
