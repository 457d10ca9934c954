"""Laws of unrolled layers, whose weights and sums of gradients are arrays of their own: no number
depends on it, on any mesh, and what a matmul adds to its sum is not rounded on the way."""

import functools

import jax
import numpy as np
import pytest

from mjax.plan.execution import DeviceFacts
from mjax.prove import Cell, make_batch, make_trainer, measure
from tests.marks import exhaustive, quick, slow

UNROLLED = "train.unroll=0"
# Of one micro-batch each layer's weights are gathered, and its gradients reduced, by themselves.
ONE = [
    ("dense", Cell({"dp": 2, "tp": 2}, 2, 1)),
    ("experts", Cell({"dp": 2, "ep": 2}, 1, 1)),
    ("tied", Cell({"dp": 2, "tp": 2}, 1, 1)),
    ("odd widths", Cell({"dp": 4}, 1, 1)),
    ("dense", Cell({"dp": 2, "cp": 2}, 3, 2)),  # ZeRO-3: in any case
]
CASES = [
    ("dense", Cell({}, 0, 3), []),
    ("biases", Cell({"tp": 2}, 0, 1), ["train.remat=none"]),
    ("dense", Cell({"dp": 2, "tp": 2}, 1, 3), ["train.remat=full*1,dots"]),
    ("dense", Cell({"cp": 2, "tp": 2}, 1, 3), []),
    ("dense", Cell({"dp": 2, "tp": 2}, 1, 3), ["mesh.tp_overlap=always"]),
    ("experts", Cell({"dp": 2, "ep": 2}, 1, 3), []),
    ("experts", Cell({"tp": 2}, 0, 2), ["train.experts=loop"]),
    ("tied", Cell({"dp": 2, "tp": 2}, 1, 2), []),  # kv weights of which devices read a part
    ("odd widths", Cell({"dp": 4}, 1, 2), []),  # padded shards
    *((feature, cell, ["train.remat=none"]) for feature, cell in ONE),
]


@pytest.fixture(autouse=True)
def no_array_is_little(monkeypatch):
    """Or those of so small a model would go the way of vectors."""
    monkeypatch.setattr("mjax.sharding.collectives._LITTLE", 0)


@functools.cache
def looped(feature: str) -> tuple[float, dict]:
    return first_step(feature, Cell())


def first_step(feature: str, cell: Cell, *more: str) -> tuple[float, dict]:
    first = measure(make_trainer(feature, cell, *more), 1).first
    return float(first["loss"]), first["gradients"]


@slow
@pytest.mark.parametrize("feature, cell, more", quick(CASES, 1), ids=str)
def test_loss_and_gradients_are_those_of_a_loop(feature, cell, more):
    loss, grads = first_step(feature, cell, UNROLLED, *more)
    want_loss, want = looped(feature)
    assert abs(loss - want_loss) < 1e-6 * want_loss
    largest = max(np.abs(w).max() for w in jax.tree.leaves(want))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6 * largest), grads, want)


EIGHT_BITS = [
    ("delayed", Cell({"dp": 2}, 1, 3), ["train.remat=dots"]),
    ("current", Cell({"dp": 2}, 1, 3), ["train.remat=dots"]),
    ("delayed", Cell({"dp": 4}, 1, 1), ["train.remat=none"]),
    ("delayed", Cell({"dp": 2}, 1, 1), ["train.remat=none", "precision.fp8_skip_layers=1"]),
]


@exhaustive
@pytest.mark.parametrize("recipe, cell, keys", quick(EIGHT_BITS), ids=str)
def test_with_8_bits_too(recipe, cell, keys):
    """Of micro-batches bits of weights are turned once, their sums are scaled in the matmul; of one
    the bits are gathered layer by layer, while gradients go to the weights."""
    (loss, grads), (want_loss, want) = (
        first_step("dense", cell, f"precision.fp8={recipe}", *keys, *more)
        for more in ([UNROLLED], [])
    )
    assert abs(loss - want_loss) < 1e-6 * want_loss
    largest = max(np.abs(w).max() for w in jax.tree.leaves(want))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6 * largest), grads, want)


@slow
def test_gradients_of_devices_are_summed_in_fp32():
    """They travel in bf16; where one device of four has tokens that count, bf16 holds the sum."""
    trainer = make_trainer("dense", Cell({"dp": 4}, 1, 1), "precision.compute=bfloat16")
    trainer.init()
    batch = make_batch(24)
    up = np.asarray(trainer.grads(batch)[2]["dense"]["mlp"]["up"])
    assert (up.astype(jax.numpy.bfloat16).astype(np.float32) == up).mean() < 0.5
    batch["loss_mask"][6:] = 0
    up = np.asarray(trainer.grads(batch)[2]["dense"]["mlp"]["up"])
    assert (up.astype(jax.numpy.bfloat16).astype(np.float32) == up).all()


@exhaustive
@pytest.mark.parametrize("more, exact", [([UNROLLED], True), ([], False)])
def test_a_sum_takes_gradients_unrounded(more, exact):
    """Of three micro-batches one has tokens that count: in a loop its bf16 gradient is the sum."""
    trainer = make_trainer("dense", Cell({}, 0, 3), "precision.compute=bfloat16", *more)
    trainer.init()
    batch = make_batch(24)
    batch["loss_mask"][8:] = 0
    up = np.asarray(trainer.grads(batch)[2]["dense"]["mlp"]["up"])
    short = up.astype(jax.numpy.bfloat16).astype(np.float32) == up
    assert short.mean() < 0.05 if exact else short.all()


@exhaustive
def test_hidden_exchanges_change_no_bit(monkeypatch):
    """In bf16, where another order of roundings would show."""
    keys = UNROLLED, "train.remat=none", "precision.compute=bfloat16"
    hidden = first_step("biases", Cell({"dp": 4}, 1, 1), *keys)
    cannot = DeviceFacts(copies_permutes=False, copies_exchanges=False)
    monkeypatch.setattr("mjax.train.programs.device_facts", lambda _: cannot)
    at_the_end = first_step("biases", Cell({"dp": 4}, 1, 1), *keys)
    jax.tree.map(np.testing.assert_array_equal, hidden, at_the_end)
