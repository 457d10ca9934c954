"""From a tower to a language model: two matrices, and items' tokens in the place of a text's.

LLaVA's projector (arXiv 2310.03744). Embeddings of tokens that stand for items are zero, so what
this branch adds to the residual stream is what stands in their place. Features go from the tower's
rows, one an item, to the rows of texts by an all-gather over cp and tp, whose transpose sums their
cotangents. The matrices lie as the tower's do, where that has mesh sizes of its own.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx

from mjax.config.schema.model import ModelConfig
from mjax.kernels.elementwise.activation import activated
from mjax.models.base.branch import BranchCache, BranchInputs, BranchModule, BranchOutput, Source
from mjax.models.base.context import Context, Tokens
from mjax.models.base.norm import Norm
from mjax.models.base.params import declare, declare_bias, matrix, normal
from mjax.models.base.tensor_parallel import column, row
from mjax.models.base.weight import weight_of
from mjax.models.towers.tiles import mixed
from mjax.models.towers.tower_mesh import rows_of_all
from mjax.models.towers.vision import pixel_shuffle
from mjax.sharding.spec import ParamSpec


class Projector(BranchModule):
    """[B, S/tp, D] -> [B, S/tp, D]: features of an item where one stands, zeros elsewhere.

    It reads the output of the tower's last layer, [B*I, T/tp, D'] of I items a row, after a norm
    where `normed`, and after a pixel shuffle where the tower's config says so. It
    also has the embedding of a newline if items are cut into tiles.
    """

    modality = "vision"
    normed = False

    def __init__(self, cfg: ModelConfig, out_std: float, rngs: nnx.Rngs):
        self.cfg = cfg
        width, init = cfg.hidden_size, normal(cfg.initializer_range)
        tower = cfg.of_modality(self.modality)
        if self.normed:
            self.norm = Norm(tower, (tower.hidden_size,), ("embed",), "tower_norm", rngs)
        sizes = cfg.tower(self.modality)
        if sizes.is_tiled:
            newline = ParamSpec((width,), ("embed",), "embedding", hf=("image_newline",))
            self.newline = declare(rngs, newline, init)
        channels = tower.hidden_size * (4 if sizes.is_shuffled else 1)
        up = matrix(
            (channels, width),
            ("embed", "mlp"),
            "linear_1.weight",
            matmul="projector_up",
        )
        down = matrix(
            (width, width),
            ("mlp", "embed"),
            "linear_2.weight",
            matmul="projector_down",
        )
        self.up = declare(rngs, up, init)
        self.up_bias = declare_bias(rngs, (width,), ("mlp",), "linear_1.bias")
        self.down = declare(rngs, down, init)
        self.down_bias = declare_bias(rngs, (width,), ("embed",), "linear_2.bias")

    @jax.named_scope("projector")
    def __call__(
        self, x: jax.Array, inputs: BranchInputs, cache: BranchCache = None
    ) -> BranchOutput:
        source, ctx = inputs.source, inputs.ctx
        own = ctx.of(self.modality)
        if source.x is None:  # the items of a text are in the caches of its attention
            return BranchOutput(jnp.zeros_like(x))
        sizes = self.cfg.tower(self.modality)
        is_shuffled = sizes.is_shuffled
        h = self.norm(source.x) if self.normed else source.x
        tokens = source.tokens
        if is_shuffled:
            h = self._shuffled(h, source, own)
            tokens = replace(tokens, columns=_columns_in_order(h, own))
        y = projected(self, h, tokens, own)
        y = gathered_tokens(y, own) if is_shuffled else in_order(y, source, own)
        y = rows_of_all(y, len(x) * sizes.max_items, self.modality, ctx)
        features = y.reshape(len(x), -1, y.shape[-1])
        places = inputs.tokens.features[self.modality]
        places = ctx.parallel.shard_seq(places)
        weights = inputs.tokens.weights.get(self.modality)
        if weights is not None:
            weights = ctx.parallel.shard_seq(weights)
            found = mixed(features, places, weights, self.newline[...])
            return BranchOutput(found)
        places = places[..., None]
        found = jnp.take_along_axis(features, jnp.maximum(places, 0), 1)
        return BranchOutput(jnp.where(places >= 0, found, 0))

    def _shuffled(self, x: jax.Array, source: Source, ctx: Context) -> jax.Array:
        """[B*I, T/tp, D'] -> [B*I, T'/tp, 4 D']: merged patches and padding, in order over cp."""
        vision = self.cfg.vision
        x = in_order(x, source, ctx)
        patches = slice(vision.leading, vision.num_tokens())
        x = pixel_shuffle(x[:, patches])
        count = x.shape[1]
        behind = vision.padded(count) - count
        x = jnp.pad(x, ((0, 0), (0, behind), (0, 0)))
        return ctx.parallel.shard_seq(ctx.parallel.shard(x, "cp", 1))


def _columns_in_order(x: jax.Array, ctx: Context) -> jax.Array:
    """The columns [T/cp] of rows [B, T/tp, D] that are cut over cp in order."""
    parallel = ctx.parallel
    count = x.shape[1] * parallel.tp * parallel.cp
    columns = jnp.arange(count, dtype=jnp.int32)
    return parallel.shard(columns, "cp", 0)


def projected(matrices: nnx.Module, x: jax.Array, tokens: Tokens, ctx: Context) -> jax.Array:
    """[.., T/tp, D'] -> [.., T/tp, D]: the two matmuls of a projector, GELU between them.

    Adapters drop what they read by the places of `tokens`.
    """
    up = weight_of(matrices.up).for_tokens(tokens, ctx)
    down = weight_of(matrices.down).for_tokens(tokens, ctx)
    (h,) = column(x, (up,), ctx)
    h = activated(h, matrices.up_bias[...], "gelu")
    y = row(h, down, ctx)
    return y + matrices.down_bias[...]


def in_order(x: jax.Array, source: Source, ctx: Context) -> jax.Array:
    """All tokens [B*I, T, D] of a tower's rows [B*I, T/tp, D], cut over cp as its columns are."""
    columns = ctx.parallel.all_gather(source.tokens.columns, "cp", 0)
    order = jnp.argsort(columns)
    return jnp.take(gathered_tokens(x, ctx), order, axis=1)


def gathered_tokens(x: jax.Array, ctx: Context) -> jax.Array:
    """[B*I, T/tp, D] -> [B*I, T, D] with the shards of tp and cp one after the other."""
    x = ctx.parallel.gather_seq(x)
    return ctx.parallel.all_gather(x, "cp", 1)


class NormedProjector(Projector):
    """The projector of images behind a last norm of their tower (SigLIP in Megatron-core)."""

    normed = True


class AudioProjector(Projector):
    """The projector of sounds, after the last norm of Whisper's encoder."""

    modality = "audio"
    normed = True
