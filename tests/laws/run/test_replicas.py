"""Laws of replicas and of faults: a flipped bit is found and named; faults are told apart."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from mjax.config import load
from mjax.errors import NonFiniteLoss, ReplicasDiffer
from mjax.run.faults.replicas import (
    describe,
    differing_replicas,
    digest,
    digests_of,
    replicated_leaves,
)
from mjax.run.loop import train
from mjax.sharding.mesh import make_mesh
from mjax.sharding.processes.fake_devices import fake_devices
from mjax.train import Trainer
from tests import faults
from tests.laws.run.test_failures import events, steps
from tests.marks import exhaustive, quick, slow
from tests.processes import free_port, start_process
from tests.tiny import TINY

GAIN = "params", "final_norm", "gain"
UP = "params", "dense", "mlp", "up"


def config(folder, *overrides):
    return load(None, [*TINY, "train.micro_batch_size=1", f"run.dir={folder}", *overrides])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "float8_e4m3fn", "bool"])
def test_a_digest_shows_every_flip_and_swap(dtype):
    x = jax.numpy.asarray(np.random.default_rng(0).normal(size=(3, 1, 67)) > 0)
    x = x if dtype == "bool" else (7 * jax.random.normal(jax.random.key(0), x.shape)).astype(dtype)
    whole, make = np.asarray(x), jax.jit(digest)
    assert make(x) == digest(x)
    rng = np.random.default_rng(1)
    for _ in range(40):
        other = whole.copy()
        flat = other.reshape(-1)
        i, j = rng.choice(flat.size, 2, replace=False)
        if dtype == "bool":
            flat[i] = ~flat[i]
        else:
            bytes_of_entry = flat[i : i + 1].view(np.uint8)
            bytes_of_entry[rng.integers(bytes_of_entry.size)] ^= 1 << rng.integers(8)
        assert make(other) != make(x)
        other = whole.copy().reshape(-1)
        other[[i, j]] = other[[j, i]]
        is_same = other.tobytes() == whole.tobytes()
        assert (make(other.reshape(x.shape)) == make(x)) == is_same


MESHES = {
    "dp4·tp2, ZeRO 0": ["mesh.dp=4", "mesh.tp=2", "mesh.zero=0"],
    "pp2·dp2·tp2, ZeRO 1": ["mesh.dp=2", "mesh.pp=2", "mesh.tp=2", "model.num_hidden_layers=2"],
    "dp4·tp2, ZeRO 3": ["mesh.dp=4", "mesh.tp=2", "mesh.zero=3"],
}


@pytest.mark.parametrize("mesh", quick(MESHES, 1))
def test_one_flipped_bit_of_any_replica_is_found_and_named(tmp_path, mesh):
    cfg = config(tmp_path, *MESHES[mesh], "train.global_batch_size=8")
    trainer = Trainer(cfg)
    trainer.init()
    leaves = replicated_leaves(trainer.state_layout)
    make = digests_of(trainer.state_layout, leaves)

    def found(state):
        return differing_replicas(np.asarray(make(state)), leaves, trainer.mesh)

    assert found(trainer.state) == []
    replicated = {_names(leaf) for leaf in leaves}
    assert GAIN in replicated and (UP in replicated) == ("ZeRO 0" in mesh)
    rng, grid = np.random.default_rng(0), trainer.mesh.devices
    for leaf in leaves:
        device = grid.flat[rng.integers(8)]
        bit = int(rng.integers(32))  # all arrays of this state have entries of 32 bits
        state = faults.with_flipped_bit(trainer.state, _names(leaf), {device.id}, bit)
        (one,) = found(state)
        assert one.name == leaf.name and device in one.devices
        replicas = np.prod([trainer.mesh.shape[axis] for axis in leaf.axes])
        assert one.has_majority == (replicas > 2) and len(one.devices) == (1 if replicas > 2 else 2)
        assert f"process 0 device {device.id} (" in describe([one], trainer.mesh)


def _names(leaf) -> tuple[str, ...]:
    return tuple(key.key for key in leaf.path)


@pytest.fixture
def saved(tmp_path):
    """A function that trains on four data-parallel devices; replicas are checked every 3 steps."""

    def run(*overrides):
        keys = ["mesh.dp=4", "mesh.zero=0", "train.check_replicas_interval=3", *overrides]
        cfg = config(tmp_path, *keys)
        train(cfg, make_mesh(cfg.mesh, jax.devices()[:4]))

    return run


@exhaustive
def test_a_replica_that_differs_ends_the_run_and_is_not_saved(tmp_path, monkeypatch, saved):
    saved("train.steps=4", "checkpoint.interval=2")
    assert events(tmp_path) == [] and steps(tmp_path) == ["2", "4"]
    with monkeypatch.context() as patch:
        faults.flip_replica(patch, 5, UP, {2})
        said = r"step 6: replicas of dense.mlp.up differ in bits from most others on process 0 "
        said += (
            rf"device 2 \(dp=2\); .* last good checkpoint: {tmp_path}/checkpoints/4; start again"
        )
        with pytest.raises(ReplicasDiffer, match=said):
            saved("train.steps=9")
    assert steps(tmp_path) == ["2", "4"]
    assert events(tmp_path)[-1].endswith("on process 0 device 2 (dp=2)")
    faults.flip_replica(monkeypatch, 5, GAIN, {0, 1, 2, 3}, 7)  # alike everywhere: no difference
    saved("train.steps=5")
    faults.flip_replica(monkeypatch, 8, GAIN, {0, 3})  # found before the save, at the end
    with pytest.raises(ReplicasDiffer, match="step 8: .* no majority says which is right: "):
        saved("train.steps=8")
    assert steps(tmp_path) == ["4", "5"]


FAULTS = {  # how a run is struck, and what it says
    "bad data": (
        "run.rehearse=[nan@18]",
        "step 18: loss nan, norm nan, twice the same: its data or the model, or a device that alw",
    ),
    "transient": (
        lambda patch: faults.flip_in_gradients(patch, [18], device=1, times=1),
        "step 18: loss 4.*, norm inf; good when repeated: a device erred, or memory did",
    ),
    "persistent": (
        lambda patch: faults.flip_in_gradients(patch, [18], device=1),
        "step 18: loss 4.*, norm inf, twice the same: its data or the model, or a device that alw",
    ),
    "unsteady": (
        lambda patch: faults.flip_in_weights(patch, [18], device=1, bits=(26, 30)),
        "step 18 gave loss .* and repeated on the same state loss .*: a device computes wrongly",
    ),
    "spike": (
        lambda patch: faults.flip_in_weights(patch, [18], device=1, bits=(26,)),
        "step 18: loss [1-9].*, norm .*, twice the same: its data or the model, or a device that",
    ),
    "replica": (
        lambda patch: faults.flip_replica(patch, 17, UP, {3}),
        r"step 18: replicas of dense.mlp.up differ in bits from most others on .*device 3 \(dp=3\)",
    ),
}


@slow
@pytest.mark.parametrize("fault", quick(FAULTS, 5))
def test_faults_are_told_apart_within_a_step(tmp_path, monkeypatch, saved, fault):
    strike, said = FAULTS[fault]
    keys = ["train.steps=20", "train.spike_factor=1.2", "checkpoint.interval=10"]
    keys.append(strike) if isinstance(strike, str) else strike(monkeypatch)
    if fault == "transient":
        saved(*keys)
        (line,) = events(tmp_path)
        assert re.fullmatch(said, line) and steps(tmp_path) == ["10", "20"]
        return
    with pytest.raises((NonFiniteLoss, ReplicasDiffer), match=said) as caught:
        saved(*keys)
    kept = ["10"] if fault in ("unsteady", "replica") else ["10", "17"]  # where the state is sound
    assert f"last good checkpoint: {tmp_path}/checkpoints/{kept[-1]}" in str(caught.value)
    assert steps(tmp_path) == kept


@slow
def test_two_processes_find_and_name_a_replica_of_either(tmp_path):
    port = free_port()
    env = os.environ | {"XLA_FLAGS": fake_devices(2), "JAX_NUM_PROCESSES": "2"}
    env["JAX_COORDINATOR_ADDRESS"] = f"127.0.0.1:{port}"
    keys = [*TINY, "train.micro_batch_size=1", f"run.dir={tmp_path}", "mesh.dp=4", "mesh.zero=0"]
    keys += ["train.steps=8", "checkpoint.interval=2", "train.check_replicas_interval=1"]
    command = [sys.executable, "-m", "mjax.train", *keys, "run.rehearse=[bit_flip@4:1]"]
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    folder = Path(__file__).parents[3]
    running = [
        start_process(command, env=env | {"JAX_PROCESS_ID": str(i)}, cwd=folder, **pipe)
        for i in range(2)
    ]
    said = [process.communicate(timeout=300)[1] for process in running]
    assert [process.returncode for process in running] == [1, 1], said
    line = "mjax: stopped: step 4: replicas of .* differ in bits from most others on process 1 dev"
    line += r"ice 2048 \(dp=2\); a device"  # the first of process 1
    assert all(re.search(line, text) for text in said), said
    assert steps(tmp_path) == ["2"]
