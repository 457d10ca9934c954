"""The objective of reward models: a number for each answer, or for each step of an answer.

The model has one label (`model.num_labels`). The reward of an answer is its score at the last token
of its document. Documents are laid out as for preferences, with their last token.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.nn import log_sigmoid

from mjax.config.schema.preference import RewardConfig
from mjax.config.schema.run import Config
from mjax.kernels.loss.log_probs import sequence_sums
from mjax.models.base.context import Context, Tokens
from mjax.models.base.streams import Activation, decoder_of
from mjax.models.decoder import Decoder
from mjax.objectives.fields import SHARED_FIELDS, Batch, BatchField, HostBatch, Scalars
from mjax.objectives.objective import PAIRS, STEPS
from mjax.post.preferences.mock_answers import mock_answers
from mjax.post.preferences.objective import ANSWER_VALUES, pairs_of


@dataclass(frozen=True)
class Reward:
    """Bradley-Terry's loss of pairs, or the logistic loss of steps that are right or wrong.

    "loss" is a mean over pairs, or over steps. With pairs "center" is the term that keeps
    rewards around 0. Logged are TRL's accuracy, margin and mean_reward.
    """

    settings: RewardConfig
    shares_prefixes: bool = False

    @classmethod
    def of(cls, cfg: Config) -> "Reward":
        return cls(cfg.reward, cfg.data.shared_prefixes)

    @property
    def of_pairs(self) -> bool:
        return self.settings.loss_type == "bradley_terry"

    @property
    def dataset(self) -> str:
        return PAIRS if self.of_pairs else STEPS

    @property
    def fields(self) -> Mapping[str, BatchField]:
        fields = {"tokens": BatchField(np.int32), "answer_values": ANSWER_VALUES}
        if self.shares_prefixes:
            fields |= SHARED_FIELDS
        return fields | ({"margins": BatchField(np.float32)} if self.of_pairs else {})

    def make_fields(self, batch: HostBatch, seed: int, step: int, rows: np.ndarray) -> HostBatch:
        """Answers cut out of random tokens, for speed tests; nothing where a data set has them."""
        if "answer_values" in batch:
            return {}
        return mock_answers(batch, self.dataset, seed, step, rows, self.shares_prefixes)

    def embed(self, edges: Decoder, batch: Batch, tokens: Tokens, ctx: Context) -> jax.Array:
        return edges.embed(batch["tokens"], tokens, ctx)

    def counts(self, batch: Batch) -> Scalars:
        values = batch["answer_values"]
        good, all_values = jnp.sum(values > 0), jnp.sum(values != 0)
        count = (good if self.of_pairs else all_values).astype(jnp.float32)
        counts = {"loss": count, "accuracy": count}
        counts["mean_reward"] = all_values.astype(jnp.float32)
        if self.of_pairs:
            counts["margin"] = count
            if self.settings.center_rewards_coefficient:
                counts["center"] = count
        return counts

    def losses(
        self, edges: Decoder, x: Activation, batch: Batch, tokens: Tokens, ctx: Context
    ) -> Scalars:
        scores = edges.label_scores(decoder_of(x), ctx)[..., 0]
        values = batch["answer_values"]
        of_all = jax.lax.stop_gradient(jnp.sum(scores * (values != 0)))
        if self.of_pairs:
            return self._of_pairs(scores, batch, ctx) | {"mean_reward": of_all}
        losses = -log_sigmoid(jnp.sign(values) * scores)
        is_right = jax.lax.stop_gradient(scores * values > 0)
        return {
            "loss": jnp.sum(losses * (values != 0)),
            "accuracy": jnp.sum(is_right, dtype=jnp.float32),
            "mean_reward": of_all,
        }

    def _of_pairs(self, scores: jax.Array, batch: Batch, ctx: Context) -> Scalars:
        """Sums over pairs; each device of cp has whole answers and counts a part."""
        values, segments = batch["answer_values"], batch["segment_ids"]

        def at_ends(numbers: jax.Array) -> jax.Array:
            return sequence_sums(numbers, segments, parallel=ctx.parallel)

        chosen, rejected = pairs_of(at_ends(scores * (values != 0)))
        is_pair = pairs_of(at_ends(values))[0] > 0
        margins, _ = pairs_of(at_ends(batch["margins"]))
        difference = chosen - rejected
        losses = {"loss": -log_sigmoid(difference - margins)}
        coefficient = self.settings.center_rewards_coefficient
        if coefficient:
            losses["center"] = coefficient * (chosen + rejected) ** 2
        figures = {"accuracy": difference > 0, "margin": difference}
        losses |= jax.lax.stop_gradient(figures)
        return {name: jnp.sum(is_pair * value) / ctx.parallel.cp for name, value in losses.items()}
