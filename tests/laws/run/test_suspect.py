"""Laws of suspect steps: told apart, and repeated, left out or undone exactly."""

import jax
import numpy as np
import pytest

from mjax.config import load
from mjax.config.schema.run import TrainConfig
from mjax.data.loader import build_datasets, make_loader
from mjax.errors import NonFiniteLoss
from mjax.optim.schedule import batch_range
from mjax.run.faults.suspect import FEWEST_LOSSES, Judge
from mjax.run.loop import train
from mjax.sharding.mesh import make_mesh
from mjax.train import Trainer
from tests.laws.run.test_failures import events, losses
from tests.marks import exhaustive, slow
from tests.tiny import TINY

STEPS = 7
BAD = 4


def config(folder, *overrides):
    keys = ["model.hidden_dropout=0.1", "checkpoint.interval=2", f"train.steps={STEPS}"]
    keys += ["train.micro_batch_size=1"]
    return load(None, [*TINY, *keys, f"run.dir={folder}", "mesh.dp=2", "mesh.tp=2", *overrides])


@pytest.fixture
def run(monkeypatch, caplog):
    """A function that trains, and returns the parameters at the end."""

    def run(folder, *overrides):
        made, init = [], Trainer.__init__

        def kept(self, *args):
            init(self, *args)
            made.append(self)

        cfg = config(folder, *overrides)
        with monkeypatch.context() as patch:
            patch.setattr(Trainer, "__init__", kept)
            with jax.log_compiles():
                train(cfg, make_mesh(cfg.mesh, jax.devices()[:4]))
        compiled = [r for r in caplog.records if "Compiling jit(ordered)" in r.getMessage()]
        assert len(compiled) == 1, "the step compiles once, however often it is repeated"
        caplog.clear()
        return jax.tree.map(np.asarray, made[0].params())

    return run


def by_hand(folder, *numbers):
    """The parameters after the steps of these numbers, in which others are left out."""
    cfg = config(folder)
    trainer = Trainer(cfg, make_mesh(cfg.mesh, jax.devices()[:4]))
    trainer.init()
    data, _ = build_datasets(cfg, STEPS * 4, 0)
    batches = list(make_loader(data, lambda step: batch_range(cfg.train, step), 0, STEPS))
    for number in numbers:
        trainer.set_step(number - 1)
        assert trainer.step(batches[number - 1])["accepted"]
    return jax.tree.map(np.asarray, trainer.params())


def assert_equal(got, want) -> None:
    jax.tree.map(np.testing.assert_array_equal, got, want)


@slow
def test_a_transient_fault_is_repeated_and_leaves_no_trace(tmp_path, run):
    want = run(tmp_path / "sound")
    got = run(tmp_path / "hit", "run.rehearse=[nan_once@1, nan_once@4, nan_once@5]")
    assert_equal(got, want)
    assert losses(tmp_path / "hit") == losses(tmp_path / "sound")
    lines = events(tmp_path / "hit")
    assert len(lines) == 3 and all("good when repeated: a device erred" in x for x in lines)


@exhaustive
def test_a_bad_batch_is_left_out(tmp_path, run):
    got = run(tmp_path, "train.on_suspect=skip", f"run.rehearse=[nan@{BAD}, nan@{STEPS}]")
    assert_equal(got, by_hand(tmp_path / "x", 1, 2, 3, 5, 6))
    assert [line.partition(":")[0] for line in events(tmp_path)] == ["step 4", "step 7"]
    assert "loss nan" in events(tmp_path)[0] and "its batch is left out" in events(tmp_path)[0]
    cfg = config(tmp_path)
    trainer = Trainer(cfg, make_mesh(cfg.mesh, jax.devices()[:4]))
    assert trainer.restore() == STEPS, "left-out steps count"


@exhaustive
def test_weights_go_back_to_the_newest_checkpoint(tmp_path, run):
    got = run(tmp_path, "train.on_suspect=roll_back", f"run.rehearse=[nan@{BAD}]")
    assert_equal(got, by_hand(tmp_path / "x", 1, 2, 5, 6, 7))
    (line,) = events(tmp_path)
    assert f"the weights are those of {tmp_path}/checkpoints/2" in line


@exhaustive
def test_too_many_suspect_steps_end_the_run(tmp_path, run):
    bad = "run.rehearse=[nan@3, nan@4, nan@5]"
    with pytest.raises(NonFiniteLoss, match=r"step 5: .* number 3 in 100 steps: .* samples 16 to"):
        run(tmp_path, "train.on_suspect=skip", "train.max_suspects=2", bad)


@exhaustive
def test_a_step_above_the_limit_without_a_token_or_behind_a_closed_gate_changes_nothing(tmp_path):
    cfg = config(tmp_path)
    trainer = Trainer(cfg, make_mesh(cfg.mesh, jax.devices()[:4]))
    trainer.init()
    before = jax.tree.map(np.asarray, trainer.state)
    data, _ = build_datasets(cfg, 4, 0)
    batch = data.batch(range(4))
    for limits in ({"most_loss": 1.0}, {"is_open": False}):
        metrics = trainer.step(batch, **limits)
        assert metrics["finite"] and not metrics["accepted"]
        assert_equal(jax.tree.map(np.asarray, trainer.state), before)
    empty = batch | {"loss_mask": np.zeros_like(batch["loss_mask"])}
    metrics = trainer.step(empty)
    assert metrics["tokens"] == 0 and not metrics["accepted"]
    assert_equal(jax.tree.map(np.asarray, trainer.state), before)
    assert trainer.step(batch, most_loss=10.0)["accepted"] and trainer.state["step"] == 1
    for step in (4, 5):  # rejected steps are counted as the state is saved
        trainer.save()
        trainer.store.wait()
        assert trainer.state["step"] == trainer.step_number == trainer.store.latest_step() == step
        assert trainer.restore() == step
        trainer.step(batch)


def test_a_spike_is_measured_against_the_median_of_the_last_losses():
    judge = Judge(TrainConfig(spike_factor=2.0))
    for i in range(FEWEST_LOSSES):
        assert judge.most_loss() == np.inf
        judge.accepted(3.0 if i else 1000.0)
    assert judge.most_loss() == 6.0
    assert Judge(TrainConfig()).most_loss() == np.inf


def test_two_results_of_one_step_that_differ_accuse_the_device():
    judge = Judge(TrainConfig(on_suspect="skip", spike_factor=2.0))
    for _ in range(FEWEST_LOSSES):
        judge.accepted(3.0)
    bad = {"finite": True, "loss": 50.0, "grad_norm": 1.0}
    assert judge.verdict(20, bad, bad | {"loss": 50.001}) == "skip"
    assert judge.verdict(21, bad, bad | {"loss": 3.1}) == "transient"
    with pytest.raises(NonFiniteLoss, match="step 22 gave loss 50.0.* a device computes wrongly"):
        judge.verdict(22, bad, bad | {"loss": 70.0})
    with pytest.raises(NonFiniteLoss, match="a device computes wrongly"):
        judge.verdict(23, bad, bad | {"loss": float("nan"), "finite": False})
