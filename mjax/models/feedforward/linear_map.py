"""One matrix in the place of a mixer or of an MLP, as Nemotron-NAS's search leaves (2411.19146).

A device multiplies its own tokens by the whole matrix, so nothing is exchanged over tp.
"""

import jax
from flax import nnx

from mjax.config.schema.model import ModelConfig
from mjax.models.base.branch import BranchCache, BranchInputs, BranchModule, BranchOutput
from mjax.models.base.params import declare, matrix, normal
from mjax.models.base.tensor_parallel import local_product
from mjax.models.base.weight import weight_of


class LinearMap(BranchModule):
    """[B, S/tp, D] -> [B, S/tp, D] by a matrix [D, D], for a mixer."""

    matmul = "linear"
    hf = "self_attn.linear_attn.weight"

    def __init__(self, cfg: ModelConfig, out_std: float, rngs: nnx.Rngs):
        width = cfg.hidden_size
        spec = matrix((width, width), ("embed", None), self.hf, matmul=self.matmul)
        self.weight = declare(rngs, spec, normal(out_std))

    @jax.named_scope("linear")
    def __call__(
        self, x: jax.Array, inputs: BranchInputs, cache: BranchCache = None
    ) -> BranchOutput:
        return BranchOutput(local_product(x, weight_of(self.weight), inputs.ctx), cache=cache)


class LinearMlp(LinearMap):
    """The same for an MLP."""

    matmul = "linear_mlp"
    hf = "mlp.linear_mlp.weight"
