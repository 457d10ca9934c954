"""Laws of the expert axis: router and block equal plain references; every mesh, one answer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mjax.config import load
from mjax.models.branch import BranchInputs
from mjax.models.context import Context, tokens_of
from mjax.models.experts import reference
from mjax.models.moe import MoE
from mjax.models.router import balance_loss, route
from mjax.prove import FEATURES, SMALL, Cell, compare, deviation, holds, make_batch, make_trainer
from mjax.sharding.collectives import LOCAL
from tests.marks import quick

MODELS = {
    "all": [],
    "mixed": ["model.layer_pattern=GE", "model.num_hidden_layers=4"],
    "whole_softmax": [
        "model.layer_pattern=GEE",
        "model.num_hidden_layers=3",
        "model.moe.norm_topk_prob=false",
        "model.moe.num_experts_per_tok=3",
        "model.mlp_gated=false",
        "model.tie_word_embeddings=true",
        "model.hidden_dropout=0.1",
        "optimizer.name=muon",
    ],
}


def config(name: str, *overrides: str):
    return load(None, [*SMALL, *FEATURES["experts"], *MODELS[name], *overrides]).model


CASES = [
    ("mixed", {"ep": 8}, 1, 1),
    ("mixed", {"dp": 4, "ep": 2}, 2, 2),
    ("mixed", {"ep": 4, "tp": 2}, 0, 3),
    ("mixed", {"ep": 2, "tp": 4}, 3, 4),
    ("mixed", {"ep": 2, "cp": 2, "tp": 2}, 3, 2),
    ("mixed", {"pp": 2, "ep": 2, "tp": 2}, 1, 4),
    ("mixed", {"pp": 2, "dp": 2, "ep": 2}, 1, 3),
    ("whole_softmax", {"dp": 2, "ep": 4}, 1, 1),
    ("whole_softmax", {"dp": 2, "ep": 2, "tp": 2}, 3, 2),
]


@pytest.mark.parametrize("name,mesh,zero,micro_batches", quick(CASES, 5))
def test_gradients_equal_one_device(name, mesh, zero, micro_batches):
    record = compare("experts", Cell(mesh, zero, micro_batches), *MODELS[name], steps=1)
    assert holds(record), record


def test_balance_loss_is_reported_apart():
    got = make_trainer("experts", Cell(), *MODELS["mixed"]).step(make_batch(24))
    assert float(got["aux_loss"]) > 2 * 0.1  # two E blocks, and balance is the least there is
    assert float(got["loss"]) < 7


@pytest.mark.parametrize("norm", [True, False])
def test_router_and_balance_loss_equal_numpy(norm):
    cfg = config("all", f"model.moe.norm_topk_prob={str(norm).lower()}")
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(3, 16, 32)), rng.normal(size=(32, 8))
    routing = route(jnp.float32(x), jnp.float32(w), cfg)
    gates = np.zeros((3, 16, 8), np.float32)
    np.put_along_axis(gates, np.asarray(routing.experts), np.asarray(routing.gates), -1)
    chosen, probs = np.asarray(routing.chosen), np.asarray(routing.probs)
    logits = x @ w
    soft = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    want_gates, want_chosen = np.zeros_like(soft), np.zeros_like(soft)
    for place in np.ndindex(3, 16):
        best = np.argsort(-logits[place])[:2]
        scale = soft[place][best].sum() if norm else 1
        want_gates[place][best] = soft[place][best] / scale
        want_chosen[place][best] = 1
    np.testing.assert_array_equal(chosen, want_chosen)
    np.testing.assert_allclose(gates, want_gates, rtol=2e-5, atol=1e-7)
    np.testing.assert_allclose(probs, soft, rtol=2e-5)
    sequences = [8 * (c.mean(0) / 2 * p.mean(0)).sum() for c, p in zip(want_chosen, soft, strict=1)]
    got = float(balance_loss(routing, cfg, LOCAL))
    assert got == pytest.approx(0.1 * sum(sequences), rel=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_block_equals_reference_forward_and_backward(name):
    cfg = config(name)
    block = MoE(cfg, 0.1, nnx.Rngs(0))
    inputs = BranchInputs(tokens_of((2, 16)), Context(), "E")
    graph, params = nnx.split(block)
    x = jax.random.normal(jax.random.key(1), (2, 16, cfg.hidden_size))

    def ours(params, x):
        return jnp.sin(nnx.merge(graph, params)(x, inputs).y).sum()

    def plain(params, x):
        weights = (params[name][...] for name in ("router", "up", "down"))
        return jnp.sin(reference(x.reshape(-1, x.shape[-1]), *weights, cfg)).sum()

    ours, plain = (jax.value_and_grad(f, (0, 1))(params, x) for f in (ours, plain))
    assert float(ours[0]) == pytest.approx(float(plain[0]), rel=1e-5)
    assert deviation(ours[1], plain[1]) <= 1e-5
