"""Laws of `train.early_stop`: when it stops, that a resume counts on, and what is said."""

import json
import math

import jax
import numpy as np
import pytest

from mjax.run.early_stop import EarlyStop
from mjax.run.loop import train
from mjax.sharding.mesh import make_mesh
from mjax.train import Trainer
from tests.chats import chat_config, turns, write_lines
from tests.marks import exhaustive, slow

LOSSES = {2: 3.0, 4: 2.0, 6: 2.5, 8: 2.2, 10: 2.1, 12: 1.0}  # by the step


def test_what_counts_as_better():
    stop = EarlyStop(2)
    for loss, since in ((3.0, 0), (3.0, 1), (2.0, 0), (math.nan, 1), (None, 1), (2.5, 2)):
        assert not stop.is_due
        stop.see(loss)
        assert stop.since == since
    assert stop.is_due and stop.best == 2.0
    again = EarlyStop(2)
    again.restore(json.loads(json.dumps(stop.record())))
    assert again == stop and EarlyStop().record() == {}


@pytest.fixture
def start(tmp_path, monkeypatch):
    """A function that trains 12 steps with these held-out losses."""
    path = write_lines(tmp_path / "chats.jsonl", [turns(f"{n}", f"{n}") for n in range(20)])

    def evaluated(self, kind, batch):
        return {"loss": np.float32(LOSSES[self.step_number])}, {"loss": np.float32(1)}

    monkeypatch.setattr(Trainer, "run_program", evaluated)

    def start(*keys: str) -> None:
        given = "train.steps=12", "schedule.decay_steps=12", "train.eval_steps=1", "mesh.dp=1"
        split = "data.split=[0.5,0.5,0]", "train.eval_interval=2"
        cfg = chat_config(tmp_path, path, *given, *split, *keys)
        train(cfg, make_mesh(cfg.mesh, jax.devices()[:1]))

    return start


def steps_of(folder) -> list[int]:
    return sorted(int(p.name) for p in (folder / "run/checkpoints").iterdir() if p.name.isdecimal())


@slow
def test_a_run_stops_and_goes_on_where_more_is_allowed(start, tmp_path, capfd):
    start("train.early_stop=3", "checkpoint.interval=4")
    said = capfd.readouterr().out
    assert "stopped at step 10 of 12: the held-out loss has not fallen in train.early_stop" in said
    assert steps_of(tmp_path) == [8, 10]
    start("train.early_stop=3")
    assert "nothing left to train: step 10 of 12; raise train.early_stop" in capfd.readouterr().out
    start("train.early_stop=4")
    assert "finished at step 12 of 12" in capfd.readouterr().out


@exhaustive
def test_the_count_survives_a_stop_between_evaluations(start, tmp_path, capfd, monkeypatch):
    step = Trainer.step

    def signaled(self, *args):
        if self.step_number == 8:
            raise KeyboardInterrupt
        return step(self, *args)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Trainer, "step", signaled)
        start("train.early_stop=3", "checkpoint.interval=1", "checkpoint.async_save=false")
    assert steps_of(tmp_path)[-1] == 8  # the loss was lower two evaluations before
    start("train.early_stop=3")
    assert "stopped at step 10 of 12" in capfd.readouterr().out
