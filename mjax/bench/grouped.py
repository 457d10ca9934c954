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
from mjax.kernels.grouped import grouped_matmul, grouped_matmul_transposed, grouped_weight_gradient


def skewed_sizes(rows: int, groups: int) -> np.ndarray:
    """How many of `rows` each group gets, int32 [G]."""
    rng = np.random.default_rng(0)
    popular = np.exp(0.5 * rng.standard_normal(groups))
    return rng.multinomial(rows, popular / popular.sum()).astype(np.int32)


def grouped_matmuls(m: int, groups: int, k: int, n: int) -> Iterator[Work]:
    """Of x [M, K] by w [G, K, N], by the kernels for Hopper GPUs where this is one."""
    sizes = skewed_sizes(m, groups)
    x, w, g = draw((m, k)), draw((groups, k, n), 1), draw((m, n), 2)
    total, counts = draw((groups, k, n), 3, "float32"), jnp.asarray(sizes)
    products = {
        "forward": (grouped_matmul, (x, w, counts)),
        "d_input": (grouped_matmul_transposed, (g, w, counts)),
        "d_weight": (grouped_weight_gradient, (x, g, counts)),
        "d_weight added": (grouped_weight_gradient, (x, g, counts, total)),
    }
    implementation = "mosaic" if chooser.this_device().hopper else "auto"
    loops = loops_of_matmuls(sizes)
    for name, (product, inputs) in products.items():
        facts = {"inputs": inputs, "flops": 2.0 * m * k * n, "kept": len(inputs) == 4}
        run = functools.partial(product, implementation=implementation)
        yield Work(name, run, expected=loops[name], **facts)
        yield Work(f"reference {name}", loops[name], **facts)


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
