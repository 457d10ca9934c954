"""From a tower to a language model: two matrices, and items' tokens in the place of a text's.

LLaVA's projector (arXiv 2310.03744). Embeddings of tokens that stand for items are zero, so what
this branch adds to the residual stream is what stands in their place. Features go from the tower's
rows, one an item, to the rows of texts by an all-gather over cp and tp, whose transpose sums their
cotangents.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from mjax.config.model_schema import ModelConfig
from mjax.models.branch import BranchCache, BranchInputs, BranchModule, BranchOutput, Source
from mjax.models.context import Context
from mjax.models.linear import column, row
from mjax.models.mlp import activated
from mjax.models.norm import Norm
from mjax.models.params import declare, declare_bias, normal
from mjax.models.weight import weight_of
from mjax.sharding.spec import ParamSpec


class Projector(BranchModule):
    """[B, S/tp, D] -> [B, S/tp, D]: features of an item where one stands, zeros elsewhere.

    It reads the output of the tower's last layer, [B*I, T/tp, D'] of I items a row, after a norm
    where `normed`.
    """

    modality = "vision"
    normed = False

    def __init__(self, cfg: ModelConfig, out_std: float, rngs: nnx.Rngs):
        self.cfg = cfg
        width, init = cfg.hidden_size, normal(cfg.initializer_range)
        tower = cfg.of_modality(self.modality)
        if self.normed:
            self.norm = Norm(tower, (tower.hidden_size,), ("embed",), "tower_norm", rngs)
        up = ParamSpec(
            shape=(tower.hidden_size, width),
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
        if source.x is None:  # the items of a text are in the caches of its attention
            return BranchOutput(jnp.zeros_like(x))
        h = self.norm(source.x) if self.normed else source.x
        (h,) = column(h, (weight_of(self.up),), ctx)
        h = activated(h, self.up_bias[...], "gelu")
        y = row(h, weight_of(self.down), ctx) + self.down_bias[...]
        features = self._of_rows(y, source, ctx, len(x))
        places = ctx.parallel.shard_seq(inputs.tokens.features[self.modality])
        found = jnp.take_along_axis(features, jnp.maximum(places, 0)[..., None], 1)
        return BranchOutput(jnp.where(places[..., None] >= 0, found, 0))

    def _of_rows(self, y: jax.Array, source: Source, ctx: Context, rows: int) -> jax.Array:
        """The tokens [B, I*T, D] of all items of a row, from the tower's rows y."""
        parallel = ctx.parallel
        y = parallel.gather_seq(y)
        y = parallel.all_gather(y, "cp", 1)
        columns = parallel.all_gather(source.tokens.columns, "cp", 0)
        y = jnp.take(y, jnp.argsort(columns), axis=1)
        return y.reshape(rows, -1, y.shape[-1])


class AudioProjector(Projector):
    """That of sounds, behind the last norm of Whisper's encoder."""

    modality = "audio"
    normed = True
