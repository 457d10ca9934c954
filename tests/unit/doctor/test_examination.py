"""`mjax doctor` names the slow GPU, the full disk and the clash; else its exit code is 0."""

import json
import re
import shutil
import sys
from collections import namedtuple

import jax
import pytest

from mjax.config import load
from mjax.doctor import __main__ as command
from mjax.doctor import clashes, examination, host, speeds
from mjax.doctor.examination import DeviceSpeed, notes_of_speeds, slow_devices
from mjax.errors import run_cli
from mjax.run.faults.health import checkpoint_gb
from mjax.train.__main__ import main as train
from mjax.train.trainer import Trainer
from tests.laws.run.test_processes import finish, start
from tests.marks import exhaustive, slow

H100 = "NVIDIA H100 80GB HBM3"
Usage = namedtuple("Usage", "total used free")


def gpus(*rates, kind=H100):
    return [DeviceSpeed(f"GPU {i}", kind, rate) for i, rate in enumerate(rates)]


@pytest.fixture
def doctor(monkeypatch, capsys):
    """Run the command; returns (exit code, what it printed)."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["mjax doctor", *arguments])
        with pytest.raises(SystemExit) as end:
            run_cli(command.main)
        return end.value.code, capsys.readouterr().out

    return run


@pytest.fixture
def measured(monkeypatch):
    """Set what the devices of this process are said to do, as GPUs."""

    def set_rates(*rates):
        devices = gpus(*rates)
        own = {"devices": [(d.name, d.kind, d.tflops) for d in devices], "problems": []}
        monkeypatch.setattr(examination, "_of_this_process", lambda *_: own | {"memory": 99.0})
        monkeypatch.setattr(speeds, "all_reduce_gb_per_s", lambda _: 350.0)

    return set_rates


def test_the_cpu_is_measured_and_not_judged(doctor):
    code, text = doctor("--json")
    found = json.loads(text)
    assert code == 0 and found["healthy"] and not found["problems"]
    assert len(found["devices"]) == jax.device_count() == 8
    assert all(device["tflops"] > 1e-5 for device in found["devices"])
    assert found["all_reduce_gb_per_s"] > 0 and found["free_memory_gb"] > 0
    assert found["versions"]["jax"] == jax.__version__
    assert found["notes"][-1].startswith("there is no GPU")


def test_a_slow_gpu_is_named_and_the_exit_code_is_1(doctor, measured):
    measured(660, 655, 420, 661)
    code, text = doctor()
    assert code == 1 and "problems: 1" in text
    assert "problem: GPU 2 (NVIDIA H100 80GB HBM3) does 420 TFLOP/s, the others 660" in text
    measured(660, 655, 640, 661)
    code, text = doctor()
    assert code == 0 and "all is well" in text and len(text.splitlines()) <= 24


@pytest.mark.parametrize(
    "devices, slow",
    [
        (gpus(660, 500), ["GPU 1"]),
        (gpus(400, 400, 660, 660), ["GPU 0", "GPU 1"]),
        (gpus(300), ["GPU 0"]),  # by the data sheet
        (gpus(600), []),
        (gpus(660, 640) + gpus(200, 210, kind="NVIDIA A100-SXM4-80GB"), []),
        (gpus(50, 10, kind="NVIDIA of tomorrow"), ["GPU 1"]),
        (gpus(0.1, 0.01, kind="cpu"), []),
    ],
)
def test_gpus_are_compared_with_their_like_and_with_their_data_sheet(devices, slow):
    assert [line.split(" (")[0] for line in slow_devices(devices)] == slow


def test_a_slow_link_is_a_note():
    (line,) = notes_of_speeds(gpus(660, 660), 12.0)
    assert "moves 12 GB/s, links of NVIDIA H100 80GB HBM3 up to 450" in line
    assert not [*notes_of_speeds(gpus(660, 660), 300.0), *notes_of_speeds(gpus(660), None)]
    assert not [*notes_of_speeds(gpus(*[660] * 16), 12.0)]  # two hosts


def test_a_full_disk_and_a_file_in_the_way_are_problems(doctor, tmp_path, monkeypatch):
    monkeypatch.setattr(speeds, "matmul_tflops", lambda devices: [0.1] * len(devices))
    monkeypatch.setattr(speeds, "all_reduce_gb_per_s", lambda devices: None)
    (tmp_path / "file").touch()
    code, text = doctor("--dir", str(tmp_path / "file" / "run"))
    assert code == 1 and f"problem: {tmp_path / 'file'} is no folder that can be" in text
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**12, 10**12, 10**9))
    code, text = doctor("--dir", str(tmp_path / "not" / "there"))
    assert code == 1 and f"{tmp_path} has 1.0 GB free, 2.0 are needed" in text.replace("\n", " ")


def test_where_jax_does_not_start_the_clash_is_said(doctor, monkeypatch):
    old = clashes.Installed(glibc=(2, 17), needed_glibc=(2, 27))
    monkeypatch.setattr(clashes, "installed", lambda: old)
    monkeypatch.setitem(sys.modules, "mjax.doctor.examination", None)  # importing it fails
    code, text = doctor()
    assert code == 1 and "glibc 2.17 is too old" in text and "JAX does not start" in text
    assert json.loads(doctor("--json")[1])["healthy"] is False


def test_memory_of_a_container_counts_without_files(tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal: 64000000 kB\nMemAvailable:   48828125 kB\n")
    assert host.free_memory_gb(tmp_path, tmp_path) == 50
    (tmp_path / "memory.max").write_text("8000000000\n")
    (tmp_path / "memory.stat").write_text("anon 3000000000\nfile 5000000000\n")
    assert host.free_memory_gb(tmp_path, tmp_path) == 5
    (tmp_path / "memory.max").write_text("max\n")
    assert host.free_memory_gb(tmp_path, tmp_path) == 50


TINY = """data.mock=true model.hidden_size=32 model.num_hidden_layers=1 model.vocab_size=64
    model.attention.num_attention_heads=4 data.seq_length=16 run.doctor=true
    train.steps=1""".split()


def test_a_run_on_a_slow_gpu_stops_before_it_begins(measured, tmp_path, monkeypatch, capsys):
    measured(660, 655, 420, 661)
    folder = tmp_path / "run"
    monkeypatch.setattr(sys, "argv", ["mjax train", *TINY, f"run.dir={folder}"])
    with pytest.raises(SystemExit) as end:
        run_cli(train)
    said = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and len(said) == 1 and not folder.exists()
    assert said[0].startswith("mjax: error: run.doctor: GPU 2 (NVIDIA H100 80GB HBM3) does 420")


@pytest.mark.parametrize("keys", [[], ["optimizer.nu_dtype=bfloat16"], ["optimizer.name=muon"]])
def test_the_room_of_a_checkpoint_is_that_of_the_state(keys):
    cfg = load(None, [*TINY, *keys])
    leaves = jax.tree.leaves(Trainer(cfg).abstract_state())
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) / 1e9
    assert 0.5 * size <= checkpoint_gb(cfg) <= 1.01 * size


@slow
def test_a_problem_of_one_process_stops_all_with_the_same_line(tmp_path):
    nodes = [tmp_path / "node0", tmp_path / "node1"]
    for node in nodes:
        node.mkdir()
    (nodes[1] / "runs").touch()  # a file where the folder should be
    keys = "run.doctor=true", "run.dir=runs/job", "train.steps=1"
    running = start(tmp_path / "job", 2, *keys, nodes=nodes)
    assert [process.wait(timeout=240) for process in running] == [2, 2]
    said = [(tmp_path / f"job.{i}").read_text().splitlines()[-1] for i in range(2)]
    assert said[0] == said[1] and not (nodes[0] / "runs").exists()
    assert re.search(r": run.doctor: \S+: \S+/node1/runs is no folder that can be", said[0]), said


@exhaustive
def test_two_processes_measure_all_devices_and_train(tmp_path):
    running = start(tmp_path / "job", 2, "run.doctor=true", "train.steps=1")
    said = finish(tmp_path / "job", running)
    lines = [re.findall(r"^mjax: doctor: 8 x cpu, .* all-reduce \S+ GB/s", s, re.M) for s in said]
    assert [len(found) for found in lines] == [1, 0]
