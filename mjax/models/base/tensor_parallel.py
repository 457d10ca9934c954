"""The two matmuls of tensor parallelism: column-parallel and row-parallel, with their exchange.

`column` gathers the sequence and multiplies by weights that are split along their outputs. `row`
multiplies by a weight that is split along its inputs and reduce-scatters the sums back over the
sequence (Megatron-LM, arXiv 1909.08053, with sequence parallelism, arXiv 2205.05198). All dense
matmuls of a block go through them, so overlap and precision have one home. Outputs carry the names
of their weights, which remat policies keep. The output of `row` is named after the exchange, or a
backward that recomputes would communicate again.
"""

import jax
from jax.ad_checkpoint import checkpoint_name

from mjax.models.base.context import Context
from mjax.models.base.tensor_parallel_overlap import gather_matmul, matmul_scatter
from mjax.models.base.weight import Weight, matmul
from mjax.sharding.collectives import LOCAL, Parallel


def column(
    x: jax.Array, weights: tuple[Weight, ...], ctx: Context, named: bool = True
) -> tuple[jax.Array, ...]:
    """x [B, S/tp, D] and weights [D, ...] -> [B, S, ...] for each weight; x is gathered once.

    A caller that names what it makes of the outputs has them not `named`.
    """
    x = ctx.tap(f"inputs.{weights[0].name}", x)
    if _in_pieces(x.shape[1], weights, ctx):
        outputs = gather_matmul(_products_of_pieces, x, weights, ctx.parallel)
    else:
        outputs = _products(ctx.parallel.gather_seq(x), weights, ctx.parallel)
    if not named:
        return tuple(outputs)
    return tuple(checkpoint_name(y, w.name) for y, w in zip(outputs, weights, strict=True))


def local_product(x: jax.Array, weight: Weight, ctx: Context) -> jax.Array:
    """x [B, S', K] and a weight [K, ...] -> [B, S', ...] of the same tokens, without an exchange.

    The weight is that of all tp devices, or x is whole and the weight split along its outputs.
    """
    return checkpoint_name(matmul(x, weight, ctx.parallel), weight.name)


def row(h: jax.Array, weight: Weight, ctx: Context) -> jax.Array:
    """h [B, S, ...] and a weight [..., D] -> [B, S/tp, D], summed over tp."""
    h = ctx.tap(f"inputs.{weight.name}", h)
    if _in_pieces(h.shape[1] // ctx.parallel.tp, (weight,), ctx):
        (y,) = matmul_scatter(_products_of_pieces, h, (weight,), ctx.parallel)
    else:
        y = ctx.parallel.scatter_seq(matmul(h, weight, ctx.parallel))
    return checkpoint_name(y, weight.name)


def _in_pieces(rows: int, weights: tuple[Weight, ...], ctx: Context) -> bool:
    """Whether shards of `rows` tokens are exchanged piece by piece.

    Each piece would read a weight in few bits again. Rounding at random knows places of all tokens.
    """
    return ctx.overlaps(rows) and not any(w.is_coded or w.places is not None for w in weights)


def _products(
    x: jax.Array, weights: tuple[Weight, ...], parallel: Parallel
) -> tuple[jax.Array, ...]:
    return tuple(matmul(x, w, parallel) for w in weights)


def _products_of_pieces(x: jax.Array, weights: tuple[Weight, ...]) -> tuple[jax.Array, ...]:
    """The products of one piece of x, which current scaling measures by itself.

    To share a maximum would make each piece wait for all devices.
    """
    return _products(x, weights, LOCAL)
