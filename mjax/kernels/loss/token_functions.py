"""Token functions: the loss of a token as a function of log p(label) and of its own fields.

The chunked loss (`cross_entropy.py`) applies one to the tokens of a chunk while their logits exist.
Its slope, d loss / d log p, comes from JAX's own differentiation of the function. So SFT, weighted
SFT, DFT and the losses of policies cost the three matmuls of next-token training.

A function is any hashable callable of (`TokenScores`, fields) that works on each token alone. It
returns its loss and its statistics, each [T]. The mask is not its business: the loss, the slope and
the statistics of a token are multiplied by its mask afterwards. So each of them is a mean over
tokens once it is divided by the sum of the mask.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

# What a function reads of each token besides its scores, by name, [T] each.
Fields = dict[str, jax.Array]


class TokenScores(NamedTuple):
    """Figures of each token's distribution, fp32 [T].

    log_p: the log-probability of its label.
    entropy: in nats, or None for a function that does not ask for it.
    """

    log_p: jax.Array
    entropy: jax.Array | None = None


class TokenFunction(Protocol):
    """A token's loss. A class may say `reads_entropy = True`; scores then hold the entropy."""

    def __call__(
        self, scores: TokenScores, fields: Fields
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """(losses [T], which are differentiated by the scores; statistics by name, [T] each)."""


def negative_log_prob(
    scores: TokenScores, fields: Fields
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The loss of next-token training: SFT, and weighted SFT with weights as mask."""
    return -scores.log_p, {}


@dataclass(frozen=True)
class DynamicFineTuning:
    """DFT (arXiv 2508.05629): -p * log p with p held constant, so that p weighs the gradient.

    The statistic "nll" is -log p.
    """

    def __call__(
        self, scores: TokenScores, fields: Fields
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        nll = -scores.log_p
        return lax.stop_gradient(jnp.exp(-nll)) * nll, {"nll": nll}


def name_of(function: TokenFunction) -> str:
    """The name of a function, for messages."""
    return getattr(function, "__name__", type(function).__name__)


def reads_entropy(function: TokenFunction | None) -> bool:
    """Whether a function asks for the entropy of each token."""
    return getattr(function, "reads_entropy", False)


def apply_function(
    function: TokenFunction, scores: TokenScores, fields: Fields, mask: jax.Array
) -> tuple[dict[str, jax.Array], TokenScores]:
    """({"loss" and statistics: [T]}, the slopes of the loss by the scores), all times the mask.

    All are 0 where the mask is 0.
    """

    def losses(scores: TokenScores) -> tuple[jax.Array, dict[str, jax.Array]]:
        return function(scores, fields)

    def masked(values: jax.Array) -> jax.Array:
        return jnp.where(mask == 0, 0, values * mask)

    loss, pull, statistics = jax.vjp(losses, scores, has_aux=True)
    (slopes,) = pull(jnp.ones_like(loss))
    assert "loss" not in statistics, f"{name_of(function)} has a statistic called loss"
    return jax.tree.map(masked, {"loss": loss, **statistics}), jax.tree.map(masked, slopes)


def sums_by_scores(
    function: TokenFunction, scores: TokenScores, fields: Fields, mask: jax.Array
) -> dict[str, jax.Array]:
    """Return the sums of `apply_function`, which are differentiated by the scores.

    Tokens that do not count have a score of 0 here, which no gradient goes to: else an infinity
    that a function makes of one would be a NaN in all gradients.
    """
    off = mask == 0
    loss, found = function(
        jax.tree.map(lambda score: jnp.where(off, 0, score.reshape(mask.shape)), scores), fields
    )
    assert "loss" not in found, f"{name_of(function)} has a statistic called loss"
    terms = lax.stop_gradient(found) | {"loss": loss}
    return {name: jnp.sum(jnp.where(off, 0, term * mask)) for name, term in terms.items()}
