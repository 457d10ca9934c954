"""Laws of moments on the host: they change where bytes lie, never what is computed or saved."""

import jax
import numpy as np
import pytest

from mjax.checkpoint.weights import read_weights
from mjax.errors import UserError
from mjax.optim import offload
from mjax.prove import Cell, make_batch, make_trainer
from mjax.sharding.processes.fake_devices import usual_fusions
from mjax.train import Trainer
from tests.marks import exhaustive, quick, slow

HOST = "optimizer.offload=true"
LOW = ["precision.params=bfloat16", "optimizer.mu_dtype=bfloat16"]
KEYS = [
    "train.remat=dots",
    "optimizer.offload=false",
    "schedule.warmup_steps=1",
    "model.num_hidden_layers=2",
]


@pytest.fixture(autouse=True)
def thin_slices(monkeypatch):
    """At these sizes every parameter would be one slice; now most are several and a rest."""
    monkeypatch.setattr(offload, "SLICE", 5000)


def made(cell: Cell, *overrides: str) -> Trainer:
    trainer = make_trainer("odd widths", cell, *KEYS, *overrides)
    trainer.programs.recompile(usual_fusions())  # whole arrays and slices of them round alike
    return trainer


def run(trainer: Trainer, steps: int) -> Trainer:
    for i in range(trainer.step_number, trainer.step_number + steps):
        trainer.step(make_batch(trainer.cfg.train.global_batch_size, seed=i))
    return trainer


def assert_same(a: Trainer, b: Trainer) -> None:
    assert a.step_number == b.step_number
    jax.tree.map(
        lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), a.state, b.state
    )


def kinds(trainer: Trainer, part: str) -> set[str]:
    return {x.sharding.memory_kind for x in jax.tree.leaves(trainer.state["opt"][part])}


@slow
@pytest.mark.parametrize(
    ("cell", "low"),
    quick(
        [(Cell(), False), (Cell({"dp": 4}, 1), True), (Cell({"pp": 2, "dp": 2}, 1, 2), False)], 0
    ),
    ids=str,
)
def test_host_moments_train_the_same_parameters_bit_for_bit(cell, low):
    rest = [*LOW, "optimizer.stochastic_rounding=true"] if low else []
    here, there = run(made(cell, *rest), 4), run(made(cell, *rest, HOST), 4)
    assert kinds(there, "mu") | kinds(there, "nu") == {"pinned_host"}
    assert kinds(here, "mu") | kinds(here, "nu") == {"device"}
    assert_same(there, here)


@slow
@pytest.mark.parametrize(("first", "second"), [(False, True), (True, False)])
def test_checkpoints_do_not_depend_on_where_moments_live(tmp_path, first, second):
    """Saved on one mesh, where shards are padded, resumed there and on another."""

    def mode(host):
        return [f"run.dir={tmp_path}", f"optimizer.offload={str(host).lower()}"]

    cell = Cell({"dp": 4}, 1)
    whole = run(made(cell, *mode(first)), 2)
    whole.save()
    whole.store.wait()
    saved = jax.tree.map(np.asarray, whole.state["params"])
    run(whole, 2)  # donates what was saved
    for target in (cell, Cell({"pp": 2}, 1)):
        resumed = made(target, *mode(second))
        assert resumed.restore() == 2
        assert kinds(resumed, "nu") == {"pinned_host" if second else "device"}
        if target is cell:
            jax.tree.map(np.testing.assert_array_equal, resumed.state["params"], saved)
            assert_same(run(resumed, 2), whole)


@slow
def test_a_step_with_bad_numbers_leaves_host_moments_alone():
    trainer = run(made(Cell(), HOST, "optimizer.clip_grad_norm=0"), 1)
    before = jax.tree.map(np.asarray, trainer.state)
    nan = {"loss_mask": np.full((24, 16), np.nan, np.float32)}
    assert not trainer.step(make_batch(24) | nan)["finite"]
    jax.tree.map(np.testing.assert_array_equal, trainer.state, before)
    assert kinds(trainer, "mu") == {"pinned_host"}


@slow
def test_another_master_dtype_is_refused_in_one_line(tmp_path):
    trainer = run(made(Cell(), f"run.dir={tmp_path}"), 1)
    trainer.save()
    trainer.store.wait()
    other = made(Cell(), f"run.dir={tmp_path}", *LOW[:1], "optimizer.stochastic_rounding=true")
    with pytest.raises(UserError, match="has precision.params='float32' but this run has"):
        other.restore()


@exhaustive
def test_bf16_masters_are_read_as_weights(tmp_path):
    """By what exports, generates and starts other runs: exactly, in any dtype."""
    low = [*LOW[:1], "optimizer.stochastic_rounding=true"]
    trainer = run(made(Cell({"dp": 4}, 1), f"run.dir={tmp_path}", *low), 1)
    trainer.save()
    trainer.store.wait()
    other = made(Cell())
    other.load_params(read_weights(tmp_path / "checkpoints"))
    want = jax.tree.map(lambda x: np.asarray(x, np.float32), trainer.params())
    jax.tree.map(np.testing.assert_array_equal, other.params(), want)
    assert {x.dtype for x in jax.tree.leaves(other.params())} == {np.dtype(np.float32)}
