"""Laws of experts with a capacity: what is dropped is what the formula says, on every mesh."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.config import load
from mjax.models.base.context import tokens_of
from mjax.models.base.weight import Weight
from mjax.models.moe.capacity import expert_capacity, within_capacity
from mjax.models.moe.dispatch import make_dispatch, make_padded_dispatch
from mjax.models.moe.expert import Expert
from mjax.models.moe.expert_matmuls import multiply_down, multiply_up
from mjax.models.moe.router import Routing
from mjax.models.moe.router_losses import dropped_share
from mjax.prove import FEATURES, SMALL, Cell, compare, deviation, holds, make_batch, make_trainer
from mjax.sharding.collectives import LOCAL
from tests.laws.experts.test_dispatch import ROUTINGS, E, operands
from tests.marks import exhaustive, quick


def model(*keys: str):
    return load(None, [*SMALL, *FEATURES["experts"], *(f"model.moe.{key}" for key in keys)]).model


def routing_of(experts: np.ndarray, gates: np.ndarray) -> Routing:
    scores = jnp.zeros((*experts.shape[:2], E))
    return Routing(jnp.asarray(experts, jnp.int32), jnp.float32(gates), scores, scores)


def kept_by_loop(experts, gates, capacity: int, policy: str) -> np.ndarray:
    """The experts of tokens [B, S, k], E where a pair is dropped: pair by pair."""
    kept = np.full_like(experts, E)
    for row, (numbers, weights) in enumerate(zip(experts, gates, strict=True)):
        pairs = [(t, j) for t in range(len(numbers)) for j in range(numbers.shape[1])]
        if policy == "probs":
            pairs.sort(key=lambda pair: (-weights[pair], pair[0]))
        taken = dict.fromkeys(range(E), 0)
        for pair in pairs:
            expert = numbers[pair]
            if expert < E and taken[expert] < capacity:
                taken[expert] += 1
                kept[(row, *pair)] = expert
    return kept


@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize("factor", [0.1, 0.5, 1.0, 1.7])
@pytest.mark.parametrize("name", ROUTINGS)
def test_what_is_dropped_is_what_the_formula_says(name, factor, policy):
    numbers = ROUTINGS[name]
    length, k = numbers.shape
    rng = np.random.default_rng(length)
    experts = np.stack([numbers, numbers[::-1], rng.permutation(numbers)])
    gates = np.round(rng.random(experts.shape), 1)  # many are equal
    experts[2, 0] = E  # a token that goes nowhere
    keys = f"capacity_factor={factor}", f"drop_policy={policy}", f"num_experts_per_tok={k}"
    cfg = model(*keys, "num_experts=8", "norm_topk_prob=false")
    before = routing_of(experts, gates)
    after = within_capacity(before, tokens_of(experts.shape[:2]), cfg.moe, LOCAL)
    capacity = min(math.ceil(round(factor * length * k / E, 9)), length)
    assert expert_capacity(cfg.moe, length) == capacity
    want = kept_by_loop(experts, gates, capacity, policy)
    np.testing.assert_array_equal(after.experts, want)
    np.testing.assert_array_equal(after.gates, before.gates)
    share = float(dropped_share(after, cfg, LOCAL)) * cfg.num_hidden_layers / len(experts)
    assert share == pytest.approx((want != experts).mean(), abs=1e-6)
    for row in want:
        assert np.bincount(row.ravel(), minlength=E + 1)[:E].max() <= capacity


def test_the_capacity_is_rounded_up_from_the_decimal_number():
    """1.1 is less than its float; 10 * 1.1 must not become 12."""
    moe = model("num_experts=8", "capacity_factor=1.1").moe
    assert [expert_capacity(moe, length) for length in (40, 41, 1)] == [11, 12, 1]


CASES = [
    ({"dp": 2, "ep": 2, "cp": 2}, 1, 4, ["model.moe.drop_policy=position"]),
    ({"pp": 2, "ep": 2, "tp": 2}, 1, 3, ["train.experts=batched"]),
    ({"dp": 2, "cp": 4}, 2, 1, ["model.mlp_bias=true", "train.experts=batched"]),
]


@exhaustive
@pytest.mark.parametrize("mesh,zero,micro_batches,keys", quick(CASES))
def test_capacity_equals_one_device(mesh, zero, micro_batches, keys):
    record = compare("capacity", Cell(mesh, zero, micro_batches), *keys, steps=1)
    assert holds(record), record


ONE_LAYER = ["model.num_hidden_layers=1", "model.layer_pattern=E"]


def one_layer(factor: str):
    return make_trainer("capacity", Cell(), *ONE_LAYER, f"model.moe.capacity_factor={factor}")


@exhaustive
def test_the_dropped_share_is_logged_and_nothing_is_dropped_by_a_large_capacity():
    """A factor that no expert's load reaches, and one at which none could: both are dropless."""
    batch = make_batch(24)
    some, fits, never, dropless = map(one_layer, ("0.75", "3.5", "4.0", "null"))
    assert expert_capacity(fits.cfg.model.moe, 16) == 14
    want, wanted = dropless.grads(batch)[2], dropless.step(batch)
    for large in (fits, never):
        assert deviation(large.grads(batch)[2], want) <= 1e-6
        assert float(large.step(batch)["dropped_share"]) == 0
    got = some.step(batch)
    assert 0.2 < float(got["dropped_share"]) < 0.6
    assert "dropped_share" not in wanted and float(got["loss"]) != float(wanted["loss"])


@pytest.mark.grid
@pytest.mark.parametrize("first,held", [(0, E), (5, 3), (0, 2)])
@pytest.mark.parametrize("name", ROUTINGS)
def test_batched_experts_equal_grouped_ones(name, first, held):
    """Of equal groups with rows that no pair takes, forward and backward, with running sums."""
    experts = jnp.asarray(ROUTINGS[name], jnp.int32)
    experts = experts.at[0, 0].set(E)
    given, cotangent = operands(experts, 2)
    mine = slice(first, first + held)
    loads = np.bincount(np.ravel(experts), minlength=E + 1)[mine]
    makers = {
        "xla": lambda: make_dispatch(experts, first, held),
        "batched": lambda: make_padded_dispatch(experts, first, held, int(loads.max()) + 2),
    }

    def run(kernel, x, gates, up, down):
        expert, dispatch = Expert("silu", True, kernel=kernel), makers[kernel]()
        sums = jnp.ones_like(up[mine]), jnp.ones_like(down[mine])
        up, down = Weight(up[mine], grad_sum=sums[0]), Weight(down[mine], grad_sum=sums[1])
        h = multiply_up(expert, x, up, dispatch)
        return multiply_down(expert, h, gates, down, dispatch)

    results = []
    for kernel in makers:
        y, vjp = jax.vjp(lambda *args, kernel=kernel: run(kernel, *args), *given)
        results.append((y, vjp(cotangent)))
    assert deviation(results[1], results[0]) <= 1e-5


@exhaustive
def test_a_capacity_binds_in_evaluation_and_not_in_a_plain_forward():
    bound, free = one_layer("0.25"), one_layer("null")
    batch = make_batch(24)
    assert float(bound.evaluate(batch)[0]) != float(free.evaluate(batch)[0])
    tokens = jnp.asarray(batch["tokens"])
    logits = [trainer.definition.bind(trainer.params())(tokens) for trainer in (bound, free)]
    np.testing.assert_array_equal(*logits)
