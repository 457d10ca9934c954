"""The heads of encoders: BERT's (arXiv 1810.04805) for hidden tokens and for whole sequences.

They belong to the edges of the model, as the head of a decoder does: the last stage of a pipeline
runs them, ZeRO gathers them once a step, and FP8 recipes leave them in the dtype of the
computation. Weights between the residual stream and the heads are whole on each device, so a
device applies them to its own part of the sequence.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from mjax.config.model_schema import ModelConfig
from mjax.models.context import Context, Tokens
from mjax.models.mlp import activated
from mjax.models.norm import Norm
from mjax.models.params import declare, declare_bias, normal
from mjax.sharding.spec import ParamSpec


class Dense(nnx.Module):
    """x [..., D] -> act(x W + b), [..., D]; ModernBERT has no b.

    `hf` is its name in Hugging Face's words. `active` is the share of tokens that pass it.
    """

    def __init__(self, cfg: ModelConfig, hf: str, rngs: nnx.Rngs, active: float = 1.0):
        width = cfg.hidden_size
        weight = ParamSpec(
            shape=(width, width),
            axes=("embed", None),
            role="matrix",
            active=active,
            hf=(f"{hf}.weight",),
        )
        self.weight = declare(rngs, weight, normal(cfg.initializer_range))
        self.has_bias = not cfg.bert.prediction_head
        if self.has_bias:
            self.bias = declare_bias(rngs, (width,), ("embed",), f"{hf}.bias")

    def __call__(self, x: jax.Array, act: str) -> jax.Array:
        """`act` is the name of an activation, as `model.hidden_act`."""
        return activated(x @ self.weight[...], self.bias[...] if self.has_bias else None, act)


class MaskedHead(nnx.Module):
    """What stands between the last layer and the vocabulary, [B, S/tp, D] -> [B, S/tp, D].

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
        if not cfg.reads_images:
            self.pooler = Dense(cfg, "pooler.dense", rngs, active=0.0)  # one token of a row
        if cfg.bert.prediction_head:
            self.norm = Norm(cfg, (cfg.hidden_size,), ("embed",), "pooler.norm", rngs)
        self.weight = declare(rngs, weight, normal(cfg.initializer_range))
        self.bias = declare_bias(rngs, (labels,), (None,), f"{name}.bias")

    def __call__(self, x: jax.Array, tokens: Tokens, ctx: Context) -> jax.Array:
        """fp32 logits [B, C] of the last layer's output after the final norm, x [B, S/tp, D]."""
        if self.cfg.bert.pooling == "mean":
            pooled = mean_of_tokens(x, tokens, ctx)
        else:
            pooled = first_tokens(x, ctx)
        if self.cfg.bert.prediction_head:
            pooled = self.norm(self.pooler(pooled, self.cfg.hidden_act))
        elif not self.cfg.reads_images:
            pooled = jnp.tanh(pooled @ self.pooler.weight[...] + self.pooler.bias[...])
        weight = self.weight[...]
        logits = jnp.einsum("bd,cd->bc", pooled, weight, preferred_element_type=jnp.float32)
        return logits + self.bias[...].astype(jnp.float32)


def first_tokens(x: jax.Array, ctx: Context) -> jax.Array:
    """Each row's first token on this cp device, [B, D], of x [B, S/tp, D]; equal over tp."""
    return ctx.parallel.gather_seq(x[:, :1])[:, 0]


def mean_of_tokens(x: jax.Array, tokens: Tokens, ctx: Context) -> jax.Array:
    """The mean of each row's tokens but padding, [B, D], of x [B, S/tp, D]; equal on cp and tp."""
    real = jnp.ones(x.shape[:2], jnp.float32)
    if tokens.segments is not None:
        real = ctx.parallel.shard_seq(tokens.segments != 0).astype(jnp.float32)
    total = jnp.einsum("bsd,bs->bd", x, real, preferred_element_type=jnp.float32)
    total = ctx.parallel.psum(total, "cp", "tp")
    count = ctx.parallel.psum(jnp.sum(real, 1), "cp", "tp")
    return (total / jnp.maximum(count, 1)[:, None]).astype(x.dtype)


def has_first_token(columns: jax.Array) -> jax.Array:
    """Whether a device's columns [S/cp] begin with the first of the sequence, bool []."""
    return columns[0] == 0
