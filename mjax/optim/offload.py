"""Moments that live in pinned host memory and visit the device a slice at a time.

A loop runs over slices of the leading axis (a layer of a stack, as many rows of anything else). It
fetches both moments, updates, and sends them back into the same buffers. So the device holds a few
slices whatever the model's size. Invariant: the update is elementwise, so the result is that of one
update of everything. The compiler makes the transfers asynchronous: `tests/aot/test_optim.py`.
"""

from collections.abc import Callable

import jax
from jax import lax

SLICE = 128 * 2**20  # bytes of the slice of a master; a slice has at least one row

# (inputs, param, moments) -> (param, moments)
Update = Callable[..., tuple[jax.Array, ...]]


def update_in_slices(
    update: Update, inputs: tuple, param: jax.Array, moments: tuple[jax.Array, ...]
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """(param, moments) after `update(inputs, param, moments)`.

    `update` is elementwise along the leading axis of all its arrays. `moments` are in host memory
    and stay there.
    """
    rows = param.shape[0]
    rows_per_slice = max(1, SLICE * rows // max(param.nbytes, 1))
    rows_per_slice = min(rows, rows_per_slice)

    def step(first: jax.Array | int, size: int, state: tuple) -> tuple:
        """The state with the rows from `first` on updated."""

        def cut(x: jax.Array) -> jax.Array:
            return lax.dynamic_slice_in_dim(x, first, size)

        def put(x: jax.Array, new: jax.Array) -> jax.Array:
            return lax.dynamic_update_slice_in_dim(x, new, first, 0)

        param, moments = state
        on_device = tuple(jax.device_put(cut(m), jax.memory.Space.Device) for m in moments)
        slices = jax.tree.map(cut, inputs), cut(param), on_device
        new_param, new_moments = update(*slices)
        param = put(param, new_param)
        on_host = [jax.device_put(new, jax.memory.Space.Host) for new in new_moments]
        return param, tuple(map(put, moments, on_host))

    def iteration(i: jax.Array, state: tuple) -> tuple:
        return step(i * rows_per_slice, rows_per_slice, state)

    iterations, rest = divmod(rows, rows_per_slice)
    state = lax.fori_loop(0, iterations, iteration, (param, moments))
    if rest == 0:
        return state
    return step(rows - rest, rest, state)
