"""The head of a language model: scores of a vocabulary for each token, and their losses."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx

from mjax.kernels.loss.cross_entropy import Terms, count_hits, cross_entropy
from mjax.models.base.context import Context, scaled
from mjax.models.base.params import declare, normal, table
from mjax.sharding.collectives import LOCAL, Parallel


class VocabularyHead:
    """The part of a decoder after its final norm: a table [V, D], its own or the embedding's."""

    def declare_head(self, rngs: nnx.Rngs) -> None:
        """Declare the parameters after the final norm."""
        cfg = self.cfg
        if not cfg.tie_word_embeddings:
            words = table(cfg.padded_vocab_size, cfg.hidden_size, "vocab", "tokens")
            head = replace(words, role="head", hf=("lm_head.weight",))
            self.head = declare(rngs, head, normal(cfg.initializer_range))

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
        return self._of_tokens(cross_entropy, x, labels, mask, ctx)

    @jax.named_scope("head")
    def token_hits(
        self, x: jax.Array, labels: jax.Array, mask: jax.Array, ctx: Context
    ) -> jax.Array:
        """The sum of mask where the likeliest token is the label; arguments as `head_loss`."""
        return self._of_tokens(count_hits, self.normed(x), labels, mask, ctx)

    def _of_tokens(self, function, x, labels, mask, ctx: Context) -> jax.Array:
        """A function of tokens' logits, given what they are made from; x is normed."""
        x = ctx.parallel.gather_seq(self.head_input(x))
        terms = Terms(
            self.cfg.vocab_size,
            self.cfg.final_logit_softcapping,
            ctx.training.label_smoothing,
            ctx.training.z_loss,
        )
        return function(
            x.reshape(-1, x.shape[-1]),
            self.head_table(),
            labels.reshape(-1),
            mask.reshape(-1),
            bias=self.head_bias(),
            terms=terms,
            parallel=ctx.parallel,
            chunk=ctx.training.loss_chunk,
            few=self.cfg.bert.mlm_head,
        )

    def head_table(self) -> jax.Array:
        """The weight of the head, [V/tp, D]: the embedding's, if they are tied."""
        weight = self.embedding if self.cfg.tie_word_embeddings else self.head
        return weight[...]

    def head_bias(self) -> jax.Array | None:
        """The bias of the logits, [V/tp], if the model has one."""
        return None

    def head_input(self, x: jax.Array) -> jax.Array:
        """The activations [..., D] that the head multiplies, from those after the final norm."""
        if self.cfg.logits_scaling is None:
            return x
        return scaled(x, 1 / self.cfg.logits_scaling)

    def logits(self, x: jax.Array, parallel: Parallel = LOCAL) -> jax.Array:
        """[..., D] -> fp32 [..., vocab_size], for evaluation and generation.

        Each tp device makes its part of the vocabulary; all get all of it.
        """
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
