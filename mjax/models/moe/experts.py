"""The experts of a mixture: from routed tokens to the weighted sum of what their experts make.

Pairs of a token and one of its experts are sorted by expert, so that each expert's rows lie
together, and grouped matmuls multiply each row by the weights of its expert. Pairs of an expert
number that no device holds, which are dropped, have no row. Over ep, and tp where it divides
experts (`Parallel.expert_axes`), every device gets the tokens of its group, works on the pairs of
the experts that it holds (`passes.py`), and scatters the sums back (`exchange.py`). `every_expert`
is the oracle: it runs all experts on all tokens. Invariant: the result depends on neither the mesh
nor the order of pairs.
"""

import functools
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from mjax.config.schema.model import ModelConfig
from mjax.kernels.base.chooser import choose
from mjax.kernels.fp8.blocks import Blocks
from mjax.models.base.adapter import InputDropout
from mjax.models.base.context import Context
from mjax.models.base.weight import Weight
from mjax.models.moe.capacity import expert_capacity
from mjax.models.moe.dispatch import Dispatch, make_dispatch, make_padded_dispatch, most_rows
from mjax.models.moe.exchange import (
    Route,
    gather_rounded,
    gather_tokens,
    group_size,
    has_gathered,
    route_of,
    scatter_sums,
    whole_tokens,
)
from mjax.models.moe.expert import Expert
from mjax.models.moe.expert_adapters import (
    add_adapter_up,
    multiply_down_adapted,
    multiply_one,
    numbers_of_rows,
    weights_one_by_one,
)
from mjax.models.moe.expert_matmuls import bias_of_rows, multiply_down, multiply_up
from mjax.models.moe.matmuls_fp8 import gated_experts8, in_one, multiply_down8, multiply_up8
from mjax.models.moe.passes import Operands, experts_in_passes, rows_of_pass
from mjax.models.moe.router import Routing
from mjax.sharding.collectives import Parallel


class ExpertWeights(NamedTuple):
    """This device's shards: up [E/ep, D, (2,) F/tp], down [E/ep, F/tp, D].

    up_bias [E/ep, (2,) F/tp] and down_bias [E/ep, D], or None. Folded, E/ep/tp are held, whole.
    """

    up: Weight
    down: Weight
    up_bias: jax.Array | None = None
    down_bias: jax.Array | None = None

    @property
    def have_adapters(self) -> bool:
        return self.up.adapter is not None or self.down.adapter is not None

    @property
    def dropouts(self) -> tuple[InputDropout | None, InputDropout | None]:
        """The dropout of what the adapters of `up` and of `down` read."""
        of_up, of_down = self.up.adapter, self.down.adapter
        return of_up and of_up.dropout, of_down and of_down.dropout

    @property
    def are_frozen(self) -> bool:
        """Whether they have adapters, or would if they were targets."""
        return self.have_adapters or self.up.is_coded or self.down.is_coded


class RoutedTokens(NamedTuple):
    """The tokens of a group: x [T, D], their experts int32 [T, k] and gates fp32 [T, k].

    x is None before they came. route: how they come, if not all of them do. blocks: the same
    numbers in 8 bits, where they came so. places: (row, column) of each token in the global batch,
    int32 [T, 2], where an adapter drops out.
    """

    x: jax.Array | None
    experts: jax.Array
    gates: jax.Array
    route: Route | None = None
    blocks: Blocks | None = None
    places: jax.Array | None = None


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
    if not (_has_capacity(cfg, ctx) or cfg.moe.skip_padding):
        return _run_experts(x, routing, weights, cfg, ctx)
    # Tokens without an expert reach neither products nor FP8's maxima, nor do their gradients.
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
        "asked": ctx.kernels.experts,
        "has_capacity": _has_capacity(cfg, ctx),
        "eight_bits": up.scales_tensors or weights.down.scales_tensors,
    }
    routed = routed_tokens(x, routing, cfg, ctx, *weights.dropouts)
    held = up.value.shape[0]
    shape = most_rows(routed.experts, held), held, x.shape[-1], up.value.shape[-1]
    kernel = choose("experts", x.dtype, shape, **facts).name
    if kernel == "loop" and (up.recipe or weights.down.recipe):
        kernel = "xla"  # the loop would round nothing
    expert = Expert(cfg.hidden_act, cfg.mlp_gated, cfg.swiglu_limit, kernel)
    sequences = x.shape[0] * parallel.ep
    first = parallel.index(parallel.expert_axes.over) * held
    dispatch = None
    if kernel != "loop":
        of_sequences = routed.experts.reshape(sequences, -1, routed.experts.shape[-1])
        dispatch = dispatch_of(of_sequences, first, held, cfg, ctx, kernel)
    in_one_function = not weights.have_adapters and up.recipe == weights.down.recipe
    in_one_function = in_one_function and not ctx.training.rounds_dispatch
    if in_one_function and in_one(expert, up, weights.up_bias is not None):
        both, route = (up, weights.down), routed.route
        rows = _rows_of_pass(expert, routed, dispatch, parallel)
        y = gated_experts8(parallel, expert, rows, x, routed.gates, both, dispatch, route)
        return ExpertSums(y, has_gathered(route))
    if ctx.training.rounds_dispatch:
        tokens, blocks = gather_rounded(parallel, x, routed.route)
        routed = routed._replace(x=tokens, blocks=blocks)
    else:
        routed = routed._replace(x=gather_tokens(parallel, x, routed.route))
    if dispatch is None:
        y = every_expert(expert, routed, weights, first)
    else:
        y = _sums_of_experts(expert, routed, weights, dispatch, parallel)
    if weights.down_bias is not None:
        gates = gates_of_held(routed, first, held)
        cuts = parallel.size(*parallel.expert_axes.within)
        y = y + (gates.astype(y.dtype) @ weights.down_bias) / cuts
    y = scatter_sums(parallel, y, x.shape[0], routed.route)
    return ExpertSums(y, has_gathered(routed.route))


def _has_capacity(cfg: ModelConfig, ctx: Context) -> bool:
    return ctx.training.capacity and cfg.moe.capacity_factor is not None


def _sums_of_experts(
    expert: Expert,
    routed: RoutedTokens,
    weights: ExpertWeights,
    dispatch: Dispatch,
    parallel: Parallel,
) -> jax.Array:
    """[T, D]: the sums over this device's experts and ffn columns, without the bias of `down`."""
    up, down, bias, _ = weights
    rows = _rows_of_pass(expert, routed, dispatch, parallel)
    is_plain = up.recipe is None and down.recipe is None and not weights.are_frozen
    if rows < len(dispatch.pairs) and is_plain:
        operands = Operands(routed.x, routed.gates, up, down, bias)
        return experts_in_passes(expert, rows, operands, dispatch)
    by_up, by_down = multiply_up, multiply_down
    if up.scales_tensors:
        by_up = functools.partial(multiply_up8, parallel)
    elif up.recipe is not None:
        by_up = functools.partial(multiply_up, blocks=routed.blocks)
    if down.scales_tensors:
        by_down = functools.partial(multiply_down8, parallel)
    h = by_up(expert, routed.x, replace(up, adapter=None), dispatch)
    h = add_adapter_up(h, expert, routed.x, up, dispatch, routed.places)
    h = checkpoint_name(h, up.name)
    if bias is not None:
        h = h + bias_of_rows(bias, dispatch)
    numbers = numbers_of_rows(routed.places, routed.experts, dispatch)
    return multiply_down_adapted(by_down, expert, h, routed.gates, down, dispatch, numbers)


def _rows_of_pass(
    expert: Expert, routed: RoutedTokens, dispatch: Dispatch, parallel: Parallel
) -> int:
    most = len(dispatch.pairs)
    if expert.kernel == "batched":  # its experts have places of their own
        return most
    return rows_of_pass(routed.experts.size, most, group_size(parallel))


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
    if not ctx.training.capacity:
        return make_dispatch(tokens, first, held)
    capacity = expert_capacity(cfg.moe, columns * ctx.parallel.cp)
    rows = sequences * min(capacity, columns)
    if kernel == "batched":
        return make_padded_dispatch(tokens, first, held, rows)
    return make_dispatch(tokens, first, held, held * rows)


def routed_tokens(
    x: jax.Array,
    routing: Routing,
    cfg: ModelConfig,
    ctx: Context,
    *dropouts: InputDropout | None,
) -> RoutedTokens:
    """The routing of the group's tokens, in the order of `whole_tokens`, from a device's own.

    x is [B, S/tp, D]. With one of `dropouts` tokens have places.
    """
    parallel = ctx.parallel
    columns, width = x.shape[1:]
    k = routing.experts.shape[-1]

    def of_group(field: jax.Array) -> jax.Array:
        """[B, S/tp, n] -> [G, B*S/tp, n]."""
        own = field.reshape(1, -1, field.shape[-1])
        return parallel.all_gather(own, parallel.expert_axes.over, 0)

    experts = of_group(routing.experts)
    tokens = x.reshape(-1, width)
    own_experts = routing.experts.reshape(-1, k)
    route = route_of(tokens, experts, own_experts, cfg.moe, ctx)
    gates = whole_tokens(parallel, of_group(routing.gates), columns)
    places = next((dropout.places_of(len(tokens)) for dropout in dropouts if dropout), None)
    if places is not None:
        places = whole_tokens(parallel, of_group(places), columns)
    experts = whole_tokens(parallel, experts, columns)
    return RoutedTokens(None, experts, gates, route, places=places)


def gates_of_held(routed: RoutedTokens, first: jax.Array | int, held: int) -> jax.Array:
    """The gates fp32 [T, held] of a device's experts, from `first` on; 0 where not chosen."""
    numbers = first + jnp.arange(held, dtype=jnp.int32)
    is_chosen = routed.experts[:, :, None] == numbers
    return jnp.sum(routed.gates[:, :, None], 1, where=is_chosen)


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
    x, places, held = routed.x, routed.places, weights.up.value.shape[0]
    gates, (of_up, of_down) = gates_of_held(routed, first, held), weights.dropouts

    @jax.checkpoint  # or every expert's activations of all tokens would be kept
    def add_expert(total: jax.Array, one: tuple) -> tuple[jax.Array, None]:
        up, down, gates, bias, number = one
        h = multiply_one(x, up, of_up, places)
        h = h if bias is None else h + bias
        rows = expert.weighted(h, gates)
        numbers = None if places is None else jnp.insert(places, 2, number, 1)
        y = multiply_one(rows, down, of_down, numbers, jnp.float32)
        return total + y, None

    zero = jnp.zeros(x.shape, jnp.float32)
    both = tuple(weights_one_by_one(w, x.dtype) for w in weights[:2])
    numbers = first + jnp.arange(held, dtype=jnp.int32)
    one_each = *both, gates.T, weights.up_bias, numbers
    total, _ = jax.lax.scan(add_expert, zero, one_each)
    return total.astype(x.dtype)
