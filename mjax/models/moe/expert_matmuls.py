"""The two grouped matmuls of experts, each a function with its own backward.

A recipe that scales blocks rounds each operand of the six products; other recipes have functions of
their own (`matmuls_fp8.py`).
Rows are gathered again in the backward instead of being kept, and gates are multiplied in before
the second matmul, so that the backward does not need its output (SonicMoE, arXiv 2512.14080).
"""

import functools

import jax
import jax.numpy as jnp

from mjax.kernels.fp8.blocks import Blocks
from mjax.models.base.weight import Weight
from mjax.models.moe.dispatch import (
    Dispatch,
    gates_of_pairs,
    gates_of_rows,
    rows_of_tokens,
    sums_of_rows,
)
from mjax.models.moe.expert import Expert
from mjax.models.moe.grouped_linear import product_of_rows, rounded_rows, weight_cotangent


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def multiply_up(
    expert: Expert, x: jax.Array, up: Weight, dispatch: Dispatch, blocks: Blocks | None = None
) -> jax.Array:
    """[M, (2,) F]: the rows of tokens x [T, D], each times its expert's `up` [E, D, (2,) F].

    blocks: the numbers of x, where they came in 8 bits and `up` has a recipe that reads them.
    """
    tokens = x if blocks is None else blocks
    rows, _ = rounded_rows(tokens, up, None, "input", turned=False)
    rows = jax.tree.map(lambda part: rows_of_tokens(part, dispatch), rows)
    h = product_of_rows(rows, up, dispatch.sizes, expert.kernel, 0)
    return h.reshape(-1, *up.value.shape[2:])


def _multiply_up_forward(expert, x, up, dispatch, blocks=None):
    h = multiply_up(expert, x, up, dispatch, blocks)
    return h, (x if blocks is None else blocks, up, dispatch)


def backward_of_up(
    expert: Expert, saved: tuple[jax.Array | Blocks, Weight, Dispatch], dh: jax.Array
) -> tuple[jax.Array, Weight]:
    """The cotangents of x and `up`, which are saved with their dispatch, from the output's."""
    x, up, dispatch = saved
    dh = dh.reshape(len(dh), -1)
    rows = jax.tree.map(lambda part: rows_of_tokens(part, dispatch), x)
    if isinstance(rows, Blocks):
        rows = rows.numbers()
    by_rows, by_columns = rounded_rows(dh, up, dispatch.sizes, "gradient")
    d_up = weight_cotangent(up, rows, by_columns, dispatch.sizes, expert.kernel)
    d_rows = product_of_rows(by_rows, up, dispatch.sizes, expert.kernel, 1)
    dx = sums_of_rows(d_rows, dispatch)
    return dx, d_up


def _multiply_up_backward(expert, saved, dh):
    return *backward_of_up(expert, saved, dh), None, None


multiply_up.defvjp(_multiply_up_forward, _multiply_up_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def multiply_down(
    expert: Expert,
    h: jax.Array,
    gates: jax.Array,
    down: Weight,
    dispatch: Dispatch,
) -> jax.Array:
    """[T, D]: each token's sum of gate * act(h) times its experts' `down` [E, F, D].

    h [M, (2,) F] are the rows that `multiply_up` gives, gates fp32 [T, k].
    """
    of_rows = gates_of_rows(gates, dispatch)
    rows, _ = rounded_rows(expert.weighted(h, of_rows), down, None, "input", turned=False)
    y = product_of_rows(rows, down, dispatch.sizes, expert.kernel, 0)
    return sums_of_rows(y, dispatch)


def _multiply_down_forward(expert, h, gates, down, dispatch):
    y = multiply_down(expert, h, gates, down, dispatch)
    return y, (h, gates, down, dispatch)


def backward_of_down(
    expert: Expert,
    saved: tuple[jax.Array, jax.Array, Weight, Dispatch],
    dy: jax.Array,
) -> tuple[jax.Array, jax.Array, Weight]:
    """The cotangents of h, gates and `down`, which are saved with their dispatch, from dy."""
    h, gates, down, dispatch = saved
    dy = rows_of_tokens(dy, dispatch)
    of_rows = gates_of_rows(gates, dispatch)
    rows, vjp = jax.vjp(expert.weighted, h, of_rows)
    by_rows, by_columns = rounded_rows(dy, down, dispatch.sizes, "gradient")
    d_down = weight_cotangent(down, rows, by_columns, dispatch.sizes, expert.kernel)
    d_rows = product_of_rows(by_rows, down, dispatch.sizes, expert.kernel, 1)
    dh, d_gates = vjp(d_rows)
    return dh, gates_of_pairs(d_gates, dispatch), d_down


def _multiply_down_backward(expert, saved, dy):
    return *backward_of_down(expert, saved, dy), None


multiply_down.defvjp(_multiply_down_forward, _multiply_down_backward)


def bias_of_rows(bias: jax.Array, dispatch: Dispatch) -> jax.Array:
    """The bias [E, ...] of each row's expert, [M, ...].

    It is a product with a matrix of ones and zeros. So the gradient is one, too, where the
    transpose of a lookup would add row after row.
    """
    ends = jnp.cumsum(dispatch.sizes)
    row = jnp.arange(len(dispatch.pairs))[:, None]
    is_in = (row < ends) & (row >= ends - dispatch.sizes)
    return jnp.tensordot(is_in.astype(bias.dtype), bias, 1)
