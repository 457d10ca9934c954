"""Losses of pairs and of single answers, from sums over the tokens of each answer.

A loss is a function of (settings, chosen, rejected), all entries alike; `PAIR_LOSSES` has each by
its name in `preference.loss_type`. The formulas are TRL's (`trl/trainer/dpo_trainer.py`, and cpo,
orpo and kto there) and stand in docs/train/preferences.md. Invariant: entry i of a result depends
on entry i of what is given alone.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.nn import log_sigmoid, sigmoid

from mjax.config.schema.preference import PreferenceConfig

_SURE = -1e-7  # the largest mean log-probability whose odds are finite in fp32
_LARGEST = 80.0  # exponent that fp32 holds


class AnswerSums(NamedTuple):
    """Figures of answers, fp32 arrays of one shape.

    log_prob: the sum over an answer's tokens. of_reference: likewise under the reference, or 0.
    tokens: their number.
    """

    log_prob: jax.Array
    of_reference: jax.Array
    tokens: jax.Array

    @property
    def log_ratio(self) -> jax.Array:
        return self.log_prob - self.of_reference

    @property
    def length(self) -> jax.Array:
        """The tokens, at least 1."""
        return jnp.maximum(self.tokens, 1)

    @property
    def mean_log_prob(self) -> jax.Array:
        return self.log_prob / self.length


PairLossFunction = Callable[[PreferenceConfig, AnswerSums, AnswerSums], jax.Array]


def divergence_score(settings: PreferenceConfig, answer: AnswerSums) -> jax.Array:
    """f'(t) of the divergence f at t = exp(log_ratio), up to a constant (arXiv 2309.16240)."""
    log_ratio, alpha = answer.log_ratio, settings.f_alpha_divergence_coef - 1
    match settings.f_divergence_type:
        case "forward_kl":
            return 1 - jnp.exp(-log_ratio)
        case "js_divergence":
            return math.log(2) + log_sigmoid(log_ratio)
        case "alpha_divergence" if abs(alpha) >= 1e-6:
            return (jnp.exp(jnp.minimum(alpha * log_ratio, _LARGEST)) - 1) / alpha
        case _:
            return log_ratio


def _smoothed(logits: jax.Array, label_smoothing: float) -> jax.Array:
    """The logistic loss where a share of labels is wrong."""
    right, wrong = log_sigmoid(logits), log_sigmoid(-logits)
    return -(1 - label_smoothing) * right - label_smoothing * wrong


def _logits(settings: PreferenceConfig, chosen: AnswerSums, rejected: AnswerSums) -> jax.Array:
    scores = divergence_score(settings, chosen) - divergence_score(settings, rejected)
    return settings.beta * scores


def _mean_scores(settings: PreferenceConfig, chosen: AnswerSums, rejected: AnswerSums) -> jax.Array:
    """The difference of scores, each divided by the tokens of its answer."""
    of_chosen = divergence_score(settings, chosen) / chosen.length
    return of_chosen - divergence_score(settings, rejected) / rejected.length


def _rewards(
    settings: PreferenceConfig, chosen: AnswerSums, rejected: AnswerSums
) -> tuple[jax.Array, jax.Array]:
    return settings.beta * chosen.log_ratio, settings.beta * rejected.log_ratio


def dpo(settings: PreferenceConfig, chosen: AnswerSums, rejected: AnswerSums) -> jax.Array:
    """DPO (arXiv 2305.18290), with smoothed labels cDPO."""
    return _smoothed(_logits(settings, chosen, rejected), settings.label_smoothing)


def hinge(settings: PreferenceConfig, chosen: AnswerSums, rejected: AnswerSums) -> jax.Array:
    """SLiC (arXiv 2305.10425)."""
    return jax.nn.relu(1 - _logits(settings, chosen, rejected))


def ipo(settings: PreferenceConfig, chosen: AnswerSums, rejected: AnswerSums) -> jax.Array:
    """IPO (arXiv 2310.12036) of means over tokens, as its authors compute it."""
    return (_mean_scores(settings, chosen, rejected) - 1 / (2 * settings.beta)) ** 2


def robust(settings: PreferenceConfig, chosen: AnswerSums, rejected: AnswerSums) -> jax.Array:
    """Unbiased where a share of labels is wrong (arXiv 2403.00409)."""
    logits, wrong = _logits(settings, chosen, rejected), settings.label_smoothing
    loss = -(1 - wrong) * log_sigmoid(logits) + wrong * log_sigmoid(-logits)
    return loss / (1 - 2 * wrong)


def sigmoid_norm(settings: PreferenceConfig, chosen: AnswerSums, rejected: AnswerSums) -> jax.Array:
    """DPO of means over tokens (Tulu 3, arXiv 2411.15124)."""
    return -log_sigmoid(settings.beta * _mean_scores(settings, chosen, rejected))


def exo_pair(settings: PreferenceConfig, chosen: AnswerSums, rejected: AnswerSums) -> jax.Array:
    """EXO (arXiv 2402.00856), equation 16 for two answers."""
    logits, wrong = _logits(settings, chosen, rejected), settings.label_smoothing
    of_chosen = sigmoid(logits) * (log_sigmoid(logits) - math.log1p(-wrong))
    return of_chosen + sigmoid(-logits) * (log_sigmoid(-logits) - math.log(wrong))


def nca_pair(settings: PreferenceConfig, chosen: AnswerSums, rejected: AnswerSums) -> jax.Array:
    """NCA (arXiv 2402.05369)."""
    good, bad = _rewards(settings, chosen, rejected)
    return -log_sigmoid(good) - 0.5 * log_sigmoid(-good) - 0.5 * log_sigmoid(-bad)


def bco_pair(settings: PreferenceConfig, chosen: AnswerSums, rejected: AnswerSums) -> jax.Array:
    """BCO (arXiv 2404.04656) without its running shift."""
    good, bad = _rewards(settings, chosen, rejected)
    return -log_sigmoid(good) - log_sigmoid(-bad)


def sppo_hard(settings: PreferenceConfig, chosen: AnswerSums, rejected: AnswerSums) -> jax.Array:
    """SPPO (arXiv 2405.00675) with certain labels."""
    half = 0.5 / settings.beta
    return (chosen.log_ratio - half) ** 2 + (rejected.log_ratio + half) ** 2


def apo_zero(settings: PreferenceConfig, chosen: AnswerSums, rejected: AnswerSums) -> jax.Array:
    """APO-zero (arXiv 2408.06266), equation 7."""
    good, bad = _rewards(settings, chosen, rejected)
    return 1 - sigmoid(good) + sigmoid(bad)


def apo_down(settings: PreferenceConfig, chosen: AnswerSums, rejected: AnswerSums) -> jax.Array:
    """APO-down (arXiv 2408.06266), equation 8."""
    good, bad = _rewards(settings, chosen, rejected)
    return sigmoid(good) + 1 - sigmoid(good - bad)


def discopop(settings: PreferenceConfig, chosen: AnswerSums, rejected: AnswerSums) -> jax.Array:
    """DiscoPOP (arXiv 2406.08414), equation 5: logistic and exponential, blended."""
    logits = _logits(settings, chosen, rejected)
    blend = sigmoid(logits / settings.discopop_tau)
    return -log_sigmoid(logits) * (1 - blend) + jnp.exp(-logits) * blend


def cpo(settings: PreferenceConfig, chosen: AnswerSums, rejected: AnswerSums) -> jax.Array:
    """CPO (arXiv 2401.08417) without its SFT term, which is the loss sft."""
    logits = settings.beta * (chosen.log_prob - rejected.log_prob)
    return _smoothed(logits, settings.label_smoothing)


def simpo(settings: PreferenceConfig, chosen: AnswerSums, rejected: AnswerSums) -> jax.Array:
    """SimPO (arXiv 2405.14734)."""
    margin = settings.beta * (chosen.mean_log_prob - rejected.mean_log_prob)
    return _smoothed(margin - settings.simpo_gamma, settings.label_smoothing)


def orpo(settings: PreferenceConfig, chosen: AnswerSums, rejected: AnswerSums) -> jax.Array:
    """The odds ratio's part of ORPO (arXiv 2403.07691)."""
    log_odds = _log_odds(chosen.mean_log_prob) - _log_odds(rejected.mean_log_prob)
    return -settings.beta * log_sigmoid(log_odds)


def _log_odds(log_prob: jax.Array) -> jax.Array:
    """log(p / (1 - p)), finite also where p rounds to 1."""
    log_prob = jnp.minimum(log_prob, _SURE)
    is_small = log_prob < -math.log(2)
    # Each form where it is exact; the other one's argument stays finite there.
    of_small = jnp.log1p(-jnp.exp(jnp.where(is_small, log_prob, -1.0)))
    of_large = jnp.log(-jnp.expm1(jnp.where(is_small, -0.5, log_prob)))
    return log_prob - jnp.where(is_small, of_small, of_large)


PAIR_LOSSES: dict[str, PairLossFunction] = {
    "sigmoid": dpo,
    "hinge": hinge,
    "ipo": ipo,
    "robust": robust,
    "sigmoid_norm": sigmoid_norm,
    "exo_pair": exo_pair,
    "nca_pair": nca_pair,
    "bco_pair": bco_pair,
    "sppo_hard": sppo_hard,
    "apo_zero": apo_zero,
    "apo_down": apo_down,
    "discopop": discopop,
    "cpo": cpo,
    "simpo": simpo,
    "orpo": orpo,
}


def kto(
    settings: PreferenceConfig, answer: AnswerSums, is_good: jax.Array, kl: jax.Array
) -> jax.Array:
    """KTO (arXiv 2402.01306) of single answers; `kl` is 0 in apo_zero_unpaired.

    kl: an estimate of the divergence from the reference, which gives no gradient.
    """
    distance = settings.beta * (answer.log_ratio - kl)
    good = settings.desirable_weight * (1 - sigmoid(distance))
    bad = settings.undesirable_weight * (1 - sigmoid(-distance))
    return jnp.where(is_good, good, bad)


def rewards_of(settings: PreferenceConfig, answer: AnswerSums) -> jax.Array:
    """The rewards that a policy implies, for figures: those of TRL."""
    names = settings.losses
    if "simpo" in names or "orpo" in names:
        return settings.beta * answer.mean_log_prob
    return settings.beta * answer.log_ratio
