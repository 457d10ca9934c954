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
from mjax.models.context import Context
from mjax.models.mlp import activated
from mjax.models.norm import Norm
from mjax.models.params import declare, declare_bias, normal
from mjax.sharding.spec import ParamSpec


class Dense(nnx.Module):
    """x [..., D] -> x W + b, [..., D]; `hf` is its name in Hugging Face's words.

    `active` is the share of tokens that pass it.
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
        self.bias = declare_bias(rngs, (width,), ("embed",), f"{hf}.bias")


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
        dense = self.projection
        x = activated(x @ dense.weight[...], dense.bias[...], self.cfg.hidden_act)
        return self.norm(x)


class Classifier(nnx.Module):
    """The class of a row, from its first token: a dense layer (the pooler), tanh, a linear map.

    That of an image has no pooler.
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
        self.has_pooler = not cfg.reads_images
        if self.has_pooler:
            self.pooler = Dense(cfg, "pooler.dense", rngs, active=0.0)  # one token of a row
        self.weight = declare(rngs, weight, normal(cfg.initializer_range))
        self.bias = declare_bias(rngs, (labels,), (None,), f"{name}.bias")

    def __call__(self, first: jax.Array) -> jax.Array:
        """fp32 logits [B, C] of the first tokens [B, D]."""
        weight = self.weight[...]
        if self.has_pooler:
            pooler = self.pooler
            first = jnp.tanh(first @ pooler.weight[...] + pooler.bias[...])
        logits = jnp.einsum("bd,cd->bc", first, weight, preferred_element_type=jnp.float32)
        return logits + self.bias[...].astype(jnp.float32)


def first_tokens(x: jax.Array, ctx: Context) -> jax.Array:
    """Each row's first token on this cp device, [B, D], of x [B, S/tp, D]; equal over tp."""
    return ctx.parallel.gather_seq(x[:, :1])[:, 0]


def has_first_token(columns: jax.Array) -> jax.Array:
    """Whether a device's columns [S/cp] begin with the first of the sequence, bool []."""
    return columns[0] == 0
