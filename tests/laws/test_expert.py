"""Laws of the expert axis: router and block equal plain references; every mesh, one answer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mjax.config import Config, load
from mjax.models.context import Context
from mjax.models.moe import MoE, balance_loss, reference, route
from mjax.sharding.collectives import LOCAL
from mjax.sharding.mesh import make_mesh
from mjax.train import Trainer
from tests.laws.common import BASE, ROWS, curve, deviation, make_batch

MOE = [
    "model.layer_pattern=E",
    "model.num_experts=8",
    "model.num_experts_per_tok=2",
    "model.moe_intermediate_size=24",
    "model.router_aux_loss_coef=0.1",
]
MODELS = {
    "all": MOE,
    "mixed": [*MOE, "model.layer_pattern=GE", "model.num_hidden_layers=4"],
    "whole_softmax": [
        *MOE,
        "model.layer_pattern=GEE",
        "model.num_hidden_layers=3",
        "model.norm_topk_prob=false",
        "model.num_experts_per_tok=3",
        "model.mlp_gated=false",
        "model.tie_word_embeddings=true",
        "model.hidden_dropout=0.1",
        "optimizer.name=muon",
    ],
}
MESHES = [(1, 8, 1), (4, 2, 1), (2, 4, 1), (2, 2, 2), (1, 4, 2), (1, 2, 4)]  # dp, ep, tp


def config(name: str, *overrides: str) -> Config:
    return load(None, [*BASE, *MODELS[name], *overrides])


def trainer(name: str, dp: int, ep: int, tp: int, micro_batches: int, *overrides: str) -> Trainer:
    size = ROWS // (dp * ep) // micro_batches
    mesh = [f"mesh.dp={dp}", f"mesh.ep={ep}", f"mesh.tp={tp}", f"train.micro_batch_size={size}"]
    cfg = config(name, *mesh, *overrides)
    count = dp * ep * tp * cfg.mesh.cp * cfg.mesh.pp
    made = Trainer(cfg, make_mesh(cfg.mesh, jax.devices()[:count]))
    made.init()
    return made


@functools.cache
def one_device(name: str) -> tuple:
    """(loss, norm, gradients) on one device in one micro-batch."""
    loss, norm, grads = trainer(name, 1, 1, 1, 1).grads(make_batch())
    return float(loss), float(norm), jax.tree.map(np.asarray, grads)


CASES = [("mixed", *mesh, n) for mesh in MESHES for n in (1, 2, 4)]
CASES += [(name, *mesh, 2) for name in ("all", "whole_softmax") for mesh in MESHES]


@pytest.mark.parametrize("name,dp,ep,tp,micro_batches", CASES)
def test_gradients_equal_one_device(name, dp, ep, tp, micro_batches):
    loss, norm, grads = trainer(name, dp, ep, tp, micro_batches).grads(make_batch())
    loss1, norm1, grads1 = one_device(name)
    assert abs(float(loss) - loss1) <= 1e-5 * loss1
    assert abs(float(norm) - norm1) <= 1e-5 * norm1
    assert deviation(grads, grads1) <= 1e-5
    assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(grads1)), "a gradient is all zero"


@pytest.mark.parametrize(
    "dp,ep,tp,overrides",
    [
        (2, 2, 2, ["mesh.zero=0"]),
        (2, 2, 2, ["mesh.zero=2"]),
        (2, 2, 2, ["mesh.zero=3"]),
        (1, 4, 1, ["mesh.cp=2"]),
        (1, 2, 2, ["mesh.cp=2", "mesh.zero=3"]),
        (2, 2, 1, ["mesh.pp=2"]),
        (1, 2, 2, ["mesh.pp=2"]),
        (1, 2, 1, ["mesh.pp=2", "mesh.cp=2"]),
    ],
)
def test_composes_with_zero_context_and_pipeline(dp, ep, tp, overrides):
    loss, norm, grads = trainer("mixed", dp, ep, tp, 4, *overrides).grads(make_batch())
    loss1, norm1, grads1 = one_device("mixed")
    assert abs(float(loss) - loss1) <= 1e-5 * loss1
    assert abs(float(norm) - norm1) <= 1e-5 * norm1
    assert deviation(grads, grads1) <= 1e-5


def test_twenty_steps_agree():
    one = curve(trainer("mixed", 1, 1, 1, 1), 20)
    np.testing.assert_allclose(curve(trainer("mixed", 2, 2, 2, 2), 20), one, rtol=1e-4)


def test_balance_loss_is_reported_apart_and_alike_on_every_mesh():
    def step(*mesh):
        return {k: float(v) for k, v in trainer("mixed", *mesh).step(make_batch()).items()}

    one, many = step(1, 1, 1, 1), step(2, 2, 2, 2)
    assert one["aux_loss"] > 2 * 0.1  # two E blocks, and balance is the least there is
    for key in one:
        assert many[key] == pytest.approx(one[key], rel=1e-5)


def test_ep_without_experts_is_data_parallelism():
    cfg = load(None, [*BASE, "mesh.dp=2", "mesh.ep=4", "train.micro_batch_size=4"])
    made = Trainer(cfg, make_mesh(cfg.mesh, jax.devices()))
    made.init()
    plain = load(None, [*BASE, "mesh.dp=8", "train.micro_batch_size=4"])
    other = Trainer(plain, make_mesh(plain.mesh, jax.devices()))
    other.init()
    assert deviation(made.grads(make_batch())[2], other.grads(make_batch())[2]) <= 1e-5


@pytest.mark.parametrize("norm", [True, False])
def test_router_and_balance_loss_equal_numpy(norm):
    cfg = config("all", f"model.norm_topk_prob={str(norm).lower()}").model
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(3, 16, 32)), rng.normal(size=(32, 8))
    gates, chosen, probs = (np.asarray(a) for a in route(jnp.float32(x), jnp.float32(w), cfg))
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
    got = float(balance_loss(jnp.float32(chosen), jnp.float32(probs), cfg, LOCAL))
    assert got == pytest.approx(0.1 * sum(sequences), rel=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_block_equals_reference_forward_and_backward(name):
    cfg = config(name).model
    block = MoE(cfg, 0.1, nnx.Rngs(0))
    graph, params = nnx.split(block)
    x = jax.random.normal(jax.random.key(1), (2, 16, cfg.hidden_size))

    def ours(params, x):
        return jnp.sin(nnx.merge(graph, params)(x, Context())[0]).sum()

    def plain(params, x):
        weights = (params[name][...] for name in ("router", "up", "down"))
        return jnp.sin(reference(x.reshape(-1, x.shape[-1]), *weights, cfg)).sum()

    ours, plain = (jax.value_and_grad(f, (0, 1))(params, x) for f in (ours, plain))
    assert float(ours[0]) == pytest.approx(float(plain[0]), rel=1e-5)
    assert deviation(ours[1], plain[1]) <= 1e-5
