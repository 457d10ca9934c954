"""The two matmuls of tensor parallelism: column-parallel and row-parallel, with their exchange.

`column` gathers the sequence and multiplies by weights split along their outputs; `row` multiplies
by a weight split along its inputs and reduce-scatters the sums back over the sequence (Megatron-LM,
arXiv 1909.08053, with sequence parallelism, arXiv 2205.05198). All dense matmuls of a block go
through them, so overlap and precision have one home. Outputs carry names that remat policies keep;
`row`'s is named after the exchange, or a backward that recomputes would communicate again.
"""

import jax
from jax.ad_checkpoint import checkpoint_name

from mjax.kernels.quantize import matmul
from mjax.models.context import Context
from mjax.sharding.overlap import gather_matmul, matmul_scatter
from mjax.models.pattern import STACKS

# A block's matmuls and where their weights are. The names are what remat policies keep (config key
# train.remat) and what FP8 scales go by.
WEIGHTS = {
    "q": ("attention", "q"),
    "kv": ("attention", "kv"),
    "attn_proj": ("attention", "out"),
    "up": ("mlp", "up"),
    "down": ("mlp", "down"),
}
NAMES = tuple(WEIGHTS)


def weights_of(tree: dict, specs: dict) -> dict[str, dict]:
    """The leaves of `tree` (like `specs`, stacks of layers) that `column` and `row` multiply by:
    {stack: {name: leaf}}."""
    out: dict[str, dict] = {}
    for stack in specs:
        for name, (module, weight) in WEIGHTS.items() if stack in STACKS else ():
            spec = specs[stack].get(module, {}).get(weight)
            if spec is not None and "experts" not in spec.axes:
                out.setdefault(stack, {})[name] = tree[stack][module][weight]
    return out


def column(x: jax.Array, weights: dict[str, jax.Array], ctx: Context) -> tuple[jax.Array, ...]:
    """x [B, S/tp, D] and weights name -> [D, ...] -> for each [B, S, ...], x gathered once."""
    if ctx.in_rings(x.shape[1]):
        ys = gather_matmul(_each, x, tuple(weights.values()), ctx.parallel)
    else:
        ys = _each(ctx.parallel.gather_seq(x), tuple(weights.values()))
    return tuple(checkpoint_name(y, name) for y, name in zip(ys, weights, strict=True))


def row(h: jax.Array, weight: tuple[str, jax.Array], ctx: Context) -> jax.Array:
    """h [B, S, ...] and (name, weight [..., D]) -> [B, S/tp, D], summed over tp."""
    name, w = weight
    if ctx.in_rings(h.shape[1] // ctx.parallel.tp):
        y = matmul_scatter(_summed, h, w, ctx.parallel)
    else:
        y = ctx.parallel.scatter_seq(_summed(h, w))
    return checkpoint_name(y, name)


def _each(x: jax.Array, weights: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return tuple(jnp.tensordot(x, w, 1) for w in weights)


def _summed(h: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.tensordot(h, w, w.ndim - 1)
