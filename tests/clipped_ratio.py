"""A token function with two fields and a statistic, in the smallest form of a policy's loss."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from mjax.kernels.loss.token_functions import Fields, TokenScores


@dataclass(frozen=True)
class ClippedRatio:
    """PPO's and GRPO's loss (arXiv 1707.06347): -min(r * A, clip(r, 1 - low, 1 + high) * A).

    r is exp(log p - old_log_prob). The fields are "old_log_prob" and "advantage" (A). The statistic
    "clipped" is 1 where the clip ends the gradient.
    """

    low: float = 0.2
    high: float = 0.2

    def __call__(
        self, scores: TokenScores, fields: Fields
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        ratio = jnp.exp(scores.log_p - fields["old_log_prob"])
        advantage = fields["advantage"]
        bound = jnp.where(advantage > 0, 1 + self.high, 1 - self.low)
        clipped = jnp.where(advantage > 0, ratio > bound, ratio < bound) & (advantage != 0)
        loss = -advantage * jnp.where(clipped, bound, ratio)
        return loss, {"clipped": clipped.astype(loss.dtype)}
