"""Moments that live in pinned host memory and visit the device a slice at a time.

A loop over slices of the leading axis (a layer of a stack, as many rows of anything else) fetches
both moments, updates, and sends them back into the same buffers, so the device holds a few slices
whatever the model's size. Invariant: the update is elementwise, so the result is that of updating
the whole. The compiler makes the transfers asynchronous copies: `tests/aot/test_optim.py`.
"""

from collections.abc import Callable

import jax
from jax import lax

SLICE = 128 * 2**20  # bytes of the slice of a master; a slice has at least one row

Update = Callable[..., tuple[jax.Array, ...]]


def update_in_slices(
    update: Update, inputs: tuple, param: jax.Array, moments: tuple[jax.Array, ...]
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """(param, moments) after `update(inputs, param, moments)`, which returns the same pair and is
    elementwise along the leading axis of all leaves; `moments` are and stay in host memory."""
    rows = param.shape[0]
    size = min(rows, max(1, SLICE * rows // max(param.nbytes, 1)))

    def step(first: jax.Array | int, size: int, state: tuple) -> tuple:
        def cut(x):
            return lax.dynamic_slice_in_dim(x, first, size)

        def put(x, new):
            return lax.dynamic_update_slice_in_dim(x, new, first, 0)

        param, moments = state
        here = tuple(jax.device_put(cut(m), jax.memory.Space.Device) for m in moments)
        new, here = update(jax.tree.map(cut, inputs), cut(param), here)
        back = (jax.device_put(m, jax.memory.Space.Host) for m in here)
        return put(param, new), tuple(map(put, moments, back))

    loops, rest = divmod(rows, size)
    state = lax.fori_loop(0, loops, lambda i, s: step(i * size, size, s), (param, moments))
    return step(rows - rest, rest, state) if rest else state
