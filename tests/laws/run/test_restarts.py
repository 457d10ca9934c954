"""Laws of restarts: what dies or hangs ends in bounded time, starts again, and is the same run."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from mjax.run.faults.supervisor import is_recoverable
from mjax.sharding.processes.fake_devices import fake_devices
from tests.marks import exhaustive, slow
from tests.processes import free_port, start_process
from tests.torture import BASE, compare

STEPS = 24
LIMIT = 1.5  # minutes, in which the first step compiles, too
TINY = [*BASE, f"train.steps={STEPS}", f"schedule.decay_steps={STEPS}", "checkpoint.keep_every=4"]

# Process 1 hangs in the way that the first argument says, once step 5 is over.
FAULTY = """
    import itertools, os, signal, sys, time
    from mjax.errors import run_cli
    from mjax.run import batches
    from mjax.train import __main__, trainer
    how = sys.argv.pop(1)
    is_faulty = os.environ["JAX_PROCESS_ID"] == "1"
    load = batches.make_loader

    def hanging(*arguments, **keywords):
        for number, batch in enumerate(load(*arguments, **keywords)):
            if number == 5 and is_faulty:
                if how == "stop":
                    os.kill(os.getpid(), signal.SIGSTOP)
                time.sleep(10**6)
            yield batch

    if how == "save" and is_faulty:
        trainer.Trainer.save = lambda self, loss: time.sleep(10**6)
    elif how != "save":
        batches.make_loader = hanging
    run_cli(__main__.main)
"""


def start(folder, processes, *overrides, program=("-m", "mjax.train")) -> list[subprocess.Popen]:
    """Training as `processes` processes with two CPU devices each."""
    port = free_port()
    env = os.environ | {"XLA_FLAGS": FLAGS, "JAX_NUM_PROCESSES": str(processes)}
    env["JAX_COORDINATOR_ADDRESS"] = f"127.0.0.1:{port}"
    command = [sys.executable, "-u", *program, *TINY, f"run.dir={folder}", *overrides]
    return [
        start_process(
            command,
            env=env | {"JAX_PROCESS_ID": str(i)},
            stdout=open(f"{folder}.{i}", "w"),  # noqa: SIM115
            stderr=subprocess.STDOUT,
        )
        for i in range(processes)
    ]


FLAGS = fake_devices(2)


def said(folder) -> list[str]:
    return [path.read_text() for path in sorted(folder.parent.glob(f"{folder.name}.[0-9]"))]


def records(folder) -> list[dict]:
    log = folder / "metrics.jsonl"
    lines = log.read_text().splitlines(keepends=True) if log.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def wait_for_step(folder, running, step) -> None:
    until = time.monotonic() + 240
    while not any(r["step"] >= step for r in records(folder) if "loss" in r):
        assert time.monotonic() < until and all(p.poll() is None for p in running), said(folder)
        time.sleep(0.02)


def child_of(process) -> int:
    task = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return int(task.read_text().split()[0])


def finish(folder, running) -> None:
    assert [p.wait(timeout=500) for p in running] == [0] * len(running), said(folder)


def losses(folder) -> list[tuple[int, float]]:
    return [(r["step"], r["loss"]) for r in records(folder) if "loss" in r]


def require_same(folder, unbroken) -> None:
    assert losses(folder) == losses(unbroken)
    compare(*(f / "checkpoints" / str(STEPS) for f in (unbroken, folder)))


@pytest.fixture(scope="module", params=[1, 2])
def unbroken(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    finish(folder, start(folder, request.param))
    return request.param, folder


@slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_dies_or_stops_starts_again_and_the_run_is_the_same(unbroken, tmp_path, how):
    """Of two processes both start again, at the newest checkpoint; a stopped one is killed."""
    processes, folder = unbroken[0], tmp_path / "run"
    if processes == 1 and how == signal.SIGSTOP:
        pytest.skip("nobody notices that a lone process was stopped, and it goes on when continued")
    limit = f"train.step_timeout_minutes={LIMIT}"
    running = start(folder, processes, "--restarts", "3", limit)
    wait_for_step(folder, running, 5)
    os.kill(child_of(running[-1]), how)
    finish(folder, running)
    require_same(folder, unbroken[1])
    notes = [r["event"] for r in records(folder) if r.get("event", "").startswith("restart 1 ")]
    assert len(notes) == 1 and "without a new checkpoint): training " in notes[0]
    if processes == 1:
        assert notes[0].endswith("died of SIGKILL") and notes[0] in said(folder)[0]


@exhaustive
def test_a_stop_signal_to_one_supervisor_stops_all_and_nobody_starts_again(tmp_path):
    folder = tmp_path / "run"
    running = start(folder, 2, "--restarts", "3", "train.steps=100000")
    wait_for_step(folder, running, 3)
    running[1].send_signal(signal.SIGTERM)
    finish(folder, running)
    assert "a stop signal was received; checkpoint" in said(folder)[0]
    assert not any("starting again" in text for text in said(folder))


@slow
@exhaustive
def test_a_job_goes_on_with_fewer_processes_when_one_stays_away(tmp_path):
    """Supervisor and child of process 1 are killed; process 0 goes on alone, from the checkpoint.

    When process 1 comes back, it joins after the next checkpoint.
    """
    folder = tmp_path / "run"
    elastic = ["--restarts", "3", "--min-processes", "1", "--patience", "0.1"]
    long = ["train.steps=100000", "checkpoint.keep_every=null", "checkpoint.interval=50"]
    running = start(folder, 2, *elastic, *long, "train.eval_interval=50")
    wait_for_step(folder, running, 51)
    child = child_of(running[1])
    running[1].kill()
    os.kill(child, signal.SIGKILL)
    step = max(s for s, _ in losses(folder))
    wait_for_step(folder, running[:1], step + 100)
    assert "2 x cpu (dp=2)" in said(folder)[0].split("starting again")[-1]
    env = dict(v.split("=", 1) for v in environment_of(running[0]))
    again = start_process(
        [*running[1].args], env=env | {"JAX_PROCESS_ID": "1"}, stdout=subprocess.DEVNULL
    )
    until = time.monotonic() + 240
    while "more processes have come" not in "".join(r.get("event", "") for r in records(folder)):
        assert time.monotonic() < until and again.poll() is None, said(folder)
        time.sleep(0.1)
    assert "4 x cpu (dp=4)" in said(folder)[0].split("starting again")[-1]
    wait_for_step(folder, [running[0], again], max(s for s, _ in losses(folder)) + 2)
    again.send_signal(signal.SIGTERM)
    assert [p.wait(timeout=240) for p in (running[0], again)] == [0, 0]


def environment_of(process) -> list[str]:
    return Path(f"/proc/{process.pid}/environ").read_text().rstrip("\0").split("\0")


@exhaustive
@pytest.mark.parametrize(("how", "processes"), [("stop", 4), ("data", 2), ("save", 2)])
def test_a_hang_ends_in_bounded_time_and_says_where(tmp_path, how, processes):
    """JAX's heartbeat may know before, or process 0 end first: then others die of SIGABRT."""
    folder = tmp_path / "run"
    program = ("-c", textwrap.dedent(FAULTY), how)
    limit = f"train.step_timeout_minutes={LIMIT}"
    running = start(folder, processes, limit, "train.global_batch_size=8", program=program)
    if how != "save":
        wait_for_step(folder, running, 3)
    healthy = [p for i, p in enumerate(running) if i != 1 or how != "stop"]
    codes = [p.wait(timeout=60 * LIMIT + 240) for p in healthy]
    texts = said(folder)
    assert all(map(is_recoverable, codes)) and (how == "stop" or 3 in codes), texts
    for process, code in zip(healthy, codes, strict=True):
        i = running.index(process)
        if code != 3:
            assert "another task died" in texts[i] or "coordination" in texts[i], texts[i]
            continue
        assert "the run resumes from its newest checkpoint" in texts[i]
        assert f"process {i} of {processes}" in texts[i]
        if i == 1:
            words = {"data": "loading data; steps dispatched: 4", "save": "saving step 2; steps"}
            assert f"it was {words[how]}" in texts[1] and "most recent call first" in texts[1]
