"""Policy-gradient losses of sampled tokens, as functions of log p and of the fields of a token.

r is the ratio p / p_old, of the token or of its answer; A is the advantage. Without `OLD` a policy
takes its first update on a rollout. Then r is p / stop_gradient(p): 1, with the gradient of log p.
Formulas and sources are in docs/train/policy-losses.md; figures have TRL's names.
"""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from mjax.config.schema.reinforce import PolicyLoss, ReinforceConfig
from mjax.kernels.loss.token_functions import Fields, TokenScores

# Fields of a batch. They are 0 where the mask is 0, and speak of the label of their place.
ADVANTAGES, SAMPLER, OLD, REFERENCE = (
    "advantages",
    "sampler_log_probs",
    "old_log_probs",
    "ref_log_probs",
)
# Derived from them: the sampled tokens of a token's answer, and its `correction_weights`.
ANSWER_TOKENS, CORRECTION = "answer_tokens", "correction_weights"

# Figures: shares of tokens whose gradient the clip ends, and sampler against trainer.
CLIPS = (
    "clip_ratio/low_mean",
    "clip_ratio/high_mean",
    "clip_ratio/region_mean",
    "cispo_clip_ratio",
)
DIFFERENCE = "sampling/sampling_logp_difference/mean"
MISMATCH = "sampling/token_mult_prob_error"  # the mean of exp |difference|, NeMo-RL's name
CORRECTION_MEAN = "sampling/importance_sampling_ratio/mean"

SAPO_TEMPERATURES = 1.0, 1.05  # of advantages above 0, and of others (arXiv 2511.20347)
_RATIO_EXPONENT = 20.0  # products of e^20 are finite in fp32


def bounded_exp(x: jax.Array) -> jax.Array:
    """exp(x), which is constant and has no gradient beyond exp(20)."""
    return jnp.exp(jnp.clip(x, -_RATIO_EXPONENT, _RATIO_EXPONENT))


def divergence_estimate(kind: str, log_p: jax.Array, ref_log_p: jax.Array) -> jax.Array:
    """k1, k2 or k3 of KL(policy || reference) from a sample of the policy, of any shape.

    They are http://joschu.net/blog/kl-approx.html's.
    """
    difference = ref_log_p - log_p
    if kind == "k1":
        return -difference
    if kind == "k2":
        return jnp.square(difference) / 2
    return bounded_exp(difference) - difference - 1


def clip_figures(loss_type: PolicyLoss) -> tuple[str, ...]:
    """The names of a loss's figures of clipping."""
    if loss_type == "sapo":
        return ()
    return CLIPS[3:] if loss_type == "cispo" else CLIPS[:3]


@dataclass(frozen=True)
class PolicyFunction:
    """A token function: one of the losses, and the divergence from a reference.

    low, high: the bounds of ratios.
    weighs_answers: each answer counts as the mean of its tokens, not as their sum.
    """

    loss_type: PolicyLoss
    low: float
    high: float
    kl_coef: float
    kl_estimator: str
    weighs_answers: bool

    reads_entropy: ClassVar[bool] = True

    @classmethod
    def of(cls, settings: ReinforceConfig) -> "PolicyFunction":
        return cls(
            settings.loss_type,
            low=1 - settings.clip_low,
            high=1 + settings.clip_high,
            kl_coef=0.0 if settings.kl_in_reward else settings.kl_coef,
            kl_estimator=settings.kl_estimator,
            weighs_answers=settings.loss_divisor == "sequences",
        )

    def __call__(
        self, scores: TokenScores, fields: Fields
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        old = fields.get(OLD, lax.stop_gradient(scores.log_p))
        return self.terms(scores, scores.log_p - old, fields)

    def terms(
        self, scores: TokenScores, log_ratio: jax.Array, fields: Fields
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """(losses, statistics) of tokens; log_ratio is log r."""
        ratio, advantage = bounded_exp(log_ratio), fields[ADVANTAGES]
        is_low = (advantage < 0) & (ratio < self.low)
        is_high = (advantage > 0) & (ratio > self.high)
        if self.loss_type == "cispo":
            weight = lax.stop_gradient(jnp.minimum(ratio, self.high))
            loss = -weight * advantage * scores.log_p
        elif self.loss_type == "sapo":
            of_good, of_others = SAPO_TEMPERATURES
            heat = jnp.where(advantage > 0, of_good, of_others)
            loss = -advantage * jax.nn.sigmoid(heat * (ratio - 1)) * 4 / heat
        else:  # -min(r A, clip(r) A)
            bound = jnp.where(is_high, self.high, self.low)
            loss = -advantage * jnp.where(is_low | is_high, bound, ratio)
        loss = loss * fields.get(CORRECTION, 1.0)
        clips = is_low, is_high, is_low | is_high, is_high
        clips = {name: share.astype(loss.dtype) for name, share in zip(CLIPS, clips, strict=True)}
        figures = {name: clips[name] for name in clip_figures(self.loss_type)}
        figures["entropy"] = scores.entropy
        mismatch = jnp.abs(fields.get(OLD, scores.log_p) - fields[SAMPLER])
        figures[DIFFERENCE], figures[MISMATCH] = mismatch, bounded_exp(mismatch)
        if REFERENCE in fields:
            kl = divergence_estimate(self.kl_estimator, scores.log_p, fields[REFERENCE])
            loss, figures["kl"] = loss + self.kl_coef * kl, kl
        if self.weighs_answers:
            loss = loss / fields[ANSWER_TOKENS]
        return loss, figures


def importance_sampling(
    scores: TokenScores, fields: Fields
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """-A p / p_sampler, the policy gradient of tokens that another policy drew."""
    ratio = bounded_exp(scores.log_p - fields[SAMPLER])
    return -ratio * fields[ADVANTAGES], {"ratio": ratio}


def correction_weights(settings: ReinforceConfig, log_ratio: jax.Array) -> jax.Array:
    """The weights of `reinforce.correction` from log(p_old / p_sampler) of tokens or answers."""
    weights = bounded_exp(log_ratio)
    if settings.correction.endswith("truncate"):
        return jnp.minimum(weights, settings.correction_high)
    is_kept = (weights >= settings.correction_low) & (weights <= settings.correction_high)
    return jnp.where(is_kept, weights, 0.0)
