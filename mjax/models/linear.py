"""The two matmuls of tensor parallelism: column-parallel and row-parallel, with their exchange.

`column` gathers the sequence and multiplies by weights split along their outputs; `row` multiplies
by a weight split along its inputs and reduce-scatters the sums back over the sequence (Megatron-LM,
arXiv 1909.08053, with sequence parallelism, arXiv 2205.05198). All dense matmuls of a block go
through them, so overlap and precision have one home. Outputs carry names that remat policies keep;
`row`'s is named after the exchange, or a backward that recomputes would communicate again.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from mjax.config.pattern import STACKS
from mjax.kernels.quantize import flipped, matmul
from mjax.models.context import Context
from mjax.models.tp_overlap import gather_matmul, matmul_scatter
from mjax.sharding.collectives import LOCAL

# A block's matmuls and where their weights are. The names are what remat policies keep (config key
# train.remat) and what FP8 scales go by.
WEIGHTS = {
    "q": ("attention", "q"),
    "kv": ("attention", "kv"),
    "attn_proj": ("attention", "out"),
    "up": ("mlp", "up"),
    "down": ("mlp", "down"),
}


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


def with_weights(tree: dict, leaves: dict[str, dict]) -> dict:
    """`tree` with `leaves`, as `weights_of` gives them, in their places."""
    out = dict(tree)
    for stack, named in leaves.items():
        for name, leaf in named.items():
            module, weight = WEIGHTS[name]
            out[stack] = out[stack] | {module: out[stack][module] | {weight: leaf}}
    return out


def apart(leaves: dict[str, dict]) -> dict[str, dict]:
    """Leaves [L, ...] -> tuples of L arrays, which unrolled layers read as they are (of a stack XLA
    would copy slices) and whose sums of gradients matmuls write in place."""
    return jax.tree.map(lambda a: tuple(a[i] for i in range(a.shape[0])), leaves)


def together(tree: dict, stack: Callable = jnp.stack) -> dict:
    """A tree in which tuples stand for stacks, stacked by `stack`."""
    is_tuple = lambda a: isinstance(a, tuple)  # noqa: E731
    return jax.tree.map(lambda a: stack(a) if is_tuple(a) else a, tree, is_leaf=is_tuple)


def filled(layers: tuple[jax.Array, ...]) -> jax.Array:
    """Arrays of L layers -> [L, ...], each copied into its place once it is made, the last first.
    GPUs do that beside other work; `jnp.stack` waits for all and looks up whose each element is
    (GPT 1.3B: 5.7 ms of a step of 265)."""
    out = jax.lax.empty((len(layers), *layers[0].shape), layers[0].dtype)
    for i in reversed(range(len(layers))):
        out = jax.lax.dynamic_update_index_in_dim(out, layers[i], i, 0)
    return out


def column(x: jax.Array, weights: dict[str, jax.Array], ctx: Context) -> tuple[jax.Array, ...]:
    """x [B, S/tp, D] and weights name -> [D, ...] -> for each [B, S, ...], x gathered once."""
    overlaps = ctx.overlaps(x.shape[1])
    multiply, operands = _local(weights, 1, ctx, overlaps)
    if overlaps:
        ys = gather_matmul(multiply, x, operands, ctx.parallel)
    else:
        ys = multiply(ctx.parallel.gather_seq(x), operands)
    return tuple(checkpoint_name(ys[name], name) for name in weights)


def row(h: jax.Array, weight: tuple[str, jax.Array], ctx: Context) -> jax.Array:
    """h [B, S, ...] and (name, weight [..., D]) -> [B, S/tp, D], summed over tp."""
    name, w = weight
    overlaps = ctx.overlaps(h.shape[1] // ctx.parallel.tp)
    multiply, operands = _local({name: w}, w.ndim - 1, ctx, overlaps)
    if overlaps:
        y = matmul_scatter(multiply, h, operands, ctx.parallel)[name]
    else:
        y = ctx.parallel.scatter_seq(multiply(h, operands)[name])
    return checkpoint_name(y, name)


def _local(
    weights: dict[str, jax.Array], contracted: int, ctx: Context, pieces: bool
) -> tuple[Callable, tuple]:
    """(a device's own matmuls as a function of x and operands, giving name -> y; the operands).
    FP8 scales are operands too, their gradients tell what a matmul saw, and so are rounded weights.
    Of `pieces` of x each is scaled by itself: to share a maximum would make every one wait for all
    devices. Sums of gradients are operands as well."""
    fp8, parallel = ctx.fp8, LOCAL if pieces else ctx.parallel
    static = None if fp8 is None else fp8.of({}, {})
    scales = {} if fp8 is None else {name: fp8.scales[name] for name in weights}
    bits = {} if fp8 is None else fp8.rounded
    wanted = [n for name in weights for n in (name, flipped(name))]
    rounded = {name: bits[name] for name in wanted if name in bits}
    sums = {name: ctx.sums[name] for name in weights if name in ctx.sums}
    weights = {n: jax.lax.stop_gradient(w) if n in sums else w for n, w in weights.items()}

    def multiply(x: jax.Array, operands: tuple) -> dict[str, jax.Array]:
        weights, *of_fp8, sums = operands
        own = None if static is None else static.of(*of_fp8)
        product = functools.partial(matmul, x, contracted=contracted, fp8=own, parallel=parallel)
        return {name: product(w, name=name, total=sums.get(name)) for name, w in weights.items()}

    return multiply, (weights, scales, rounded, sums)
