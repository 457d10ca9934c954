"""Jobs of a battery: limits, figures, and files that are none."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import battery
from mjax.errors import UserError
from mjax.interop.sources import source_of
from tests.processes import start_process, wait_until
from tools import random_model

JOBS = r"""
variables: {WORD: tok/s, NUMBER: 4}
prepare: echo 3 > $BATTERY/count
jobs:
  rates:
    seconds: 100
    run: for rate in 9k 1,000 2,000 2.5k; do echo "$rate $WORD"; done
    figures: {rate: '([\d.,]+k?) tok/s', none: 'nothing (\d+)', word: '(tok)/s'}
  wrong:
    seconds: 100
    run: exit $(cat $BATTERY/count)
  endless:
    seconds: 1
    run: sleep 654.PID & wait
"""


def test_each_job_has_its_limit_and_its_figures(tmp_path, capsys):
    (tmp_path / "jobs.yaml").write_text(JOBS.replace("PID", str(os.getpid())))
    assert battery.main([str(tmp_path / "jobs.yaml"), "--out", str(tmp_path / "out")]) == 0
    rows = {}
    for row in capsys.readouterr().out.splitlines():
        name, code, _, figures = (cell.strip() for cell in row.split("|")[1:-1])
        rows[name] = code, figures
    assert rows["rates"] == ("0", "rate 2,250")  # the median of 2,000 and 2,500
    assert rows["wrong"] == ("3", "") and rows["endless"] == ("124", "")
    wait_until(lambda: not lives(f"sleep 654.{os.getpid()}"))


def test_sigterm_ends_the_job_that_runs(tmp_path):
    sleep = f"sleep 655.{os.getpid()}"
    (tmp_path / "jobs.yaml").write_text(f"jobs: {{long: {{seconds: 600, run: {sleep} & wait}}}}")
    arguments = "benchmarks.battery", tmp_path / "jobs.yaml", "--out", tmp_path / "out"
    process = start_process([sys.executable, "-m", *arguments])
    wait_until(lambda: lives(sleep))
    process.terminate()
    assert process.wait(60) == 143
    wait_until(lambda: not lives(sleep))


def lives(command: str) -> bool:
    wanted = b"\0".join(map(str.encode, command.split())) + b"\0"
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            if file.read_bytes() == wanted:
                return True
    return False


@pytest.mark.parametrize(
    "text, message",
    [
        ("[1", "no battery"),
        ("a: 1", "jobs: Field required"),
        ("jobs: {}", "jobs: .* at least 1 item"),
        ("jobs: {x: {run: ls}}", "jobs.x.seconds: Field required"),
        ("jobs: {a/b: {run: ls, seconds: 1}}", "jobs.a/b.* pattern"),
        ("jobs: {x: {run: ls, seconds: 1, figures: {a: '(b'}}}", "figures.a: .*one group"),
        ("jobs: {x: {run: ls, seconds: 1}}\nprepare:", "prepare: Input should be a valid string"),
    ],
)
def test_what_is_no_battery_is_one_line(tmp_path, text, message):
    (tmp_path / "jobs.yaml").write_text(text)
    with pytest.raises(UserError, match=message):
        battery.main([str(tmp_path / "jobs.yaml"), "--out", str(tmp_path / "out")])


FILES = sorted(Path(battery.__file__).with_name("batteries").iterdir())


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_files_that_are_there_are_batteries(file):
    found = battery.read_battery(file)
    for script in (found.prepare, *[job.run for job in found.jobs.values()]):
        subprocess.run(["bash", "-n", "-c", script], check=True)


def test_a_load_has_its_own_figure(tmp_path):
    (file,) = (file for file in FILES if file.stem == "serving")
    lines = [
        f'load {name}\nnoise\n{{"tpot_ms": {{"p50": 9.0}}, "between_ms": {{"p50": {ms}}}}}\n'
        for name, ms in (("one", 5.5), ("some", 6.5), ("drawn", 8.5))
    ]
    (tmp_path / "log").write_text("".join(lines))
    figures = battery.read_battery(file).jobs["http"].figures
    assert battery.figures_of(tmp_path / "log", figures) == {"one": 5.5, "some": 6.5, "drawn": 8.5}


def test_a_random_model_is_a_folder_of_hugging_face(tmp_path):
    small = "hidden_size=32", "num_hidden_layers=2", "intermediate_size=48", "vocab_size=64"
    keys = ["data.mock=true", *[f"model.{key}" for key in small]]
    assert random_model.main(["--out", str(tmp_path / "m"), *keys]) == 0
    found = source_of(tmp_path / "m")
    found.check()
    assert found.cfg.hidden_size == 32
