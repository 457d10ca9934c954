"""The gated delta rule's systems and walks over chunks on GPUs, by our Triton kernels.

`gated_delta.py` says what they compute; its products within chunks stay XLA's. Plain JAX solves
the systems by cuBLAS and walks in a loop of small launches: with keys and values of 128, 8 x 4096
tokens of 32 heads took 15.3 ms forward on an H200, 8.2 of them the systems.
Invariant: systems and states are fp32; products with states read their operands in v's dtype.

Alone, for these sizes (docs/lab/2026-11-24-two-gpus.md): a solution takes 1.8 ms and moves 2.4 GB
(0.6 ms at 4.2 TB/s). A walk forward takes 0.49 ms and moves 1.5 GB (0.35 ms), the one back 0.73 ms
and 2.4 GB (0.6 ms). The whole rule takes 5.9 ms forward and 21.8 with its backward.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from mjax.kernels.base.chooser import DELTA_CHANNELS as CHANNELS
from mjax.kernels.base.triton_call import triton_call

COLUMNS_OF_PROGRAM = 128, 64  # of a right side that a program takes: the first that divides it
WARPS, SOLVE_WARPS, STAGES = 4, 2, 2  # of a walk and of a solution; loads of a walk ahead


@jax.custom_vjp
def solve(system: jax.Array, right: jax.Array) -> jax.Array:
    """x [..., 64, W] of (I + system) x = right; system [..., 64, 64] is strictly lower, all fp32.

    W is a multiple of 64. Only entries below the diagonal of `system` are read.
    """
    return _solve(system, right)


def _solve_forward(system, right):
    x = _solve(system, right)
    return x, (system, x)


def _solve_back(saved, g):
    system, x = saved
    d_right = _solve_transposed(system, g)
    d_system = -jnp.einsum("...ic,...jc->...ij", d_right, x, precision="highest")
    return jnp.tril(d_system, -1), d_right


solve.defvjp(_solve_forward, _solve_back)


def _launch_solve(system: jax.Array, right: jax.Array, transposed: bool) -> jax.Array:
    from mjax.kernels.recurrence.gated_delta_triton import delta_solve

    width = right.shape[-1]
    columns = next(columns for columns in COLUMNS_OF_PROGRAM if width % columns == 0)
    (solution,) = triton_call(
        delta_solve,
        [system, right],
        [jax.ShapeDtypeStruct(right.shape, right.dtype)],
        programs=right.size // (right.shape[-2] * columns),
        warps=SOLVE_WARPS,
        WIDTH=width,
        COLUMNS=columns,
        TRANSPOSED=transposed,
    )
    return solution


def _over_leading_axes(transposed: bool):
    """`_launch_solve`, which has all leading axes in one launch, under vmap too."""

    @custom_vmap
    def run(system, right):
        return _launch_solve(system, right, transposed)

    @run.def_vmap
    def _(size, is_batched, *operands):
        full = [
            v if batched else jnp.broadcast_to(v, (size, *v.shape))
            for v, batched in zip(operands, is_batched, strict=True)
        ]
        return run(*full), True

    return run


_solve, _solve_transposed = _over_leading_axes(False), _over_leading_axes(True)


def states_of(chunks: Any, initial: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(the state before each chunk fp32 [B, C, H, P, N], the last one [B, H, P, N]).

    `chunks` is a `gated_delta.ChunkEffect` of arrays [B, C, ...].
    """
    from mjax.kernels.recurrence.gated_delta_triton import delta_states

    states = jax.ShapeDtypeStruct((*chunks.left.shape, *initial.shape[2:]), initial.dtype)
    inputs = chunks.values, chunks.readers, chunks.writers, chunks.left, initial
    states, final = _launch_walk(delta_states, chunks, inputs, (states, initial))
    return states, final


def gradients_of(
    chunks: Any, states: jax.Array, d_states: jax.Array, d_final: jax.Array
) -> tuple[Any, jax.Array]:
    """The gradients of `chunks` and of the first state, from those of what `states_of` gave.

    The kernel walks alone what depends on the chunk behind; products of all chunks follow.
    """
    from mjax.kernels.recurrence.gated_delta_triton import delta_state_gradients

    inputs = chunks.readers, chunks.writers, chunks.left, d_states, d_final
    outputs = d_states, d_final
    d_after, d_initial = _launch_walk(delta_state_gradients, chunks, inputs, outputs)
    dtype = chunks.values.dtype
    product = functools.partial(jnp.einsum, preferred_element_type=states.dtype)
    low, d_low = states.astype(dtype), d_after.astype(dtype)
    read = product("zchpn,zcqhn->zcqhp", low, chunks.readers)
    written = (chunks.values - read).astype(dtype)
    d_written = product("zcqhn,zchpn->zcqhp", chunks.writers, d_low).astype(dtype)
    gradients = chunks._replace(
        values=d_written,
        readers=-product("zcqhp,zchpn->zcqhn", d_written, low).astype(dtype),
        writers=product("zcqhp,zchpn->zcqhn", written, d_low).astype(dtype),
        left=jnp.sum(d_after * states, (-2, -1)),
    )
    return gradients, d_initial


def _launch_walk(kernel: Any, chunks: Any, inputs: tuple, outputs: tuple) -> list[jax.Array]:
    """Launch a walk over `chunks`; the last of its inputs is a state [B, H, P, N]."""
    batch, heads, size, width = inputs[-1].shape
    return triton_call(
        kernel,
        inputs,
        [jax.ShapeDtypeStruct(o.shape, o.dtype) for o in outputs],
        programs=batch * heads * (size // CHANNELS),
        warps=WARPS,
        CHUNKS=chunks.left.shape[1],
        HEADS=heads,
        TOKENS=chunks.readers.shape[2],
        P=size,
        N=width,
        CHANNELS=CHANNELS,
        STAGES=STAGES,
    )
