"""Laws of the expert axis: router and block equal plain references; every mesh, one answer."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mjax.config import load
from mjax.config.schema.model import ModelConfig
from mjax.models.base.branch import BranchInputs
from mjax.models.base.context import Context, tokens_of
from mjax.models.moe import layer
from mjax.models.moe.expert import Expert
from mjax.models.moe.layer import MoE
from mjax.models.moe.router import Router, balanced, counted, route
from mjax.models.moe.router_losses import balance_loss, entropy, z_loss
from mjax.prove import FEATURES, SMALL, Cell, compare, deviation, holds, make_batch, make_trainer
from mjax.sharding.collectives import LOCAL
from tests.marks import exhaustive, quick

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
    ("mixed", {"pp": 2, "ep": 2, "tp": 2}, 1, 4),
    ("whole_softmax", {"dp": 2, "ep": 2, "tp": 2}, 3, 2),
]


@exhaustive
@pytest.mark.parametrize("name,mesh,zero,micro_batches", CASES)
def test_gradients_equal_one_device(name, mesh, zero, micro_batches):
    record = compare("experts", Cell(mesh, zero, micro_batches), *MODELS[name], steps=1)
    assert holds(record), record


@exhaustive
def test_balance_loss_is_reported_apart():
    got = make_trainer("experts", Cell(), *MODELS["mixed"]).step(make_batch(24))
    assert float(got["aux_loss"]) > 2 * 0.1  # two E blocks, and balance is the least there is
    assert float(got["loss"]) < 7


LATENT = ["model.moe.latent_size=12", "model.moe.shared_expert_intermediate_size=16"]
LATENT_CASES = [
    ({"ep": 2, "cp": 2, "tp": 2}, 3, 2, []),
    ({"pp": 2, "ep": 2, "tp": 2}, 1, 4, ["train.expert_exchange=all_to_all"]),
    ({"dp": 2, "tp": 4}, 2, 1, ["model.mlp_bias=true"]),
]


@exhaustive
@pytest.mark.parametrize("mesh,zero,micro_batches,keys", LATENT_CASES)
def test_latent_experts_equal_one_device(mesh, zero, micro_batches, keys):
    record = compare("experts", Cell(mesh, zero, micro_batches), *LATENT, *keys, steps=1)
    assert holds(record), record


ROUTERS = {
    "softmax over the chosen": [],
    "softmax over all": ["norm_topk_prob=false", "routed_scaling_factor=16.0"],
    "sigmoid": ["scoring_func=sigmoid"],
    "sigmoid, not normalized": ["scoring_func=sigmoid", "norm_topk_prob=false"],
    "DeepSeek-V2": ["norm_topk_prob=false", "n_group=4", "topk_group=2", "group_score_topk=1"],
    "DeepSeek-V3": ["scoring_func=sigmoid", "n_group=2", "routed_scaling_factor=2.5"],
    "bias": ["router_bias=true"],
}


class Reference(NamedTuple):
    """Experts [T, k] in rising order, gates [T, E], probabilities [T, E] and logits [T, E]."""

    experts: np.ndarray
    gates: np.ndarray
    probs: np.ndarray
    logits: np.ndarray


def numpy_router(x: np.ndarray, w: np.ndarray, bias: np.ndarray, moe) -> Reference:
    """The router of x [T, D] token by token, in float64, from the papers' formulas."""
    logits = x @ w + bias * moe.router_bias
    softmax = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    scores = softmax if moe.scoring_func == "softmax" else 1 / (1 + np.exp(-logits))
    experts = np.zeros((len(x), moe.num_experts_per_tok), int)
    gates = np.zeros_like(scores)
    for token, score in enumerate(scores):
        groups = np.split(score, moe.n_group)
        of_groups = [np.sort(group)[-moe.group_score_topk :].sum() for group in groups]
        allowed = np.argsort(of_groups)[-moe.topk_group :]
        size = len(score) // moe.n_group
        ranked = [s if e // size in allowed else -1 for e, s in enumerate(score)]
        best = np.sort(np.argsort(ranked)[-moe.num_experts_per_tok :])
        total = score[best].sum() if moe.norm_topk_prob else 1
        gates[token, best] = score[best] / total * moe.routed_scaling_factor
        experts[token] = best
    return Reference(experts, gates, scores / scores.sum(-1, keepdims=True), logits)


@pytest.mark.parametrize("over", ["sequence", "global_batch"])
@pytest.mark.parametrize("name", ROUTERS)
def test_router_and_its_losses_equal_numpy(name, over):
    keys = [*ROUTERS[name], "router_z_loss_coef=0.01", f"router_aux_loss_over={over}"]
    cfg = config("all", *(f"model.moe.{key}" for key in keys))
    rng = np.random.default_rng(0)
    x, w, bias = rng.normal(size=(3, 16, 32)), rng.normal(size=(32, 8)), rng.normal(size=8)
    router = Router(jnp.float32(w), jnp.float32(bias) if cfg.moe.router_bias else None)
    routing = route(jnp.float32(x), router, cfg)
    want = numpy_router(x.reshape(-1, 32), w, bias, cfg.moe)
    gates = np.zeros((48, 8))
    np.put_along_axis(gates, np.asarray(routing.experts).reshape(48, 2), 1.0, -1)
    np.testing.assert_array_equal(gates > 0, want.gates > 0)
    got = np.asarray(routing.gates).reshape(48, 2)
    np.put_along_axis(gates, np.asarray(routing.experts).reshape(48, 2), got, -1)
    np.testing.assert_allclose(gates, want.gates, rtol=5e-5, atol=1e-7)
    np.testing.assert_allclose(routing.probs.reshape(48, 8), want.probs, rtol=5e-5, atol=1e-7)

    parts = 3 if over == "sequence" else 1
    best = np.argsort(want.probs)[:, -2:].reshape(parts, -1)
    means = want.probs.reshape(parts, -1, 8).mean(1)
    loss = 0.0
    for choices, mean in zip(best, means, strict=True):
        loss += 0.1 * 8 * (np.bincount(choices, minlength=8) / choices.size * mean).sum() / parts
    assert float(balance_loss(routing, cfg, LOCAL)) / 3 == pytest.approx(loss, rel=1e-5)
    squares = np.log(np.exp(want.logits).sum(-1)) ** 2
    assert float(z_loss(routing, cfg, LOCAL)) / 3 == pytest.approx(0.01 * squares.mean(), rel=1e-5)
    entropies = -(want.probs * np.log(want.probs)).sum(-1)
    got = float(entropy(routing, cfg, LOCAL)) / 3
    assert got == pytest.approx(entropies.mean() / cfg.num_hidden_layers, rel=1e-5)


def test_forced_balance_uses_all_experts_alike():
    cfg = config("all", "model.moe.force_balanced=true", "model.moe.scoring_func=sigmoid")
    x = jax.random.normal(jax.random.key(0), (4, 16, 32))
    routing = route(x, Router(jax.random.normal(jax.random.key(1), (32, 8))), cfg)
    routing = balanced(routing, tokens_of((4, 16)), cfg, LOCAL)
    np.testing.assert_array_equal(routing.chosen.sum(1), np.full((4, 8), 4))
    np.testing.assert_array_equal(routing.chosen.max(-1), 1)
    np.testing.assert_allclose(routing.gates.sum(-1), 1, rtol=1e-6)


ROUTING = [
    ({"dp": 2, "ep": 2, "tp": 2}, 1, 1, ["model.moe.router_aux_loss_over=global_batch"]),
    ({"ep": 2, "cp": 4}, 2, 3, ["model.moe.force_balanced=true"]),
]


@exhaustive
@pytest.mark.parametrize("mesh,zero,micro_batches,keys", ROUTING)
def test_routing_equals_one_device(mesh, zero, micro_batches, keys):
    record = compare("routing", Cell(mesh, zero, micro_batches), *keys, steps=1)
    assert holds(record), record


BIASES = [
    ({"ep": 2, "tp": 4}, 3, 2, []),
    ({"pp": 2, "dp": 2, "cp": 2}, 1, 3, ["precision.grad_accum=bfloat16"]),
    ({"pp": 4, "ep": 2}, 0, 2, ["model.num_hidden_layers=5", "model.layer_pattern=GEE"]),
    ({"dp": 4}, 2, 1, ["precision.fp8=delayed", "train.freeze=[embedding]"]),
]


def biases(trainer) -> np.ndarray:
    """Those of all layers, [L, E]."""
    return np.asarray(trainer.params()["moe"]["mlp"]["expert_bias"])


@exhaustive
@pytest.mark.parametrize("mesh,zero,micro_batches,keys", BIASES)
def test_experts_biases_are_equal_on_every_mesh(mesh, zero, micro_batches, keys):
    """The same bits: after one step, whose loads no rounding moves, each has gone one step."""
    common = [key for key in keys if "grad_accum" not in key]
    mine = make_trainer("expert bias", Cell(mesh, zero, micro_batches), *keys)
    one = make_trainer("expert bias", Cell(), *common)
    loads = [trainer.step(make_batch(24))["load_imbalance"] for trainer in (mine, one)]
    assert float(loads[0]) == pytest.approx(float(loads[1]), rel=1e-6) and loads[0] > 1
    np.testing.assert_array_equal(biases(mine), biases(one))
    assert set(np.unique(np.abs(biases(one)))) <= {np.float32(0), np.float32(0.001)}


@exhaustive
def test_experts_biases_follow_the_loads_choose_and_stay_in_evaluation(monkeypatch, tmp_path):
    chosen = []

    def watch(routing, bias):
        jax.debug.callback(
            lambda experts: chosen.append(np.bincount(experts.ravel())), routing.experts
        )
        return counted(routing, bias)

    monkeypatch.setattr(layer, "counted", watch)
    keys = f"run.dir={tmp_path}", "train.remat=full"
    trainer, resumed = (make_trainer("expert bias", Cell(), *keys) for _ in range(2))
    trainer.step(make_batch(24))
    jax.effects_barrier()
    loads = np.array(chosen[:1])  # the backward routes again
    assert loads.shape == (1, 8) and set(loads.sum(1)) == {24 * 16 * 2}
    np.testing.assert_array_equal(biases(trainer), np.float32(0.001) * np.sign(96 - loads))
    trainer.save()
    trainer.store.wait()
    assert resumed.restore() == 1
    np.testing.assert_array_equal(biases(resumed), biases(trainer))
    resumed.evaluate(make_batch(24))
    np.testing.assert_array_equal(biases(resumed), biases(trainer))


def test_experts_biases_choose_but_do_not_weigh():
    cfg = config("all", "model.moe.scoring_func=sigmoid", "model.moe.norm_topk_prob=false")
    x, w = jax.random.normal(jax.random.key(0), (2, 3, 32)), jnp.zeros((32, 8))
    routing = route(x, Router(w, expert_bias=jnp.arange(8.0)), cfg)
    np.testing.assert_array_equal(routing.experts, np.broadcast_to([7, 6], (2, 3, 2)))
    np.testing.assert_array_equal(routing.gates, 0.5)


def reference(
    x: jax.Array, router: jax.Array, up: jax.Array, down: jax.Array, cfg: ModelConfig
) -> jax.Array:
    """The output [T, D] of a block for x [T, D] on one device, token by token."""
    expert = Expert(cfg.hidden_act, cfg.mlp_gated, cfg.swiglu_limit)

    def token(x: jax.Array) -> jax.Array:
        logits = router.T @ x
        best = jnp.argsort(-logits)[: cfg.moe.num_experts_per_tok]
        if cfg.moe.norm_topk_prob:
            gates = jax.nn.softmax(logits[best])
        else:
            gates = jax.nn.softmax(logits)[best]
        outputs = []
        for number in best:
            h = expert.activate(jnp.tensordot(x, up[number], 1))
            outputs.append(h @ down[number])
        return gates @ jnp.stack(outputs)

    return jax.lax.map(token, x)


@pytest.mark.parametrize("name", quick(MODELS, 1))
def test_block_equals_reference_forward_and_backward(name):
    cfg = config(name)
    block = MoE(cfg, 0.1, nnx.Rngs(0))
    inputs = BranchInputs(tokens_of((2, 16)), Context(), "experts")
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
