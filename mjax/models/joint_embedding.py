"""Images and texts in one space: what stands behind the towers of CLIP (arXiv 2103.00020) and
SigLIP (arXiv 2303.15343).

Each is read off its tower as one vector: a text at a token, an image at its class token or by
attention, whose query is a parameter. Rows lie over cp and tp, and sums over both make a vector
equal on all of these devices. The modules belong to the edges of the model, in whose weights a
device has all rows and columns. Vectors and scores are fp32.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from mjax.config.model_schema import ModelConfig
from mjax.models.context import Context, Tokens
from mjax.models.mlp import activated
from mjax.models.norm import Norm
from mjax.models.params import constant, declare, declare_bias, normal
from mjax.sharding.spec import ParamSpec

_LARGEST = 2  # as `eos_token_id`: the end of a text has the largest id
_HEAD = "vision_model.head"
_FIRST_SCALES = {"softmax": math.log(1 / 0.07), "sigmoid": math.log(10)}
_FIRST_BIAS = -10.0


def _matrix(width: int, out: int, hf: str, active: float = 0.0) -> ParamSpec:
    """A projection that a vector of a row passes, or a share `active` of it each token."""
    return ParamSpec(
        shape=(width, out),
        axes=("embed", None),
        role="matrix",
        active=active,
        hf=(f"{hf}weight",),
    )


class ImagePooler(nnx.Module):
    """The output of the last V block, [B, T/tp, D'] -> a vector of each image, fp32 [B, D'].

    Both are normed. Without a class token, a learned query attends to all patches, and an MLP
    follows. `cfg` has the sizes of the tower.
    """

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs):
        self.cfg = cfg
        width, ffn = cfg.hidden_size, cfg.intermediate_size
        self.norm = Norm(cfg, (width,), ("embed",), "vision_model.post_layernorm", rngs)
        if cfg.vision.class_token:
            return
        init = normal(cfg.initializer_range)
        probe = ParamSpec((width,), ("embed",), "embedding", hf=(f"{_HEAD}.probe",))
        self.probe = declare(rngs, probe, init)
        keys_and_values = 2 / 3  # of each patch; the query is one
        name = f"{_HEAD}.attention.in_proj_"
        self.qkv = declare(rngs, _matrix(width, 3 * width, name, keys_and_values), init)
        self.qkv_bias = declare_bias(rngs, (3 * width,), (None,), f"{name}bias")
        name = f"{_HEAD}.attention.out_proj."
        self.out = declare(rngs, _matrix(width, width, name), init)
        self.out_bias = declare_bias(rngs, (width,), (None,), f"{name}bias")
        self.mlp_norm = Norm(cfg, (width,), ("embed",), f"{_HEAD}.layernorm", rngs)
        self.up = declare(rngs, _matrix(width, ffn, f"{_HEAD}.mlp.fc1."), init)
        self.up_bias = declare_bias(rngs, (ffn,), (None,), f"{_HEAD}.mlp.fc1.bias")
        self.down = declare(rngs, _matrix(ffn, width, f"{_HEAD}.mlp.fc2."), init)
        self.down_bias = declare_bias(rngs, (width,), (None,), f"{_HEAD}.mlp.fc2.bias")

    @jax.named_scope("image_pooler")
    def __call__(self, x: jax.Array, tokens: Tokens, ctx: Context) -> jax.Array:
        if self.cfg.vision.class_token:
            is_class = jnp.broadcast_to(tokens.columns == 0, tokens.positions.shape)
            return self.norm(_read_off(x, is_class, ctx))
        pooled = self._attend(self.norm(x), tokens, ctx)
        pooled = _product(pooled, self.out) + self.out_bias[...]
        h = _product(self.mlp_norm(pooled), self.up)
        bias = self.up_bias[...].astype(jnp.float32)
        h = activated(h, bias, self.cfg.hidden_act)
        return pooled + _product(h, self.down) + self.down_bias[...]

    def _attend(self, x: jax.Array, tokens: Tokens, ctx: Context) -> jax.Array:
        """Values of all patches [B, T/tp, D'], weighed by the query's attention, fp32 [B, D']."""
        heads, parallel = self.cfg.attention.num_attention_heads, ctx.parallel
        width = x.shape[-1]
        weights, biases = jnp.split(self.qkv[...], (width,), 1), self.qkv_bias[...]
        query = _product(self.probe[...].astype(jnp.float32), weights[0]) + biases[:width]
        query = query.reshape(heads, -1) * (width // heads) ** -0.5
        kv = (x @ weights[1] + biases[width:]).astype(jnp.float32)
        keys, values = jnp.moveaxis(kv.reshape(*kv.shape[:2], 2, heads, -1), 2, 0)
        scores = jnp.einsum("bsnh,nh->bsn", keys, query, precision="highest")
        if tokens.segments is not None:  # 0 is padding
            real = parallel.shard_seq(tokens.segments) > 0
            scores = jnp.where(real[..., None], scores, -jnp.inf)
        highest = parallel.pmax(scores.max(1, keepdims=True), "cp", "tp")
        chances = jnp.exp(scores - highest)
        sums = jnp.einsum("bsn,bsnh->bnh", chances, values, precision="highest")
        sums = parallel.psum(sums, "cp", "tp")
        totals = parallel.psum(chances.sum(1), "cp", "tp")
        return (sums / totals[..., None]).reshape(-1, width)


class JointEmbedding(nnx.Module):
    """Vectors of images [B, D'] and texts [B, D] -> unit vectors of one space, fp32 [B, P].

    The logit of a pair is their product times exp(`logit_scale`), plus `logit_bias` for the sigmoid
    loss. Vectors of images that attention pooled are in that space.
    """

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs):
        self.cfg = cfg
        sizes, init = cfg.contrastive, normal(cfg.initializer_range)
        self.has_class = cfg.vision.class_token
        name = "text_projection." if self.has_class else "text_model.head."
        of_texts = _matrix(cfg.hidden_size, sizes.projection_dim, name)
        self.of_texts = declare(rngs, of_texts, init)
        if self.has_class:
            width = cfg.vision.hidden_size
            of_images = _matrix(width, sizes.projection_dim, "visual_projection.")
            self.of_images = declare(rngs, of_images, init)
        else:
            self.bias = declare_bias(rngs, (sizes.projection_dim,), (None,), f"{name}bias")
        scale = ParamSpec((1,), (None,), "scalar", precise=True, hf=("logit_scale",))
        self.logit_scale = declare(rngs, scale, constant(_FIRST_SCALES[sizes.loss]))
        if sizes.loss == "sigmoid":
            bias = ParamSpec((1,), (None,), "scalar", precise=True, hf=("logit_bias",))
            self.logit_bias = declare(rngs, bias, constant(_FIRST_BIAS))

    def images(self, pooled: jax.Array) -> jax.Array:
        """fp32 [B, P] from `ImagePooler`."""
        return _unit(_product(pooled, self.of_images) if self.has_class else pooled)

    def texts(self, pooled: jax.Array) -> jax.Array:
        """fp32 [B, P] of vectors [B, D]."""
        projected = _product(pooled, self.of_texts)
        return _unit(projected if self.has_class else projected + self.bias[...])

    def logits(self, mine: jax.Array, others: jax.Array) -> jax.Array:
        """fp32 [B, B'] of unit vectors [B, P] and [B', P]."""
        products = jnp.einsum("bp,cp->bc", mine, others, precision="highest")
        logits = products * jnp.exp(self.logit_scale[...])
        return logits + self.logit_bias[...] if self.cfg.contrastive.loss == "sigmoid" else logits


def vectors_of_texts(
    x: jax.Array, ids: jax.Array, tokens: Tokens, eos: int | None, ctx: Context
) -> jax.Array:
    """fp32 [B, D] of texts x [B, S/tp, D] with ids int32 [B, S], at their ends.

    `eos` is `model.contrastive.eos_token_id`. A text without one is read off at its first token.
    """
    parallel, columns = ctx.parallel, tokens.columns
    length = columns.size * parallel.cp
    if eos is None:
        is_end = jnp.broadcast_to(columns == length - 1, ids.shape)
        return _read_off(x, is_end, ctx)
    end = parallel.pmax(ids.max(1, keepdims=True), "cp") if eos == _LARGEST else eos
    places = jnp.where(ids == end, columns, length)
    first = -parallel.pmax(-places.min(1, keepdims=True), "cp")
    return _read_off(x, columns == first % length, ctx)


def _read_off(x: jax.Array, here: jax.Array, ctx: Context) -> jax.Array:
    """fp32 [B, D]: the one token of each row of x [B, S/tp, D] that bool [B, S] marks."""
    mine = ctx.parallel.shard_seq(here)
    vectors = jnp.where(mine[..., None], x.astype(jnp.float32), 0)
    return ctx.parallel.psum(vectors.sum(1), "cp", "tp")


def _product(x: jax.Array, weight: nnx.Param | jax.Array) -> jax.Array:
    """fp32 x times a matrix."""
    return jnp.matmul(x, weight[...].astype(jnp.float32), precision="highest")


def _unit(x: jax.Array) -> jax.Array:
    squares = jnp.sum(jnp.square(x), -1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.maximum(squares, 1e-24))
