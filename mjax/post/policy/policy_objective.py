"""The objective of policies: losses of sampled tokens, weighted by their advantages.

An answer is a document of its row; "loss_mask" is 1 at the tokens that the policy drew. Fields are
aligned with "labels". Losses of a token alone run within the chunked loss (`head_sums`). Losses of
whole answers, and those with a bonus for entropy, start from the log-probabilities of all tokens.
Invariant: each sum is divided by a count over the global batch, never a mean by another mean.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mjax.config.schema.reinforce import ReinforceConfig
from mjax.config.schema.run import Config
from mjax.kernels.loss.log_probs import of_each_token, sequence_sums
from mjax.kernels.loss.token_functions import TokenScores
from mjax.models.base.context import Context, Tokens
from mjax.models.base.streams import Activation, decoder_of
from mjax.models.decoder import Decoder
from mjax.models.heads.multi_token import with_weight
from mjax.models.moe.router import expert_layer_count
from mjax.objectives.fields import REPLAY_FIELDS, Batch, BatchField, HostBatch, Scalars
from mjax.objectives.next_token import NextToken
from mjax.post.policy.mock_rollouts import mock_rollouts
from mjax.post.policy.policy_losses import (
    ADVANTAGES,
    ANSWER_TOKENS,
    CORRECTION,
    CORRECTION_MEAN,
    DIFFERENCE,
    MISMATCH,
    OLD,
    REFERENCE,
    SAMPLER,
    PolicyFunction,
    clip_figures,
    correction_weights,
)
from mjax.post.policy.published_settings import SEQUENCE_RATIOS, with_published
from mjax.sharding.collectives import Parallel

_COMPUTED = BatchField(np.float32, is_computed=True)


@dataclass(frozen=True)
class PolicyObjective:
    """The loss that `reinforce.loss_type` names, and figures under TRL's names.

    "loss" has the divergence from a reference in it. "entropy" is logged as it is; its gradient has
    the weight -`reinforce.entropy_coef`.
    """

    settings: ReinforceConfig
    routes: tuple[int, int] = (0, 0)  # layers with experts, and experts of a token in each

    def __post_init__(self) -> None:
        object.__setattr__(self, "settings", with_published(self.settings))

    @classmethod
    def of(cls, cfg: Config) -> "PolicyObjective":
        routes = expert_layer_count(cfg.model), cfg.model.moe.num_experts_per_tok
        return cls(cfg.reinforce, routes)

    @property
    def lengths(self) -> dict[str, int]:
        """The lengths of the axes that no other objective has."""
        return dict(zip(("expert_layers", "chosen"), self.routes, strict=True))

    @property
    def own_devices(self) -> tuple[int, str]:
        """The devices of the engine."""
        engine = self.settings.engine
        return engine.get("devices", 0), f"reinforce.engine={engine}"

    @property
    def fields(self) -> Mapping[str, BatchField]:
        given = BatchField(np.float32)
        fields = dict(NextToken.fields) | {ADVANTAGES: given, SAMPLER: given}
        if self.settings.reads_old:
            fields[OLD] = _COMPUTED
        if self.settings.kl_coef:
            fields[REFERENCE] = _COMPUTED
        return fields | REPLAY_FIELDS if self.settings.router_replay else fields

    @property
    def _compares_answers(self) -> bool:
        """Whether a ratio is one of a whole answer."""
        return self.settings.loss_type in SEQUENCE_RATIOS

    def make_fields(self, batch: HostBatch, seed: int, step: int, rows: np.ndarray) -> HostBatch:
        """Answers cut out of random tokens, for speed tests; nothing where rollouts have them."""
        return {} if ADVANTAGES in batch else mock_rollouts(batch, seed, step, rows)

    def derive_fields(self, batch: Batch, parallel: Parallel) -> Batch:
        """The sampled tokens of each token's answer, and the weights of the correction."""
        mask = batch["loss_mask"].astype(jnp.float32)
        settings, derived = self.settings, {}
        derived[ANSWER_TOKENS] = jnp.maximum(_of_answers(mask, batch, parallel), 1)
        if settings.correction != "none":
            log_ratio = jnp.where(mask == 0, 0, batch[OLD] - batch[SAMPLER])
            if settings.correction.startswith("sequence"):
                log_ratio = _of_answers(log_ratio * mask, batch, parallel)
            derived[CORRECTION] = correction_weights(settings, log_ratio)
        return derived

    def embed(self, edges: Decoder, batch: Batch, tokens: Tokens, ctx: Context) -> jax.Array:
        return edges.embed(batch["tokens"], tokens, ctx)

    def counts(self, batch: Batch) -> Scalars:
        settings, mask = self.settings, batch["loss_mask"].astype(jnp.float32)
        tokens, answers = jnp.sum(mask), jnp.sum(mask / batch[ANSWER_TOKENS])
        divisors = {
            "tokens": tokens,
            "sequences": answers,
            "constant": answers * settings.max_new_tokens,
        }
        clips = clip_figures(settings.loss_type)
        names = [*clips, "entropy", DIFFERENCE, MISMATCH]
        names += [CORRECTION_MEAN] if settings.correction != "none" else []
        names += ["kl"] if settings.kl_coef else []
        counts = {"loss": divisors[settings.loss_divisor]} | dict.fromkeys(names, tokens)
        if self._compares_answers:
            counts |= dict.fromkeys(clips, answers)
        if settings.correction.startswith("sequence"):
            counts[CORRECTION_MEAN] = answers
        return counts

    # ---- losses --------------------------------------------------------------------------------

    def losses(
        self, edges: Decoder, x: Activation, batch: Batch, tokens: Tokens, ctx: Context
    ) -> Scalars:
        settings = self.settings
        ctx = ctx.in_training(temperature=settings.temperature)
        mask, labels = batch["loss_mask"], batch["labels"]
        if settings.entropy_coef or self._compares_answers:
            scores = edges.token_scores(decoder_of(x), labels, ctx, entropy=True)
            found = self._of_scores(scores, batch, ctx.parallel)
        else:
            names = ADVANTAGES, SAMPLER, OLD, REFERENCE, ANSWER_TOKENS, CORRECTION
            fields = {name: batch[name] for name in names if name in batch}
            function = PolicyFunction.of(settings)
            found = edges.head_sums(decoder_of(x), labels, mask, ctx, function, fields)
        if settings.correction != "none":
            weights = batch[CORRECTION]
            if settings.correction.startswith("sequence"):
                weights = weights / batch[ANSWER_TOKENS]
            found[CORRECTION_MEAN] = jnp.sum(weights * mask)
        return found

    def _of_scores(self, scores: TokenScores, batch: Batch, parallel: Parallel) -> Scalars:
        """Sums from the log-probabilities of all tokens; what is off the mask has no gradient."""
        settings, mask = self.settings, batch["loss_mask"]
        scores = TokenScores(*(jnp.where(mask == 0, 0, score) for score in scores))
        names = ADVANTAGES, SAMPLER, OLD, REFERENCE, CORRECTION
        fields = {name: jnp.where(mask == 0, 0, batch[name]) for name in names if name in batch}
        fields[ANSWER_TOKENS] = batch[ANSWER_TOKENS]
        log_ratio = scores.log_p - fields.get(OLD, lax.stop_gradient(scores.log_p))
        if self._compares_answers:
            log_ratio = _of_answers(log_ratio * mask, batch, parallel)
            if settings.loss_type == "gspo":
                log_ratio = log_ratio / batch[ANSWER_TOKENS]
        loss, figures = PolicyFunction.of(settings).terms(scores, log_ratio, fields)
        if self._compares_answers:
            for name in clip_figures(settings.loss_type):
                figures[name] = figures[name] / batch[ANSWER_TOKENS]
        found = {name: jnp.sum(figure * mask) for name, figure in figures.items()}
        bonus = with_weight(found["entropy"], -settings.entropy_coef)
        total = jnp.sum(jnp.where(mask == 0, 0, loss * mask))
        return lax.stop_gradient(found) | {"loss": total, "entropy": bonus}


def _of_answers(values: jax.Array, batch: Batch, parallel: Parallel) -> jax.Array:
    """The sum over the answer of each token, [B, S/cp]."""
    segments = batch["segment_ids"]
    sums = sequence_sums(values, segments, parallel=parallel)
    return of_each_token(sums, segments, values.shape[1])
