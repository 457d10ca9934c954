"""Laws of rehearsed faults: each leads to what docs/train/failures.md says, and strikes once."""

import json
import os
import subprocess
import sys
import time

import jax
import pytest

from mjax.config import load
from mjax.config.languages.rehearsal import Fault, parse_fault
from mjax.errors import ReplicasDiffer, UserError
from mjax.run.loop import train
from mjax.sharding.mesh import make_mesh
from mjax.sharding.processes.fake_devices import fake_devices
from tests.laws.run.test_failures import events, losses
from tests.laws.run.test_restarts import finish, records, said, start
from tests.marks import exhaustive, slow
from tests.processes import start_process
from tests.tiny import TINY


def run(folder, *keys, devices=1) -> None:
    cfg = load(None, [*TINY, "train.micro_batch_size=1", f"run.dir={folder}", *keys])
    train(cfg, make_mesh(cfg.mesh, jax.devices()[:devices]))


def test_faults_are_read_or_refused():
    assert parse_fault("die@20:1") == Fault("die", 20, 1)
    assert parse_fault("nan@3") == Fault("nan", 3, 0)
    for text in ("die", "die@0", "die@-1", "die@2:", "burn@2", "die@2:x", "die@2 ", "die@1.5"):
        assert parse_fault(text) is None


def test_faults_of_processes_that_are_not_there_are_one_line(tmp_path):
    with pytest.raises(UserError, match="process 3 is not one of 1"):
        run(tmp_path / "run", "run.rehearse=[die@2:3]")
    assert not (tmp_path / "run").exists()


@slow
def test_a_fault_that_passes_strikes_once_and_is_said(tmp_path, capfd):
    run(tmp_path, "train.steps=4", "run.rehearse=[nan_once@3]")
    (line,) = events(tmp_path)
    assert "step 3: loss nan" in line and "good when repeated" in line
    assert len(losses(tmp_path)) == 4 and all(loss == loss for _, loss in losses(tmp_path))
    assert "rehearsing: run.rehearse strikes with nan_once@3" in capfd.readouterr().err
    assert (tmp_path / "rehearsed" / "0").read_text() == "nan_once@3"


@slow
def test_a_flipped_bit_is_found_and_named(tmp_path):
    keys = "mesh.dp=4", "mesh.zero=0", "train.check_replicas_interval=1", "train.steps=9"
    with pytest.raises(ReplicasDiffer, match=r"step 5: replicas of .* device 0 \(dp=0\)"):
        run(tmp_path, *keys, "run.rehearse=[bit_flip@5]", devices=4)


def restarted(folder, *keys) -> tuple[float, str, list[str]]:
    """(seconds, standard error, events of restarts) of a run that ends well after restarts."""
    steps = ["train.steps=20", "checkpoint.interval=5", *keys]
    command = [sys.executable, "-m", "mjax.train", *TINY, f"run.dir={folder}", *steps]
    began = time.time()
    process = start_process(
        [*command, "--restarts", "2"],
        env=os.environ | {"XLA_FLAGS": fake_devices(1)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    _, err = process.communicate(timeout=400)
    assert process.returncode == 0, err
    assert [step for step, _ in losses(folder)] == list(range(1, 21))
    restarts = [line for line in events(folder) if line.startswith("restart ")]
    return time.time() - began, err, restarts


@exhaustive
def test_death_is_followed_by_a_restart_whose_time_is_lost(tmp_path):
    folder = tmp_path / "run"
    whole, err, restarts = restarted(folder, "run.rehearse=[die@12]")
    assert err.count("strikes with die@12") == 1 and "died of SIGKILL" in restarts[0]
    found = json.loads((folder / "goodput.json").read_text())
    seconds = found["seconds"]
    assert found["ended"] and seconds["restart"] >= 2  # the supervisor's pause
    assert seconds["compile"] > 0 and seconds["checkpoint"] > 0
    assert 0.5 * whole < sum(seconds.values()) <= whole
    goodput = [r["goodput"] for r in records(folder) if "loss" in r]
    share = seconds["training"] / sum(seconds.values())
    assert 0 < goodput[-1] < 0.5 and goodput[-1] == pytest.approx(share, rel=0.5)


@slow
@exhaustive
def test_a_hang_is_ended_and_followed_by_a_restart(tmp_path):
    keys = "run.rehearse=[hang@17]", "train.step_timeout_minutes=0.7"
    _, err, restarts = restarted(tmp_path / "run", *keys)
    assert err.count("strikes with hang@17") == 1 and "exit code 3" in restarts[0]
    found = json.loads((tmp_path / "run" / "goodput.json").read_text())["seconds"]
    assert found["restart"] > 30  # no step had ended since


@slow
@exhaustive
def test_the_death_of_one_process_of_two_restarts_both(tmp_path):
    folder = tmp_path / "run"
    finish(folder, start(folder, 2, "--restarts", "2", "run.rehearse=[die@9:1]"))
    assert [text.count("strikes with") for text in said(folder)] == [0, 1]
    assert any("restart 1 " in record.get("event", "") for record in records(folder))
