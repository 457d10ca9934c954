"""Laws of what only training's router does: jitter of its input, and Sinkhorn's routing."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.models.base.context import Context, Training, tokens_of
from mjax.models.base.dropout import jitter
from mjax.models.moe.sinkhorn import sinkhorn, sinkhorn_experts
from mjax.prove import Cell, compare, holds, make_batch, make_trainer
from mjax.sharding.collectives import LOCAL
from tests.laws.experts.test_capacity import model
from tests.marks import exhaustive, quick

TRAINING = Context(training=Training(dropout=True))


def megatron_sinkhorn(cost: np.ndarray, turns: int) -> np.ndarray:
    """Its formula in float64. The small number in it lets factors drift, but not their products."""
    cost = np.exp(cost)
    of_experts = np.ones(cost.shape[1])
    for _ in range(turns):
        of_tokens = 1 / len(cost) / (cost @ of_experts + 1e-8)
        of_experts = 1 / cost.shape[1] / (of_tokens @ cost + 1e-8)
    return of_experts * cost * of_tokens[:, None]


@pytest.mark.parametrize("spread", [0.1, 1.0, 2.0])
def test_sinkhorn_equals_megatrons_and_balances(spread):
    logits = np.random.default_rng(0).normal(size=(96, 8)) * spread + np.arange(8) / 4
    got, want = np.asarray(sinkhorn(jnp.float32(logits))), megatron_sinkhorn(logits, 2000)
    np.testing.assert_allclose(got, want, rtol=2e-3)
    np.testing.assert_allclose(got.sum(0), 1 / 8, rtol=1e-4)
    np.testing.assert_allclose(got.sum(1), 1 / 96, rtol=1e-3)


def test_sinkhorn_balances_loads_of_each_sequence_alone():
    logits = np.random.default_rng(1).normal(size=(2, 64, 8)) + np.arange(8) / 2
    moe = model("num_experts=8", "router_aux_loss_coef=0.0", "sinkhorn=true").moe
    experts = sinkhorn_experts(jnp.float32(logits), moe, LOCAL)
    plain = jax.lax.top_k(jnp.float32(logits), 2)[1]
    loads, before = (np.bincount(np.ravel(e[0]), minlength=8) for e in (experts, plain))
    assert loads.max() < 1.5 * 16 < 2 * 16 < before.max()
    alone = sinkhorn_experts(jnp.float32(logits[1:]), moe, LOCAL)
    np.testing.assert_array_equal(experts[1:], alone)


def test_jitter_is_uniform_of_each_token_and_off_outside_training():
    x = jnp.ones((3, 40, 64))
    tokens = tokens_of((3, 40), key=jax.random.key(0))
    got = np.asarray(jitter(x, 0.25, tokens, TRAINING, 1))
    assert 0.75 <= got.min() < 0.76 and 1.24 < got.max() <= 1.25
    assert got.mean() == pytest.approx(1, abs=0.01)
    assert got.std() == pytest.approx(0.25 / 3**0.5, rel=0.02)
    assert len(np.unique(got[:, :, 0])) > 100
    other = jitter(x, 0.25, tokens, TRAINING, 2)
    assert (np.asarray(other) != got).mean() > 0.99
    part = replace(tokens, rows=tokens.rows[1:], columns=tokens.columns[8:])
    np.testing.assert_array_equal(jitter(x[1:, 8:], 0.25, part, TRAINING, 1), got[1:, 8:])
    for off in (jitter(x, 0.0, tokens, TRAINING, 1), jitter(x, 0.25, tokens, Context(), 1)):
        assert off is x


ONE_LAYER = ["model.num_hidden_layers=1", "model.layer_pattern=E"]


@exhaustive
def test_evaluation_has_neither():
    batch = make_batch(24)
    off = ["model.moe.sinkhorn=false", "model.moe.router_jitter_noise=0.0"]
    trainer = make_trainer("sinkhorn", Cell(), *ONE_LAYER)
    plain = make_trainer("sinkhorn", Cell(), *ONE_LAYER, *off)
    losses = [float(made.evaluate(batch)[0]) for made in (trainer, plain)]
    assert losses[0] == losses[1]
    steps = [float(made.step(batch)["loss"]) for made in (trainer, plain)]
    assert steps[0] != steps[1]


CASES = [
    ({"pp": 2, "dp": 2, "cp": 2}, 0, 2, ["model.moe.sinkhorn=false"]),
    ({"ep": 2, "tp": 4}, 3, 1, ["model.moe.capacity_factor=1.0"]),
]


@exhaustive
@pytest.mark.parametrize("mesh,zero,micro_batches,keys", quick(CASES))
def test_every_mesh_equals_one_device(mesh, zero, micro_batches, keys):
    record = compare("sinkhorn", Cell(mesh, zero, micro_batches), *keys, steps=1)
    assert holds(record), record
