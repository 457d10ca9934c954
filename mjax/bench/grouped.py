"""Grouped matmuls to time: forward, both gradients, and a loop of matmuls beside each.

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
from mjax.kernels import chooser
from mjax.kernels.grouped import (
    grouped_matmul,
    grouped_matmul_transposed,
    grouped_weight_gradient,
)
from mjax.kernels.grouped_tiles import Tile

# lines, columns, slots, band, cluster: candidates beside the usual tile, by `--tiles`
CANDIDATES = {
    "usual": (),
    "single": (
        (128, 256, 4, 16),
        (128, 256, 4, 8),
        (128, 256, 4, 32),
        (128, 256, 3, 16),
        (256, 128, 4, 16),
        (256, 128, 4, 8),
        (256, 192, 3, 16),
        (128, 192, 4, 16),
        (128, 128, 6, 16),
    ),
    "cluster": (
        (256, 128, 4, 8, 2),
        (128, 256, 4, 16, 2),
        (128, 128, 6, 16, 2),
    ),
}
ALL_CANDIDATES = CANDIDATES["single"] + CANDIDATES["cluster"]


def skewed_sizes(rows: int, groups: int) -> np.ndarray:
    """How many of `rows` each group gets, int32 [G]."""
    rng = np.random.default_rng(0)
    popular = np.exp(0.5 * rng.standard_normal(groups))
    return rng.multinomial(rows, popular / popular.sum()).astype(np.int32)


def grouped_matmuls(m: int, groups: int, k: int, n: int, tiles: str = "usual") -> Iterator[Work]:
    """Of x [M, K] by w [G, K, N]; `tiles` names candidates for the Hopper kernels."""
    sizes = skewed_sizes(m, groups)
    x, w, g = draw((m, k)), draw((groups, k, n), 1), draw((m, n), 2)
    total, counts = draw((groups, k, n), 3, "float32"), jnp.asarray(sizes)
    products = {
        "forward": (x, w, counts),
        "d_input": (g, w, counts),
        "d_weight": (x, g, counts),
        "d_weight added": (x, g, counts, total),
    }
    loops, checks = loops_of_matmuls(sizes), every_group_on_all_rows()
    flops = 2.0 * m * k * n
    for name, inputs in products.items():
        facts = {"inputs": inputs, "flops": flops, "kept": len(inputs) == 4}
        for tile, run in runs_of(name, tiles).items():
            yield Work(f"{name}{tile}", run, expected=checks[name], **facts)
        yield Work(f"reference {name}", loops[name], **facts)


def runs_of(name: str, tiles: str) -> dict[str, Callable]:
    """The usual implementation of a product, by "", and those of each candidate by its tile."""
    hopper = chooser.this_device().hopper
    usual = {
        "forward": grouped_matmul,
        "d_input": grouped_matmul_transposed,
        "d_weight": grouped_weight_gradient,
        "d_weight added": grouped_weight_gradient,
    }
    implementation = "mosaic" if hopper else "auto"
    runs = {"": functools.partial(usual[name], implementation=implementation)}
    if not hopper or tiles == "usual":
        return runs
    from mjax.kernels.mosaic_grouped import multiply_rows, weight_gradient

    def with_tile(tile: Tile, *inputs: jax.Array) -> jax.Array:
        if name.startswith("d_weight"):
            total = inputs[3] if len(inputs) == 4 else None
            return weight_gradient(*inputs[:3], total, tile)
        return multiply_rows(*inputs, tile, transposed=name == "d_input")

    for candidate in CANDIDATES[tiles]:
        label = "x".join(map(str, candidate))
        runs[f" {label}"] = functools.partial(with_tile, Tile(*candidate))
    return runs


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


def every_group_on_all_rows() -> dict[str, Callable]:
    """Each product with G times the work, to compare with: one matmul, which compiles at once."""

    def product(rows, w, sizes, transposed=False):
        def add(y, one):
            matrix, own = one
            matrix = matrix.T if transposed else matrix
            return jnp.where(own[:, None], rows @ matrix, y), None

        y = jnp.zeros((len(rows), w.shape[1 if transposed else 2]), rows.dtype)
        return jax.lax.scan(add, y, (w, rows_of_groups(len(rows), sizes)))[0]

    def d_weight(x, g, sizes, dtype=jnp.bfloat16):
        def one(own):
            own_rows = jnp.where(own[:, None], x, 0)
            return jax.lax.dot(own_rows.T, g, preferred_element_type=dtype)

        return jax.lax.map(one, rows_of_groups(len(x), sizes))

    def added(x, g, sizes, total):
        return total + d_weight(x, g, sizes, total.dtype)

    return {
        "forward": product,
        "d_input": functools.partial(product, transposed=True),
        "d_weight": d_weight,
        "d_weight added": added,
    }


def rows_of_groups(m: int, sizes: jax.Array) -> jax.Array:
    """Whether a row is of a group, bool [G, M]."""
    ends = jnp.cumsum(sizes)[:, None]
    row = jnp.arange(m)
    return (row < ends) & (row >= ends - sizes[:, None])
