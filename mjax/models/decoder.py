"""A language model: embedding, a pattern of blocks, final norm, head. Follows GPT-2 and Llama.

One code path serves a researcher's `jax.jit(model)(tokens)` outside any mesh and the manual train
step inside one. Between blocks activations are [B, S/tp, D]. Blocks of equal parameter shapes are
stacked and scanned; a scan's body spells out one period of the layer pattern. Other architectures
put parts before this class that extend its methods (`models/architectures.py`).
"""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx

from mjax.config.languages.layer_pattern import (
    BRANCHES,
    branches_of,
    stack_of,
    stacks_of,
    stream_of,
)
from mjax.config.schema.model import ModelConfig
from mjax.kernels.loss.cross_entropy import Terms, count_hits, cross_entropy
from mjax.models.attention.positions import look_up, rope_tables
from mjax.models.base.branch import Rope, begin_layers, branch_class, finish_layers
from mjax.models.base.context import Context, Tokens, dropout, tokens_of
from mjax.models.base.inputs import require_inputs
from mjax.models.base.norm import Norm
from mjax.models.base.params import StatisticCount, declare, normal, split, stack, table
from mjax.models.base.streams import EMBEDDING_SALT, Activation, decoder_of
from mjax.models.block import Block, scaled
from mjax.models.runtime.execution import Execution, plain_layers
from mjax.models.runtime.run import Caches, LayerInputs, Layers

# The normed output [B, S, D] of the last layer, shares of statistics, new caches.
Hidden = tuple[jax.Array, dict[str, jax.Array], Caches | None]


class Decoder(nnx.Module):
    """A language model of one stack of layers.

    `model(tokens)` gives fp32 logits [B, S, vocab_size]. Parameters are drawn in the order in which
    they are declared.
    """

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs):
        self.cfg = cfg
        self.kinds = cfg.layer_kinds
        self.declare_embedding(rngs)
        self.declare_layers(rngs)
        self.declare_head(rngs)

    def declare_embedding(self, rngs: nnx.Rngs) -> None:
        """Declare the parameters that the first layer's input is computed with."""
        cfg, init = self.cfg, normal(self.cfg.initializer_range)
        words = table(cfg.padded_vocab_size, cfg.hidden_size, "vocab", "tokens")
        self.embedding = declare(rngs, words, init)
        if cfg.position_embedding == "learned":
            rows = cfg.max_position_embeddings
            positions = table(rows, cfg.hidden_size, "positions", "positions")
            self.position_embedding = declare(rngs, positions, init)

    def declare_layers(self, rngs: nnx.Rngs) -> None:
        """Declare the stacks of layers, which are attributes by their names, and the last norm."""
        cfg = self.cfg
        self.stacks = stacks_of(self.kinds)
        for name in self.stacks:
            kinds = [kind for kind in self.kinds if stack_of(kind) == name]
            layers = stack(functools.partial(self.make_block, kinds[0]), len(kinds), rngs)
            setattr(self, name, layers)
        if cfg.norm_placement == "post_residual":  # the last layer's output is normed
            self.final_norm = None
        else:
            self.final_norm = Norm(cfg, (cfg.hidden_size,), ("embed",), "model.norm", rngs)

    def make_block(self, kind: str, rngs: nnx.Rngs) -> Block:
        """One layer."""
        return Block(self.cfg, kind, rngs)

    def declare_head(self, rngs: nnx.Rngs) -> None:
        """Declare the parameters that follow the last norm."""
        cfg = self.cfg
        if not cfg.tie_word_embeddings:
            words = table(cfg.padded_vocab_size, cfg.hidden_size, "vocab", "tokens")
            head = replace(words, role="head", hf=("lm_head.weight",))
            self.head = declare(rngs, head, normal(cfg.initializer_range))

    # ---- outside a mesh --------------------------------------------------------------------------

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array | None = None,
        segments: jax.Array | None = None,
        types: jax.Array | None = None,
        *,
        ctx: Context = Context(),  # noqa: B008 - frozen
        **others: jax.Array | None,
    ) -> jax.Array:
        """tokens int32 [B, S] -> fp32 logits [B, S, vocab_size] (not inside a tp mesh).

        `segments` and `types` are as in `Tokens`; padding is a segment of its own. `others` are the
        inputs that some architectures read besides (`activations`).
        """
        assert ctx.parallel.tp == 1, "inside a tp mesh use hidden() and head_loss()"
        given = {name: value for name, value in others.items() if value is not None}
        require_inputs(self.cfg, given)
        info = replace(tokens_of(tokens.shape, positions, segments), types=types)
        return self.logits(self.activations(tokens, info, ctx, **given))

    def activations(self, tokens: jax.Array, info: Tokens, ctx: Context) -> jax.Array:
        """The final normed activations [B, S, D] for the inputs of `__call__`."""
        return self.hidden(tokens, info, ctx)[0]

    def hidden(
        self, tokens: jax.Array, info: Tokens, ctx: Context, caches: Caches | None = None
    ) -> Hidden:
        """(final normed activations [B, S, D], shares of statistics, new caches).

        `tokens` are int32 [B, S]. The shares are this device's, fp32, summed over layers and
        sequences. There is a cache for each layer.
        """
        return self.run(self.embed(tokens, info, ctx), info, ctx, caches)

    def run(
        self, x: Activation, info: Tokens, ctx: Context, caches: Caches | None = None
    ) -> Hidden:
        """`hidden` of the first layer's input."""
        x, statistics, caches = self.layers(x, info, ctx, caches)
        x = ctx.parallel.gather_seq(self.normed(decoder_of(x)))
        return x, statistics, caches

    def layers(
        self, x: Activation, info: Tokens, ctx: Context, caches: Caches | None = None
    ) -> tuple[Activation, dict[str, jax.Array], Caches | None]:
        """`hidden` from the first layer's input x [B, S/tp, D] to the last one's output.

        The layers are those that this module holds, stacked. They run in scans, and with caches one
        after the other.
        """
        blocks, weights = {}, {}
        for name in self.stacks:
            blocks[name], weights[name] = split(getattr(self, name))
        execution = Execution(plain_layers(self.kinds), unroll=1 if caches is None else 0)
        inputs = LayerInputs(info, self.rope(info, ctx))
        layers = Layers(blocks, execution, ctx, statistics=tuple(self.statistics))
        if caches is None:
            x = begin_layers(x, len(info.rows), self.cfg)
        x, statistics, caches = layers.run(weights, x, inputs, caches=caches)
        x, of_all = finish_layers(x, self.cfg, ctx.parallel)
        return x, statistics | of_all, caches

    # ---- the parts -------------------------------------------------------------------------------

    @jax.named_scope("embed")
    def embed(
        self, tokens: jax.Array, info: Tokens, ctx: Context, salt: int = EMBEDDING_SALT
    ) -> jax.Array:
        """The input of the first layer, [B, S/tp, D], of int32 tokens [B, S].

        `salt` keys dropout.
        """
        x = self.sum_embeddings(tokens, info, ctx)
        return dropout(x, self.cfg.hidden_dropout, info, ctx, salt)

    def sum_embeddings(self, tokens: jax.Array, info: Tokens, ctx: Context) -> jax.Array:
        """`embed` before dropout."""
        x = self.embed_words(tokens, info, ctx)
        if self.cfg.position_embedding == "learned":
            positions = ctx.parallel.shard_seq(info.positions) + self.cfg.bert.position_offset
            x = x + look_up(self.position_embedding[...], positions)
        return x

    def embed_words(self, tokens: jax.Array, info: Tokens, ctx: Context) -> jax.Array:
        """The embeddings of words alone.

        Each tp device looks up its part of the vocabulary; the sum is scattered over the sequence.
        """
        parallel, embedding = ctx.parallel, self.embedding[...]
        rows = embedding.shape[0]
        row = tokens - parallel.index("tp") * rows
        is_local = (row >= 0) & (row < rows)
        # The rows of other devices are spread: GPUs add the gradients of one row one by one.
        x = look_up(embedding, row % rows)
        x = jnp.where(is_local[..., None], x, 0)
        x = parallel.scatter_seq(x)
        return scaled(x, self.cfg.embedding_multiplier)

    def rope(self, info: Tokens, ctx: Context) -> Rope:
        """The tables (cos, sin) of each kind of branch that rotates its queries and keys."""
        if self.cfg.position_embedding != "rope":
            return {}
        tables = {}
        for kind in self.kinds:
            side = info.of(stream_of(kind)) if self.cfg.architecture.has_streams else info
            for word in branches_of(kind):
                if BRANCHES[word].rotary and word not in tables:
                    tables[word] = rope_tables(self.cfg, side.positions, word, ctx.parallel)
        return tables

    @property
    def statistics(self) -> dict[str, StatisticCount]:
        """The names of the statistics of the layers, and what each is divided by."""
        found: dict[str, StatisticCount] = {}
        for word in sorted(self.cfg.branches):
            found |= branch_class(word).statistics(self.cfg)
        return found

    def normed(self, x: jax.Array) -> jax.Array:
        """The last layer's output after the final norm, if the model has one."""
        return x if self.final_norm is None else self.final_norm(x)

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

    def logits(self, x: jax.Array) -> jax.Array:
        """[..., D] -> fp32 [..., vocab_size], for evaluation and generation outside tp."""
        w = self.head_table()
        x = self.head_input(x)
        z = jnp.einsum("...d,vd->...v", x, w, preferred_element_type=jnp.float32)
        bias = self.head_bias()
        z = z if bias is None else z + bias.astype(jnp.float32)
        z = z[..., : self.cfg.vocab_size]  # not w: cutting a sharded table would move it
        cap = self.cfg.final_logit_softcapping
        if cap is None:
            return z
        return cap * jnp.tanh(z / cap)
