"""The batches of PPO: rewards at the ends of answers, and advantages and returns of each token."""

from collections.abc import Mapping, Sequence

import numpy as np

from mjax.config.schema.reinforce import ReinforceConfig
from mjax.objectives.fields import HostBatch
from mjax.post.policy.advantages import (
    divergence_costs,
    generalized_advantages,
    shaped_rewards,
    whitened,
)
from mjax.post.rollouts.packing import PackedTranscripts


def ppo_batches(
    settings: ReinforceConfig,
    packs: Sequence[PackedTranscripts],
    scored: Sequence[Mapping[str, np.ndarray]],
) -> list[HostBatch]:
    """The batches of packed rollouts, with "advantages" and "returns" from their "values".

    scored: fields [B, S] of each, with "values" among them. Advantages are whitened over all.
    """
    batches = []
    for pack, fields in zip(packs, scored, strict=True):
        batch = pack.batch(rewards=_rewards_of_tokens(settings, pack)) | fields
        rewards, is_sampled = batch.pop("rewards"), batch["loss_mask"] > 0
        if settings.kl_coef > 0 and settings.kl_in_reward:
            own = divergence_costs(settings, batch["old_log_probs"], batch["ref_log_probs"])
            rewards = rewards - np.where(is_sampled, own, 0)
        given = rewards, batch["values"], is_sampled, settings.gamma, settings.gae_lambda
        found = generalized_advantages(*given, batch["segment_ids"])
        batch["advantages"], batch["returns"] = found
        batches.append(batch)
    names = "advantages", "loss_mask"
    advantages, mask = (np.concatenate([batch[name] for batch in batches]) for name in names)
    ends = np.cumsum([len(batch["tokens"]) for batch in batches])[:-1]
    of_batches = np.split(whitened(settings, advantages, mask > 0), ends)
    return [b | {"advantages": own} for b, own in zip(batches, of_batches, strict=True)]


def _rewards_of_tokens(settings: ReinforceConfig, pack: PackedTranscripts) -> list[np.ndarray]:
    """The reward of each transcript at its last sampled token, 0 at others, [n] each."""
    transcripts = pack.transcripts
    lengths = np.array([t.length for t in transcripts])
    rewards = shaped_rewards(settings, np.array([t.reward for t in transcripts]), lengths)
    found = [np.zeros(len(t.ids)) for t in transcripts]
    for of_tokens, reward, transcript in zip(found, rewards, transcripts, strict=True):
        of_tokens[np.flatnonzero(transcript.is_sampled)[-1:]] = reward
    return found
