"""Experts of a group in passes: each takes a bounded number of rows, so memory is bounded, too.

A device may get all pairs of its group of G devices, but about 1 / G of them come. Room for all
would be G times what is used, in what a layer keeps and in every pass over its rows. So there is
room for `ROOM` times the balanced rows. A device that meets more takes another pass, and one more,
until it has done all; no other device waits for anything but the sums. Only the first pass keeps
its rows for the backward; later ones make theirs again. Invariant: the result is that of one pass
with room for all, whatever the routing; sums over passes are rounded once more a pass.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from mjax.models.base.weight import Weight
from mjax.models.moe.dispatch import Dispatch
from mjax.models.moe.exchange import ROOM
from mjax.models.moe.expert import Expert
from mjax.models.moe.expert_matmuls import (
    backward_of_down,
    backward_of_up,
    bias_of_rows,
    multiply_down,
    multiply_up,
)

PassState = TypeVar("PassState")
ROWS_ALIGNED = 128  # of which kernels of 8 bits want a multiple


class Operands(NamedTuple):
    """Inputs of experts: tokens x [T, D], gates fp32 [T, k], this device's weights.

    up [E/ep, D, (2,) F/tp], down [E/ep, F/tp, D], bias [E/ep, (2,) F/tp] of up, or None.
    """

    x: jax.Array
    gates: jax.Array
    up: Weight
    down: Weight
    bias: jax.Array | None


def rows_of_pass(pairs: int, most: int, group: int) -> int:
    """The rows of a pass, of `pairs` of a group of devices; `most` can come to each.

    They are `most` where fewer would not save half of it.
    """
    together = math.gcd(most, ROWS_ALIGNED)
    rows = math.ceil(pairs / group * ROOM / together) * together
    return rows if 2 * rows <= most else most


def pass_of(dispatch: Dispatch, number: jax.Array | int, rows: int) -> Dispatch:
    """The rows `number` * rows, .. of a dispatch, as one of `rows` rows."""
    if rows == len(dispatch.pairs):
        return dispatch
    start = number * rows
    pairs = jnp.pad(dispatch.pairs, (0, -len(dispatch.pairs) % rows))
    ends = jnp.cumsum(dispatch.sizes)
    first, last = (jnp.clip(x - start, 0, rows) for x in (ends - dispatch.sizes, ends))
    places = dispatch.places - start
    is_here = (places >= 0) & (places < rows) & (dispatch.places < ends[-1])
    return Dispatch(
        lax.dynamic_slice_in_dim(pairs, start, rows),
        jnp.where(is_here, places, rows),
        last - first,
    )


def later_passes(
    dispatch: Dispatch,
    rows: int,
    add_pass: Callable[[Dispatch, PassState], PassState],
    so_far: PassState,
) -> PassState:
    """Sums all passes: `add_pass` adds each but the first to `so_far`, the first's result."""
    if rows == len(dispatch.pairs):
        return so_far
    passes = -(-dispatch.sizes.sum() // rows)

    def add(number: jax.Array, so_far: PassState) -> PassState:
        return add_pass(pass_of(dispatch, number, rows), so_far)

    return lax.fori_loop(1, passes, add, so_far)


def with_sum(w: Weight, d: Weight) -> Weight:
    """A weight whose running sum, if it has one, is that of its cotangent by earlier passes."""
    return w if w.grad_sum is None else replace(w, grad_sum=d.grad_sum)


def joined_cotangent(w: Weight, d: Weight, more: Weight) -> Weight:
    """The cotangent of w by earlier passes and one more, whose matmul added to the running sum."""
    both = jax.tree.map(jnp.add, d, more) if w.grad_sum is None else more
    return both if w.scales is None else replace(both, scales=jnp.maximum(d.scales, more.scales))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def experts_in_passes(
    expert: Expert, rows: int, operands: Operands, dispatch: Dispatch
) -> jax.Array:
    """[T, D]: each token's sum over this device's experts, in passes of `rows` rows.

    The first one's output of `up` is named as that weight.
    """
    return _forward(expert, rows, operands, dispatch)[0]


def _forward(expert, rows, operands, dispatch):
    first = pass_of(dispatch, 0, rows)
    h = checkpoint_name(multiply_up(expert, operands.x, operands.up, first), operands.up.name)

    def add_pass(part: Dispatch, y: jax.Array) -> jax.Array:
        h = multiply_up(expert, operands.x, operands.up, part)
        return y + _sums(expert, operands, h, part)

    y = later_passes(dispatch, rows, add_pass, _sums(expert, operands, h, first))
    return y, (operands, dispatch, h)


def _backward(expert, rows, kept, dy):
    operands, dispatch, h = kept
    h = lax.optimization_barrier(h)  # or XLA would keep what the forward made of it
    _, _, up, down, _ = operands

    def add_pass(part: Dispatch, d: Operands) -> Operands:
        h = multiply_up(expert, operands.x, up, part)
        so_far = operands._replace(
            up=with_sum(up, d.up),
            down=with_sum(down, d.down),
        )
        more = _pass_gradients(expert, so_far, h, part, dy)
        both = jax.tree.map(jnp.add, d, more)
        return both._replace(
            up=joined_cotangent(up, d.up, more.up),
            down=joined_cotangent(down, d.down, more.down),
        )

    d = _pass_gradients(expert, operands, h, pass_of(dispatch, 0, rows), dy)
    return later_passes(dispatch, rows, add_pass, d), None


experts_in_passes.defvjp(_forward, _backward)


def _sums(expert: Expert, operands: Operands, h: jax.Array, part: Dispatch) -> jax.Array:
    if operands.bias is not None:
        h = h + bias_of_rows(operands.bias, part)
    return multiply_down(expert, h, operands.gates, operands.down, part)


def _pass_gradients(
    expert: Expert, operands: Operands, h: jax.Array, part: Dispatch, dy: jax.Array
) -> Operands:
    """The cotangents of the operands by one pass, of the sums' dy [T, D]."""
    x, gates, up, down, bias = operands
    d_bias = None
    if bias is not None:
        more, transposed = jax.vjp(lambda bias: bias_of_rows(bias, part), bias)
        h = h + more
    dh, d_gates, d_down = backward_of_down(expert, (h, gates, down, part), dy)
    if bias is not None:
        (d_bias,) = transposed(dh)
    dx, d_up = backward_of_up(expert, (x, up, part), dh)
    return Operands(dx, d_gates, d_up, d_down, d_bias)
