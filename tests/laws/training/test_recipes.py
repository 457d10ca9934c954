"""Law of recipes: one that this file defines trains, and nothing else of mjax is asked to know it.

It rounds nothing. So a run by it is a run without a recipe, whatever the mesh.
"""

from dataclasses import dataclass
from typing import ClassVar

import jax
import numpy as np
import pytest

from mjax.config.schema.run import FP8_RECIPES
from mjax.kernels.fp8.recipe import RECIPES, Current, Gradient8, Rounded8, recipe_of
from mjax.prove import Cell, deviation, make_batch, make_trainer
from tests.marks import exhaustive


@dataclass(frozen=True)
class Exact(Current):
    """A recipe whose operands stay as they are, with a state that counts steps."""

    name: ClassVar[str] = "exact"
    remembers: ClassVar[bool] = True

    def round_input(self, x, scales, parallel, amax=None):
        return Rounded8(x, scales[:2])

    def round_weight(self, value, scales, contracted):
        return value

    def round_gradient(self, g, scales, parallel, places=None):
        return Gradient8(g, g.T, scales[:2])

    def product(self, x8, w8, contracted, scales, dtype):
        return x8.values @ w8

    def input_gradient(self, g8, w8, scales, dtype):
        return g8.values @ w8.T

    def weight_gradient(self, x8, g8, dtype, total):
        product = (g8.transposed @ x8.values).T.astype(dtype)
        return product if total is None else total + product

    def supports(self, block):
        return False

    def first_state(self, weights, steps):
        return jax.tree.map(lambda w: np.zeros((w.shape[0], steps), np.float32), weights)

    def next_state(self, state, seen, parallel):
        return jax.tree.map(lambda s: s + 1, state), True


def test_every_recipe_of_the_config_is_built():
    assert set(RECIPES) == set(FP8_RECIPES)


# With layers that are left out and ZeRO, weights are rounded by each matmul, not where stored.
IN_MATMULS = "precision.fp8_skip_layers=1", "precision.fp8_amax_history=3"


@exhaustive
@pytest.mark.parametrize("cell", [Cell({"dp": 2}, 1, 1), Cell({"dp": 2, "cp": 2, "tp": 2}, 1, 2)])
def test_a_recipe_that_rounds_nothing_trains_as_no_recipe(monkeypatch, cell):
    monkeypatch.setitem(RECIPES, "delayed", Exact)
    plain = make_trainer("dense", cell)
    exact = make_trainer("dense", cell, "precision.fp8=delayed", *IN_MATMULS)
    assert isinstance(recipe_of(exact.cfg.precision), Exact)
    batch = make_batch(cell.rows)
    losses = [(float(t.step(batch)["loss"]), float(t.step(batch)["loss"])) for t in (plain, exact)]
    assert deviation(*map(np.asarray, losses)) <= 1e-6
    assert deviation(exact.params(), plain.params()) <= 1e-5
    state = jax.tree.leaves(jax.device_get(exact.state["buffers"]["fp8"]))
    assert state and all((leaf == 2).all() and leaf.shape[1] == 3 for leaf in state)
