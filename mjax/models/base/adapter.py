"""A low-rank adapter of one weight, and its product: LoRA (arXiv 2106.09685), DoRA (2402.09353).

With an adapter a product x W becomes x W + scale * (x a) b. Only a and b are trained. Where tp
splits the outputs of W, it splits those of b, and a is whole; where it splits the inputs of W, it
splits those of a, and b is whole. So x a b is summed over devices where x W is, and an adapter adds
no exchange. Invariant: with b = 0 the product is that of W, bit for bit.
"""

import functools
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax.tree_util import register_dataclass

from mjax.sharding.collectives import LOCAL, Parallel


def _static(default):
    return field(default=default, metadata={"static": True})


@register_dataclass
@dataclass(frozen=True)
class Adapter:
    """The adapter of a weight [*inputs, *outputs].

    a: [*inputs, r]; [*inputs, 2, r] of a weight with two halves, each of which has its own.
    b: [r, *outputs].
    magnitude: [1, *outputs], the trained lengths of DoRA, or None.
    scale: of the product.
    halves: the axis of b that enumerates the halves, or None.
    split: the mesh whose tp devices hold parts of the inputs, or `LOCAL`.
    """

    a: jax.Array
    b: jax.Array
    magnitude: jax.Array | None = None
    scale: float = _static(1.0)
    halves: int | None = _static(None)
    split: Parallel = _static(LOCAL)


def add_product(y: jax.Array, x: jax.Array, value: jax.Array | None, adapter: Adapter) -> jax.Array:
    """y [M, *outputs] = x W with the product of the adapter; x is [M, K].

    `value` is W [K, N], which only DoRA reads.
    """
    a, b = adapter_matrices(adapter, x.dtype)
    low = (x @ a) * adapter.scale
    y = y + jnp.tensordot(low, b, 1)
    if adapter.magnitude is not None:
        y = y * _stretch(value, adapter).reshape(y.shape[1:]).astype(y.dtype)
    return y


def adapted_value(value: jax.Array, adapter: Adapter) -> jax.Array:
    """The one weight [*inputs, *outputs] whose product is that of W and its adapter; fp32 sums."""
    a, b = adapter_matrices(adapter, jnp.float32)
    change = (a * adapter.scale) @ b.reshape(len(b), -1)
    whole = value.astype(jnp.float32) + change.reshape(value.shape)
    if adapter.magnitude is not None:
        matrix = value.reshape(change.shape)
        whole = whole * _stretch(matrix, adapter).reshape(adapter.b.shape[1:])
    return whole.astype(value.dtype)


def lengths(value: jax.Array, inputs: int) -> jax.Array:
    """The length of the weights of each output, fp32 [1, *outputs], of a whole [*inputs, ..]."""
    axes = tuple(range(inputs))
    squares = jnp.sum(jnp.square(value.astype(jnp.float32)), axes)
    return jnp.sqrt(squares)[None]


def adapter_matrices(adapter: Adapter, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """(a [K, R], b [R, *outputs]) with x a b their product; R is 2 r where there are halves.

    b is then zero where a row is of one half and an output of the other.
    """
    a, b = adapter.a.astype(dtype), adapter.b.astype(dtype)
    rank, outputs = len(b), b.shape[1:]
    if adapter.halves is not None:
        count = b.shape[adapter.halves]
        of_half = [count if axis == adapter.halves else 1 for axis in range(b.ndim)]
        own = jnp.eye(count, dtype=dtype).reshape(count, *of_half)
        b = (b[None] * own).reshape(count * rank, *outputs)
    return a.reshape(-1, len(b)), b


def _stretch(value: jax.Array, adapter: Adapter) -> jax.Array:
    """DoRA's factor of each output, fp32 [N]: its trained length over that of W + scale * a b.

    The length that divides takes no gradient. It is summed up by parts, for which no a b is made.
    """
    value, fixed = jax.lax.stop_gradient((value, adapter))
    a, b = adapter_matrices(fixed, jnp.float32)
    b = b.reshape(len(b), -1) * adapter.scale
    exact = functools.partial(jnp.matmul, precision="highest")
    of_base = jnp.sum(jnp.square(value.astype(jnp.float32)), 0)
    crossed = jnp.sum(exact(a.T, value.astype(jnp.float32)) * b, 0)
    of_adapter = jnp.sum(exact(exact(a.T, a), b) * b, 0)
    squares = adapter.split.psum(of_base + 2 * crossed + of_adapter, "tp")
    return adapter.magnitude.astype(jnp.float32).reshape(-1) * jax.lax.rsqrt(squares)
