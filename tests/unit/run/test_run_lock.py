"""Laws of the run lock: one live holder, a dead one's lock is free, a stopped one never writes."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from mjax.errors import UserError
from mjax.run.faults import run_lock
from mjax.run.faults.run_lock import RunLock
from tests.marks import slow
from tests.processes import start_process

HOLDER = """
    import sys, time
    from pathlib import Path
    from mjax.run.faults.run_lock import RunLock
    with RunLock(Path(sys.argv[1])):
        print("held", flush=True)
        time.sleep(60)
"""


@pytest.fixture
def fast(monkeypatch):
    monkeypatch.setattr(run_lock, "BEAT", 0.05)
    monkeypatch.setattr(run_lock, "PATIENCE", 0.4)


def holder(folder) -> subprocess.Popen:
    process = start_process(
        [sys.executable, "-c", textwrap.dedent(HOLDER), str(folder)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "held\n"
    return process


def of_another_machine(folder, **changes) -> dict:
    """Write the record of a run elsewhere, as a file system without locks between hosts shows."""
    record = {"host": "node7", "pid": 41, "machine": "b00t", "since": "noon", "token": "other"}
    record |= changes
    written = folder / "other.lock"
    written.write_text(json.dumps(record))
    written.replace(folder / "run.lock")  # whole at once: a holder may look at any time
    return record


def test_the_second_starter_is_told_who_holds_the_folder_until_that_one_dies(tmp_path, monkeypatch):
    process = holder(tmp_path)
    line = rf"process {process.pid} on host .* trains in this folder; stop that run or choose"
    try:
        with pytest.raises(UserError, match=line), RunLock(tmp_path):
            pytest.fail("two holders")
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    monkeypatch.setattr(run_lock, "PATIENCE", 1e9)  # the kernel vouches for it; no waiting
    with RunLock(tmp_path) as lock:
        assert f"the lock of process {process.pid} " in lock.note and "was stale" in lock.note
    assert (tmp_path / "run.lock").read_bytes() == b""
    with RunLock(tmp_path) as lock:
        assert lock.note == ""


@slow
def test_of_starters_at_once_exactly_one_holds(tmp_path):
    script = HOLDER.replace("time.sleep(60)", "sys.stdin.read()")
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)]
    pipe = subprocess.PIPE
    several = [
        start_process(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) for _ in range(3)
    ]
    while sum(process.poll() is None for process in several) > 1:
        time.sleep(0.05)
    said = [process.communicate("")[0] for process in several]
    assert sorted(said) == ["", "", "held\n"]


def test_a_count_that_rises_elsewhere_is_a_live_run(tmp_path, fast, monkeypatch):
    of_another_machine(tmp_path, count=1)
    count = iter(range(2, 100))
    sleep = time.sleep

    def sleep_while_it_counts(seconds):
        sleep(seconds)
        of_another_machine(tmp_path, count=next(count))

    monkeypatch.setattr(run_lock.time, "sleep", sleep_while_it_counts)
    with pytest.raises(UserError, match="process 41 on host node7 .* trains in this folder"):
        RunLock(tmp_path).__enter__()


@pytest.mark.parametrize("left", [None, b"{ torn", b"[]", b"\xff\0"])
def test_a_count_that_stands_still_elsewhere_is_stale_whatever_the_clock_says(
    tmp_path, fast, left, monkeypatch
):
    of_another_machine(tmp_path, since="2099-01-01")
    if left is not None:
        (tmp_path / "run.lock").write_bytes(left)
    monkeypatch.setattr(run_lock.time, "time", lambda: -1e9)
    with RunLock(tmp_path) as lock:
        assert left == b"[]" or "was stale" in lock.note


def test_without_locks_of_the_kernel_the_record_decides(tmp_path, fast, monkeypatch):
    def unsupported(*_):
        raise OSError(run_lock.errno.ENOLCK, "No locks available")

    monkeypatch.setattr(run_lock.fcntl, "flock", unsupported)
    with RunLock(tmp_path):
        with pytest.raises(UserError, match=f"process {os.getpid()} on host"), RunLock(tmp_path):
            pytest.fail("two holders")
    with RunLock(tmp_path) as lock:
        assert lock.note == ""


def test_a_holder_that_stood_still_and_was_replaced_writes_no_more(tmp_path, fast):
    with RunLock(tmp_path) as lock:
        other = of_another_machine(tmp_path)
        wait_until(lambda: lock.is_lost)
        assert "taken over by process 41 on host node7" in str(lock.loss())
    assert json.loads((tmp_path / "run.lock").read_text()) == other


def test_a_removed_lock_file_is_made_again(tmp_path, fast):
    with RunLock(tmp_path) as lock:
        file = tmp_path / "run.lock"
        file.unlink()
        # What is written is locked; a starter may yet take a file that is only there.
        wait_until(lambda: file.exists() and file.read_bytes())
        with pytest.raises(UserError, match="trains in this folder"), RunLock(tmp_path):
            pytest.fail("two holders")
        assert not lock.is_lost


def test_a_full_or_failing_disk_does_not_end_the_holder(tmp_path, fast, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    with RunLock(tmp_path) as lock:
        monkeypatch.setattr(run_lock.os, "pwrite", full)
        time.sleep(0.3)
        assert not lock.is_lost
    with pytest.raises(UserError, match="run.lock: cannot be locked: No space left"):
        RunLock(tmp_path).__enter__()


def wait_until(condition, seconds=60.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)
