"""Advantages of groups and of values, shaped rewards, and the critic's loss."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.config.schema.reinforce import ReinforceConfig
from mjax.errors import UserError
from mjax.models.base.context import Context
from mjax.post.policy.advantages import (
    advantages_of,
    divergence_costs,
    generalized_advantages,
    is_informative,
    shaped_rewards,
    whitened,
)
from mjax.post.policy.policy_losses import bounded_exp
from mjax.post.policy.published_settings import with_published
from mjax.post.policy.values import VALUES, ValueObjective
from mjax.prove import Cell, deviation, make_batch, make_trainer
from tests.marks import slow

REWARDS = np.array([1.0, 0.0, 0.5, 2.0, 2.0, 0.3])
GROUPS = np.array([7, 3, 7, 3, 9, 7])  # in any order, of any size
LENGTHS = np.array([2, 5, 1, 3, 4, 2])


def advantages(loss: str, **keys) -> np.ndarray:
    return advantages_of(ReinforceConfig(loss_type=loss, **keys), REWARDS, GROUPS, LENGTHS)


def test_groups_are_compared_among_themselves():
    first, second = np.array([1.0, 0.5, 0.3]), np.array([0.0, 2.0])
    found = advantages("grpo")
    wanted = (first - first.mean()) / (first.std(ddof=1) + 1e-4)
    np.testing.assert_allclose(found[GROUPS == 7], wanted, rtol=1e-6)
    wanted = (second - 1) / (np.sqrt(2) + 1e-4)
    np.testing.assert_allclose(found[GROUPS == 3], wanted, rtol=1e-6)
    assert found[4] == 0 and found.dtype == np.float32  # a group of one
    wanted = (first - first.mean()) / (REWARDS.std(ddof=1) + 1e-4)
    found = advantages("grpo", advantage_scale="batch")
    np.testing.assert_allclose(found[GROUPS == 7], wanted, rtol=1e-6)
    np.testing.assert_allclose(advantages("dr_grpo")[GROUPS == 3], second - 1, rtol=1e-6)
    others = np.array([0.4, 0.65, 0.75])
    np.testing.assert_allclose(advantages("rloo")[GROUPS == 7], first - others, rtol=1e-6)


def test_reinforce_pp_compares_the_tokens_of_the_batch():
    tokens = np.repeat(REWARDS, LENGTHS)
    wanted = (REWARDS - tokens.mean()) / (tokens.std() + 1e-4)
    np.testing.assert_allclose(advantages("reinforce_pp"), wanted, rtol=1e-6)
    found = advantages("reinforce_pp", advantage_scale="none")
    np.testing.assert_allclose(found, REWARDS - tokens.mean(), rtol=1e-6)


def test_equal_rewards_give_exactly_0():
    rewards = np.array([0.1, 0.1, 0.1, 0.7, 0.1, 0.1])  # 0.1 is not the mean of three in binary
    groups = np.array([1, 1, 1, 2, 2, 1])
    assert is_informative(rewards, groups).tolist() == [False] * 3 + [True] * 2 + [False]
    for loss in ("grpo", "rloo", "dr_grpo"):
        settings = ReinforceConfig(loss_type=loss)
        found = advantages_of(settings, rewards, groups, np.ones(6, int))
        assert not found[groups == 1].any() and found[groups == 2].all()


@pytest.mark.parametrize("reward", [np.nan, np.inf])
def test_rewards_that_are_no_numbers_are_refused(reward):
    rewards = np.append(REWARDS[:-1], reward)
    with pytest.raises(UserError, match="reward of an answer to prompt 7 is (nan|inf); give"):
        advantages_of(ReinforceConfig(), rewards, GROUPS, LENGTHS)


def test_long_answers_lose_reward_linearly():
    settings = ReinforceConfig(max_new_tokens=20, overlong_tokens=4)
    found = shaped_rewards(settings, np.ones(5), np.array([3, 16, 17, 19, 20]))
    np.testing.assert_allclose(found, [1, 1, 0.75, 0.25, 0])
    plain = shaped_rewards(ReinforceConfig(max_new_tokens=20), np.ones(2), np.array([1, 20]))
    np.testing.assert_array_equal(plain, 1)


def test_costs_of_a_divergence():
    log_p, ref = np.float32([-1.0, -2.0]), np.float32([-1.5, -1.0])
    wanted = {"k1": [0.5, -1.0], "k2": [0.125, 0.5]}
    wanted["k3"] = [np.exp(-0.5) + 0.5 - 1, np.e - 1 - 1]
    for kind, costs in wanted.items():
        settings = ReinforceConfig(kl_coef=0.1, kl_in_reward=True, kl_estimator=kind)
        np.testing.assert_allclose(divergence_costs(settings, log_p, ref), 0.1 * np.array(costs))


def test_published_settings_give_way_to_those_given():
    gspo = with_published(ReinforceConfig(loss_type="gspo", clip_high=0.0))
    assert (gspo.clip_low, gspo.clip_high, gspo.loss_divisor) == (3e-4, 0.0, "sequences")
    assert with_published(gspo) == gspo


def test_large_ratios_have_finite_gradients():
    value, slope = jax.value_and_grad(lambda x: bounded_exp(x) * 1e9)(jnp.float32(500.0))
    assert np.isfinite(value) and slope == 0


# ---- values ------------------------------------------------------------------------------------


def by_definition(rewards: list, values: list, gamma: float, lam: float) -> list[float]:
    """sum_k (gamma lam)^k delta_k of an answer whose tokens were all drawn."""
    following = [*values[1:], 0.0]
    steps = zip(rewards, values, following, strict=True)
    deltas = [reward + gamma * after - value for reward, value, after in steps]
    count = len(deltas)
    return [
        sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, count)) for t in range(count)
    ]


def test_generalized_advantages_pass_over_what_was_not_drawn_and_end_with_the_document():
    rng = np.random.default_rng(0)
    shape = 2, 12
    rewards, values = rng.normal(size=shape), rng.normal(size=shape)
    drawn = np.array([[0, 1, 1, 0, 0, 1, 1, 0, 1, 1, 1, 0], [0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 1]])
    segments = np.array([[1] * 7 + [2] * 4 + [0], [1] * 6 + [2] * 6])
    found, returns = generalized_advantages(rewards, values, drawn, 0.9, 0.8, segments)
    wanted = np.zeros(shape)
    for row in range(2):
        for document in (1, 2):
            at = np.flatnonzero((segments[row] == document) & (drawn[row] == 1))
            given = rewards[row, at].tolist(), values[row, at].tolist()
            wanted[row, at] = by_definition(*given, 0.9, 0.8)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(returns, np.where(drawn, wanted + values, 0), rtol=1e-5, atol=1e-6)
    one = generalized_advantages(rewards[:1, 7:11], values[:1, 7:11], drawn[:1, 7:11], 0.9, 0.8)
    np.testing.assert_allclose(one[0], wanted[:1, 7:11], rtol=1e-5, atol=1e-6)
    # With gamma = lambda = 1 it is the sum of what follows, less the value.
    monte_carlo, returns = generalized_advantages(rewards, values, drawn, 1.0, 1.0, segments)
    assert returns[0, 8] == pytest.approx(rewards[0, 8:11].sum(), rel=1e-6)
    assert monte_carlo[0, 8] == pytest.approx(rewards[0, 8:11].sum() - values[0, 8], rel=1e-5)


def test_advantages_are_whitened_over_all_tokens_drawn():
    rng = np.random.default_rng(1)
    given, drawn = rng.normal(3, 2, (3, 5)), rng.random((3, 5)) < 0.6
    found = whitened(ReinforceConfig(loss_type="ppo"), given, drawn)
    assert found[drawn].mean() == pytest.approx(0, abs=1e-6)
    assert found[drawn].std() == pytest.approx(1, abs=1e-3) and not found[~drawn].any()
    plain = whitened(ReinforceConfig(loss_type="ppo", advantage_scale="none"), given, drawn)
    np.testing.assert_allclose(plain, np.where(drawn, given, 0), rtol=1e-6)


def test_the_loss_of_values_ends_where_the_clip_does():
    values = jnp.array([[0.0, 1.0, 0.5, -1.0, 9.0]])
    batch = {"values": jnp.array([[0.1, 0.5, 0.5, -0.5, jnp.nan]])}
    batch |= {"returns": jnp.array([[1.0, 2.0, 0.0, -3.0, jnp.nan]])}
    batch |= {"loss_mask": jnp.array([[1.0, 1, 1, 1, 0]])}

    def losses(values: jax.Array) -> dict:
        edges = SimpleNamespace(label_scores=lambda x, ctx: x[..., None])
        return ValueObjective(0.2).losses(edges, values, batch, None, Context())

    found = losses(values)
    wanted = [1.0, max(1.0, 1.3**2), 0.25, max(4.0, 2.3**2)]
    assert float(found["loss"]) == pytest.approx(sum(wanted) / 2)
    assert float(found["value/clip_ratio"]) == 2
    slope = jax.grad(lambda values: losses(values)["loss"])(values)
    np.testing.assert_allclose(slope, [[-1.0, 0, 0.5, 0, 0]], atol=1e-6)


@slow
def test_a_critic_gives_the_values_that_its_loss_reads():
    """At the values of the rollout the loss is half the squared error, on every mesh."""
    for cell in (Cell(), Cell({"dp": 2, "cp": 2, "tp": 2}, 3, 2)):
        trainer = make_trainer("values", cell)
        batch = make_batch(cell.rows)
        batch |= trainer.objective.make_fields(batch, 0, 0, np.arange(cell.rows))
        del batch["values"]
        placed = trainer.placer.place(batch)
        values = trainer.run_placed(VALUES, placed, trainer.weights())
        columns = np.asarray(placed["columns"])
        found = np.zeros(values.shape, np.float32)
        found[:, columns] = np.asarray(values)
        if cell == Cell():
            wanted = found
        assert deviation(found, wanted) < 2e-5 and found.std() > 1e-3
        step = trainer.step(batch | {"values": found})
        drawn = batch["loss_mask"] > 0
        error = np.square(found - batch["returns"])[drawn].mean()
        assert float(step["loss"]) == pytest.approx(error / 2, rel=1e-4)
        assert float(step["value/clip_ratio"]) == 0
