"""From an image tower to a language model: two matrices, and patches in the place of tokens.

LLaVA's projector (arXiv 2310.03744). Embeddings of tokens that stand for patches are zero, so what
this branch adds to the residual stream is what stands in their place. Features go from the tower's
rows, one an image, to the rows of texts by an all-gather over cp and tp, whose transpose sums their
cotangents.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx

from mjax.config.model_schema import ModelConfig
from mjax.models.branch import BranchCache, BranchInputs, BranchModule, BranchOutput, Source
from mjax.models.context import Context, Tokens, tokens_of
from mjax.models.linear import column, row
from mjax.models.mlp import activated
from mjax.models.params import declare, declare_bias, normal
from mjax.models.weight import weight_of
from mjax.sharding.spec import ParamSpec


class Projector(BranchModule):
    """[B, S/tp, D] -> [B, S/tp, D]: features of patches where one stands, zeros elsewhere.

    It reads the output of the last V block, [B*I, T/tp, D'] of I images a row.
    """

    def __init__(self, cfg: ModelConfig, out_std: float, rngs: nnx.Rngs):
        self.cfg = cfg
        width, init = cfg.hidden_size, normal(cfg.initializer_range)
        up = ParamSpec(
            shape=(cfg.vision.hidden_size, width),
            axes=("embed", "mlp"),
            role="matrix",
            matmul="projector_up",
            hf=("linear_1.weight",),
        )
        down = ParamSpec(
            shape=(width, width),
            axes=("mlp", "embed"),
            role="matrix",
            matmul="projector_down",
            hf=("linear_2.weight",),
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
        if source.x is None:  # the images of a text are in the caches of its attention
            return BranchOutput(jnp.zeros_like(x))
        (h,) = column(source.x, (weight_of(self.up),), ctx)
        h = activated(h, self.up_bias[...], "gelu")
        y = row(h, weight_of(self.down), ctx) + self.down_bias[...]
        features = self._of_rows(y, source, ctx, len(x))
        places = ctx.parallel.shard_seq(inputs.tokens.features)
        found = jnp.take_along_axis(features, jnp.maximum(places, 0)[..., None], 1)
        return BranchOutput(jnp.where(places[..., None] >= 0, found, 0))

    def _of_rows(self, y: jax.Array, source: Source, ctx: Context, rows: int) -> jax.Array:
        """The tokens [B, I*T, D] of all images of a row, from the tower's rows y."""
        parallel = ctx.parallel
        y = parallel.gather_seq(y)
        y = parallel.all_gather(y, "cp", 1)
        columns = parallel.all_gather(source.tokens.columns, "cp", 0)
        y = jnp.take(y, jnp.argsort(columns), axis=1)
        return y.reshape(rows, -1, y.shape[-1])


def beside_images(
    text: Tokens,
    features: jax.Array | None,
    images: tuple[int, int],
    num_tokens: int,
    columns: jax.Array | None = None,
) -> Tokens:
    """Facts about the tokens of images, with those about the text's tokens.

    features: int32 [B, S] (`Tokens`), or None where no image stands in a text. images: how many a
    row has, and the tokens of each with padding, which is segment 0. num_tokens: those that are no
    padding. columns: of an image's tokens on this device; None: all.
    """
    each, length = images
    columns = jnp.arange(length, dtype=jnp.int32) if columns is None else columns
    rows = text.rows[:, None] * each + jnp.arange(each)
    shape = rows.size, len(columns)
    real = jnp.broadcast_to(columns < num_tokens, shape)
    positions = jnp.broadcast_to(jnp.minimum(columns, num_tokens - 1), shape)
    tokens = tokens_of(
        shape,
        positions,
        segments=real.astype(jnp.int32),
        rows=rows.reshape(-1),
        columns=columns,
        key=text.key,
    )
    return replace(tokens, target=replace(text, features=features))
