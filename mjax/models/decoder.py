"""A language model: embedding, a pattern of blocks, final norm, head. Follows GPT-2 and Llama.

One code path serves a researcher's `jax.jit(model)(tokens)` outside any mesh and the manual train
step inside one. Between blocks activations are [B, S/tp, D]. Blocks of equal parameter shapes are
stacked and scanned; a scan's body spells out one period of the layer pattern. Other architectures
are subclasses: mixins, called parts, that extend its methods (`models/architectures.py`).
"""

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mjax.config.languages.layer_pattern import stack_of, stacks_of
from mjax.config.schema.architecture import require_inputs
from mjax.config.schema.model import ModelConfig
from mjax.models.attention.positions import look_up, rope_of_layers
from mjax.models.base.branch import Rope, begin_layers, branch_class, finish_layers
from mjax.models.base.context import Context, Tokens, scaled, tokens_of
from mjax.models.base.dropout import dropout
from mjax.models.base.norm import Norm
from mjax.models.base.params import StatisticCount, declare, normal, split, stack, table
from mjax.models.base.streams import EMBEDDING_SALT, Activation, decoder_of
from mjax.models.block import Block
from mjax.models.heads.vocabulary import VocabularyHead
from mjax.models.runtime.execution import Execution, plain_layers
from mjax.models.runtime.run import Caches, LayerInputs, Layers, LayersOutput


class Decoder(VocabularyHead, nnx.Module):
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
        cfg = self.cfg
        width = cfg.hidden_size
        init = normal(cfg.initializer_range)
        words = table(cfg.padded_vocab_size, width, "vocab", "tokens")
        self.embedding = declare(rngs, words, init)
        if cfg.position_embedding == "learned":
            rows = cfg.max_position_embeddings
            positions = table(rows, width, "positions", "positions")
            self.position_embedding = declare(rngs, positions, init)

    def declare_layers(self, rngs: nnx.Rngs) -> None:
        """Declare the stacks of layers, which are attributes by their names, and the last norm."""
        cfg = self.cfg
        self.stacks = stacks_of(self.kinds)
        for name in self.stacks:
            kinds = [kind for kind in self.kinds if stack_of(kind) == name]
            make_layer = functools.partial(self.make_block, kinds[0])
            layers = stack(make_layer, len(kinds), rngs)
            setattr(self, name, layers)
        if cfg.norm_placement == "post_residual":  # the last layer's output is normed
            self.final_norm = None
        else:
            sizes, axes = (cfg.hidden_size,), ("embed",)
            self.final_norm = Norm(cfg, sizes, axes, "model.norm", rngs)

    def make_block(self, kind: str, rngs: nnx.Rngs) -> Block:
        """One layer."""
        return Block(self.cfg, kind, rngs)

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

    def activations(self, tokens: jax.Array, info: Tokens, ctx: Context) -> Any:
        """The final normed activations [B, S, D] for the inputs of `__call__`."""
        return self.hidden(tokens, info, ctx)[0]

    def hidden(
        self, tokens: jax.Array, info: Tokens, ctx: Context, caches: Caches | None = None
    ) -> LayersOutput:
        """(final normed activations [B, S, D], shares of statistics, new caches).

        `tokens` are int32 [B, S]. The shares are this device's, fp32, summed over layers and
        sequences. There is a cache for each layer.
        """
        x = self.embed(tokens, info, ctx)
        return self.run(x, info, ctx, caches)

    def extend(
        self, ids: jax.Array, info: Tokens, ctx: Context, caches: Caches, inputs: Mapping
    ) -> LayersOutput:
        """`hidden` of tokens [B, S] that follow those in the caches.

        `inputs` are those that go with a prompt (`infer/whole_prompts.py`): empty after it.
        """
        return self.hidden(ids, info, ctx, caches, **inputs)

    def run(
        self, x: Activation, info: Tokens, ctx: Context, caches: Caches | None = None
    ) -> LayersOutput:
        """`hidden` of the first layer's input."""
        last: Any
        last, statistics, caches = self.layers(x, info, ctx, caches)
        last = decoder_of(last)
        blocks = ctx.kernels.blocks
        normed = self.normed(last) if blocks is None else blocks.each(self.normed, last)
        x = ctx.parallel.gather_seq(normed)
        return x, statistics, caches

    def layers(
        self, x: Activation, info: Tokens, ctx: Context, caches: Caches | None = None
    ) -> LayersOutput:
        """`hidden` from the first layer's input x [B, S/tp, D] to the last one's output.

        The layers are those that this module holds, stacked. They run in scans, and with caches one
        after the other. `ctx.run_layers` may run them instead.
        """
        if ctx.run_layers is not None:
            return ctx.run_layers(self, x, info, ctx, caches)
        blocks, weights = {}, {}
        for name in self.stacks:
            blocks[name], weights[name] = split(getattr(self, name))
        unroll = 1 if caches is None else 0
        execution = Execution(plain_layers(self.kinds), unroll=unroll)
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
            positions = ctx.parallel.shard_seq(info.positions)
            positions = positions + self.cfg.bert.position_offset
            x = x + look_up(self.position_embedding[...], positions)
        return x

    def embed_words(self, tokens: jax.Array, info: Tokens, ctx: Context) -> jax.Array:
        """The embeddings of words alone.

        Each tp device looks up its part of the vocabulary; the sum is scattered over the sequence.
        """
        parallel = ctx.parallel
        embedding = self.embedding[...]
        rows = embedding.shape[0]
        row = tokens - parallel.index("tp") * rows
        is_local = (row >= 0) & (row < rows)
        # The rows of other devices are spread: GPUs add the gradients of one row one by one.
        x = look_up(embedding, row % rows)
        x = jnp.where(is_local[..., None], x, 0)
        x = parallel.scatter_seq(x)
        if ctx.training.noise is not None:
            x = ctx.training.noise(x, info, ctx)
        return scaled(x, self.cfg.embedding_multiplier)

    def rope(self, info: Tokens, ctx: Context) -> Rope:
        """The tables (cos, sin) of each kind of branch that rotates its queries and keys."""
        return rope_of_layers(self.cfg, self.kinds, info, ctx.parallel)

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
