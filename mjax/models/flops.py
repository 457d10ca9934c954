"""Model FLOPs of a token: what the speed of a run is measured by.

They are counted from the declarations: products with weights from the parameters' specs, and the
rest from each branch (`BranchModule.flops`). The convention is that of PaLM (Chowdhery et al. 2022,
appendix B) with the causal half counted. Recomputation is not counted.
"""

import functools

import jax

from mjax.config.pattern import branches_of
from mjax.config.schema import ModelConfig
from mjax.models import definition_of
from mjax.models.branch import branch_class
from mjax.sharding.spec import ParamSpec, is_spec

# Roles of the parameters that every token is multiplied with, besides the head.
_MULTIPLIED = ("matrix", "router")


def matmul_weights(model: ModelConfig) -> float:
    """Weights that a token is multiplied with, of which experts count as far as they are active.

    The head counts vocab_size rows, without padding, tied or not; looking up embeddings is free.
    """
    return _layer_weights(model.model_dump_json()) + model.hidden_size * model.vocab_size


@functools.cache
def _layer_weights(model: str) -> float:
    """The part of the layers, of a config in JSON."""
    specs = definition_of(ModelConfig.model_validate_json(model)).specs

    def count(spec: ParamSpec) -> float:
        return spec.size * spec.active if spec.role in _MULTIPLIED else 0

    return sum(map(count, jax.tree.leaves(specs, is_leaf=is_spec)))


def flops_per_token(model: ModelConfig, seq_length: int) -> float:
    """Model FLOPs of one token, forward and backward, nothing recomputed.

    They are 6 * matmul_weights and those of the branches of each layer, as the mean over a sequence
    of `seq_length` tokens.
    """
    total = 6.0 * matmul_weights(model)
    for kind in model.layer_kinds:
        sizes = model.of_layer(kind)
        for letter in branches_of(kind):
            total += branch_class(letter).flops(sizes, letter, seq_length)
    return total
