"""The experts of a mixture: from routed tokens to the weighted sum of what their experts make.

Pairs of a token and one of its experts are sorted by expert, so that each expert's rows lie
together, and grouped matmuls multiply each row by the weights of its expert. Pairs of an expert
number that no device holds, which are dropped, have no row.
Gates are multiplied in before the second matmul, so the backward does not need its output, and rows
are gathered again in the backward instead of being kept (SonicMoE, arXiv 2512.14080). Over ep every
device gets the tokens of its group, works on the pairs of the experts that it holds, and
scatters the sums back (Megatron-LM's allgather dispatcher). `every_expert` is the oracle: it runs
all experts on all tokens. Invariant: the result depends on neither the mesh nor the order of pairs.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from mjax.config.model_schema import ModelConfig
from mjax.kernels.chooser import choose
from mjax.kernels.grouped import grouped_matmul
from mjax.models.capacity import expert_capacity
from mjax.models.context import Context
from mjax.models.dispatch import (
    Dispatch,
    gates_of_pairs,
    gates_of_rows,
    make_dispatch,
    make_padded_dispatch,
    most_rows,
    rows_of_tokens,
    sums_of_rows,
)
from mjax.models.expert import Expert
from mjax.models.expert_exchange import Route, gather_tokens, has_gathered, route_of, scatter_sums
from mjax.models.experts_fp8 import gated_experts8, in_one, multiply_down8, multiply_up8
from mjax.models.grouped_linear import matrices_of, weight_cotangent
from mjax.models.router import Routing
from mjax.models.weight import Weight, read_value
from mjax.sharding.collectives import Parallel


class ExpertWeights(NamedTuple):
    """This device's shards: up [E/ep, D, (2,) F/tp], down [E/ep, F/tp, D].

    up_bias [E/ep, (2,) F/tp] and down_bias [E/ep, D], or None.
    """

    up: Weight
    down: Weight
    up_bias: jax.Array | None = None
    down_bias: jax.Array | None = None


class RoutedTokens(NamedTuple):
    """The tokens of an ep group: x [T, D], their experts int32 [T, k] and gates fp32 [T, k].

    x is None before they came. route: how they come, if not all of them do.
    """

    x: jax.Array | None
    experts: jax.Array
    gates: jax.Array
    route: Route | None = None


class ExpertSums(NamedTuple):
    """y [B, S/tp, D]: the sum of each token's experts, weighted by its gates.

    gathered: fp32 [], 1 where the tokens did not fit an all-to-all, else 0.
    """

    y: jax.Array
    gathered: jax.Array


def run_experts(
    x: jax.Array,
    routing: Routing,
    weights: ExpertWeights,
    cfg: ModelConfig,
    ctx: Context,
) -> ExpertSums:
    """Tokens x [B, S/tp, D] through their experts."""
    some_dropped = _has_capacity(cfg, ctx) or cfg.moe.skip_padding
    if weights.up.recipe is None or not some_dropped:
        return _run_experts(x, routing, weights, cfg, ctx)
    # FP8's maxima are those of tokens that have an expert, and of their gradients.
    is_sent = jnp.any(routing.experts < cfg.moe.num_experts, -1, keepdims=True)
    x = jnp.where(is_sent, x, 0)
    sums = _run_experts(x, routing, weights, cfg, ctx)
    return sums._replace(y=jnp.where(is_sent, sums.y, 0))


def _run_experts(
    x: jax.Array,
    routing: Routing,
    weights: ExpertWeights,
    cfg: ModelConfig,
    ctx: Context,
) -> ExpertSums:
    parallel, up = ctx.parallel, weights.up
    facts = {
        "asked": ctx.experts,
        "has_capacity": _has_capacity(cfg, ctx),
        "eight_bits": up.recipe is not None,
    }
    routed = routed_tokens(x, routing, cfg, ctx)
    held = len(up.value)
    shape = most_rows(routed.experts, held), held, x.shape[-1], up.value.shape[-1]
    kernel = choose("experts", x.dtype, shape, **facts).name
    expert = Expert(cfg.hidden_act, cfg.mlp_gated, cfg.swiglu_limit, kernel)
    sequences = x.shape[0] * parallel.ep
    first = parallel.index("ep") * held
    dispatch = None
    if kernel != "loop":
        of_sequences = routed.experts.reshape(sequences, -1, routed.experts.shape[-1])
        dispatch = dispatch_of(of_sequences, first, held, cfg, ctx, kernel)
    if up.recipe is not None and in_one(expert, up, weights.up_bias is not None):
        both, route = (up, weights.down), routed.route
        y = gated_experts8(parallel, expert, x, routed.gates, both, dispatch, route)
        return ExpertSums(y, has_gathered(route))
    routed = routed._replace(x=gather_tokens(parallel, x, routed.route))
    if dispatch is None:
        y = every_expert(expert, routed, weights, first)
    else:
        y = _sums_of_experts(expert, routed, weights, dispatch, parallel)
    if weights.down_bias is not None:
        gates = gates_of_held(routed, first, held)
        y = y + (gates.astype(y.dtype) @ weights.down_bias) / parallel.tp
    y = scatter_sums(parallel, y, x.shape[0], routed.route)
    return ExpertSums(y, has_gathered(routed.route))


def _has_capacity(cfg: ModelConfig, ctx: Context) -> bool:
    return ctx.capacity and cfg.moe.capacity_factor is not None


def _sums_of_experts(
    expert: Expert,
    routed: RoutedTokens,
    weights: ExpertWeights,
    dispatch: Dispatch,
    parallel: Parallel,
) -> jax.Array:
    """[T, D]: the sums over this device's experts and ffn columns, without the bias of `down`."""
    up, down, bias, _ = weights
    by_up, by_down = multiply_up, multiply_down
    if up.recipe is not None:
        by_up = functools.partial(multiply_up8, parallel)
        by_down = functools.partial(multiply_down8, parallel)
    h = by_up(expert, routed.x, up, dispatch)
    h = checkpoint_name(h, up.name)
    if bias is not None:
        h = h + bias_of_rows(bias, dispatch)
    return by_down(expert, h, routed.gates, down, dispatch)


def dispatch_of(
    experts: jax.Array,
    first: jax.Array | int,
    held: int,
    cfg: ModelConfig,
    ctx: Context,
    kernel: str,
) -> Dispatch:
    """The dispatch of experts int32 [B*ep, S, k] to those of this device, from `first` on.

    It has no more rows than the experts' capacity allows, if they have one.
    """
    sequences, columns, k = experts.shape
    tokens = experts.reshape(-1, k)
    if not ctx.capacity:
        return make_dispatch(tokens, first, held)
    capacity = expert_capacity(cfg.moe, columns * ctx.parallel.cp)
    rows = sequences * min(capacity, columns)
    if kernel == "batched":
        return make_padded_dispatch(tokens, first, held, rows)
    return make_dispatch(tokens, first, held, held * rows)


def routed_tokens(x: jax.Array, routing: Routing, cfg: ModelConfig, ctx: Context) -> RoutedTokens:
    """The routing of the ep group's tokens, in the order of [B*ep, S], from a device's own.

    x is [B, S/tp, D].
    """
    parallel = ctx.parallel
    columns, width = x.shape[1:]
    k = routing.experts.shape[-1]

    def whole(field: jax.Array) -> jax.Array:
        """[ep, B*S/tp, ...] -> [ep*B*S, ...]."""
        field = field.reshape(-1, columns, field.shape[-1])
        return parallel.gather_seq(field).reshape(-1, field.shape[-1])

    def of_group(field: jax.Array) -> jax.Array:
        return parallel.all_gather(field.reshape(1, -1, k), "ep", 0)

    experts, tokens = of_group(routing.experts), x.reshape(-1, width)
    route = route_of(tokens, experts, routing.experts.reshape(-1, k), cfg.moe, ctx)
    gates = whole(of_group(routing.gates))
    return RoutedTokens(None, whole(experts), gates, route)


# ---- biases --------------------------------------------------------------------------------------


def bias_of_rows(bias: jax.Array, dispatch: Dispatch) -> jax.Array:
    """The bias [E, ...] of each row's expert, [M, ...].

    It is a product with a matrix of ones and zeros. So the gradient is one, too, where the
    transpose of a lookup would add row after row.
    """
    ends = jnp.cumsum(dispatch.sizes)
    row = jnp.arange(len(dispatch.pairs))[:, None]
    is_in = (row < ends) & (row >= ends - dispatch.sizes)
    return jnp.tensordot(is_in.astype(bias.dtype), bias, 1)


def gates_of_held(routed: RoutedTokens, first: jax.Array | int, held: int) -> jax.Array:
    """The gates fp32 [T, held] of a device's experts, from `first` on; 0 where not chosen."""
    numbers = first + jnp.arange(held, dtype=jnp.int32)
    is_chosen = routed.experts[:, :, None] == numbers
    return jnp.sum(routed.gates[:, :, None], 1, where=is_chosen)


# ---- the two matmuls --------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def multiply_up(expert: Expert, x: jax.Array, up: Weight, dispatch: Dispatch) -> jax.Array:
    """[M, (2,) F]: the rows of tokens x [T, D], each times its expert's `up` [E, D, (2,) F]."""
    rows = rows_of_tokens(x, dispatch)
    h = grouped_matmul(rows, matrices_of(up), dispatch.sizes, expert.kernel)
    return h.reshape(-1, *up.value.shape[2:])


def _multiply_up_forward(expert, x, up, dispatch):
    h = multiply_up(expert, x, up, dispatch)
    return h, (x, up, dispatch)


def _multiply_up_backward(expert, saved, dh):
    x, up, dispatch = saved
    dh = dh.reshape(len(dh), -1)
    rows = rows_of_tokens(x, dispatch)
    sizes = dispatch.sizes
    d_up = weight_cotangent(up, rows, dh, sizes, expert.kernel)
    d_rows = grouped_matmul(dh, matrices_of(up), sizes, expert.kernel, transposed=True)
    dx = sums_of_rows(d_rows, dispatch)
    return dx, d_up, None


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
    rows = expert.weighted(h, of_rows)
    y = grouped_matmul(rows, matrices_of(down), dispatch.sizes, expert.kernel)
    return sums_of_rows(y, dispatch)


def _multiply_down_forward(expert, h, gates, down, dispatch):
    y = multiply_down(expert, h, gates, down, dispatch)
    return y, (h, gates, down, dispatch)


def _multiply_down_backward(expert, saved, dy):
    h, gates, down, dispatch = saved
    dy = rows_of_tokens(dy, dispatch)
    of_rows = gates_of_rows(gates, dispatch)
    rows, vjp = jax.vjp(expert.weighted, h, of_rows)
    sizes = dispatch.sizes
    d_down = weight_cotangent(down, rows, dy, sizes, expert.kernel)
    d_rows = grouped_matmul(dy, matrices_of(down), sizes, expert.kernel, transposed=True)
    dh, d_gates = vjp(d_rows)
    return dh, gates_of_pairs(d_gates, dispatch), d_down, None


multiply_down.defvjp(_multiply_down_forward, _multiply_down_backward)


# ---- oracle --------------------------------------------------------------------------------------


def every_expert(
    expert: Expert,
    routed: RoutedTokens,
    weights: ExpertWeights,
    first: jax.Array | int,
) -> jax.Array:
    """[T, D]: this device's experts, from `first` on, run on all tokens, one after the other.

    A token's gate is zero where the expert was not chosen. So this does E/k times the work needed.
    The bias of `down` is left out.
    """
    x, held = routed.x, len(weights.up.value)
    gates = gates_of_held(routed, first, held)

    @jax.checkpoint  # or every expert's activations of all tokens would be kept
    def add_expert(total: jax.Array, one: tuple) -> tuple[jax.Array, None]:
        up, down, gates, bias = one
        h = jnp.tensordot(x, up, 1)
        h = h if bias is None else h + bias
        rows = expert.weighted(h, gates)
        y = jnp.tensordot(rows, down, 1, preferred_element_type=jnp.float32)
        return total + y, None

    zero = jnp.zeros(x.shape, jnp.float32)
    matrices = read_value(weights.up), read_value(weights.down)
    one_each = *matrices, gates.T, weights.up_bias
    total, _ = jax.lax.scan(add_expert, zero, one_each)
    return total.astype(x.dtype)
