"""Advantages from rewards, on the host in fp64: of groups of answers, and of values (GAE).

Sources: GRPO arXiv 2402.03300, Dr. GRPO 2503.20783, RLOO 2402.14740, REINFORCE++ 2501.03262, DAPO
2503.14476, GAE 1506.02438. Groups whose rewards are all equal give exactly 0.
"""

import numpy as np

from mjax.config.schema.reinforce import ReinforceConfig
from mjax.errors import UserError
from mjax.post.policy.policy_losses import divergence_estimate
from mjax.post.policy.published_settings import with_published

_EPSILON = 1e-4  # added to standard deviations, as in TRL


def advantages_of(
    settings: ReinforceConfig, rewards: np.ndarray, groups: np.ndarray, lengths: np.ndarray
) -> np.ndarray:
    """One number for each answer, float32 [n]; all losses but ppo.

    rewards: float [n]. groups: int [n], the number of each answer's prompt. lengths: int [n], its
    sampled tokens.
    """
    rewards, scale = np.asarray(rewards, np.float64), with_published(settings).advantage_scale
    if not np.isfinite(rewards).all():
        worst = int(np.flatnonzero(~np.isfinite(rewards))[0])
        raise UserError(
            f"reinforce.environment: the reward of an answer to prompt {groups[worst]} is "
            f"{rewards[worst]}; give finite numbers"
        )
    if settings.loss_type == "reinforce_pp":
        weights = np.asarray(lengths, np.float64)
        return _standardized(rewards, weights, scale).astype(np.float32)
    assert settings.loss_type != "ppo", "generalized_advantages has those of ppo"
    _, places, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    sizes = sizes[places]
    centered = rewards - _group_sums(rewards, places) / sizes
    others = np.maximum(sizes - 1, 1)
    advantages = centered * (sizes / others if settings.loss_type == "rloo" else 1)
    if scale == "group":
        advantages = advantages / (np.sqrt(_group_sums(centered**2, places) / others) + _EPSILON)
    elif scale == "batch" and len(rewards) > 1:
        spread = advantages if settings.loss_type == "rloo" else rewards
        advantages = advantages / (spread.std(ddof=1) + _EPSILON)
    return np.where(is_informative(rewards, groups), advantages, 0).astype(np.float32)


def is_informative(rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """bool [n]: False in groups whose rewards are all equal, which DAPO draws anew."""
    _, first, places = np.unique(groups, return_index=True, return_inverse=True)
    differs = np.asarray(rewards) != np.asarray(rewards)[first][places]
    return _group_sums(differs, places) > 0


def shaped_rewards(
    settings: ReinforceConfig, rewards: np.ndarray, lengths: np.ndarray
) -> np.ndarray:
    """Rewards less DAPO's penalty, 0 to 1 over the last overlong_tokens, float64 [n]."""
    rewards, over = np.asarray(rewards, np.float64), settings.overlong_tokens
    if not over:
        return rewards
    excess = np.asarray(lengths) - (settings.max_new_tokens - over)
    return rewards - np.clip(excess / over, 0, 1)


def divergence_costs(
    settings: ReinforceConfig, log_probs: np.ndarray, ref_log_probs: np.ndarray
) -> np.ndarray:
    """The cost of each sampled token with `reinforce.kl_in_reward`, of any shape.

    An answer's sum is taken off its reward; ppo takes each off the reward of its token.
    """
    kind = settings.kl_estimator
    return settings.kl_coef * np.asarray(divergence_estimate(kind, log_probs, ref_log_probs))


def generalized_advantages(
    rewards: np.ndarray,
    values: np.ndarray,
    is_sampled: np.ndarray,
    gamma: float,
    lam: float,
    segment_ids: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """(advantages, returns) of tokens, float32 [B, S], 0 where a token was not sampled.

    rewards: float [B, S], read at sampled tokens; an answer's own lies at its last one. The value
    of what follows an answer is 0. Tokens that an environment added are passed over, without
    discount. segment_ids: int [B, S], the documents of packed rows; None: a row is one answer.
    """
    rewards, values = np.asarray(rewards, np.float64), np.asarray(values, np.float64)
    is_sampled = np.asarray(is_sampled, bool)
    segments = np.zeros(values.shape, np.int32) if segment_ids is None else segment_ids
    advantages = np.zeros(values.shape)
    following = running = np.zeros(len(values))
    for t in reversed(range(values.shape[1])):
        if t + 1 < values.shape[1]:
            goes_on = segments[:, t] == segments[:, t + 1]
            following, running = following * goes_on, running * goes_on
        drawn = is_sampled[:, t]
        found = rewards[:, t] + gamma * following - values[:, t] + gamma * lam * running
        running = np.where(drawn, found, running)
        following = np.where(drawn, values[:, t], following)
        advantages[:, t] = running * drawn
    returns = np.where(is_sampled, advantages + values, 0)
    return advantages.astype(np.float32), returns.astype(np.float32)


def whitened(
    settings: ReinforceConfig, advantages: np.ndarray, is_sampled: np.ndarray
) -> np.ndarray:
    """PPO's advantages by `reinforce.advantage_scale` over all sampled tokens, float32."""
    found = np.asarray(advantages, np.float64)
    if with_published(settings).advantage_scale == "batch":
        found = _standardized(found, np.asarray(is_sampled, np.float64), "batch")
    return np.where(is_sampled, found, 0).astype(np.float32)


def _standardized(numbers: np.ndarray, weights: np.ndarray, scale: str) -> np.ndarray:
    """Numbers less their weighted mean, with "batch" by their deviation; 0 where all are equal."""
    counts = weights > 0
    if not counts.any() or np.ptp(numbers[counts]) == 0:
        return np.zeros_like(numbers)
    centered = numbers - np.average(numbers, weights=weights)
    if scale != "batch":
        return centered
    return centered / (np.sqrt(np.average(centered**2, weights=weights)) + _EPSILON)


def _group_sums(numbers: np.ndarray, places: np.ndarray) -> np.ndarray:
    """The sum over the group of each answer, [n]; places: the index of its group."""
    return np.bincount(places, numbers)[places]
