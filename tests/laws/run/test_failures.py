"""Laws of a run that meets trouble: nothing is lost that need not be, and one line says it."""

import errno
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from mjax.checkpoint.store import OUTDATED, SaveFailed
from mjax.config import load
from mjax.data import IndexedDatasetWriter
from mjax.errors import NonFiniteLoss, UserError
from mjax.run import training_run
from mjax.run.faults import run_lock, saving
from mjax.run.loop import train
from mjax.run.monitor import goodput, log_writer, metrics, trackers
from mjax.sharding.mesh import make_mesh
from mjax.sharding.processes.fake_devices import fake_devices
from mjax.train import Trainer
from tests.marks import exhaustive, quick, slow
from tests.processes import start_process, wait_until
from tests.tiny import TINY


def run(folder, *overrides) -> None:
    cfg = load(None, [*TINY, f"run.dir={folder}", *overrides])
    train(cfg, make_mesh(cfg.mesh, jax.devices()[:1]))


def records(folder) -> list[dict]:
    return list(map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()))


def losses(folder) -> list[tuple[int, float]]:
    return [(r["step"], r["loss"]) for r in records(folder) if "loss" in r]


def events(folder) -> list[str]:
    return [r["event"] for r in records(folder) if "event" in r]


def steps(folder) -> list[str]:
    return sorted(p.name for p in (folder / "checkpoints").iterdir())


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken")
    run(folder, "train.steps=6", "checkpoint.interval=2")
    return folder


def start(folder, *overrides, wrapper=()) -> subprocess.Popen:
    """`python -m mjax.train` in a process of one device."""
    command = [*wrapper, sys.executable, "-m", "mjax.train", *TINY, f"run.dir={folder}", *overrides]
    pipe = subprocess.PIPE
    env = os.environ | {"XLA_FLAGS": fake_devices(1)}
    return start_process(command, stdout=pipe, stderr=pipe, text=True, env=env)


def wait_for_step(folder, process, step) -> None:
    log, until = folder / "metrics.jsonl", time.monotonic() + 120
    while not (log.exists() and f'"step": {step},' in log.read_text()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.02)


# ---- one run, one folder ---------------------------------------------------------------------


@slow
def test_a_second_run_in_a_folder_is_one_line_and_leaves_the_first_alone(tmp_path):
    long = ["train.steps=100000", "checkpoint.interval=20"]
    first = start(tmp_path / "run", *long)
    try:
        wait_for_step(tmp_path / "run", first, 3)
        before = (tmp_path / "run" / "config.yaml").read_text()
        second = start(tmp_path / "run", *long, "train.global_batch_size=8")
        _, err = second.communicate(timeout=120)
        assert second.returncode == 2 and len(err.splitlines()) == 1
        assert f"process {first.pid} on host" in err and "trains in this folder" in err
        assert (tmp_path / "run" / "config.yaml").read_text() == before
        first.send_signal(signal.SIGUSR1)
        out, err = first.communicate(timeout=60)
    finally:
        first.kill()
    assert first.returncode == 0 and "SIGUSR1: finishing this step" in err
    logged = [step for step, _ in losses(tmp_path / "run")]
    assert logged == list(range(1, len(logged) + 1))
    assert f"stopped at step {logged[-1]} of 100000" in out


@slow
def test_a_second_job_of_two_processes_ends_in_both(tmp_path):
    from tests.laws.run.test_processes import start as start_job

    with run_lock.RunLock(tmp_path):
        processes = start_job(tmp_path / "x", 2, f"run.dir={tmp_path}", "train.steps=3")
        assert [p.wait(timeout=120) for p in processes] == [2, 2]
    for i in range(2):
        assert "trains in this folder" in (tmp_path / f"x.{i}").read_text()


@exhaustive
def test_what_changed_since_the_checkpoint_is_a_line_and_an_event(tmp_path, capfd):
    run(tmp_path, "train.steps=2")
    capfd.readouterr()
    run(tmp_path, "train.steps=3", "data.seq_length=8", "run.seed=7", "log.interval=2")
    line = "changed since step 2: run.seed 1234 -> 7, data.seq_length 16 -> 8, train.steps 2 -> 3"
    assert line in capfd.readouterr().out.splitlines()
    resumed = f"resumed from {tmp_path / 'checkpoints' / '2'}"
    assert events(tmp_path) == [resumed, line]
    run(tmp_path, "train.steps=3", "data.seq_length=8", "run.seed=7")
    assert events(tmp_path) == [resumed, line]  # nothing left to train


@exhaustive
def test_a_start_that_trains_nothing_changes_nothing(tmp_path):
    run(tmp_path, "train.steps=2")

    def contents():
        return {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}

    files = contents()
    run(tmp_path, "train.steps=2", "schedule.lr=1e-5")
    with pytest.raises(UserError, match=r"no such file|cannot"):
        run(tmp_path, "checkpoint.resume=never", "data.mock=false", "data.paths=[/nowhere]")
    assert contents() == files
    with pytest.raises(NonFiniteLoss):
        run(tmp_path, "train.steps=4", "train.z_loss=1e38")
    log = tmp_path / "metrics.jsonl"  # it says what was tried
    assert contents() | {log: b""} == files | {log: b""} and len(losses(tmp_path)) == 2
    files = contents()
    with pytest.raises(NonFiniteLoss):
        run(tmp_path, "checkpoint.resume=never", "train.z_loss=1e38")
    assert contents() == files
    run(tmp_path, "checkpoint.resume=never", "train.steps=1")
    for name in ("metrics.jsonl", "config.yaml"):
        assert (tmp_path / f"{name}.old-1").read_bytes() == files[tmp_path / name]
    assert len(losses(tmp_path)) == 1 and (tmp_path / "checkpoints.old-1" / "2").is_dir()


@exhaustive
def test_a_run_that_lost_its_folder_to_another_saves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "BEAT", 0.05)
    step = Trainer.step

    def step_then_be_replaced(self, batch, *gate):
        if self.step_number == 4:
            other = {"host": "node7", "pid": 41, "token": "other"}
            written = tmp_path / "other.lock"
            written.write_text(json.dumps(other))
            written.replace(tmp_path / "run.lock")  # whole at once: the holder looks all the time
            for keeper in (t for t in threading.enumerate() if t.name == "run_lock"):
                keeper.join(60)  # it ends when it has seen that record
        return step(self, batch, *gate)

    monkeypatch.setattr(Trainer, "step", step_then_be_replaced)
    with pytest.raises(UserError, match="taken over by process 41 on host node7"):
        run(tmp_path, "train.steps=9", "checkpoint.interval=3", "checkpoint.async_save=false")
    assert steps(tmp_path) == ["3"]


# ---- storage ---------------------------------------------------------------------------------


def fail(*_args, **_kwargs):
    raise OSError(errno.EIO, os.strerror(errno.EIO))


BROKEN_WRITES = [
    (log_writer.JsonLines, "flush", "metrics.jsonl"),
    (training_run, "replace_text", "config.yaml"),
    (metrics, "print_line", "standard output"),
    (goodput, "replace_text", "goodput.json"),
    (trackers, "TRACKERS", "tensorboard"),
]


@slow
@pytest.mark.parametrize(
    ("module", "name", "place"),
    quick(BROKEN_WRITES, 2),
)
def test_a_log_that_cannot_be_written_is_not_worth_the_run(
    tmp_path, unbroken, monkeypatch, capfd, module, name, place
):
    broken = fail
    if name == "TRACKERS":
        broken = (trackers.TRACKERS[0]._replace(open=fail),)
    monkeypatch.setattr(module, name, broken)
    run(tmp_path, "train.steps=6", "checkpoint.interval=2", "log.tensorboard=true")
    lines = [line for line in capfd.readouterr().err.splitlines() if "cannot be written" in line]
    (line,) = lines
    assert place in line and "(Input/output error); training goes on" in line
    assert steps(tmp_path) == steps(unbroken)
    if place != "metrics.jsonl":
        assert losses(tmp_path) == losses(unbroken)


def break_saves(monkeypatch, *numbers) -> None:
    """Let saves of these numbers, counted from 1, fail."""
    count, save = itertools.count(1), Trainer.save

    def sometimes(self, held_out_loss=None):
        if next(count) in numbers:
            error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            raise SaveFailed(self.step_number, error, "not shown")
        save(self, held_out_loss)

    monkeypatch.setattr(Trainer, "save", sometimes)


@exhaustive
def test_old_steps_that_cannot_be_removed_cost_no_new_one(tmp_path, monkeypatch):
    refused = []

    def refuse_removals(move):
        def moved(source, target, *args, **kwargs):
            if OUTDATED in str(target):
                refused.append(source)
                fail()
            return move(source, target, *args, **kwargs)

        return moved

    for name in ("rename", "replace"):
        monkeypatch.setattr(os, name, refuse_removals(getattr(os, name)))
    run(tmp_path, "train.steps=6", "checkpoint.interval=2", "checkpoint.keep=1")
    assert refused and steps(tmp_path) == ["2", "4", "6"]


@exhaustive
def test_a_failed_save_costs_nothing_if_the_next_one_works(tmp_path, unbroken, monkeypatch):
    break_saves(monkeypatch, 2)
    run(tmp_path, "train.steps=6", "checkpoint.interval=2")
    assert events(tmp_path) == [
        "saving step 4 failed: No space left on device; training goes on and saves again in 2 "
        "steps; until then a stop loses the steps after step 2"
    ]
    assert steps(tmp_path) == ["2", "6"] and losses(tmp_path) == losses(unbroken)


@slow
@pytest.mark.parametrize("limit", quick([1, 2], 1))
def test_too_many_failed_saves_in_a_row_end_the_run(tmp_path, monkeypatch, limit):
    break_saves(monkeypatch, *range(2, 2 + limit))
    with pytest.raises(UserError) as end:
        run(
            tmp_path,
            "train.steps=20",
            "checkpoint.interval=2",
            f"checkpoint.max_failed_saves={limit}",
        )
    assert f"saving step {2 + 2 * limit} failed: No space left" in str(end.value)
    assert f"{limit} failed in a row" in str(end.value)
    assert "the steps after step 2 are lost" in str(end.value)
    assert steps(tmp_path) == ["2"]


@exhaustive
def test_failed_saves_with_one_that_works_between_do_not_end_the_run(tmp_path, monkeypatch):
    break_saves(monkeypatch, 1, 3)
    run(tmp_path, "train.steps=8", "checkpoint.interval=2", "checkpoint.max_failed_saves=2")
    assert len(events(tmp_path)) == 2 and steps(tmp_path) == ["4", "8"]


@slow
def test_the_last_save_is_tried_again(tmp_path, unbroken, monkeypatch):
    monkeypatch.setattr(saving, "PAUSE", 0.01)
    break_saves(monkeypatch, 3, 4)
    run(tmp_path, "train.steps=6", "checkpoint.interval=2")
    assert steps(tmp_path) == steps(unbroken)
    assert all("trying again in 0.01 s" in line for line in events(tmp_path))


def spoil_weights(monkeypatch, step) -> None:
    """Let a weight be infinite after this step, whose own numbers are finite."""
    compute = Trainer.step

    def step_and_spoil(self, batch, *gate):
        metrics = compute(self, batch, *gate)
        if self.step_number == step:
            head = self.state["params"]["head"]
            self.state["params"]["head"] = head.at[-1, 0].set(np.inf)
        return metrics

    monkeypatch.setattr(Trainer, "step", step_and_spoil)


@pytest.mark.parametrize("last", quick([6, 4]))
def test_weights_that_are_not_finite_end_the_run_and_are_no_failed_save(
    tmp_path, monkeypatch, last
):
    spoil_weights(monkeypatch, 4)
    with pytest.raises(NonFiniteLoss, match=r"step 4: parameter head .*last good .*/2;"):
        run(tmp_path, f"train.steps={last}", "checkpoint.interval=2")
    assert steps(tmp_path) == ["2"] and not events(tmp_path)
    assert (tmp_path / "run.lock").read_bytes() == b"", "the folder is free"


@exhaustive
def test_weights_that_are_not_finite_after_a_failed_save_end_the_run_alike(tmp_path, monkeypatch):
    cfg = load(None, [*TINY, f"run.dir={tmp_path}"])
    trainer = Trainer(cfg, make_mesh(cfg.mesh, jax.devices()[:1]))
    trainer.init()
    trainer.save()
    trainer.store.wait()

    def failed(self):
        raise SaveFailed(1, OSError(errno.EIO, "not shown"), "not shown")

    monkeypatch.setattr(type(trainer.store), "wait", failed)
    trainer.set_step(2)
    head = trainer.state["params"]["head"]
    trainer.state["params"]["head"] = head.at[-1, 0].set(np.nan)
    with pytest.raises(NonFiniteLoss, match=r"step 2: parameter head .*last good .*/0;"):
        trainer.save()


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 700 KB: a dozen checkpoints do not fit."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=700k", "none", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a small file system can be mounted by root only")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@slow
@pytest.mark.parametrize("room_comes", [True, False])
def test_a_full_disk_is_said_in_lines_and_loses_nothing_if_room_comes(
    small_disk, tmp_path, room_comes
):
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"x" * 200_000)
    keys = ["checkpoint.interval=200", "checkpoint.keep=100", "log.tensorboard=true"]
    keys += ["train.steps=1000000", "log.interval=50", "checkpoint.max_failed_saves=2"]
    folder = small_disk / "run"
    process = start(folder, *keys)
    said = process.stdout
    for line in said:
        if "failed: No space left on device" in line:
            break
    if not room_comes:
        _, err = process.communicate(timeout=120)
        assert process.returncode == 2 and "Traceback" not in err
        assert "2 failed in a row" in err.splitlines()[-1]
        before = set(steps(folder))
        assert before and all(name.isdecimal() for name in before), "no remains"
        assert start(folder, *keys[:3], "train.steps=1").wait(120) == 0, "and they can be read"
        return
    ballast.unlink()
    for line in said:
        if line.startswith("step") and steps(folder):
            process.send_signal(signal.SIGTERM)
            break
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0 and "Traceback" not in err
    assert "checkpoint: " in out and str(folder / "checkpoints") in out
    assert (folder / "config.yaml").exists()
    logged = [step for step, _ in losses(folder)]
    assert logged == sorted(set(logged))


@exhaustive
def test_a_folder_that_may_be_written_no_more_ends_in_one_line(tmp_path):
    folder, wrapper = tmp_path / "run", ()
    if os.geteuid() == 0:  # whom permissions do not stop
        powers = "-dac_override,-dac_read_search"
        wrapper = ["setpriv", f"--inh-caps={powers}", f"--bounding-set={powers}"]
        if shutil.which("setpriv") is None:
            pytest.skip("permissions do not stop root, and there is no setpriv")
    keys = ["train.steps=1000000", "checkpoint.interval=50", "log.interval=10"]
    process = start(folder, *keys, wrapper=wrapper)
    wait_for_step(folder, process, 60)
    wait_until(lambda: (folder / "checkpoints" / "50").exists())
    for part in (folder, folder / "checkpoints"):
        part.chmod(0o555)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 2 and "Traceback" not in err
    assert "failed: Permission denied; 3 failed in a row" in err.splitlines()[-1]
    again = start(folder, *keys, wrapper=wrapper)
    _, err = again.communicate(timeout=120)
    assert again.returncode == 2 and len(err.splitlines()) == 1
    assert "cannot write in folder" in err and "Permission denied" in err


# ---- data ------------------------------------------------------------------------------------


def cut(file):
    os.truncate(file, 100)


def replace(file):
    new = file.with_name("new")
    new.write_bytes(bytes(file.stat().st_size))
    os.utime(new, ns=(1, 1))
    os.replace(new, file)


@pytest.mark.parametrize("harm", quick([cut, replace, Path.unlink]))
def test_data_that_changes_under_a_run_ends_it_in_a_line_with_its_state_saved(
    tmp_path, monkeypatch, harm
):
    prefix = tmp_path / "corpus"
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for i in range(60):
            writer.add_document(np.random.default_rng(i).integers(0, 90, 50))
    step = Trainer.step

    def step_then_harm(self, batch, *gate):
        if self.step_number == 3:
            harm(prefix.with_suffix(".bin"))
        return step(self, batch, *gate)

    monkeypatch.setattr(Trainer, "step", step_then_harm)
    data = ["data.mock=false", f"data.paths=[{prefix}]", "data.prefetch=1", "data.workers=1"]
    with pytest.raises(UserError, match=r"corpus\.bin: (changed while it was|cannot be read)"):
        run(tmp_path / "run", *data, "train.steps=20")
    (saved,) = steps(tmp_path / "run")
    assert int(saved) >= 4 and losses(tmp_path / "run")[-1][0] == int(saved)


# ---- clocks ----------------------------------------------------------------------------------


@exhaustive
def test_a_clock_that_jumps_changes_no_step_and_no_checkpoint(tmp_path, unbroken, monkeypatch):
    jumps, now, step = {2: 1e6, 4: -3600.0, 5: 0.0}, time.time, Trainer.step
    offset = [0.0]

    def step_and_jump(self, batch, *gate):
        offset[0] = jumps.get(self.step_number, offset[0])
        return step(self, batch, *gate)

    monkeypatch.setattr(time, "time", lambda: now() + offset[0])
    monkeypatch.setattr(Trainer, "step", step_and_jump)
    monkeypatch.setattr(saving, "PAUSE", 0.01)
    run(tmp_path, "train.steps=6", "checkpoint.interval=2", "train.max_minutes=60")
    # orbax takes a jump during a save for a time-out, and the run saves again.
    assert steps(tmp_path)[-1] == "6" and losses(tmp_path) == losses(unbroken)
    assert np.isfinite([r["ms_per_step"] for r in records(tmp_path)[1:] if "loss" in r]).all()
    assert Path(tmp_path / "run.lock").read_bytes() == b""
