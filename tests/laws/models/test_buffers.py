"""Laws of buffers: step, trainer and checkpoints carry any that is declared."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.models.runtime.buffers import Buffer
from mjax.prove import Cell, make_batch, make_trainer
from mjax.train import state
from tests.marks import quick, slow


def average_of_loss(most: float = 100.0) -> Buffer:
    """A running average that starts at 7; steps whose loss is larger than `most` do not count."""

    def initial(params: dict) -> dict:
        return {"loss": jnp.float32(7)}

    def update(old, seen, parallel):
        loss = seen.losses["loss"]
        return {"loss": 0.5 * old["loss"] + 0.5 * loss}, loss <= most

    return Buffer(initial, (), update)


def declare(monkeypatch, buffer: Buffer) -> None:
    original = state.buffers_of
    monkeypatch.setattr(state, "buffers_of", lambda *a: original(*a) | {"average": buffer})


@slow
@pytest.mark.parametrize("cell", quick([Cell(), Cell({"pp": 2, "dp": 2, "tp": 2}, 1, 3)], 1))
def test_a_buffer_is_initialized_updated_and_saved(monkeypatch, tmp_path, cell):
    declare(monkeypatch, average_of_loss())
    keys = f"run.dir={tmp_path}", "precision.fp8=delayed"
    trainer, resumed = (make_trainer("dense", cell, *keys) for _ in range(2))
    want = 7.0
    for seed in range(3):
        want = 0.5 * want + 0.5 * float(trainer.step(make_batch(24, seed))["loss"])
    assert float(trainer.state["buffers"]["average"]["loss"]) == pytest.approx(want)
    trainer.save()
    trainer.store.wait()
    assert resumed.restore() == 3
    jax.tree.map(np.testing.assert_array_equal, resumed.state, trainer.state)
    assert set(trainer.state["buffers"]) == {"average", "fp8"}


@slow
def test_a_step_that_does_not_count_leaves_the_state(monkeypatch):
    declare(monkeypatch, average_of_loss(most=1.0))
    trainer = make_trainer("dense", Cell())
    before = jax.device_get(trainer.state)
    assert not trainer.step(make_batch(24))["finite"]
    jax.tree.map(np.testing.assert_array_equal, trainer.state, before)
