"""Grouped matmuls to time: forward, both gradients, and a loop of matmuls beside each; those of
8 bits beside those of bf16.

Sizes of groups are skewed as routers' are: each group is as popular as the exponential of half a
normal number, and rows choose by it (of 128 groups the largest has about 3 times the mean). The
loop knows the sizes when it is compiled, which no training step does.
"""

import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from mjax.bench.work import Work, draw
from mjax.kernels.base import chooser
from mjax.kernels.elementwise.gate import E4M3, E5M2
from mjax.kernels.matmul.grouped import (
    grouped_matmul,
    grouped_matmul8,
    grouped_weight_gradient,
    grouped_weight_gradient8,
)


def skewed_sizes(rows: int, groups: int) -> np.ndarray:
    """How many of `rows` each group gets, int32 [G]."""
    rng = np.random.default_rng(0)
    popular = np.exp(0.5 * rng.standard_normal(groups))
    return rng.multinomial(rows, popular / popular.sum()).astype(np.int32)


def grouped_matmuls(m: int, groups: int, k: int, n: int) -> Iterator[Work]:
    """Time grouped matmuls of x [M, K] by w [G, K, N], by the Hopper kernels on Hopper GPUs."""
    sizes = skewed_sizes(m, groups)
    x, w, g, total = _operands_of_groups(m, groups, k, n)
    products = products_of(x, w, g, jnp.asarray(sizes), total)
    implementation = fastest()
    loops = loops_of_matmuls(sizes)
    flops = 2.0 * m * k * n
    for name, (product, inputs) in products.items():
        kept = len(inputs) == 4
        loop = loops[name]
        run = functools.partial(product, implementation=implementation)
        yield Work(name, run, inputs, flops, expected=loop, kept=kept)
        yield Work(f"reference {name}", loop, inputs, flops, kept=kept)


def _operands_of_groups(
    m: int, groups: int, k: int, n: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """x [M, K], w [G, K, N], d_y [M, N], and an fp32 sum of gradients of w."""
    x = draw((m, k))
    w = draw((groups, k, n), 1)
    d_y = draw((m, n), 2)
    return x, w, d_y, draw((groups, k, n), 3, "float32")


def grouped_matmuls8(m: int, groups: int, k: int, n: int) -> Iterator[Work]:
    """The same products of operands in 8 bits, by the kernels for Hopper GPUs where this is one.

    Beside each is that of bf16. Operands of 8 bits lie as `grouped_matmul8` wants them.
    """
    x, w, g, total = _operands_of_groups(m, groups, k, n)
    x8 = x.astype(E4M3)
    w8 = w.astype(E4M3)
    g8 = g.astype(E5M2)
    counts = jnp.asarray(skewed_sizes(m, groups))
    own = {"implementation": fastest()}
    rows8 = functools.partial(grouped_matmul8, dtype=x.dtype, **own)
    gradient8 = functools.partial(grouped_weight_gradient8, dtype=x.dtype, **own)

    def added8(x, g, counts, scale, total):
        return gradient8(x, g, counts, scale, total=total)

    facts = counts, jnp.float32(1)
    w8_transposed = jnp.swapaxes(w8, 1, 2)
    transposed = jnp.copy(x8.T), jnp.copy(g8.T), *facts
    products8 = {
        "forward": (rows8, (x8, w8_transposed, *facts)),
        "d_input": (functools.partial(rows8, precise=True), (g8, w8, *facts)),
        "d_weight": (gradient8, transposed),
        "d_weight added": (added8, (*transposed, total)),
    }
    products = products_of(x, w, g, counts, total)
    flops = 2.0 * m * k * n
    for name, (product8, inputs8) in products8.items():
        kept = name == "d_weight added"
        product, inputs = products[name]
        reference = functools.partial(product, **own)
        yield Work(name, product8, inputs8, flops, kept=kept)
        yield Work(f"reference {name}", reference, inputs, flops, kept=kept)


def products_of(
    x: jax.Array, w: jax.Array, g: jax.Array, sizes: jax.Array, total: jax.Array
) -> dict[str, tuple[Callable, tuple]]:
    """Each product and what it is of."""
    return {
        "forward": (grouped_matmul, (x, w, sizes)),
        "d_input": (functools.partial(grouped_matmul, transposed=True), (g, w, sizes)),
        "d_weight": (grouped_weight_gradient, (x, g, sizes)),
        "d_weight added": (grouped_weight_gradient, (x, g, sizes, total)),
    }


def fastest() -> str:
    """The implementation to time."""
    return "mosaic" if chooser.this_device().hopper else "auto"


def loops_of_matmuls(sizes: np.ndarray) -> dict[str, Callable]:
    """Each product as a matmul for each group; sizes are constants of the program."""
    ends = np.cumsum(sizes)
    parts = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]

    def forward(x, w, _):
        return jnp.concatenate([x[part] @ w[i] for i, part in enumerate(parts)])

    def d_input(g, w, _):
        return jnp.concatenate([g[part] @ w[i].T for i, part in enumerate(parts)])

    def d_weight(x, g, _, dtype=jnp.bfloat16):
        products = [jax.lax.dot(x[part].T, g[part], preferred_element_type=dtype) for part in parts]
        return jnp.stack(products)

    def added(x, g, sizes, total):
        return total + d_weight(x, g, sizes, total.dtype)

    return {
        "forward": forward,
        "d_input": d_input,
        "d_weight": d_weight,
        "d_weight added": added,
    }
