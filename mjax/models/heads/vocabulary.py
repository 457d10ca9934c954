"""The head of a language model: scores of a vocabulary for each token, and their losses.

With `num_labels` it has a table of its own in their place, as transformers' models for sequence
classification: a few numbers for each token, of which a reader takes those of a last token.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mjax.kernels.loss.cross_entropy import Terms, count_hits, cross_entropy, token_sums
from mjax.kernels.loss.divergence import Divergence, LogitSource, divergence_sums
from mjax.kernels.loss.log_probs import TopLogProbs, token_scores, top_log_probs
from mjax.kernels.loss.token_functions import (
    Fields,
    TokenFunction,
    TokenScores,
    reads_entropy,
    sums_by_scores,
)
from mjax.models.base.context import Context, scaled
from mjax.models.base.params import declare, declare_bias, normal, table
from mjax.sharding.collectives import LOCAL, Parallel
from mjax.sharding.spec import ParamSpec


class VocabularyHead:
    """The part of a decoder after its final norm: a table [V, D], its own or the embedding's."""

    def declare_head(self, rngs: nnx.Rngs) -> None:
        """Declare the parameters after the final norm."""
        cfg = self.cfg
        if cfg.num_labels:
            shape = cfg.num_labels, cfg.hidden_size
            score = ParamSpec(shape, (None, "embed"), "head", hf=("score.weight",))
            self.score = declare(rngs, score, normal(cfg.initializer_range))
            return
        if not cfg.tie_word_embeddings:
            words = table(cfg.padded_vocab_size, cfg.hidden_size, "vocab", "tokens")
            head = replace(words, role="head", hf=("lm_head.weight",))
            self.head = declare(rngs, head, normal(cfg.initializer_range))
        if cfg.lm_head_bias:
            shape, axes = (cfg.padded_vocab_size,), ("vocab",)
            self.vocabulary_bias = declare_bias(rngs, shape, axes, "lm_head.bias")

    @jax.named_scope("head")
    def head_loss(
        self, x: jax.Array, labels: jax.Array, mask: jax.Array, ctx: Context
    ) -> jax.Array:
        """The sum of mask * cross-entropy, fp32 [], equal on all tp devices.

        x [B, S/tp, D] is the last layer's output, `labels` int32 and `mask` fp32 are [B, S].
        """
        return self.token_loss(self.normed(x), labels, mask, ctx)

    def token_loss(
        self, x: jax.Array, labels: jax.Array, mask: jax.Array, ctx: Context
    ) -> jax.Array:
        """`head_loss` of x [B, S/tp, D] that is normed already."""
        few = self.cfg.bert.mlm_head
        return self._of_tokens(cross_entropy, x, (labels, mask), ctx, few=few)

    @jax.named_scope("head")
    def token_hits(
        self, x: jax.Array, labels: jax.Array, mask: jax.Array, ctx: Context
    ) -> jax.Array:
        """The sum of mask where the likeliest token is the label; arguments as `head_loss`."""
        few = self.cfg.bert.mlm_head
        return self._of_tokens(count_hits, self.normed(x), (labels, mask), ctx, few=few)

    @jax.named_scope("head")
    def head_sums(
        self,
        x: jax.Array,
        labels: jax.Array,
        mask: jax.Array,
        ctx: Context,
        function: TokenFunction,
        fields: Fields,
    ) -> dict[str, jax.Array]:
        """Sums of mask * a token function, fp32 []: "loss" and the function's statistics.

        `fields` [B, S] are what it reads of each token. Other arguments are those of `head_loss`.
        """
        flat = {name: field.reshape(-1) for name, field in fields.items()}
        if ctx.kernels.blocks is not None:
            scores = self.token_scores(x, labels, ctx, entropy=reads_entropy(function))
            return sums_by_scores(function, scores, flat, mask.reshape(-1))
        more = {"function": function, "fields": flat}
        return self._of_tokens(token_sums, self.normed(x), (labels, mask), ctx, **more)

    @jax.named_scope("head")
    def head_divergence(
        self,
        x: jax.Array,
        labels: jax.Array,
        mask: jax.Array,
        ctx: Context,
        teacher: LogitSource,
        teacher_terms: Terms,
        divergence: Divergence,
    ) -> dict[str, jax.Array]:
        """The sums of `divergence_sums` with this model as student; arguments as `head_loss`."""

        def compute(x, w, labels, mask, *, bias, terms, parallel, chunk):
            more = {"teacher_terms": teacher_terms, "parallel": parallel, "chunk": chunk}
            student = LogitSource(x, w, bias)
            given = student, teacher, labels, mask, divergence
            return divergence_sums(*given, terms=terms, **more)

        return self._of_tokens(compute, self.normed(x), (labels, mask), ctx)

    @jax.named_scope("head")
    def top_log_probs(self, x: jax.Array, most: int, ctx: Context) -> TopLogProbs:
        """The `most` likeliest tokens and their log-probabilities, [B, S, most]; x is normed."""
        found = self._of_tokens(top_log_probs, x, (), ctx, most=most)
        return jax.tree.map(lambda a: a.reshape(len(x), -1, most), found)

    @jax.named_scope("head")
    def token_scores(
        self,
        x: jax.Array,
        labels: jax.Array,
        ctx: Context,
        *,
        entropy: bool = False,
        keep: bool = False,
    ) -> TokenScores:
        """The log-probability of each label, fp32 [B, S], and with `entropy` each token's entropy.

        x and labels as in `head_loss`; or labels [B, S, K], K of each token, without entropy.
        Results are equal on all tp devices, and differentiable. `keep` as in `log_probs.py`.
        """
        more = {"entropy": entropy, "keep": keep}
        found = self._of_tokens(token_scores, self.normed(x), (labels,), ctx, **more)
        found = jax.tree.map(lambda scores: scores.reshape(labels.shape), found)
        blocks = ctx.kernels.blocks
        if blocks is not None and labels.ndim < x.ndim:
            given = found.log_p, x, labels, ctx.training.temperature
            found = found._replace(log_p=blocks.log_probs(self, *given))
        return found

    def _of_tokens(
        self, compute: Callable, x: jax.Array, per_token: tuple, ctx: Context, **more: Any
    ) -> Any:
        """A function of what tokens' logits are made from and of arrays [B, S]; x is normed."""
        x = ctx.parallel.gather_seq(self.head_input(x))
        training = ctx.training
        terms = Terms(
            self.cfg.vocab_size,
            self.cfg.final_logit_softcapping,
            training.label_smoothing,
            training.z_loss,
            training.temperature,
        )
        return compute(
            x.reshape(-1, x.shape[-1]),
            self.head_table(),
            *(values.reshape(-1, *values.shape[2:]) for values in per_token),
            bias=self.head_bias(),
            terms=terms,
            parallel=ctx.parallel,
            chunk=training.loss_chunk,
            **more,
        )

    @jax.named_scope("head")
    def label_scores(self, x: jax.Array, ctx: Context) -> jax.Array:
        """fp32 [B, S, num_labels] of the last layer's output x [B, S/tp, D]; equal over tp."""
        return ctx.parallel.gather_seq(self._scores(self.normed(x)))

    def _scores(self, x: jax.Array) -> jax.Array:
        return jnp.einsum("...d,ld->...l", x, self.score[...], preferred_element_type=jnp.float32)

    def head_table(self) -> jax.Array:
        """The weight of the head, [V/tp, D]: the embedding's, if they are tied."""
        weight = self.embedding if self.cfg.tie_word_embeddings else self.head
        return weight[...]

    def head_bias(self) -> jax.Array | None:
        """The bias of the logits, [V/tp], if the model has one."""
        return self.vocabulary_bias[...] if self.cfg.lm_head_bias else None

    def head_input(self, x: jax.Array) -> jax.Array:
        """The activations [..., D] that the head multiplies, from those after the final norm."""
        if self.cfg.logits_scaling is None:
            return x
        return scaled(x, 1 / self.cfg.logits_scaling)

    def logits(self, x: jax.Array, parallel: Parallel = LOCAL) -> jax.Array:
        """[..., D] -> fp32 [..., vocab_size], for evaluation and generation.

        Each tp device makes its part of the vocabulary; all get all of it. With `num_labels` they
        are [..., num_labels].
        """
        if self.cfg.num_labels:
            return self._scores(x)
        w = self.head_table()
        x = self.head_input(x)
        z = jnp.einsum("...d,vd->...v", x, w, preferred_element_type=jnp.float32)
        bias = self.head_bias()
        z = z if bias is None else z + bias.astype(jnp.float32)
        z = parallel.all_gather(z, "tp", z.ndim - 1)
        z = z[..., : self.cfg.vocab_size]  # not w: cutting a sharded table would move it
        cap = self.cfg.final_logit_softcapping
        if cap is None:
            return z
        return cap * jnp.tanh(z / cap)
