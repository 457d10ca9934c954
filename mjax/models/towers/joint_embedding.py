"""Images and texts in one space: what stands behind the towers of CLIP (arXiv 2103.00020) and
SigLIP (arXiv 2303.15343).

Each is read off its tower as one vector: a text at a token, an image at its class token or by
attention, whose query is a parameter. Rows lie over cp and tp, and sums over both make a vector
equal on all of these devices. The modules belong to the edges of the model, in whose weights a
device has all rows and columns. Vectors and scores are fp32.
"""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx

from mjax.config.schema.model import ModelConfig
from mjax.kernels.elementwise.activation import activate
from mjax.models.base.context import Context, Tokens
from mjax.models.base.norm import Norm
from mjax.models.base.params import constant, declare, declare_bias, matrix, normal
from mjax.sharding.spec import ParamSpec

_LARGEST = 2  # as `eos_token_id`: the end of a text has the largest id
_POOLER = "vision_model.head"
_FIRST_SCALES = {"softmax": math.log(1 / 0.07), "sigmoid": math.log(10)}
_FIRST_BIAS = -10.0


class Projection(nnx.Module):
    """x [..., D] -> x W + b, fp32 [..., P]; `hf` begins its names.

    It is of a vector of each row, or of a share `active` of all tokens.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        shape: tuple[int, int],
        hf: str,
        rngs: nnx.Rngs,
        *,
        has_bias: bool = True,
        active: float = 0.0,
        parts: tuple[int, ...] = (),
    ):
        weight = matrix(shape, ("embed", None), f"{hf}weight", active=active, parts=parts)
        self.weight = declare(rngs, weight, normal(cfg.initializer_range))
        self.has_bias = has_bias
        if has_bias:
            self.bias = declare_bias(rngs, shape[1:], (None,), f"{hf}bias")

    def __call__(self, x: jax.Array) -> jax.Array:
        weight = self.weight[...].astype(jnp.float32)
        y = jnp.matmul(x, weight, precision="highest")
        return y + self.bias[...] if self.has_bias else y


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
        probe = ParamSpec((width,), ("embed",), "embedding", hf=(f"{_POOLER}.probe",))
        self.probe = declare(rngs, probe, normal(cfg.initializer_range))
        self.qkv = Projection(
            cfg,
            (width, 3 * width),
            f"{_POOLER}.attention.in_proj_",
            rngs,
            active=2 / 3,  # keys and values of each patch; the query is one
            parts=(width, width, width),
        )
        name = f"{_POOLER}.attention.out_proj."
        self.out = Projection(cfg, (width, width), name, rngs)
        self.mlp_norm = Norm(cfg, (width,), ("embed",), f"{_POOLER}.layernorm", rngs)
        self.up = Projection(cfg, (width, ffn), f"{_POOLER}.mlp.fc1.", rngs)
        self.down = Projection(cfg, (ffn, width), f"{_POOLER}.mlp.fc2.", rngs)

    @jax.named_scope("image_pooler")
    def __call__(self, x: jax.Array, tokens: Tokens, ctx: Context) -> jax.Array:
        if self.cfg.vision.class_token:
            is_class = jnp.broadcast_to(tokens.columns == 0, tokens.positions.shape)
            vectors = _read_off(x, is_class, ctx)
            return self.norm(vectors)
        vectors = self._attend(self.norm(x), tokens, ctx)
        vectors = self.out(vectors)
        h = self.up(self.mlp_norm(vectors))
        h = activate(h, self.cfg.hidden_act)
        return vectors + self.down(h)

    def _attend(self, x: jax.Array, tokens: Tokens, ctx: Context) -> jax.Array:
        """Values of all patches x [B, T/tp, D'], weighed by the query's attention, fp32 [B, D']."""
        parallel = ctx.parallel
        width, heads = x.shape[-1], self.cfg.attention.num_attention_heads
        head = width // heads
        weight, bias = self.qkv.weight[...], self.qkv.bias[...]
        query = self.probe[...] @ weight[:, :width]
        query = query + bias[:width]
        query = query.astype(jnp.float32) * head**-0.5
        query = query.reshape(heads, head)
        kv = x @ weight[:, width:]
        kv = kv + bias[width:]
        kv = kv.astype(jnp.float32)
        kv = kv.reshape(*x.shape[:2], 2, heads, head)
        keys, values = kv[:, :, 0], kv[:, :, 1]
        scores = jnp.einsum("bsnh,nh->bsn", keys, query, precision="highest")
        if tokens.segments is not None:  # 0 is padding
            real = parallel.shard_seq(tokens.segments) > 0
            scores = jnp.where(real[..., None], scores, -jnp.inf)
        highest = scores.max(1, keepdims=True)
        highest = parallel.pmax(highest, "cp", "tp")
        chances = jnp.exp(scores - highest)
        sums = jnp.einsum("bsn,bsnh->bnh", chances, values, precision="highest")
        sums = parallel.psum(sums, "cp", "tp")
        totals = parallel.psum(chances.sum(1), "cp", "tp")
        attended = sums / totals[..., None]
        return attended.reshape(-1, width)


class JointEmbedding(nnx.Module):
    """Vectors of images [B, D'] and texts [B, D] -> unit vectors of one space, fp32 [B, P].

    The logit of a pair is their product times exp(`logit_scale`), plus `logit_bias` for the sigmoid
    loss. Vectors of images that attention pooled are in that space.
    """

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs):
        loss = cfg.contrastive.loss
        width = cfg.contrastive.projection_dim
        self.has_class = cfg.vision.class_token
        if self.has_class:
            sizes = cfg.vision.hidden_size, width
            name = "visual_projection."
            self.of_images = Projection(cfg, sizes, name, rngs, has_bias=False)
        sizes = cfg.hidden_size, width
        name = "text_projection." if self.has_class else "text_model.head."
        self.of_texts = Projection(
            cfg,
            sizes,
            name,
            rngs,
            has_bias=not self.has_class,
        )
        self.has_bias = loss == "sigmoid"
        scale = ParamSpec((1,), (None,), "scalar", precise=True, hf=("logit_scale",))
        self.logit_scale = declare(rngs, scale, constant(_FIRST_SCALES[loss]))
        if self.has_bias:
            bias = replace(scale, hf=("logit_bias",))
            self.logit_bias = declare(rngs, bias, constant(_FIRST_BIAS))

    def images(self, pooled: jax.Array) -> jax.Array:
        """fp32 [B, P] from `ImagePooler`."""
        return _unit(self.of_images(pooled) if self.has_class else pooled)

    def texts(self, vectors: jax.Array) -> jax.Array:
        """fp32 [B, P] of vectors [B, D]."""
        return _unit(self.of_texts(vectors))

    def logits(self, images: jax.Array, texts: jax.Array) -> jax.Array:
        """fp32 [B, B'] of unit vectors [B, P] and [B', P]."""
        products = jnp.einsum("bp,cp->bc", images, texts, precision="highest")
        logits = products * jnp.exp(self.logit_scale[...])
        return logits + self.logit_bias[...] if self.has_bias else logits


def vectors_of_texts(
    x: jax.Array,
    ids: jax.Array,
    tokens: Tokens,
    eos: int | None,
    ctx: Context,
) -> jax.Array:
    """fp32 [B, D] of texts x [B, S/tp, D] with ids int32 [B, S], at their ends.

    `eos` is `model.contrastive.eos_token_id`. A text without one is read off at its first token.
    """
    parallel, columns = ctx.parallel, tokens.columns
    length = columns.size * parallel.cp
    if eos is None:
        is_end = jnp.broadcast_to(columns == length - 1, ids.shape)
        return _read_off(x, is_end, ctx)
    end = eos
    if eos == _LARGEST:
        largest = ids.max(1, keepdims=True)
        end = parallel.pmax(largest, "cp")
    places = jnp.where(ids == end, columns, length)
    first = places.min(1, keepdims=True)
    first = -parallel.pmax(-first, "cp")
    return _read_off(x, columns == first % length, ctx)


def _read_off(x: jax.Array, here: jax.Array, ctx: Context) -> jax.Array:
    """fp32 [B, D]: the one token of each row of x [B, S/tp, D] that bool [B, S] marks."""
    mine = ctx.parallel.shard_seq(here)
    vectors = jnp.where(mine[..., None], x.astype(jnp.float32), 0)
    return ctx.parallel.psum(vectors.sum(1), "cp", "tp")


def _unit(x: jax.Array) -> jax.Array:
    squares = jnp.sum(jnp.square(x), -1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.maximum(squares, 1e-24))
