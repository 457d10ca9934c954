"""The exchange of tokens: `send_tokens` to the devices of their experts, and the sums back.

A group is the G devices over which experts lie: those of ep, and with `mesh.expert_tp=1` of ep and
tp (`Parallel.expert_axes`). Tokens travel as sequence parallelism cuts them. `all_gather` sends
every token to every device of the group. `all_to_all` sends a token once to each device that holds
one of its experts, in a fixed number of rows for each pair of devices. If any device of the group
needs more rows, all of them gather instead, in that exchange: `lax.cond` on a flag that is summed
over the group. So no token is lost. Both leave tokens in equal places, so what follows knows of
neither. Tokens travel in the dtype of the computation, or in 8 bits: by one scale
(`matmuls_fp8.py`), or by blocks (`gather_rounded`, as DeepSeek-V3's dispatch, arXiv 2412.19437,
3.3). Sums travel in the former. Invariant: each exchange is the transpose of the other, and the
result is that of `all_gather`; tokens are rounded alike on every mesh, also where none travels.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mjax.config.schema.model import MoeConfig
from mjax.kernels.base.chooser import Choice
from mjax.kernels.elementwise.gate import E4M3
from mjax.kernels.fp8.block_recipes import Block128
from mjax.kernels.fp8.blocks import Blocks, scales_of_bytes
from mjax.models.base.context import Context
from mjax.sharding.collectives import Parallel

ROOM = 1.5  # times the rows that balanced routing needs
LEAST_SAVED = 32 * 2**20  # bytes for which an all-to-all is worth its packing and its condition
ROWS_TOGETHER = 8
DISPATCHED = Block128()  # how tokens are rounded that travel in blocks


class Route(NamedTuple):
    """Places of a device's T tokens in an all-to-all over a group of G devices, in P rows each.

    sent int32 [G, P]: the token in each row to a device; T where there is none.
    rows int32 [T, G]: the row of each token to a device; P where it does not go there.
    tokens int32 [G, P], received int32 [G, T]: the same of the rows that come from each device.
    fits: bool [], equal in the group: all rows suffice.
    """

    sent: jax.Array
    rows: jax.Array
    tokens: jax.Array
    received: jax.Array
    fits: jax.Array


def group_size(parallel: Parallel) -> int:
    """The devices over which the experts of a layer lie."""
    return parallel.size(*parallel.expert_axes.over)


def rows_per_peer(tokens: int, group: int, moe: MoeConfig) -> int:
    """The rows of an all-to-all from one device of `tokens` tokens to another of its group.

    Balanced routing sends a token to a device with the chance that one of its k experts is there.
    """
    elsewhere = (1 - 1 / group) ** moe.num_experts_per_tok
    share = min(1 - elsewhere, moe.topk_group / moe.n_group if moe.n_group > 1 else 1.0)
    rows = math.ceil(tokens * share * ROOM)
    rows = -(-rows // ROWS_TOGETHER) * ROWS_TOGETHER
    return min(rows, tokens)


def bytes_of_token(width: int, dtype: jnp.dtype | str, rounds_dispatch: bool) -> float:
    """The bytes of a token [width] in an exchange, the mean of the four of a step.

    Two are in the forward and two in the backward; the first may send `bytes_of_tokens`.
    """
    plain = width * jnp.dtype(dtype).itemsize
    first = width + width / DISPATCHED.side if rounds_dispatch else plain
    return (first + 3 * plain) / 4


def choose_expert_exchange(
    asked: str,
    tokens: int,
    width: float,
    group: int,
    moe: MoeConfig,
) -> Choice:
    """`all_gather` or `all_to_all` for `tokens` of `width` bytes on each of a group's devices."""
    if asked != "auto":
        return Choice(asked, "train.expert_exchange asks for it")
    rows = rows_per_peer(tokens, group, moe)
    saved = (group - 1) * (tokens - rows) * width
    what = f"an all-to-all sends {rows:,} rows to a device instead of {tokens:,}"
    if 2 * rows > tokens or saved < LEAST_SAVED:
        return Choice("all_gather", f"{what}: too little is saved")
    return Choice("all_to_all", what)


def make_route(
    experts: jax.Array,
    mine: jax.Array,
    rows: int,
    held: int,
    parallel: Parallel,
) -> Route:
    """The route of tokens whose experts are `mine` int32 [T, k].

    `experts` int32 [G, T, k] are those of the whole group; each device holds `held` experts.
    """
    over = parallel.expert_axes.over
    peers = jnp.arange(parallel.size(*over), dtype=jnp.int32)
    goes = jnp.any(mine[:, :, None] // held == peers, 1)
    comes = jnp.any(experts // held == parallel.index(over), 2)
    places = _numbered(goes, 0)
    needed = goes.sum(0).max()
    overflows = (needed > rows).astype(jnp.int32)
    fits = parallel.psum(overflows, *over) == 0
    received = jnp.where(comes, _numbered(comes, 1), rows)
    places = jnp.where(goes, places, rows)
    return Route(
        sent=_first_rows(goes.T, rows),
        rows=places,
        tokens=_first_rows(comes, rows),
        received=received,
        fits=fits,
    )


def _numbered(mask: jax.Array, axis: int) -> jax.Array:
    """How many are True before each, int32."""
    return jnp.cumsum(mask, axis, dtype=jnp.int32) - 1


def _first_rows(mask: jax.Array, rows: int) -> jax.Array:
    """The places of the first `rows` True of each line of [G, T]; T where there are fewer."""
    tokens = mask.shape[1]
    place = jnp.where(mask, jnp.arange(tokens, dtype=jnp.int32), tokens)
    return jnp.sort(place, axis=1)[:, :rows]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def send_tokens(parallel: Parallel, x: jax.Array, route: Route | None) -> jax.Array:
    """[G, T, D]: the tokens of each device of the group, from this device's x [T, D].

    Without a route it has all tokens, else those that have an expert here, and zeros.
    """

    if route is None:
        return _gather_all(parallel, x, None)
    exchange = functools.partial(_exchange_rows, parallel)
    gather = functools.partial(_gather_all, parallel)
    return lax.cond(route.fits, exchange, gather, x, route)


def _gather_all(parallel: Parallel, x: jax.Array, _: Route | None) -> jax.Array:
    return parallel.all_gather(x[None], parallel.expert_axes.over, 0)


def _exchange_rows(parallel: Parallel, x: jax.Array, route: Route) -> jax.Array:
    sent = _rows_at(x, route.sent)
    rows = parallel.all_to_all(sent, parallel.expert_axes.over, 0, 0)
    return jax.vmap(_rows_at)(rows, route.received)


def _rows_at(x: jax.Array, places: jax.Array) -> jax.Array:
    """The rows of x at these places; zeros for places behind the last row."""
    return jnp.take(x, places, axis=0, mode="fill", fill_value=0)


def _send_forward(parallel, x, route):
    return send_tokens(parallel, x, route), route


def _send_backward(parallel, route, d):
    return sum_tokens(parallel, d, route), None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def sum_tokens(parallel: Parallel, y: jax.Array, route: Route | None) -> jax.Array:
    """[T, D]: the sums over the group, from this device's part y [G, T, D] of each."""

    if route is None:
        return _scatter_all(parallel, y, None)
    exchange = functools.partial(_sum_rows, parallel)
    scatter = functools.partial(_scatter_all, parallel)
    return lax.cond(route.fits, exchange, scatter, y, route)


def _scatter_all(parallel: Parallel, y: jax.Array, _: Route | None) -> jax.Array:
    return parallel.reduce_scatter(y, parallel.expert_axes.over, 0)[0]


def _sum_rows(parallel: Parallel, y: jax.Array, route: Route) -> jax.Array:
    parts = jax.vmap(_rows_at)(y, route.tokens)
    rows = parallel.all_to_all(parts, parallel.expert_axes.over, 0, 0)
    rows_of_tokens = jax.vmap(_rows_at, out_axes=1)
    parts_of_tokens = rows_of_tokens(rows, route.rows.T)
    sums = jnp.sum(parts_of_tokens, 1, dtype=jnp.float32)
    return sums.astype(y.dtype)


def _sum_forward(parallel, y, route):
    return sum_tokens(parallel, y, route), route


def _sum_backward(parallel, route, d):
    return send_tokens(parallel, d, route), None


send_tokens.defvjp(_send_forward, _send_backward)
sum_tokens.defvjp(_sum_forward, _sum_backward)


def has_gathered(route: Route | None) -> jax.Array:
    """1 where the tokens of a route were gathered, for lack of rows, else 0: fp32 []."""
    if route is None:
        return jnp.float32(0)
    return 1 - route.fits.astype(jnp.float32)


def gather_tokens(parallel: Parallel, x: jax.Array, route: Route | None) -> jax.Array:
    """[T, D]: the tokens of the group, in `whole_tokens`' order, from this device's [B, S/tp, D].

    After an all-to-all, tokens without an expert here are zero.
    """
    _, columns, width = x.shape
    sent = send_tokens(parallel, x.reshape(-1, width), route)
    return whole_tokens(parallel, sent, columns)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def gather_rounded(
    parallel: Parallel, x: jax.Array, route: Route | None
) -> tuple[jax.Array, Blocks]:
    """`gather_tokens` of x rounded by `DISPATCHED`: (their numbers in x's dtype, the blocks).

    The bytes of `bytes_of_tokens` travel. The gradient is that of `gather_tokens`, straight through
    the rounding, and travels in its own dtype.
    """
    rows, columns, width = x.shape
    tokens = DISPATCHED.round_rows(x.reshape(-1, width))
    bits = bytes_of_tokens(tokens)
    bits = bits.reshape(rows, columns, -1)
    sent = gather_tokens(parallel, bits, route)
    blocks = tokens_of_bytes(sent, width, x.dtype)
    return blocks.numbers(), blocks


def _gather_rounded_forward(parallel, x, route):
    of_rows = x[:, :0, 0]  # tells how many there are
    return gather_rounded(parallel, x, route), (route, of_rows)


def _gather_rounded_backward(parallel, kept, d):
    route, of_rows = kept
    return scatter_sums(parallel, d[0], len(of_rows), route), None


gather_rounded.defvjp(_gather_rounded_forward, _gather_rounded_backward)


def bytes_of_tokens(tokens: Blocks) -> jax.Array:
    """uint8 [T, D + D / 128]: the values of tokens, then the exponents of their factors."""
    values = lax.bitcast_convert_type(tokens.values, jnp.uint8)
    exponents = lax.bitcast_convert_type(tokens.factors, jnp.uint32) >> 23
    exponents = exponents.astype(jnp.uint8)
    return jnp.concatenate([values, exponents], 1)


def tokens_of_bytes(bits: jax.Array, width: int, dtype: jnp.dtype) -> Blocks:
    """The tokens [T, width] of `bytes_of_tokens`, numbers of `dtype`; zeros are zeros."""
    values, exponents = bits[:, :width], bits[:, width:]
    _, factors = scales_of_bytes(exponents.astype(jnp.int32))
    return Blocks(
        lax.bitcast_convert_type(values, E4M3),
        factors,
        block=(1, DISPATCHED.side),
        wide=jnp.dtype(dtype),
    )


def whole_tokens(parallel: Parallel, sent: jax.Array, columns: int) -> jax.Array:
    """[G, B*S/tp, W] of a group -> [T, W]: with tokens of all devices that cut its experts.

    In the order of [G*B, S], or of [G*B, S/tp] where none does. `columns` is S/tp.
    """
    width = sent.shape[-1]
    if parallel.expert_axes.within:
        sent = parallel.gather_seq(sent.reshape(-1, columns, width))
    return sent.reshape(-1, width)


def scatter_sums(parallel: Parallel, y: jax.Array, rows: int, route: Route | None) -> jax.Array:
    """The transpose of `gather_tokens`: [B, S/tp, D], sums over all devices of the group.

    `y` [T, D] are the sums over this device's experts and ffn columns. `rows` is B.
    """
    width = y.shape[-1]
    group = group_size(parallel)
    if parallel.expert_axes.within:
        y = y.reshape(rows * group, -1, width)
        y = parallel.scatter_seq(y)
    y = y.reshape(group, -1, width)
    y = sum_tokens(parallel, y, route)
    return y.reshape(rows, -1, width)


def route_of(
    x: jax.Array,
    experts: jax.Array,
    mine: jax.Array,
    moe: MoeConfig,
    ctx: Context,
) -> Route | None:
    """The route of x [T, D] (`make_route`), or None where tokens are gathered."""
    group, (tokens, width) = group_size(ctx.parallel), x.shape
    if group == 1:
        return None
    size = bytes_of_token(width, x.dtype, ctx.training.rounds_dispatch)
    asked = ctx.kernels.expert_exchange
    if choose_expert_exchange(asked, tokens, size, group, moe).name == "all_gather":
        return None
    held = moe.num_experts // group
    return make_route(experts, mine, rows_per_peer(tokens, group, moe), held, ctx.parallel)
