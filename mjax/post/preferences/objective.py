"""The objective of preferences: losses of whole answers in packed rows.

An answer is a document of its row: a prompt, and the answer, which "loss_mask" marks. Documents 2k
- 1 and 2k of a row are a pair, the chosen answer first; losses of single answers take each by
itself. Sums over an answer hold under packing and context parallelism (`sequence_sums`). Each
device of cp and tp computes the same losses of a row, and counts its share.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mjax.config.schema.preference import PreferenceConfig
from mjax.config.schema.run import Config
from mjax.kernels.loss.log_probs import sequence_sums
from mjax.models.base.context import Context, Tokens
from mjax.models.base.streams import Activation, decoder_of
from mjax.models.decoder import Decoder
from mjax.objectives.fields import SHARED_FIELDS, Batch, BatchField, HostBatch, Scalars
from mjax.objectives.next_token import NextToken
from mjax.objectives.objective import MATCHED, PAIRS, SINGLE
from mjax.post.preferences.mock_answers import mock_answers
from mjax.post.preferences.pair_losses import PAIR_LOSSES, AnswerSums, kto, rewards_of
from mjax.sharding.collectives import Parallel

# At the last token of an answer: 1 for a chosen or good one, -1 for a rejected or bad one. 0 at all
# other tokens, and at those of answers that only the divergence of kto reads.
ANSWER_VALUES = BatchField(np.float32)
# The log-probability of each label under the reference, and kto's divergence, one for a batch.
REF_LOG_PROBS = BatchField(np.float32, is_computed=True)
KL = BatchField(np.float32, ("batch",), is_computed=True)


@dataclass(frozen=True)
class Preference:
    """The losses that `preference.loss_type` names, and figures of rewards.

    "loss" is the weighted sum of the losses of pairs, or of single answers. "sft" is the weighted
    cross-entropy of chosen answers, over their tokens; orpo's is over their prompts, too. Figures
    that are only logged have TRL's names.
    """

    settings: PreferenceConfig
    shares_prefixes: bool = False

    @classmethod
    def of(cls, cfg: Config) -> "Preference":
        return cls(cfg.preference, cfg.data.shared_prefixes)

    @property
    def dataset(self) -> str:
        if not self.settings.is_unpaired:
            return PAIRS
        return MATCHED if self.reads_kl else SINGLE

    @property
    def reads_kl(self) -> bool:
        return "kto" in self.settings.losses

    @property
    def fields(self) -> Mapping[str, BatchField]:
        fields = dict(NextToken.fields) | {"answer_values": ANSWER_VALUES}
        if self.settings.needs_reference:
            fields["ref_log_probs"] = REF_LOG_PROBS
        if self.shares_prefixes:
            fields |= SHARED_FIELDS
        return fields | ({"kl": KL} if self.reads_kl else {})

    @property
    def _sft_weight(self) -> float:
        losses = self.settings.losses
        return losses.get("sft", losses.get("orpo", 0.0))

    def make_fields(self, batch: HostBatch, seed: int, step: int, rows: np.ndarray) -> HostBatch:
        """Pairs cut out of random tokens, for speed tests; nothing where a data set has them.

        A reference that each step computes is left to its role.
        """
        if "answer_values" in batch:
            return {}
        made = mock_answers(batch, self.dataset, seed, step, rows, self.shares_prefixes)
        if self.settings.computes_reference:
            del made["ref_log_probs"]
        return made

    def embed(self, edges: Decoder, batch: Batch, tokens: Tokens, ctx: Context) -> jax.Array:
        return edges.embed(batch["tokens"], tokens, ctx)

    # ---- counts --------------------------------------------------------------------------------

    def counts(self, batch: Batch) -> Scalars:
        values = batch["answer_values"]
        good, bad = jnp.sum(values > 0, dtype=jnp.float32), jnp.sum(values < 0, dtype=jnp.float32)
        answers = good + bad
        divisors = {
            "pairs": answers if self.settings.is_unpaired else good,
            "sequences": answers,
            "tokens": jnp.sum(batch["loss_mask"].astype(jnp.float32)),
        }
        counts = {"loss": divisors[self.settings.loss_divisor]}
        if self._sft_weight:
            counts["sft"] = jnp.sum(self._sft_mask(batch))
        counts |= {"rewards/chosen": good, "rewards/rejected": bad}
        counts |= {"logps/chosen": good, "logps/rejected": bad}
        if not self.settings.is_unpaired:
            counts |= {"rewards/accuracies": good, "rewards/margins": good}
        if self.reads_kl:
            counts["kl"] = answers
        return counts

    def _sft_mask(self, batch: Batch) -> jax.Array:
        """fp32 [B, S]: the tokens of chosen answers; in orpo those of their prompts, too."""
        is_chosen = batch["segment_ids"] % 2 == 1
        mask = batch["loss_mask"] if "sft" in self.settings.losses else is_chosen
        return mask.astype(jnp.float32) * is_chosen

    # ---- losses --------------------------------------------------------------------------------

    def losses(
        self, edges: Decoder, x: Activation, batch: Batch, tokens: Tokens, ctx: Context
    ) -> Scalars:
        log_probs = edges.token_scores(decoder_of(x), batch["labels"], ctx, keep=True).log_p
        answers, values = sums_of_answers(log_probs, batch, ctx.parallel)
        figures = self._of_answers(answers, values, batch)
        if not self.settings.is_unpaired:
            figures |= self._of_pairs(answers, values)
        # All devices of cp have the sums of whole answers: each counts a part.
        found = {name: total / ctx.parallel.cp for name, total in figures.items()}
        if self._sft_weight:
            found["sft"] = -self._sft_weight * jnp.sum(log_probs * self._sft_mask(batch))
        return found

    def _of_pairs(self, answers: AnswerSums, values: jax.Array) -> Scalars:
        """Sums over pairs: the losses, and how often the chosen answer has the larger reward."""
        settings, total = self.settings, jnp.float32(0)
        chosen, rejected = pairs_of(answers)
        is_pair = pairs_of(values)[0] > 0
        for name, weight in settings.losses.items():
            if name != "sft":
                losses = PAIR_LOSSES[name](settings, chosen, rejected)
                total += weight * jnp.sum(jnp.where(is_pair, losses, 0))
        margins = rewards_of(settings, chosen) - rewards_of(settings, rejected)
        figures = {"rewards/margins": margins, "rewards/accuracies": margins > 0}
        figures = {name: jnp.sum(is_pair * value) for name, value in figures.items()}
        return {"loss": total} | jax.lax.stop_gradient(figures)

    def _of_answers(self, answers: AnswerSums, values: jax.Array, batch: Batch) -> Scalars:
        """Sums over answers: rewards and log-probabilities, and the losses of single answers."""
        figures = {}
        rewards = rewards_of(self.settings, answers)
        for name, counts in {"chosen": values > 0, "rejected": values < 0}.items():
            figures[f"rewards/{name}"] = jnp.sum(counts * rewards)
            figures[f"logps/{name}"] = jnp.sum(counts * answers.log_prob)
        figures = jax.lax.stop_gradient(figures)
        if not self.settings.is_unpaired:
            return figures
        kl = batch["kl"][:, None] if self.reads_kl else jnp.float32(0)
        losses = kto(self.settings, answers, values > 0, kl)
        (weight,) = self.settings.losses.values()
        figures["loss"] = weight * jnp.sum(jnp.where(values != 0, losses, 0))
        if self.reads_kl:
            figures["kl"] = jnp.sum((values != 0) * kl)
        return figures


def sums_of_answers(
    log_probs: jax.Array, batch: Batch, parallel: Parallel
) -> tuple[AnswerSums, jax.Array]:
    """(sums of the answer of each document, their values), fp32 [B, N]; document 0 is padding.

    log_probs: of labels, fp32 [B, S/cp].
    """
    mask = batch["loss_mask"].astype(jnp.float32)
    total = partial(sequence_sums, segments=batch["segment_ids"], parallel=parallel)
    of_reference = batch.get("ref_log_probs", jnp.zeros_like(mask))
    answers = AnswerSums(total(log_probs * mask), total(of_reference * mask), total(mask))
    return answers, total(batch["answer_values"])


def pairs_of(answers: Any) -> tuple[Any, Any]:
    """(chosen, rejected) of arrays [B, N] over documents: entries 1, 3, .. and 2, 4, .."""
    firsts = jax.tree.map(lambda a: a[:, 1::2], answers)
    seconds = jax.tree.map(lambda a: a[:, 2::2], answers)
    pairs = jax.tree.leaves(seconds)[0].shape[1]
    return jax.tree.map(lambda a: a[:, :pairs], firsts), seconds
