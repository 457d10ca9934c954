"""Laws of policy losses, on a decision problem whose answers are all enumerated, and on batches.

A policy is a table w [3 words, 4 states]: the first state, and one after each first word. Word 2
ends an answer, so there are seven answers of one or two tokens. Their probabilities and rewards are
known, and the mean of an estimator is a sum.
"""

import itertools
from types import SimpleNamespace
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.config.schema.reinforce import PolicyLoss, ReinforceConfig
from mjax.kernels.loss.cross_entropy import token_sums
from mjax.kernels.loss.log_probs import token_scores
from mjax.kernels.loss.rows import Terms
from mjax.models.base.context import Context
from mjax.objectives.objective import Denominators
from mjax.post.policy.advantages import advantages_of, is_informative
from mjax.post.policy.mock_rollouts import mock_rollouts
from mjax.post.policy.policy_objective import PolicyObjective
from mjax.post.policy.published_settings import with_published
from mjax.prove import Cell, deviation, make_batch, make_trainer
from mjax.sharding.collectives import LOCAL
from mjax.train.step import GRADIENTS
from tests.marks import exhaustive, quick, slow

END = 2
ANSWERS = [(END,), *itertools.product((0, 1), range(3))]
REWARDS = np.array([0.3, 1.0, -0.5, 0.2, 2.0, 0.0, -1.0])
LENGTHS = np.array([len(answer) for answer in ANSWERS])
ALL = get_args(PolicyLoss)
LOSSES = [name for name in ALL if name != "ppo"]  # whose advantages are of values


def table(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(3, 4)).astype(np.float32)


POLICY, BEFORE = table(1), table(2)


def log_probs(w: jax.Array) -> jax.Array:
    """log p of the tokens of each answer, [7, 2]; 0 where there is none."""
    log_p = jax.nn.log_softmax(jnp.asarray(w), 0)
    rows = [[log_p[a[0], 0], log_p[a[1], 1 + a[0]] if len(a) > 1 else 0] for a in ANSWERS]
    return jnp.array(rows)


def slopes(w: np.ndarray) -> np.ndarray:
    """The gradient of log p of each token by the table, [7, 2, 3, 4]."""
    return np.asarray(jax.jacobian(log_probs)(w), np.float64)


def chances(w: np.ndarray) -> np.ndarray:
    return np.exp(np.asarray(log_probs(w), np.float64).sum(1))


def exact_gradient(w: np.ndarray) -> np.ndarray:
    """The gradient of the expected reward."""
    return np.asarray(jax.grad(lambda w: jnp.exp(log_probs(w).sum(1)) @ REWARDS)(w))


def batch_of(which: np.ndarray, advantages: np.ndarray, **fields: np.ndarray) -> dict:
    """A row for each answer; advantages [n], other fields [7, 2] of all answers."""
    states, labels = np.zeros((7, 2, 4), np.float32), np.zeros((7, 2), np.int32)
    mask = np.zeros((7, 2), np.float32)
    for n, answer in enumerate(ANSWERS):
        labels[n, : len(answer)], mask[n, : len(answer)] = answer, 1
        states[n, 0, 0] = states[n, 1, 1 + answer[0] % 2] = 1
    mask = mask[which]
    fields = {name: np.asarray(field, np.float32)[which] for name, field in fields.items()}
    none = np.full(mask.shape, np.nan, np.float32)  # what is off the mask is never read
    fields = {name: np.where(mask == 0, none, field) for name, field in fields.items()}
    batch = {"labels": labels[which], "loss_mask": mask, "x": states[which]}
    batch |= {"segment_ids": np.ones(mask.shape, np.int32)}
    batch |= {"sampler_log_probs": np.zeros_like(mask), **fields}
    return batch | {"advantages": np.float32(advantages[:, None] * mask)}


def edges_of(w: jax.Array) -> SimpleNamespace:
    """The head of a decoder whose weights are the table, by the kernels of all heads."""

    def more(ctx):
        return {"terms": Terms(3, temperature=ctx.training.temperature), "parallel": LOCAL}

    def head_sums(x, labels, mask, ctx, function, fields):
        fields = {name: field.reshape(-1) for name, field in fields.items()}
        tokens = x.reshape(-1, 4), w, labels.reshape(-1), mask.reshape(-1)
        return token_sums(*tokens, function, fields, **more(ctx))

    def scores(x, labels, ctx, entropy):
        found = token_scores(x.reshape(-1, 4), w, labels.reshape(-1), entropy=entropy, **more(ctx))
        return jax.tree.map(lambda score: score.reshape(labels.shape), found)

    return SimpleNamespace(head_sums=head_sums, token_scores=scores)


def shares_of(settings: ReinforceConfig, w: jax.Array, batch: dict) -> dict:
    """The losses and figures of a batch."""
    objective = PolicyObjective(settings)
    batch = {name: jnp.asarray(field) for name, field in batch.items()}
    batch |= objective.derive_fields(batch, LOCAL)
    found = objective.losses(edges_of(w), batch["x"], batch, None, Context())
    counts = objective.counts(batch)
    assert found.keys() == counts.keys()
    return Denominators(counts, {}, 1).shares(found, {})


def gradient(settings: ReinforceConfig, batch: dict, w: np.ndarray = POLICY) -> np.ndarray:
    """The gradient of the total, as a step takes it."""
    return np.asarray(jax.grad(lambda w: sum(shares_of(settings, w, batch).values()))(w))


def config(loss: str, **keys) -> ReinforceConfig:
    settings = ReinforceConfig(loss_type=loss, group_size=2, max_new_tokens=2, **keys)
    return with_published(settings)


PAIRS = np.array(list(itertools.product(range(7), repeat=2)))


def mean_of_estimator(settings: ReinforceConfig, drawn_by: np.ndarray, **fields) -> np.ndarray:
    """The mean of the gradient over all groups of two answers that `drawn_by` draws.

    All groups are in one batch. A loss is linear in the advantages, which carry each group's
    probability and divisor.
    """
    chance = chances(drawn_by)[PAIRS].prod(1)
    lengths = LENGTHS[PAIRS]
    divisors = {"tokens": lengths.sum(1), "sequences": np.full(len(PAIRS), 2.0)}
    divisors["constant"] = divisors["sequences"]
    divisor = divisors[settings.loss_divisor]
    weights = chance * divisor.sum() / divisor
    advantages = [
        advantages_of(settings, REWARDS[pair], np.zeros(2, int), LENGTHS[pair]) for pair in PAIRS
    ]
    advantages = np.array(advantages, np.float64) * weights[:, None]
    return gradient(settings, batch_of(PAIRS.reshape(-1), advantages.reshape(-1), **fields))


def assert_near(found, wanted) -> None:
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-5 * np.abs(wanted).max())


@slow
def test_leave_one_out_is_the_exact_gradient():
    assert_near(mean_of_estimator(config("rloo"), POLICY), -exact_gradient(POLICY))


@slow
def test_without_clip_leave_one_out_is_exact_for_answers_of_older_weights():
    free = config("rloo", updates_per_rollout=2, clip_low=1.0, clip_high=1e6)
    found = mean_of_estimator(free, BEFORE, old_log_probs=log_probs(BEFORE))
    assert_near(found, -exact_gradient(POLICY))
    clipped = config("rloo", updates_per_rollout=2)
    biased = mean_of_estimator(clipped, BEFORE, old_log_probs=log_probs(BEFORE))
    assert deviation(biased, found) > 0.1


def test_dr_grpo_is_the_exact_gradient_times_a_constant():
    """(G - 1) / G since its mean has the answer itself, by the constant."""
    found = mean_of_estimator(config("dr_grpo"), POLICY)
    assert_near(found, -exact_gradient(POLICY) / 2 / 2)


def predicted(advantages: np.ndarray, weights: np.ndarray, drawn_by: np.ndarray) -> np.ndarray:
    """-E sum_i A_i sum_t weight_it grad log p_it; advantages [49, 2], weights [49, 2, 2]."""
    chance = chances(drawn_by)[PAIRS].prod(1)
    of_tokens = slopes(POLICY)[PAIRS]
    return -np.einsum("n,ni,nit,nitab->ab", chance, advantages, weights, of_tokens)


def test_the_bias_of_grpo_is_that_of_its_formula():
    found = mean_of_estimator(config("grpo"), POLICY)
    rewards = REWARDS[PAIRS]
    spread = np.abs(rewards[:, :1] - rewards[:, 1:]) / np.sqrt(2)
    advantages = (rewards - rewards.mean(1, keepdims=True)) / (spread + 1e-4)
    weights = np.ones((49, 2, 2)) / LENGTHS[PAIRS][..., None] / 2
    assert_near(found, predicted(advantages, weights, POLICY))
    exact = -exact_gradient(POLICY)
    cosine = (found * exact).sum() / np.linalg.norm(found) / np.linalg.norm(exact)
    assert 0.5 < cosine < 0.999


@pytest.mark.parametrize("loss", quick(["dapo", "cispo", "reinforce_pp"]))
def test_the_bias_of_losses_divided_by_tokens(loss):
    found = mean_of_estimator(config(loss, advantage_scale="none"), POLICY)
    rewards, lengths = REWARDS[PAIRS], LENGTHS[PAIRS]
    mean = rewards.mean(1, keepdims=True)
    if loss == "reinforce_pp":
        mean = (rewards * lengths).sum(1, keepdims=True) / lengths.sum(1, keepdims=True)
    weights = np.ones((49, 2, 2)) / lengths.sum(1)[:, None, None]
    assert_near(found, predicted(rewards - mean, weights, POLICY))


CORRECTIONS = "truncate", "mask", "sequence_truncate", "sequence_mask"
CLIPPED = {
    "dr_grpo": ("clip", 0.1, 0.3),
    "cispo": ("cap", 0.0, 0.3),
    "gspo": ("clip of means", 0.2, 0.1),
    "rloo": ("clip of sums", 0.2, 0.1),
}


@pytest.mark.parametrize("loss", quick(CLIPPED, 2))
def test_the_bias_of_clipped_ratios_is_that_of_their_formula(loss):
    kind, low, high = CLIPPED[loss]
    keys = {"clip_high": high} | ({} if loss == "cispo" else {"clip_low": low})
    keys |= {"advantage_scale": "none", "updates_per_rollout": 2}
    found = mean_of_estimator(config(loss, **keys), BEFORE, old_log_probs=log_probs(BEFORE))
    rewards, lengths = REWARDS[PAIRS], LENGTHS[PAIRS]
    advantages = rewards - (rewards[:, ::-1] if loss == "rloo" else rewards.mean(1, keepdims=True))
    moved = np.asarray(log_probs(POLICY) - log_probs(BEFORE), np.float64)[PAIRS]
    if "of" in kind:
        moved = np.broadcast_to(moved.sum(-1, keepdims=True), moved.shape)
    if kind == "clip of means":
        moved = moved / lengths[..., None]
    ratio, sign = np.exp(moved), np.sign(advantages)[..., None]
    if kind == "cap":
        weights = np.minimum(ratio, 1 + high)
    else:
        ends = np.where(sign > 0, ratio > 1 + high, ratio < 1 - low)
        weights = np.where(ends, 0, ratio)
        assert 0 < ends.mean() < 1
    if loss == "gspo":
        weights = weights / lengths[..., None] / 2
    elif loss == "rloo":
        weights = weights / 2
    elif loss == "dr_grpo":
        weights = weights / 4
    else:
        weights = weights / lengths.sum(1)[:, None, None]
    assert_near(found, predicted(advantages, weights, BEFORE))


@pytest.mark.parametrize("kind", quick(CORRECTIONS, 1))
def test_the_bias_of_corrections_is_that_of_their_formula(kind):
    """Answers are drawn by a sampler that rates tokens otherwise than the trainer."""
    keys = {"correction": kind, "correction_low": 0.7, "correction_high": 1.4}
    fields = {"old_log_probs": log_probs(POLICY), "sampler_log_probs": log_probs(BEFORE)}
    found = mean_of_estimator(config("dr_grpo", **keys), BEFORE, **fields)
    rewards = REWARDS[PAIRS]
    moved = np.asarray(log_probs(POLICY) - log_probs(BEFORE), np.float64)[PAIRS]
    if kind.startswith("sequence"):
        moved = np.broadcast_to(moved.sum(-1, keepdims=True), moved.shape)
    weights = np.exp(moved)
    if kind.endswith("mask"):
        kept = (weights >= 0.7) & (weights <= 1.4)
        assert 0 < kept.mean() < 1
        weights = weights * kept
    weights = np.minimum(weights, 1.4)
    advantages = rewards - rewards.mean(1, keepdims=True)
    assert_near(found, predicted(advantages, weights / 4, BEFORE))


def test_a_sequence_correction_without_bounds_is_exact_for_any_sampler():
    keys = {"correction": "sequence_truncate", "correction_high": 1e6}
    fields = {"old_log_probs": log_probs(POLICY), "sampler_log_probs": log_probs(BEFORE)}
    keys |= {"clip_low": 1.0, "clip_high": 1e6}
    found = mean_of_estimator(config("rloo", **keys), BEFORE, **fields)
    assert_near(found, -exact_gradient(POLICY))


def of_all_answers(**keys) -> np.ndarray:
    """The mean gradient over answers that the policy draws, times the mean length."""
    settings = config("dapo", kl_coef=1.0, **keys)
    batch = batch_of(np.arange(7), np.zeros(7), ref_log_probs=log_probs(BEFORE))
    batch["loss_mask"] *= np.float32(chances(POLICY))[:, None]
    return gradient(settings, batch) * (chances(POLICY) @ LENGTHS)


@slow
def test_divergences_pull_to_the_reference():
    """Of k2 the mean gradient is the divergence's at each state; k1's is 0."""

    def divergence(w: jax.Array) -> jax.Array:
        log_p, log_r = jax.nn.log_softmax(w, 0), jax.nn.log_softmax(BEFORE, 0)
        first = jnp.exp(jax.nn.log_softmax(POLICY[:, 0]))
        visits = jnp.array([1.0, first[0], first[1], 0])
        return visits @ (jnp.exp(log_p) * (log_p - log_r)).sum(0)

    exact = np.asarray(jax.grad(divergence)(POLICY))
    assert_near(of_all_answers(kl_estimator="k2"), exact)
    assert np.abs(of_all_answers(kl_estimator="k1")).max() < 1e-6 * np.abs(exact).max()
    ratio = np.exp(np.asarray(log_probs(BEFORE) - log_probs(POLICY), np.float64))
    weights = chances(POLICY)[:, None] * (1 - ratio) * (np.arange(2) < LENGTHS[:, None])
    assert_near(of_all_answers(kl_estimator="k3"), np.einsum("nt,ntab", weights, slopes(POLICY)))
    of_reward = of_all_answers(kl_estimator="k2", kl_in_reward=True)
    assert not of_reward.any()


@pytest.mark.parametrize("loss", quick(["grpo", "dapo", "dr_grpo"], 0))
def test_the_entropy_is_a_mean_over_tokens_whatever_the_divisor(loss):
    settings = config(loss, entropy_coef=0.3)
    batch = batch_of(np.arange(7), np.zeros(7))

    def bonus(w: jax.Array) -> jax.Array:
        log_p = jax.nn.log_softmax(w, 0)
        entropy = -(jnp.exp(log_p) * log_p).sum(0)
        return -0.3 * (7 * entropy[0] + 3 * entropy[1] + 3 * entropy[2]) / 13, entropy

    wanted, entropy = jax.grad(bonus, has_aux=True)(POLICY)
    assert_near(gradient(settings, batch), np.asarray(wanted))
    mean = (7 * entropy[0] + 3 * entropy[1] + 3 * entropy[2]) / 13
    assert float(shares_of(settings, POLICY, batch)["entropy"]) == pytest.approx(float(mean))


@pytest.mark.parametrize("loss, reads_old", quick(itertools.product(ALL, (False, True)), 0, 7))
def test_at_ratio_1_the_gradient_is_that_of_weighted_log_likelihood(loss, reads_old):
    settings = config(loss, updates_per_rollout=1 + reads_old)
    advantages = np.random.default_rng(3).normal(size=7)
    fields = {"old_log_probs": log_probs(POLICY)} if reads_old else {}
    found = gradient(settings, batch_of(np.arange(7), advantages, **fields))
    weights = (
        np.ones((7, 2))
        / {"tokens": LENGTHS.sum(), "sequences": 7, "constant": 14}[settings.loss_divisor]
    )
    if settings.loss_divisor == "sequences" and loss != "rloo":  # whose ratio is a product
        weights = weights / LENGTHS[:, None]
    wanted = -np.einsum("n,nt,ntab->ab", advantages, weights, slopes(POLICY))
    assert_near(found, wanted)


@pytest.mark.parametrize("loss", quick(LOSSES, 0))
def test_equal_rewards_give_no_gradient(loss):
    settings = config(loss)
    rewards = np.array([0.1, 0.1, 0.1, 0.7, 0.7, 0.7, 0.7])
    groups = np.array([4, 4, 4, 1, 1, 1, 1])
    if loss == "reinforce_pp":  # it compares the whole batch
        rewards[:] = 0.1
    advantages = advantages_of(settings, rewards, groups, LENGTHS)
    assert not is_informative(rewards, groups).any()
    assert not gradient(settings, batch_of(np.arange(7), advantages)).any()


# ---- batches of a model ------------------------------------------------------------------------

CASES = [
    ("grpo", "reinforce.correction=mask", "reinforce.kl_coef=0.2"),
    ("rloo", "reinforce.updates_per_rollout=2", "reinforce.clip_high=2.0"),
    ("dr_grpo", "reinforce.correction=sequence_truncate", "reinforce.kl_coef=0.1"),
    ("dapo", "reinforce.entropy_coef=0.02", "reinforce.sampling={temperature: 0.7}"),
    ("gspo", "reinforce.updates_per_rollout=2", "reinforce.clip_high=0.3"),
    ("cispo", "reinforce.updates_per_rollout=3", "reinforce.kl_estimator=k2"),
    ("sapo", "reinforce.updates_per_rollout=2"),
    ("reinforce_pp",),
    ("ppo", "reinforce.loss_divisor=sequences", "reinforce.updates_per_rollout=2"),
]
MESHES = {"dp": 2, "cp": 2, "tp": 2}, {"cp": 4, "tp": 2}, {"dp": 4, "tp": 2}


def first_step(keys: tuple[str, ...], cell: Cell, batch: dict | None = None) -> dict:
    loss, *more = keys
    if "reinforce.kl_estimator=k2" in more:
        more.append("reinforce.kl_coef=0.1")
    own = ["train.objective=policy", f"reinforce.loss_type={loss}", "train.loss_chunk=12"]
    own.append("model.num_hidden_layers=1")
    trainer = make_trainer("dense", cell, *own, *more)
    if batch is None:
        batch = make_batch(cell.rows)
        batch |= trainer.objective.make_fields(batch, 0, 0, np.arange(cell.rows))
    found = trainer.run_program(GRADIENTS, batch)
    return jax.device_get({"losses": found.losses, "gradients": found.gradients})


GRID = [pytest.param(n, marks=exhaustive if n > 1 else slow) for n in range(len(CASES))]


@pytest.mark.parametrize("number", GRID, ids=[case[0] for case in CASES])
def test_every_mesh_gives_the_same_losses_figures_and_gradients(number):
    mesh = MESHES[number % 3]
    keys = CASES[number]
    wanted = first_step(keys, Cell())
    found = first_step(keys, Cell(mesh, zero=number % 4, micro_batches=1 + number % 2))
    assert deviation(found, wanted) < 2e-5


def unpacked(batch: dict) -> dict:
    """A row for each document of packed rows, in their order; padded."""
    parts = []
    for row in range(len(batch["tokens"])):
        for document in range(1, batch["segment_ids"][row].max() + 1):
            parts.append((row, np.flatnonzero(batch["segment_ids"][row] == document)))
    parts += [parts[0]] * (-len(parts) % 8)
    found = {}
    for name, field in batch.items():
        if field.ndim == 2:
            found[name] = np.zeros((len(parts), field.shape[1]), field.dtype)
            for n, (row, at) in enumerate(parts):
                found[name][n, : len(at)] = field[row, at]
    return found


@exhaustive
@pytest.mark.parametrize("number", [4, 0, 2])
def test_packing_changes_nothing(number):
    keys, cell = CASES[number], Cell()
    batch = make_batch(cell.rows)
    batch |= mock_rollouts(batch, 0, 0, np.arange(cell.rows))
    wanted = first_step(keys, cell, batch)
    apart = unpacked(batch)
    assert len(apart["tokens"]) == 4 * cell.rows
    found = first_step(keys, cell._replace(rows=4 * cell.rows), apart)
    assert deviation(found, wanted) < 2e-5
