"""Laws of several processes: the same run as one process; none waits for ever for a dead one."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from mjax.run.faults.supervisor import is_recoverable
from mjax.sharding.processes.fake_devices import fake_devices
from tests.marks import exhaustive, quick, slow
from tests.processes import free_port, start_process

pytestmark = slow

BASE = [
    "model.vocab_size=97",
    "model.hidden_size=32",
    "model.attention.num_attention_heads=8",
    "model.intermediate_size=48",
    "model.num_hidden_layers=2",
    "data.mock=true",
    "data.seq_length=16",
    "train.global_batch_size=8",
    "train.micro_batch_size=1",
    "train.eval_interval=3",
    "train.eval_steps=2",
    "schedule.decay_steps=8",
    "precision.compute=float32",
    "log.interval=1",
]


def start(folder, processes, *overrides, nodes=None, module="mjax.train", devices=8):
    """`python -m mjax.train` as `processes` processes with so many CPU devices in all.

    `nodes` are the folders that they run in, by default this one.
    """
    port = free_port()
    env = os.environ | {
        "XLA_FLAGS": fake_devices(devices // processes),
        "JAX_NUM_PROCESSES": str(processes),
    }
    env["JAX_COORDINATOR_ADDRESS"] = f"127.0.0.1:{port}"
    command = [sys.executable, "-u", "-m", module, *BASE, f"run.dir={folder}", *overrides]
    return [
        start_process(
            command,
            env=env | {"JAX_PROCESS_ID": str(i)},
            cwd=None if nodes is None else nodes[i],
            stdout=open(folder.parent / f"{folder.name}.{i}", "w"),  # noqa: SIM115
            stderr=subprocess.STDOUT,
        )
        for i in range(processes)
    ]


def finish(folder, running):
    """Wait for the processes to end well; what each has printed."""
    try:
        codes = [p.wait(timeout=240) for p in running]
    finally:
        for p in running:
            p.kill()
    said = [(folder.parent / f"{folder.name}.{i}").read_text() for i in range(len(running))]
    assert not any(codes), said
    return said


def losses(folder):
    """Of every training step, and of the last evaluation (an event may come after it)."""
    records = list(map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()))
    evaluated = [r["eval_loss"] for r in records if "eval_loss" in r]
    return [r["loss"] for r in records if "loss" in r] + evaluated[-1:]


# By one process, and by two of which each has part of tp.
@pytest.mark.parametrize("count,then", quick([(2, ["mesh.tp=8"]), (1, ["mesh.dp=4", "mesh.ep=2"])]))
def test_two_processes_train_save_and_resume_as_one(count, then, tmp_path):
    two, one = tmp_path / "two", tmp_path / "one"
    mesh = ["mesh.dp=2", "mesh.tp=2", "mesh.pp=1", "mesh.cp=1", "mesh.ep=2"]
    experts = [
        "model.layer_pattern=GE",
        "model.moe.num_experts=4",
        "model.moe.router_aux_loss_coef=0.1",
    ]
    finish(one, start(one, 1, *mesh, *experts, "train.steps=8"))
    said = finish(two, start(two, 2, *mesh, *experts, "train.steps=4"))
    assert "step 4/4" in said[0] and "step" not in said[1]  # one process logs
    finish(two, start(two, count, *then, *experts, "train.steps=8"))
    assert losses(two) == pytest.approx(losses(one), rel=1e-5)


@exhaustive
def test_two_processes_say_the_samples_of_one(tmp_path):
    keys = ["model.vocab_size=300", "data.tokenizer=byte", "train.eval_interval=null"]
    keys += ["data.split=[1.0,0.0,0.0]", "train.sample_prompt=[ab,hello]", "train.sample_tokens=9"]
    keys += [
        "train.sample_interval=1",
        "train.steps=2",
        "schedule.lr=0.1",
        "mesh.dp=4",
        "mesh.tp=2",
    ]
    found = []
    for count in (1, 2):
        folder = tmp_path / str(count)
        said = finish(folder, start(folder, count, *keys))[0]
        found.append([line for line in said.split("\n") if line.startswith("sample: ")])
    assert found[0] == found[1] and len(found[0]) == 4 and found[0][:2] != found[0][2:]


@exhaustive
def test_damage_that_one_process_finds_makes_all_go_to_the_step_before(tmp_path):
    folder = tmp_path / "run"
    mesh = ["mesh.dp=8", "mesh.zero=3", "checkpoint.interval=2"]
    finish(folder, start(folder, 2, *mesh, "train.steps=4"))
    newest = folder / "checkpoints" / "4"
    assert {p.name for p in (newest / "state").glob("ocdbt.*")} == {
        "ocdbt.process_0",
        "ocdbt.process_1",
    }
    file = max(newest.glob("state/ocdbt.process_1/d/*"), key=lambda p: p.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 16
    file.write_bytes(content)
    said = finish(folder, start(folder, 2, *mesh, "train.steps=5"))
    assert f"resumed from {folder / 'checkpoints' / '2'}" in said[0]
    found = [f"bytes 0 to {len(content):,} of state/ocdbt.process_1" in text for text in said]
    assert sum(found) == 1 and all(f"checkpoint {newest} is damaged" in text for text in said)
    assert (folder / "checkpoints" / "damaged-4").is_dir()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_others_exit_when_a_process_dies_or_hangs(tmp_path, how):
    folder = tmp_path / "run"
    limit = 1.5  # minutes, in which the first step compiles
    alive, lost = start(folder, 2, "train.steps=1000000", f"train.step_timeout_minutes={limit}")
    try:
        while "step   " not in (said := (tmp_path / "run.0").read_text()):
            assert alive.poll() is None, said
            time.sleep(0.2)
        lost.send_signal(how)
        began = time.monotonic()
        code = alive.wait(timeout=60 * limit + 20)
    finally:
        alive.kill()
        lost.kill()
    said = (tmp_path / "run.0").read_text()
    assert is_recoverable(code) and time.monotonic() - began < 60 * limit + 15
    # The watchdog's own words with all stacks, or gloo's if its time-out of 30 s comes first.
    stuck = code == 3 and "train.step_timeout_minutes=1.5" in said and "Thread" in said
    assert stuck or "has lost another one" in said or "died" in said


@exhaustive
def test_a_process_whose_host_is_slow_is_named(tmp_path):
    folder = tmp_path / "run"
    slow_host = "train.objective=tests.laws.slow_objective:SlowHost"
    # No batches lie in store, and none is made behind an evaluation.
    alone = ["data.workers=1", "data.prefetch=1", "train.eval_interval=null"]
    said = finish(folder, start(folder, 2, "mesh.dp=8", "train.steps=7", slow_host, *alone))
    records = list(map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()))
    steps = [record for record in records if "slowest_host" in record]
    assert [record["step"] for record in steps] == list(range(2, 8))
    assert all(record["slowest_host_ms"] >= record["host_ms"] >= 0 for record in steps)
    late = [record["slowest_host"] for record in steps[-4:]]
    assert late.count(1) >= 3, steps
    (event,) = [record["event"] for record in records if "slow" in record.get("event", "")]
    assert event.startswith("process 1 is slow: its host takes ") and event in said[0]
