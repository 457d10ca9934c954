"""The two grouped matmuls of experts in FP8, each a function with its own backward, or both one.

With delayed scaling of gated experts without biases, the gate's kernels round what goes into the
second matmul and what comes out of its backward, in one pass (as `mlp_fp8.py`). So both are one
function there.

Tokens are rounded before their rows are gathered, and so are the gradients of tokens: each once,
and rows are gathered as bytes. In the one function tokens and gradients travel over ep and tp as
bytes, too: all devices know the scale, so rounding before is rounding after. One scale is that of
all experts: of a stack of weights, of rows and of gradients, by the recipes of dense weights
(`kernels/fp8/recipe.py`). Invariant: the result is that of rounding each operand of the matmuls
in `experts.py`.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from mjax.kernels.elementwise import gate
from mjax.kernels.elementwise.gate import E4M3, E5M2
from mjax.kernels.fp8.quantize import SCALES
from mjax.kernels.matmul.grouped import grouped_matmul8
from mjax.models.base.weight import Weight, backward_operand, kept_for_backward
from mjax.models.moe.dispatch import (
    Dispatch,
    gates_of_pairs,
    gates_of_rows,
    rows_of_tokens,
    sums_of_rows,
)
from mjax.models.moe.exchange import Route, gather_tokens, scatter_sums
from mjax.models.moe.expert import Expert
from mjax.models.moe.grouped_linear import weight_cotangent8
from mjax.models.moe.passes import joined_cotangent, later_passes, pass_of, with_sum
from mjax.sharding.collectives import Parallel


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def multiply_up8(
    parallel: Parallel, expert: Expert, x: jax.Array, up: Weight, dispatch: Dispatch
) -> jax.Array:
    """[M, (2,) F]: the rows of tokens x [T, D], each times its expert's `up` [E, D, (2,) F]."""
    return _up_forward(parallel, expert, x, up, dispatch)[0]


def _up_forward(parallel, expert, x, up, dispatch):
    x8, used = _round_tokens(parallel, x, up, 0)
    rows = rows_of_tokens(x8, dispatch)
    h = _by_weights(expert, rows, used, up, dispatch, x.dtype)
    kept = x8, used, kept_for_backward(up), dispatch
    return h.reshape(-1, *up.value.shape[2:]), kept


def _up_backward(parallel, expert, kept, dh):
    up = kept[2]
    scale = up.scales[2]
    flat = dh.reshape(len(dh), -1)
    d8, used_d = up.recipe.round_by(gate.to_fp8_both, flat, scale, E5M2, parallel)
    dx, d_up = _gradients_of_up(expert, kept, d8, used_d, dh.dtype)
    return dx, d_up, None


def _gradients_of_up(expert, kept, d8, used_d, dtype):
    """(the gradient of the tokens, the cotangent of the weights), from that of h in 8 bits."""
    x8, used, up, dispatch = kept
    d_rows = _by_transposes(expert, d8.plain, used_d, up, dispatch, dtype)
    dx = sums_of_rows(d_rows, dispatch)
    rows = rows_of_tokens(x8, dispatch)
    by_up = rows.T, used
    by_gradient = d8.transposed, used_d
    facts = dispatch.sizes, expert.kernel, dtype
    return dx, weight_cotangent8(up, by_up, by_gradient, *facts)


multiply_up8.defvjp(_up_forward, _up_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def multiply_down8(
    parallel: Parallel,
    expert: Expert,
    h: jax.Array,
    gates: jax.Array,
    down: Weight,
    dispatch: Dispatch,
) -> jax.Array:
    """[T, D]: each token's sum of gate * act(h) times its experts' `down` [E, F, D].

    h [M, (2,) F] are the rows that `multiply_up8` gives, gates fp32 [T, k].
    """
    return _down_forward(parallel, expert, h, gates, down, dispatch)[0]


def _down_forward(parallel, expert, h, gates, down, dispatch):
    rows = expert.weighted(h, gates_of_rows(gates, dispatch))
    a8, used = down.recipe.round_by(gate.to_fp8, rows, down.scales[0], E4M3, parallel)
    used = checkpoint_name(used, SCALES)
    y = _by_weights(expert, a8.plain, used, down, dispatch, h.dtype)
    kept = h, gates, used, kept_for_backward(down), dispatch
    return sums_of_rows(y, dispatch), kept


def _down_backward(parallel, expert, kept, dy):
    h, gates, used, down, dispatch = kept
    d8, used_d = _round_tokens(parallel, dy, down, 2)
    d8 = rows_of_tokens(d8, dispatch)
    d_rows = _by_transposes(expert, d8, used_d, down, dispatch, dy.dtype)
    of_rows = gates_of_rows(gates, dispatch)
    rows, vjp = jax.vjp(expert.weighted, h, of_rows)
    dh, d_gates = vjp(d_rows)
    d_gates = gates_of_pairs(d_gates, dispatch)
    a8 = gate.to_fp8_transposed(rows, used[0], E4M3)
    by_rows, by_gradient = (a8.transposed, used), (d8.T, used_d)
    facts = dispatch.sizes, expert.kernel, dy.dtype
    d_down = weight_cotangent8(down, by_rows, by_gradient, *facts)
    return dh, d_gates, d_down, None


multiply_down8.defvjp(_down_forward, _down_backward)


# ---- both in one ---------------------------------------------------------------------------------


def in_one(expert: Expert, up: Weight, has_biases: bool) -> bool:
    """Whether `gated_experts8` computes such experts."""
    plain = expert.gated and expert.limit is None and not has_biases and up.scales_tensors
    return plain and up.recipe.supports("gated experts") and expert.hidden_act in gate.GATES


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def gated_experts8(
    parallel: Parallel,
    expert: Expert,
    rows: int,
    x: jax.Array,
    gates: jax.Array,
    weights: tuple[Weight, Weight],
    dispatch: Dispatch,
    route: Route | None = None,
) -> jax.Array:
    """Applies `multiply_up8`, then `multiply_down8`, by weights up and down, `rows` rows a pass.

    x and the result are [B, S/tp, D], a device's own tokens. Passes round by one scale.
    """
    return _experts_forward(parallel, expert, rows, x, gates, weights, dispatch, route)[0]


class KeptByExperts(NamedTuple):
    """Arrays for the backward of `gated_experts8`; scales are pairs of a scale and a maximum.

    x8 e4m3 [T, D]: the group's tokens, rounded by used_x. h [M, 2, F]: the first pass's. used: of
    what the second matmul read.
    """

    x8: jax.Array
    used_x: jax.Array
    h: jax.Array
    gates: jax.Array
    used: jax.Array
    up: Weight
    down: Weight
    dispatch: Dispatch
    route: Route | None


class ExpertCotangents(NamedTuple):
    """Cotangents of the group's tokens [T, D], of their gates, and of both weights."""

    x: jax.Array
    gates: jax.Array
    up: Weight
    down: Weight


def _experts_forward(parallel, expert, rows, x, gates, weights, dispatch, route):
    up, down = weights
    x8, used_x = _gather_rounded(parallel, x, up, 0, route)

    def up_of(part: Dispatch) -> jax.Array:
        return _by_weights(expert, rows_of_tokens(x8, part), used_x, up, part, x.dtype)

    def add_pass(part: Dispatch, so_far: tuple[jax.Array, jax.Array]) -> tuple:
        before, top = so_far
        sums, amax = _sums_of_pass(expert, up_of(part), gates, down, part)
        return before + sums, jnp.maximum(top, amax)

    first = pass_of(dispatch, 0, rows)
    h = checkpoint_name(up_of(first), up.name)
    of_first = _sums_of_pass(expert, h, gates, down, first)
    sums, amax = later_passes(dispatch, rows, add_pass, of_first)
    used = jnp.stack([down.scales[0], amax])
    used = checkpoint_name(used, SCALES)
    kept = KeptByExperts(
        x8,
        used_x,
        h,
        gates,
        used,
        kept_for_backward(up),
        kept_for_backward(down),
        dispatch,
        route,
    )
    return scatter_sums(parallel, sums, len(x), route), kept


def _sums_of_pass(expert, h, gates, down, part):
    """([T, D], the sums over the rows of a pass; the maximum of what is rounded)."""
    scale = down.scales[0]
    of_rows = gates_of_rows(gates, part)
    a8 = gate.gate_to_fp8(h, scale, expert.hidden_act, of_rows)
    used = jnp.stack([scale, a8.amax])
    y = _by_weights(expert, a8.plain, used, down, part, h.dtype)
    return sums_of_rows(y, part), a8.amax


def _experts_backward(parallel, expert, rows, kept, dy):
    up, down, dispatch = kept.up, kept.down, kept.dispatch
    d8 = _gather_rounded(parallel, dy, down, 2, kept.route)

    def add_pass(part: Dispatch, so_far: ExpertCotangents) -> ExpertCotangents:
        tokens = rows_of_tokens(kept.x8, part)
        of_pass = kept._replace(
            h=_by_weights(expert, tokens, kept.used_x, up, part, dy.dtype),
            up=with_sum(up, so_far.up),
            down=with_sum(down, so_far.down),
        )
        more = _cotangents_by_pass(expert, of_pass, d8, part, dy.dtype)
        return ExpertCotangents(
            so_far.x + more.x,
            so_far.gates + more.gates,
            joined_cotangent(up, so_far.up, more.up),
            joined_cotangent(down, so_far.down, more.down),
        )

    first = pass_of(dispatch, 0, rows)
    if rows < len(dispatch.pairs):  # or XLA would keep what the forward made of it
        kept = kept._replace(h=lax.optimization_barrier(kept.h))
    of_first = _cotangents_by_pass(expert, kept, d8, first, dy.dtype)
    d = later_passes(dispatch, rows, add_pass, of_first)
    dx = scatter_sums(parallel, d.x, len(dy), kept.route)
    return dx, d.gates, (d.up, d.down), None, None


def _cotangents_by_pass(expert, kept, d8, part, dtype):
    """The `ExpertCotangents` of a pass whose h is kept, by the gradient of the group's tokens."""
    up, down, used = kept.up, kept.down, kept.used
    d8, used_d = d8
    d8 = rows_of_tokens(d8, part)
    d_rows = _by_transposes(expert, d8, used_d, down, part, dtype)
    of_rows = gates_of_rows(kept.gates, part)
    dh8, a8, d_gates = gate.gate_gradients_to_fp8(
        kept.h, d_rows, used[0], up.scales[2], expert.hidden_act, of_rows
    )
    used_dh = jnp.stack([up.scales[2], dh8.amax])
    kept_by_up = kept.x8, kept.used_x, up, part
    dx, d_up = _gradients_of_up(expert, kept_by_up, dh8, used_dh, dtype)
    by_rows, by_gradient = (a8.transposed, used), (d8.T, used_d)
    facts = part.sizes, expert.kernel, dtype
    d_down = weight_cotangent8(down, by_rows, by_gradient, *facts)
    return ExpertCotangents(dx, gates_of_pairs(d_gates, part), d_up, d_down)


gated_experts8.defvjp(_experts_forward, _experts_backward)


# ---- parts ---------------------------------------------------------------------------------------


def _round_tokens(
    parallel: Parallel, x: jax.Array, w: Weight, which: int
) -> tuple[jax.Array, jax.Array]:
    """(x [T, D] in 8 bits, fp32 [2] of its scale and maximum), by scale `which` of w's."""
    dtype = E5M2 if which == 2 else E4M3
    x8, used = w.recipe.round_by(gate.to_fp8, x, w.scales[which], dtype, parallel)
    return x8.plain, checkpoint_name(used, SCALES)


def _gather_rounded(
    parallel: Parallel, x: jax.Array, w: Weight, which: int, route: Route | None
) -> tuple[jax.Array, jax.Array]:
    """`_round_tokens` of all of the group, from this device's [B, S/tp, D]; bytes travel."""
    tokens = x.reshape(-1, x.shape[-1])
    x8, used = _round_tokens(parallel, tokens, w, which)
    bits = lax.bitcast_convert_type(x8, jnp.uint8)
    bits = bits.reshape(x.shape)
    bits = gather_tokens(parallel, bits, route)
    return lax.bitcast_convert_type(bits, x8.dtype), used


def _by_weights(expert, rows, used, w, dispatch, dtype):
    """rows [M, K] in e4m3 times the weights [E, K, N] -> [M, N]."""
    turned = w.transposed
    if turned is None:
        turned = jnp.swapaxes(_matrices8(w), 1, 2)
    else:
        turned = w.recipe.stored_weight(turned)
    scale, sizes = _without(used, w), dispatch.sizes
    return grouped_matmul8(rows, turned, sizes, scale, dtype, expert.kernel)


def _by_transposes(expert, d8, used, w, dispatch, dtype):
    """d8 [M, N] in e5m2 times the transposes of the weights [E, K, N] -> [M, K]."""
    scale, sizes = _without(used, w), dispatch.sizes
    matrices = _matrices8(w)
    return grouped_matmul8(d8, matrices, sizes, scale, dtype, expert.kernel, precise=True)


def _without(used: jax.Array, w: Weight) -> jax.Array:
    """Returns the factor that takes the scales of its operands out of a product."""
    scales = used[0] * w.scales[1]
    return 1 / scales


def _matrices8(w: Weight) -> jax.Array:
    """The weights of experts in e4m3, [E, K, N]."""
    w8 = backward_operand(w)
    return w8.reshape(*w8.shape[:2], -1)
