"""Laws of memory policies: none of them changes a number, and each does what it says."""

import functools

import jax
import numpy as np
import pytest

from mjax.prove import Cell, make_trainer, measure
from tests.marks import exhaustive

CASES = [
    (Cell(), "full", ["train.unroll=0"]),
    (Cell(), "none*1,full*2,attention", []),
    (Cell(), "full*1,dots*2,attention", ["train.offload=[up, attn_out]"]),
    (Cell({"dp": 2, "tp": 2}, 3, 2), "full*1,dots", ["train.offload=all"]),
    (Cell({"cp": 2, "dp": 2}, 1, 3), "dots", ["train.offload=[q, down]"]),
    (Cell({"pp": 2, "dp": 2}, 1, 3), "full*1,attention", []),
]


@functools.cache
def all_kept() -> tuple[float, dict]:
    return first_step(Cell(), "train.remat=none")


def first_step(cell: Cell, *overrides: str) -> tuple[float, dict]:
    first = measure(make_trainer("dense", cell, *overrides), 1).first
    return float(first["loss"]), first["gradients"]


@exhaustive
@pytest.mark.parametrize("cell,remat,more", CASES, ids=lambda c: str(c))
def test_no_policy_changes_loss_or_gradients(cell, remat, more):
    loss, grads = first_step(cell, f"train.remat={remat}", *more)
    want_loss, want = all_kept()
    assert abs(loss - want_loss) < 1e-6 * want_loss
    largest = max(np.abs(w).max() for w in jax.tree.leaves(want))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6 * largest), grads, want)


@exhaustive
def test_what_is_not_kept_is_computed_again():
    """By as many layers as are counted. (The compiler for GPUs, which sees more where layers are
    unrolled, does not undo it: tests/aot/test_memory.py.)"""
    products = []
    for remat in ("none", "full*1,none", "full"):
        keys = f"train.remat={remat}", "train.unroll=0", "model.num_hidden_layers=2"
        made = make_trainer("dense", Cell(), *keys)
        products.append(made.lower().compile().as_text().count("dot("))
    assert products[0] < products[1] < products[2]
    assert products[2] - products[1] == products[1] - products[0]
