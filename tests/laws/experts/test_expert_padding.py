"""Laws of `model.moe.skip_padding`: padding meets no expert and moves no router."""

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.models.base.context import tokens_of
from mjax.models.moe.router import Router, counted, route, without_padding
from mjax.models.moe.router_losses import balance_loss, entropy, z_loss
from mjax.prove import BOUND, Cell, deviation, make_batch, make_trainer
from mjax.sharding.collectives import LOCAL
from tests.laws.experts.test_capacity import model
from tests.marks import exhaustive, quick, slow

SKIP = "model.moe.skip_padding=true"
MOE = model("num_experts=8", "router_aux_loss_coef=0.1", "router_z_loss_coef=0.01")


def padded(segments: np.ndarray) -> np.ndarray:
    """Segments whose last tokens are padding: other numbers of a row, in the last row all."""
    segments = segments.copy()
    rows, width = segments.shape
    for row in range(rows):
        segments[row, width - row * 3 % width :] = 0
    segments[-1] = 0
    return segments


def on_a_mesh_and_alone(cell: Cell, figures: Callable) -> list:
    """`figures(where, batch)` on the mesh of `cell` and on one device, for a batch with padding."""
    batch = make_batch(cell.rows)
    batch["segment_ids"] = padded(batch["segment_ids"])
    places = cell, Cell(rows=cell.rows)
    return [jax.tree.map(np.asarray, figures(where, batch)) for where in places]


def routing_of(x: jax.Array, segments: np.ndarray | None):
    router = Router(jax.random.normal(jax.random.key(1), (32, 8)))
    tokens = tokens_of(x.shape[:2])
    if segments is not None:
        tokens = replace(tokens, segments=jnp.asarray(segments, jnp.int32))
    return without_padding(route(x, router, MOE), tokens, LOCAL)


@pytest.mark.parametrize("loss", [balance_loss, z_loss, entropy])
def test_a_loss_of_a_padded_sequence_is_that_of_its_text(loss):
    x = jax.random.normal(jax.random.key(0), (1, 12, 32))
    whole = routing_of(x, np.arange(12)[None] < 7)
    alone = routing_of(x[:, :7], None)
    np.testing.assert_allclose(loss(whole, MOE, LOCAL), loss(alone, MOE, LOCAL), rtol=1e-6)
    nothing = routing_of(x, np.zeros((1, 12)))
    assert loss(nothing, MOE, LOCAL) == 0


def test_padding_counts_for_no_expert_bias():
    x = jax.random.normal(jax.random.key(0), (2, 12, 32))
    segments = np.ones((2, 12)) * (np.arange(12) < [[12], [5]])

    def gates(bias):
        return counted(routing_of(x, segments), bias).gates.sum()

    counts = jax.grad(gates)(jnp.zeros(8))
    assert counts.sum() == 2 * (12 + 5)


@slow
def test_text_is_computed_as_without_the_key_and_padding_gets_nothing():
    """One layer of experts alone: the output of padding is its input."""
    keys = ["model.num_hidden_layers=1", 'model.layer_pattern="[E]"']
    batch = make_batch(24)
    batch["segment_ids"] = padded(batch["segment_ids"])
    batch["loss_mask"] = (batch["segment_ids"] > 0).astype(np.float32)
    losses = [
        float(make_trainer("experts", Cell(), *keys, *more).evaluate(batch)[0])
        for more in ([], [SKIP])
    ]
    assert losses[0] == losses[1]
    batch["loss_mask"] = (batch["segment_ids"] == 0).astype(np.float32)
    plain, skipped = (
        float(make_trainer("experts", Cell(), *keys, *more).evaluate(batch)[0])
        for more in ([], [SKIP])
    )
    assert abs(plain - skipped) > 1e-3


CASES = [
    ({"ep": 2, "cp": 2, "tp": 2}, 1, 3, []),
    ({"pp": 2, "dp": 2, "cp": 2}, 0, 2, ["model.moe.expert_bias=true"]),
    ({"dp": 2, "ep": 2, "tp": 2}, 3, 1, ["model.moe.capacity_factor=1.0"]),
    ({"dp": 4, "tp": 2}, 0, 1, ["model.moe.router_aux_loss_over=global_batch"]),
]


@exhaustive
@pytest.mark.parametrize("mesh,zero,micro_batches,keys", quick(CASES))
def test_every_mesh_equals_one_device(mesh, zero, micro_batches, keys):
    def figures(where, batch):
        return tuple(make_trainer("experts", where, SKIP, *keys).grads(batch))

    assert deviation(*on_a_mesh_and_alone(Cell(mesh, zero, micro_batches), figures)) <= BOUND
