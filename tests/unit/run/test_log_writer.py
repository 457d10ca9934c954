"""Laws of the log: it never ends the run and never stops it; what can be written is written."""

import contextlib
import json
import resource
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from mjax.config import load
from mjax.files import replace_text
from mjax.run.monitor import log_writer, trackers
from mjax.run.monitor.log_writer import JsonLines, LogWriter
from tests.marks import slow
from tests.processes import start_process


@contextlib.contextmanager
def small_files(size):
    """Within it files hold so many bytes at most, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:  # before pytest writes to a file itself
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_place_that_fails_is_said_once_and_tried_again(capfd):
    got, broken = [], [True]

    def sink(record):
        if broken[0]:
            raise OSError(5, "Input/output error")
        got.append(record)

    writer = LogWriter("metrics.jsonl", sink)
    writer(1)
    writer(2)
    until = time.monotonic() + 60
    while "cannot be written" not in (err := capfd.readouterr().err):
        assert time.monotonic() < until
    broken[0] = False
    writer(3)
    writer.close()
    assert err == "mjax: metrics.jsonl cannot be written (Input/output error); training goes on\n"
    assert got[-1] == 3 and capfd.readouterr().err == "mjax: metrics.jsonl is written again\n"


def test_a_place_that_hangs_costs_its_own_records_only(capfd, monkeypatch):
    monkeypatch.setattr(log_writer, "CLOSING", 0.2)
    monkeypatch.setattr(log_writer, "MOST_WAITING", 5)
    forever = threading.Event()
    writer = LogWriter("wandb", lambda record: forever.wait())
    began = time.monotonic()
    for record in range(100):
        writer(record)
    assert time.monotonic() - began < 5
    writer.close()
    forever.set()
    err = capfd.readouterr().err.splitlines()
    assert err == [
        "mjax: wandb hangs; training goes on, its records are dropped",
        "mjax: wandb hangs; its last records are lost",
    ]


def test_a_full_disk_tears_no_line_and_loses_none(tmp_path):
    file = tmp_path / "metrics.jsonl"
    write = JsonLines(file)
    failed = 0
    with small_files(200):
        for step in range(20):
            try:
                write({"step": step, "loss": 1.0})
            except OSError:
                failed += 1
    assert failed > 5
    write.flush()
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == list(range(20))


def test_a_log_that_someone_removes_begins_anew(tmp_path):
    write = JsonLines(tmp_path / "metrics.jsonl")
    write({"step": 1})
    (tmp_path / "metrics.jsonl").unlink()
    write({"step": 2})
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 2}


def test_tensorboard_takes_up_again_after_a_full_disk(tmp_path):
    pytest.importorskip("tensorboardX")
    cfg = load(None, ["data.mock=true"])
    tracker = trackers.open_tensorboard(trackers.TrackedRun(cfg, tmp_path, 0))
    with small_files(150), pytest.raises(OSError):
        for step in range(1, 5):
            tracker.log({"loss": 0.5}, step)
    tracker.log({"grad_norm": 0.5}, 9)
    tracker.finish()
    (file,) = (tmp_path / "tensorboard").iterdir()
    assert b"loss" in file.read_bytes() and b"grad_norm" in file.read_bytes()


def test_a_file_is_replaced_at_once_or_not_at_all(tmp_path):
    file = tmp_path / "config.yaml"
    replace_text(file, "old")
    with small_files(10), pytest.raises(OSError):
        replace_text(file, "new" * 100)
    assert [p.name for p in tmp_path.iterdir()] == ["config.yaml"] and file.read_text() == "old"


@slow
def test_a_reader_of_the_output_that_leaves_does_not_end_the_run(tmp_path):
    script = f"""
        import time
        from mjax.run.monitor.metrics import Log
        log = Log()
        for step in range(50):
            log.say(f"line {{step}}")
            time.sleep(0.01)
        log.close()
        open({str(tmp_path / "end")!r}, "w").close()
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    pipe = subprocess.PIPE
    with start_process(command, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout.readline() == "line 0\n"
        process.stdout.close()
        assert process.wait(60) == 0
        err = process.stderr.read()
    assert (tmp_path / "end").exists()
    said = [line for line in err.splitlines() if line.startswith("mjax")]
    assert said == ["mjax: standard output has gone (Broken pipe); training goes on"]
    assert "BrokenPipeError" not in err
