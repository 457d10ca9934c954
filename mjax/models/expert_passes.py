"""Experts over ep in passes: each takes a bounded number of rows, so memory is bounded, too.

A device of ep may get all pairs of its group, but about 1 / ep of them come. Room for all of them
would be ep times what is used, in what a layer keeps and in every pass over its rows. So there is
room for `ROOM` times the balanced rows. A device that meets more takes another pass, and one more,
until it has done all; no other device waits for anything but the sums. Only the first pass keeps
its rows for the backward; later ones make theirs again. Invariant: the result is that of one pass
with room for all, whatever the routing.
"""

import functools
import math
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from mjax.models.dispatch import Dispatch
from mjax.models.expert import Expert
from mjax.models.expert_exchange import ROOM, ROWS_TOGETHER
from mjax.models.expert_matmuls import (
    backward_of_down,
    backward_of_up,
    bias_of_rows,
    multiply_down,
    multiply_up,
)
from mjax.models.weight import Weight


class Operands(NamedTuple):
    """What experts read: tokens x [T, D], gates fp32 [T, k], this device's weights.

    up [E/ep, D, (2,) F/tp], down [E/ep, F/tp, D], bias [E/ep, (2,) F/tp] of up, or None.
    """

    x: jax.Array
    gates: jax.Array
    up: Weight
    down: Weight
    bias: jax.Array | None


def rows_of_pass(pairs: int, most: int, ep: int) -> int:
    """The rows of a pass, of `pairs` of the ep group; `most` can come to a device.

    They are `most` where fewer would not save half of it.
    """
    rows = math.ceil(pairs / ep * ROOM)
    rows = -(-rows // ROWS_TOGETHER) * ROWS_TOGETHER
    return rows if 2 * rows <= most else most


def pass_of(dispatch: Dispatch, number: jax.Array | int, rows: int) -> Dispatch:
    """The rows `number` * rows, .. of a dispatch, as one of `rows` rows."""
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

    def add_pass(number: jax.Array, y: jax.Array) -> jax.Array:
        part = pass_of(dispatch, number, rows)
        h = multiply_up(expert, operands.x, operands.up, part)
        return y + _sums(expert, operands, h, part)

    y = _sums(expert, operands, h, first)
    y = lax.fori_loop(1, _count_passes(dispatch, rows), add_pass, y)
    return y, (operands, dispatch, h)


def _backward(expert, rows, kept, dy):
    operands, dispatch, h = kept
    h = lax.optimization_barrier(h)  # or XLA would keep what the forward made of it
    d = _pass_gradients(expert, operands, h, pass_of(dispatch, 0, rows), dy)

    def add_pass(number: jax.Array, d: Operands) -> Operands:
        part = pass_of(dispatch, number, rows)
        h = multiply_up(expert, operands.x, operands.up, part)
        so_far = operands._replace(
            up=_with_sum(operands.up, d.up), down=_with_sum(operands.down, d.down)
        )
        of_pass = _pass_gradients(expert, so_far, h, part, dy)
        both = jax.tree.map(jnp.add, d, of_pass)
        # A running sum has been added to by its matmul.
        up = of_pass.up if operands.up.grad_sum is not None else both.up
        down = of_pass.down if operands.down.grad_sum is not None else both.down
        return both._replace(up=up, down=down)

    d = lax.fori_loop(1, _count_passes(dispatch, rows), add_pass, d)
    return d, None


experts_in_passes.defvjp(_forward, _backward)


def _count_passes(dispatch: Dispatch, rows: int) -> jax.Array:
    return -(-dispatch.sizes.sum() // rows)


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


def _with_sum(w: Weight, d: Weight) -> Weight:
    """A weight whose running sum, if it has one, is that of its cotangent."""
    return w if w.grad_sum is None else replace(w, grad_sum=d.grad_sum)
