"""Attention on the outputs of the q and kv matmuls as they are: q, and k and v in one array.

If nothing but biases stands between the matmuls and a kernel for short rows, the kernel adds the
biases, and no array of q, k or v is written. If each head has keys of its own, q, k and v are
one product of one matmul. Invariant: the numbers are those of q, k and v apart.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from mjax.config.languages.layer_pattern import BRANCHES
from mjax.config.schema.model import ModelConfig
from mjax.kernels.attention.api import attention_of_products, reads_products
from mjax.kernels.base.attention_call import AttentionCall
from mjax.models.attention.calls import attention_arrays
from mjax.models.base.branch import BranchInputs
from mjax.models.base.tensor_parallel import column
from mjax.models.base.weight import Weight


class Projections(NamedTuple):
    """The weights q [D, N, H] and kv [D, 2, K, H] of this device's heads.

    biases: theirs, [N, H] and [2 or 1, K, H], or None.
    """

    q: Weight
    kv: Weight
    biases: tuple[jax.Array, jax.Array] | None


def attend_to_products(
    x: jax.Array,
    cfg: ModelConfig,
    projections: Callable[[], Projections],
    call: AttentionCall,
    inputs: BranchInputs,
) -> jax.Array | None:
    """Heads of values [B, S, N/tp, H] for x [B, S/tp, D]; None where q, k and v must be apart."""
    if not _kernel_reads_products(x, cfg, call, inputs):
        return None
    q, kv, biases = projections()
    weights = (q, kv)
    each_has_keys = cfg.attention.num_attention_heads == cfg.attention.num_key_value_heads
    if each_has_keys and _can_join(q, kv):
        weights = (_one_weight(q, kv),)
    products = column(x, weights, inputs.ctx, named=biases is None)
    with jax.named_scope("sdpa"):
        if biases is not None:  # the first is named where it gets its own
            rest = zip(products[1:], weights[1:], strict=True)
            products = products[0], *(checkpoint_name(p, w.name) for p, w in rest)
        arrays = attention_arrays(cfg, inputs)
        return attention_of_products(products, biases, call, arrays, weights[0].name)


def _kernel_reads_products(
    x: jax.Array, cfg: ModelConfig, call: AttentionCall, inputs: BranchInputs
) -> bool:
    """Whether a kernel takes the products of x in the place of q, k and v."""
    parallel = inputs.ctx.parallel
    if parallel.cp > 1 or not adds_biases_only(cfg, inputs.word):
        return False
    heads = cfg.attention.num_attention_heads // parallel.tp
    shape = len(x), parallel.tp * x.shape[1], heads, cfg.attention.head_dim
    q = jax.ShapeDtypeStruct(shape, x.dtype)
    return reads_products(q, call, attention_arrays(cfg, inputs))


def adds_biases_only(cfg: ModelConfig, word: str) -> bool:
    """Whether nothing but biases stands between the products q, kv and attention."""
    sizes = cfg.attention
    rotates = cfg.position_embedding == "rope" and bool(BRANCHES[word].rotary)
    changed = sizes.qk_norm or sizes.attention_output_gate or sizes.attention_sinks
    return not (changed or rotates or sizes.key_multiplier is not None)


def _can_join(q: Weight, kv: Weight) -> bool:
    """Whether one matmul may have both weights: without scales, with two running sums or none."""
    if q.recipe or kv.recipe or q.adapter or kv.adapter or q.is_coded:
        return False
    return (q.grad_sum is None) == (kv.grad_sum is None)


def _one_weight(q: Weight, kv: Weight) -> Weight:
    """One weight [D, 3, N, H] of q [D, N, H] and kv [D, 2, N, H]; its product bears kv's name."""

    def join(a: jax.Array | None, b: jax.Array | None) -> jax.Array | None:
        return None if a is None else jnp.concatenate([a[:, None], b], axis=1)

    return replace(kv, value=join(q.value, kv.value), grad_sum=join(q.grad_sum, kv.grad_sum))
