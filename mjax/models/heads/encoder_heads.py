"""The heads of encoders: BERT's (arXiv 1810.04805) for hidden tokens and for whole sequences.

They belong to the edges of the model, as the head of a decoder does. The last stage of a pipeline
runs them. ZeRO gathers them once a step, and FP8 recipes leave them in the dtype of the
computation. Weights between the residual stream and the heads are whole on each device, so a
device applies them to its own part of the sequence.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx

from mjax.config.schema.model import ModelConfig
from mjax.kernels.elementwise.activation import activated
from mjax.models.base.context import Context, Tokens, tokens_of
from mjax.models.base.norm import Norm
from mjax.models.base.params import declare, declare_bias, matrix, normal, table
from mjax.sharding.spec import ParamSpec


class Dense(nnx.Module):
    """x [..., D] -> act(x W + b), [..., D]; ModernBERT has no b.

    `hf` is its name in Hugging Face's words. `active` is the share of tokens that pass it.
    """

    def __init__(self, cfg: ModelConfig, hf: str, rngs: nnx.Rngs, active: float = 1.0):
        width = cfg.hidden_size
        weight = matrix(
            (width, width),
            ("embed", None),
            f"{hf}.weight",
            active=active,
        )
        self.weight = declare(rngs, weight, normal(cfg.initializer_range))
        self.has_bias = not cfg.bert.prediction_head
        if self.has_bias:
            self.bias = declare_bias(rngs, (width,), ("embed",), f"{hf}.bias")

    def __call__(self, x: jax.Array, act: str) -> jax.Array:
        """`act` names an activation, as `activate` does."""
        bias = self.bias[...] if self.has_bias else None
        return activated(x @ self.weight[...], bias, act)


class MaskedHead(nnx.Module):
    """The layers between the last block and the vocabulary, [B, S/tp, D] -> [B, S/tp, D].

    `bias` [V] is added to the logits, which the table of embeddings makes.
    """

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs):
        self.cfg = cfg
        self.projection = Dense(cfg, "lm_head.dense", rngs)
        self.norm = Norm(cfg, (cfg.hidden_size,), ("embed",), "lm_head.layer_norm", rngs)
        self.bias = declare_bias(rngs, (cfg.padded_vocab_size,), ("vocab",), "lm_head.bias")

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(self.projection(x, self.cfg.hidden_act))


class Classifier(nnx.Module):
    """The class of a row, from its pooled tokens: a dense layer (the pooler), tanh, a linear map.

    ModernBERT has `hidden_act` and a norm in the place of tanh. Images have no pooler.
    """

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs):
        # BertForPreTraining and BertForSequenceClassification call it differently.
        name = "seq_relationship" if cfg.bert.mlm_head else "classifier"
        labels = cfg.bert.num_labels or cfg.vision.num_labels
        weight = ParamSpec(
            shape=(labels, cfg.hidden_size),
            axes=(None, "embed"),
            role="head",
            hf=(f"{name}.weight",),
        )
        self.cfg = cfg
        if cfg.architecture.reads_tokens:
            self.pooler = Dense(cfg, "pooler.dense", rngs, active=0.0)  # one token of a row
        if cfg.bert.prediction_head:
            self.norm = Norm(cfg, (cfg.hidden_size,), ("embed",), "pooler.norm", rngs)
        self.weight = declare(rngs, weight, normal(cfg.initializer_range))
        self.bias = declare_bias(rngs, (labels,), (None,), f"{name}.bias")

    def __call__(self, x: jax.Array, tokens: Tokens, ctx: Context) -> jax.Array:
        """fp32 logits [B, C] of the last layer's output after the final norm, x [B, S/tp, D]."""
        cfg = self.cfg
        if cfg.bert.pooling == "mean":
            pooled = mean_of_tokens(x, tokens, ctx)
        else:
            pooled = first_tokens(x, ctx)
        if cfg.bert.prediction_head:
            pooled = self.pooler(pooled, cfg.hidden_act)
            pooled = self.norm(pooled)
        elif cfg.architecture.reads_tokens:
            pooled = self.pooler(pooled, "tanh")
        logits = jnp.einsum(
            "bd,cd->bc",
            pooled,
            self.weight[...],
            preferred_element_type=jnp.float32,
        )
        return logits + self.bias[...].astype(jnp.float32)


class EncoderParts:
    """Token types, a norm of embeddings, and a head for hidden tokens, as the config says."""

    def declare_embedding(self, rngs: nnx.Rngs) -> None:
        super().declare_embedding(rngs)
        cfg = self.cfg
        if cfg.bert.type_vocab_size:
            types = table(cfg.bert.type_vocab_size, cfg.hidden_size, None, "types")
            self.type_embedding = declare(rngs, types, normal(cfg.initializer_range))
        if cfg.bert.embedding_norm:
            shape = (cfg.hidden_size,)
            self.embedding_norm = Norm(cfg, shape, ("embed",), "model.embed_norm", rngs)

    def declare_head(self, rngs: nnx.Rngs) -> None:
        super().declare_head(rngs)
        if self.cfg.bert.mlm_head:
            self.masked_head = MaskedHead(self.cfg, rngs)

    def sum_embeddings(self, tokens: jax.Array, info: Tokens, ctx: Context) -> jax.Array:
        """The embeddings of words and positions, then those of types, normed."""
        x = super().sum_embeddings(tokens, info, ctx)
        if self.cfg.bert.type_vocab_size:
            types = jnp.zeros_like(tokens) if info.types is None else info.types
            types = ctx.parallel.shard_seq(types)
            # A product, whose backward sums all tokens' gradients at once: there are few rows.
            rows = self.type_embedding[...]
            one_hot = jax.nn.one_hot(types, len(rows), dtype=rows.dtype)
            x = x + jnp.matmul(one_hot, rows, precision="highest")
        return self.embedding_norm(x) if self.cfg.bert.embedding_norm else x

    def head_bias(self) -> jax.Array | None:
        if not self.cfg.bert.mlm_head:
            return super().head_bias()
        return self.masked_head.bias[...]

    def head_input(self, x: jax.Array) -> jax.Array:
        if self.cfg.bert.mlm_head:
            x = self.masked_head(x)
        return super().head_input(x)


class ClassifierParts:
    """A head for classes of rows, if the config has labels."""

    def declare_head(self, rngs: nnx.Rngs) -> None:
        super().declare_head(rngs)
        if self.cfg.bert.num_labels or self.cfg.vision.num_labels:
            self.classifier = Classifier(self.cfg, rngs)

    def classify(
        self,
        tokens: jax.Array,
        segments: jax.Array | None = None,
        types: jax.Array | None = None,
    ) -> jax.Array:
        """tokens int32 [B, S] -> fp32 logits [B, C] of rows' classes; else as `__call__`."""
        ctx = Context()
        info = tokens_of(tokens.shape, segments=segments)
        info = replace(info, types=types)
        x = self.embed(tokens, info, ctx)
        x, _, _ = self.layers(x, info, ctx)
        return self.row_logits(x, info, ctx)

    @jax.named_scope("classifier")
    def row_logits(self, x: jax.Array, info: Tokens, ctx: Context) -> jax.Array:
        """fp32 logits [B, C] of each row's class, from the last layer's output x [B, S/tp, D].

        They mean something on cp devices that hold the first column, and are equal over tp.
        """
        return self.classifier(self.normed(x), info, ctx)


def first_tokens(x: jax.Array, ctx: Context) -> jax.Array:
    """Each row's first token on this cp device, [B, D], of x [B, S/tp, D]; equal over tp."""
    return ctx.parallel.gather_seq(x[:, :1])[:, 0]


def mean_of_tokens(x: jax.Array, tokens: Tokens, ctx: Context) -> jax.Array:
    """The mean of each row's tokens but padding, [B, D], of x [B, S/tp, D]; equal on cp and tp."""
    parallel = ctx.parallel
    real = jnp.ones(x.shape[:2], bool)
    if tokens.segments is not None:
        real = parallel.shard_seq(tokens.segments != 0)
    real = real[..., None].astype(jnp.float32)
    total = jnp.sum(x * real, 1)
    count = jnp.sum(real, 1)
    total = parallel.psum(total, "cp", "tp")
    count = parallel.psum(count, "cp", "tp")
    mean = total / jnp.maximum(count, 1)
    return mean.astype(x.dtype)


def has_first_token(columns: jax.Array) -> jax.Array:
    """Whether a device's columns [S/cp] begin with the first of the sequence, bool []."""
    return columns[0] == 0
