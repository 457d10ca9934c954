"""Laws of transformations of optax: every mesh, ZeRO stage and restart gives the same training."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.errors import UserError
from mjax.prove import Cell, make_batch, make_trainer, replicas_identical
from mjax.train import Trainer
from tests.marks import exhaustive
from tests.updates import canonical_state, updated_state

BY_NAME = {
    "momentum": ["optimizer.name=optax.sgd", "optimizer.args.momentum=0.9"],
    "lion": ["optimizer.name=optax.lion"],
    "adabelief": ["optimizer.name=optax.adabelief"],
    "adagrad": ["optimizer.name=optax.adagrad"],
}
KEYS = ["train.remat=dots", "schedule.warmup_steps=1", "model.num_hidden_layers=2"]
HOST = "optimizer.offload=true"


def made(cell: Cell, name: str, *overrides: str) -> Trainer:
    return make_trainer("odd widths", cell, *KEYS, *BY_NAME[name], *overrides)


def run(trainer: Trainer, steps: int) -> list[float]:
    losses = []
    for i in range(trainer.step_number, trainer.step_number + steps):
        batch = make_batch(trainer.cfg.train.global_batch_size, seed=i)
        losses.append(float(trainer.step(batch)["loss"]))
    return losses


def assert_equal(a: dict, b: dict) -> None:
    jax.tree.map(np.testing.assert_array_equal, a, b)


def updated(name: str, cell: Cell, *overrides: str) -> dict:
    """Parameters and moments after three updates by the same gradients everywhere."""
    return updated_state(made(cell, name, *overrides), 3)


@exhaustive
@pytest.mark.parametrize("name", BY_NAME)
def test_every_mesh_and_zero_stage_updates_alike(name):
    """Though shards are padded and pipelines store layers in another order.

    Bit for bit, but where the compiler rounds otherwise for other shapes.
    """
    alone = updated(name, Cell())
    for mesh, zero in [
        ({"dp": 8}, 1),
        ({"dp": 2, "tp": 2, "cp": 2}, 3),
        ({"pp": 2, "dp": 2, "tp": 2}, 1),
    ]:
        got = updated(name, Cell(mesh, zero))
        if name in ("momentum", "lion"):
            assert_equal(got, alone)
        else:
            jax.tree.map(
                functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7), got, alone
            )


PIPELINE = Cell({"pp": 2, "dp": 2, "tp": 2}, 1, 2)


@functools.cache
def losses_of_one_device(name: str) -> list[float]:
    return run(made(Cell(), name), 5)


@exhaustive
@pytest.mark.parametrize(
    ("name", "cell"),
    [
        *[("momentum", Cell({"dp": 4}, zero, 2)) for zero in (0, 3)],
        *[(name, PIPELINE) for name in ("momentum", "lion")],
        ("lion", Cell({"dp": 4}, 3, 2)),
    ],
    ids=str,
)
def test_training_equals_one_device(name, cell):
    many = made(cell, name)
    np.testing.assert_allclose(run(many, 5), losses_of_one_device(name), rtol=1e-4)
    assert replicas_identical(many.state)
    assert many.state["opt"]["count"] == 5


@exhaustive
@pytest.mark.parametrize("name", ["lion", "adagrad"])
def test_resumed_is_unbroken_bit_for_bit_and_another_mesh_reads_the_same_state(tmp_path, name):
    where = [f"run.dir={tmp_path}"]
    cell = Cell({"dp": 4}, 1)
    whole = made(cell, name, *where)
    run(whole, 2)
    whole.save()
    whole.store.wait()
    saved = canonical_state(whole)
    rest = run(whole, 2)
    again = made(cell, name, *where)
    assert again.restore() == 2
    assert run(again, 2) == rest
    assert_equal(canonical_state(again), canonical_state(whole))
    resumed = made(Cell({"pp": 2, "tp": 2}, 3), name, *where)
    assert resumed.restore() == 2
    assert_equal(canonical_state(resumed), saved)
    np.testing.assert_allclose(run(resumed, 2), rest, rtol=1e-4)


@exhaustive
def test_moments_on_the_host_train_the_same_parameters_bit_for_bit(monkeypatch):
    """AdaGrad's begin at 0.1, also there."""
    monkeypatch.setattr("mjax.optim.offload.SLICE", 5000)  # several slices and a rest
    cell = Cell({"pp": 2, "dp": 2}, 1, 2)
    here, there = made(cell, "adagrad", "optimizer.offload=false"), made(cell, "adagrad", HOST)
    assert run(here, 3) == run(there, 3)
    assert_equal(canonical_state(there), canonical_state(here))
    moments = there.state["opt"]["sum_of_squares"]
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves(moments)}
    assert kinds == {"pinned_host"}


@exhaustive
def test_a_step_with_bad_numbers_leaves_the_state_alone():
    trainer = made(Cell({"dp": 2}, 1), "lion", "optimizer.clip_grad_norm=0")
    run(trainer, 1)
    before = jax.tree.map(np.asarray, trainer.state)
    nan = {"loss_mask": np.full((24, 16), np.nan, np.float32)}
    assert not trainer.step(make_batch(24) | nan)["finite"]
    assert_equal(trainer.state, before | {"step": before["step"]})


@exhaustive
def test_rounding_at_random_is_the_same_on_every_mesh():
    low = [
        "precision.params=bfloat16",
        "optimizer.mu_dtype=bfloat16",
        "optimizer.stochastic_rounding=true",
    ]
    alone = updated("lion", Cell(), *low)
    assert {x.dtype for x in jax.tree.leaves(alone["opt"]["mu"])} == {jnp.dtype(jnp.bfloat16)}
    assert_equal(updated("lion", Cell({"pp": 2, "dp": 2}, 1), *low), alone)


@exhaustive
def test_other_arguments_are_refused_before_an_array_is_read(tmp_path):
    where = f"run.dir={tmp_path}"
    trainer = made(Cell(), "momentum", where)
    run(trainer, 1)
    trainer.save()
    trainer.store.wait()
    with pytest.raises(UserError, match="has optimizer.args={'momentum': 0.9} but this run has"):
        made(Cell(), "momentum", where, "optimizer.args.momentum=null").restore()
    assert (tmp_path / "checkpoints" / "1").is_dir()
    with pytest.raises(UserError, match="has optimizer.name='optax.sgd' but this run has"):
        made(Cell(), "lion", where).restore()


def test_a_transformation_that_is_not_elementwise_stops_the_trainer():
    with pytest.raises(UserError, match="'optax.lamb' is not elementwise"):
        make_trainer("dense", Cell(), "optimizer.name=optax.lamb")
