"""Laws of a run in pieces: stopped and resumed, on the same or another mesh, it is the same run."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from mjax.config import dump, load
from mjax.errors import NonFiniteLoss, UserError
from mjax.run.loop import final_step, train
from mjax.sharding.mesh import make_mesh
from mjax.sharding.processes.fake_devices import fake_devices
from mjax.train import Trainer
from tests.batches import stream_hash
from tests.marks import exhaustive, quick, slow
from tests.processes import start_process

STEPS = 8
BASE = [
    "model.vocab_size=97",
    "model.hidden_size=32",
    "model.attention.num_attention_heads=4",
    "model.attention.num_key_value_heads=2",
    "model.intermediate_size=48",
    "model.num_hidden_layers=2",
    "model.hidden_dropout=0.1",
    "data.mock=true",
    "data.seq_length=16",
    "train.global_batch_size=8",
    "train.micro_batch_size=2",
    f"schedule.decay_steps={STEPS}",
    "schedule.warmup_steps=2",
    "precision.compute=float32",
    "log.interval=1",
]


def config(folder, *overrides):
    return load(None, [*BASE, f"run.dir={folder}", *overrides])


def run(monkeypatch, folder, *overrides, dp=4, tp=1):
    """Train; returns (hash of each batch, parameters at the end as numpy)."""
    hashes, trainers = [], []
    step, init = Trainer.step, Trainer.__init__

    def watched_step(self, batch, *gate):
        hashes.append(stream_hash(batch))
        return step(self, batch, *gate)

    def watched_init(self, *args):
        init(self, *args)
        trainers.append(self)

    cfg = config(folder, f"mesh.dp={dp}", f"mesh.tp={tp}", *overrides)
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", watched_step)
        patch.setattr(Trainer, "__init__", watched_init)
        train(cfg, make_mesh(cfg.mesh, jax.devices()[: dp * tp]))
    return hashes, jax.tree.map(np.asarray, trainers[0].params())


def losses(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [(r["step"], r["loss"], r["lr"]) for r in map(json.loads, lines) if "loss" in r]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken")
    with pytest.MonkeyPatch.context() as patch:
        return folder, *run(patch, folder, f"train.steps={STEPS}")


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    folder = tmp_path_factory.mktemp("half")
    with pytest.MonkeyPatch.context() as patch:
        return folder, run(patch, folder, f"train.steps={STEPS // 2}")[0]


@slow
def test_half_restart_half_is_the_unbroken_run_bit_for_bit(unbroken, half, tmp_path, monkeypatch):
    (folder, hashes, params), (stopped, first) = unbroken, half
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
    second, got = run(monkeypatch, tmp_path, f"train.steps={STEPS}")
    assert first + second == hashes and len(set(hashes)) == STEPS
    assert losses(tmp_path) == losses(folder)
    jax.tree.map(np.testing.assert_array_equal, got, params)


@pytest.mark.parametrize(("dp", "tp"), quick([(2, 2), (1, 1), (1, 2)]))
def test_the_mesh_may_change_in_between(unbroken, half, tmp_path, monkeypatch, dp, tp):
    (folder, hashes, params), (stopped, first) = unbroken, half
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
    second, got = run(monkeypatch, tmp_path, f"train.steps={STEPS}", dp=dp, tp=tp)
    assert first + second == hashes
    np.testing.assert_allclose(
        [x[1] for x in losses(tmp_path)], [x[1] for x in losses(folder)], rtol=1e-6
    )
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-6), got, params)


@exhaustive
def test_held_out_loss_is_of_the_same_batches_every_time(tmp_path, monkeypatch):
    rest = ["train.eval_interval=2", "train.eval_steps=2", "schedule.lr=0", "train.steps=4"]
    run(monkeypatch, tmp_path, *rest)
    records = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    held_out = [(r["step"], r["eval_loss"], r["eval_tokens"]) for r in records if "eval_loss" in r]
    assert [x[0] for x in held_out] == [2, 4]
    assert held_out[0][1:] == held_out[1][1:] and held_out[0][2] == 2 * 8 * 16


@exhaustive
@pytest.mark.parametrize("end", ["train.steps=4", "train.max_minutes=1e-6"])
def test_a_step_is_evaluated_before_it_is_saved_and_carries_its_loss(tmp_path, monkeypatch, end):
    every = 2 if "steps" in end else 1
    keys = [f"train.eval_interval={every}", "train.eval_steps=1", f"checkpoint.interval={every}"]
    run(monkeypatch, tmp_path, *keys, "checkpoint.keep_best=2", end)
    records = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    logged = {r["step"]: r["eval_loss"] for r in records if "eval_loss" in r}
    steps = (tmp_path / "checkpoints").iterdir()
    saved = {int(p.name): json.loads((p / "meta" / "metadata").read_text()) for p in steps}
    assert {step: record["held_out_loss"] for step, record in saved.items()} == logged
    assert sorted(logged) == ([2, 4] if every == 2 else [1])


@exhaustive
def test_tokens_and_wall_time_end_a_run_with_a_checkpoint(tmp_path, monkeypatch):
    assert final_step(config(tmp_path, "train.steps=100", "train.max_tokens=385")) == 4
    assert final_step(config(tmp_path, "train.steps=3", "train.max_tokens=385")) == 3
    hashes, _ = run(monkeypatch, tmp_path / "t", f"train.steps={STEPS}", "train.max_tokens=385")
    assert len(hashes) == 4 and (tmp_path / "t" / "checkpoints" / "4").is_dir()
    hashes, _ = run(monkeypatch, tmp_path / "m", f"train.steps={STEPS}", "train.max_minutes=1e-6")
    assert len(hashes) == 1 and (tmp_path / "m" / "checkpoints" / "1").is_dir()


@slow
def test_bad_numbers_stop_the_run_and_name_the_last_good_checkpoint(tmp_path, monkeypatch):
    run(monkeypatch, tmp_path, "train.steps=2", "checkpoint.interval=1")
    wild = ["train.steps=8", "schedule.lr=1e30", "optimizer.clip_grad_norm=0"]
    with pytest.raises(NonFiniteLoss) as stop:
        run(monkeypatch, tmp_path, *wild, "schedule.decay=constant", "schedule.warmup_steps=0")
    assert f"last good checkpoint: {tmp_path / 'checkpoints' / '2'};" in str(stop.value)
    assert "step 4: loss" in str(stop.value) and "samples 24 to 31" in str(stop.value)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["1", "2"]


@pytest.mark.parametrize("mesh", quick(["dp=4 zero=3", "dp=2 tp=2 pp=2"], 0))
def test_weights_that_are_not_finite_are_never_saved(tmp_path, mesh):
    cfg = config(tmp_path, *[f"mesh.{part}" for part in mesh.split()], "train.global_batch_size=8")
    devices = jax.devices()[: 8 if "pp" in mesh else 4]
    trainer = Trainer(cfg, make_mesh(cfg.mesh, devices))
    trainer.init()
    trainer.save()
    trainer.step_number = 1
    head = trainer.state["params"]["head"]
    trainer.state["params"]["head"] = head.at[-1, -1].set(np.inf)
    with pytest.raises(NonFiniteLoss, match="step 1: parameter head holds .*last good .*/0;"):
        trainer.save()
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["0"]


@slow
def test_resume_never_and_require_mean_what_they_say(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="holds no checkpoint"):
        run(monkeypatch, tmp_path / "r", "checkpoint.resume=require", f"train.steps={STEPS}")
    assert not (tmp_path / "r").exists()
    run(monkeypatch, tmp_path, "train.steps=3")
    run(monkeypatch, tmp_path, "train.steps=4", "checkpoint.resume=never")
    assert (tmp_path / "checkpoints.old-1" / "3").is_dir()
    assert [step for step, *_ in losses(tmp_path)] == [1, 2, 3, 4]


@exhaustive
def test_another_architecture_is_refused_and_the_run_folder_left_alone(tmp_path, monkeypatch):
    run(monkeypatch, tmp_path, "train.steps=3")
    before = (tmp_path / "config.yaml").read_text()
    with pytest.raises(UserError, match="model.num_hidden_layers=2 but this run has .*=3"):
        run(monkeypatch, tmp_path, "train.steps=4", "model.num_hidden_layers=3")
    assert (tmp_path / "config.yaml").read_text() == before
    assert load(tmp_path / "config.yaml").model.num_hidden_layers == 2


def cli(folder, *overrides) -> subprocess.Popen:
    file = folder / "in.yaml"
    file.write_text(dump(config(folder / "run", *overrides)))
    environment = os.environ | {
        "XLA_FLAGS": fake_devices(1),
        "MJAX_CACHE_DIR": str(folder / "cache"),
    }
    return start_process(
        [sys.executable, "-m", "mjax.train", "--config", str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        text=True,
    )


def wait_for_step(folder, process, step) -> None:
    log = folder / "run" / "metrics.jsonl"
    until = time.monotonic() + 120
    while not (log.exists() and f'"step": {step}' in log.read_text()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.02)


@slow
def test_sigterm_saves_and_exits_0_and_kill_9_loses_no_checkpoint(tmp_path):
    long = ["train.steps=100000", "schedule.decay_steps=100000"]
    process = cli(tmp_path, *long)
    wait_for_step(tmp_path, process, 5)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0 and "SIGTERM: finishing this step" in err
    (saved,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert f"stopped at step {saved.name} of 100000: a stop signal was received" in out

    process = cli(tmp_path, *long, "checkpoint.interval=1")  # saving nearly all the time
    wait_for_step(tmp_path, process, int(saved.name) + 10)
    process.kill()
    out, _ = process.communicate(timeout=60)
    assert f"resumed from {saved}" in out
    trainer = Trainer(config(tmp_path / "run", "mesh.dp=1", *long), _one_device())
    step = trainer.restore()
    assert step > int(saved.name)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(trainer.params()))


def _one_device():
    return make_mesh(load(None, ["data.mock=true", "mesh.dp=1"]).mesh, jax.devices()[:1])
