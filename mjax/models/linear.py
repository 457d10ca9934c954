"""The two matmuls of tensor parallelism: column-parallel and row-parallel, with their exchange.

`column` gathers the sequence and multiplies by weights split along their outputs; `row` multiplies
by a weight split along its inputs and reduce-scatters the sums back over the sequence (Megatron-LM,
arXiv 1909.08053, with sequence parallelism, arXiv 2205.05198). All dense matmuls of a block go
through them, so overlap and precision have one home. Outputs carry names that remat policies keep;
`row`'s is named after the exchange, or a backward that recomputes would communicate again.
"""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from mjax.models.context import Context

# What a block's matmuls leave behind, by name (config key train.remat).
NAMES = ("q", "kv", "attn_proj", "up", "down")


def column(x: jax.Array, weights: dict[str, jax.Array], ctx: Context) -> tuple[jax.Array, ...]:
    """x [B, S/tp, D] and weights name -> [D, ...] -> for each [B, S, ...], x gathered once."""
    x = ctx.parallel.gather_seq(x)
    return tuple(checkpoint_name(jnp.tensordot(x, w, 1), name) for name, w in weights.items())


def row(h: jax.Array, weight: tuple[str, jax.Array], ctx: Context) -> jax.Array:
    """h [B, S, ...] and (name, weight [..., D]) -> [B, S/tp, D], summed over tp."""
    name, w = weight
    y = jnp.tensordot(h, w, w.ndim - 1)
    return checkpoint_name(ctx.parallel.scatter_seq(y), name)
