"""A low-rank adapter of one weight, and its product: LoRA (arXiv 2106.09685), DoRA (2402.09353).

With an adapter a product x W becomes x W + scale * (x a) b. Only a and b are trained. They are
split over tp as W is: b if W is split along its outputs, a if it is split along its inputs. The
other one is whole. So x a b is summed over devices together with x W, and an adapter adds no
exchange. Invariant: with b = 0 the product is that of W, bit for bit.
"""

import functools
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import register_dataclass

from mjax.kernels.matmul.adapter_slots import TokenSlots, add_products_by_slot
from mjax.sharding.collectives import LOCAL, Parallel

_EXACT = jax.lax.Precision.HIGHEST


def _without_leaves(default):
    return field(default=default, metadata={"static": True})


class TokenPlaces(NamedTuple):
    """The keys of draws of dropout: one of the layer, and rows [B] and columns [S] of the tokens in
    the global batch."""

    key: jax.Array
    rows: jax.Array
    columns: jax.Array


@register_dataclass
@dataclass(frozen=True)
class InputDropout:
    """Inverted dropout of what one adapter reads; a draw depends on the token's place alone.

    places: of the tokens, with a key of the adapter.
    rate: of what is dropped.
    parallel: the mesh, whose tp devices may hold parts of the tokens.
    cuts_inputs: whether they hold parts of the inputs.
    """

    places: TokenPlaces
    rate: float = _without_leaves(0.0)
    parallel: Parallel = _without_leaves(LOCAL)
    cuts_inputs: bool = _without_leaves(False)

    def at(self, rows: jax.Array, columns: jax.Array, parallel: Parallel) -> "InputDropout":
        """The same for tokens at other places, on the mesh that cuts them."""
        places = self.places._replace(rows=rows, columns=columns)
        return replace(self, places=places, parallel=parallel)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [M, K] of all tokens, or of those of this tp device."""
        return self.of_rows(x, self.places_of(len(x)))

    def places_of(self, tokens: int) -> jax.Array:
        """(row, column) of all tokens, or of the so many of this tp device: int32 [M, 2]."""
        _, rows, columns = self.places
        if tokens < len(rows) * len(columns):
            columns = self.parallel.shard(columns, "tp", 0)
        assert tokens == len(rows) * len(columns), "dropout of adapters: tokens of another stream"
        grid = jnp.meshgrid(rows, columns, indexing="ij")
        return jnp.stack(grid, -1).reshape(tokens, 2)

    def of_rows(self, x: jax.Array, numbers: jax.Array) -> jax.Array:
        """x [M, K], whose draws depend on the numbers int32 [M, n] of its rows."""
        inputs = x.shape[1]
        whole = inputs * self.parallel.tp if self.cuts_inputs else inputs

        def of_row(numbers: jax.Array) -> jax.Array:
            own = functools.reduce(jax.random.fold_in, numbers, self.places.key)
            return jax.random.bernoulli(own, 1 - self.rate, (whole,))

        stays = jax.vmap(of_row)(numbers)
        if self.cuts_inputs:
            stays = self.parallel.shard(stays, "tp", 1)
        return jnp.where(stays, x / (1 - self.rate), 0).astype(x.dtype)


@register_dataclass
@dataclass(frozen=True)
class Adapter:
    """The adapter of a weight [*inputs, *outputs], or several of which each token has one.

    a: [*inputs, r]; [*inputs, 2, r] of a weight with two halves, each of which has its own.
    b: [r, *outputs].
    magnitude: [1, *outputs], the trained lengths of DoRA, or None.
    dropout: of x, or None.
    scales: of several adapters, fp32 [slots]; a and b then have a leading axis of slots.
    slots: of the tokens, then.
    scale: of the product of one.
    halves: the axis of b that enumerates the halves, or None.
    split: the mesh whose tp devices hold parts of the inputs, or `LOCAL`.
    """

    a: jax.Array
    b: jax.Array
    magnitude: jax.Array | None = None
    dropout: InputDropout | None = None
    scales: jax.Array | None = None
    slots: TokenSlots | None = None
    scale: float = _without_leaves(1.0)
    halves: int | None = _without_leaves(None)
    split: Parallel = _without_leaves(LOCAL)

    def matrices(self, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
        """(a [K, R], b [R, *outputs]) with x a b the product before its scale.

        R is 2 r where there are halves. b is then zero where a row is of one half and an output of
        the other.
        """
        a = self.a.astype(dtype)
        b = self.b.astype(dtype)
        if self.halves is not None:
            b = _halves_apart(b, self.halves)
        rank = len(b)
        return a.reshape(-1, rank), b


def _halves_apart(b: jax.Array, axis: int) -> jax.Array:
    """b [r, .., 2, ..] -> [2 r, .., 2, ..]: first the rows of the first half, zero elsewhere."""
    rank, *outputs = b.shape
    count = b.shape[axis]
    sizes = [1] * b.ndim
    sizes[axis] = count
    is_own = jnp.eye(count, dtype=b.dtype)
    is_own = is_own.reshape(count, *sizes)
    apart = is_own * b
    return apart.reshape(count * rank, *outputs)


def add_product(y: jax.Array, x: jax.Array, value: jax.Array | None, adapter: Adapter) -> jax.Array:
    """y [M, *outputs] = x W with the product of the adapter; x is [M, K].

    `value` is W [K, N], which only DoRA reads.
    """
    outputs = y.shape[1:]
    if adapter.scales is not None:
        return _add_own_products(y, x, adapter)
    a, b = adapter.matrices(x.dtype)
    if adapter.dropout is not None:
        x = adapter.dropout(x)
    low = x @ a
    low = low * adapter.scale
    y = y + jnp.tensordot(low, b, 1)
    if adapter.magnitude is None:
        return y
    stretch = dora_factors(value, adapter)
    stretch = stretch.astype(y.dtype)
    return y * stretch.reshape(outputs)


def _add_own_products(y: jax.Array, x: jax.Array, several: Adapter) -> jax.Array:
    """`add_product` of several adapters."""
    assert several.slots is not None, "several adapters need the slot of each token"

    def matrices_of(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
        one = Adapter(a, b, halves=several.halves)
        return one.matrices(x.dtype)

    of_each = jax.vmap(matrices_of)
    a, b = of_each(several.a, several.b)
    count = len(x)
    slots = several.slots.of_tokens(count)
    return add_products_by_slot(y, x, a, b, several.scales, slots)


def adapted_value(value: jax.Array, adapter: Adapter) -> jax.Array:
    """The one weight [*inputs, *outputs] whose product is that of W and its adapter; fp32 sums."""
    a, b = adapter.matrices(jnp.float32)
    inputs, outputs = len(a), b.shape[1:]
    change = jnp.tensordot(a, b, 1, precision=_EXACT)
    change = adapter.scale * change
    whole = value.astype(jnp.float32)
    whole = whole + change.reshape(value.shape)
    if adapter.magnitude is not None:
        matrix = value.reshape(inputs, -1)
        stretch = dora_factors(matrix, adapter)
        whole = whole * stretch.reshape(outputs)
    return whole.astype(value.dtype)


def lengths(value: jax.Array, inputs: int) -> jax.Array:
    """The length of the weights of each output, fp32 [1, *outputs], of a whole [*inputs, ..]."""
    axes = tuple(range(inputs))
    value = value.astype(jnp.float32)
    squares = jnp.square(value)
    total = jnp.sum(squares, axes)
    return jnp.sqrt(total)[None]


def dora_factors(value: jax.Array, adapter: Adapter) -> jax.Array:
    """DoRA's factor of each output, fp32 [N]: its trained length over that of W + scale * a b.

    The length that divides takes no gradient. It is summed up by parts, for which no a b is made.
    """
    value, held = jax.lax.stop_gradient((value, adapter))
    value = value.astype(jnp.float32)
    a, b = held.matrices(jnp.float32)
    rank = len(b)
    b = adapter.scale * b
    b = b.reshape(rank, -1)
    to_base = _exact_dot(a.T, value)
    to_itself = _exact_dot(_exact_dot(a.T, a), b)
    added = 2 * to_base + to_itself
    squares = jnp.sum(jnp.square(value), 0)
    squares += jnp.sum(added * b, 0)
    squares = adapter.split.psum(squares, "tp")
    wanted = adapter.magnitude.reshape(-1)
    wanted = wanted.astype(jnp.float32)
    return wanted * jax.lax.rsqrt(squares)


def _exact_dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """The product of two fp32 matrices, not rounded to the GPU's shorter fp32."""
    return jnp.dot(a, b, precision=_EXACT)
