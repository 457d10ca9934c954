"""Adapters that start as the largest part of their weights: PiSSA (arXiv 2404.02948).

For W = U S V, the adapter takes the r largest singular values: a = U_r sqrt(S_r / scale) and
b = sqrt(S_r / scale) V_r. The base keeps W - scale a b. So the first product is that of W, but for
the rounding of the base.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from mjax.sharding.spec import ParamSpec


def take_principal(
    stack: jax.Array, spec: ParamSpec, of_b: ParamSpec
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(what a canonical parameter keeps, a and b of its adapter), matrix by matrix; donates it.

    Each layer, expert and half of a pair is split by itself, whole on every device, so the numbers
    are the same on every mesh. `spec` declares the parameter, `of_b` the adapter's b.
    """
    lead = stack.shape[: spec.lead]
    paired = spec.output_axes[:1] == ("pair",)
    sizes = of_b.shape[spec.lead], of_b.scale, spec.inputs, paired
    of_a, of_b = [], []
    for index in np.ndindex(lead):
        at = jnp.int32(index)
        stack, a, b = _take_one(stack, at, stack.sharding, *sizes)
        of_a.append(a)
        of_b.append(b)
    a, b = jnp.stack(of_a), jnp.stack(of_b)
    return stack, a.reshape(*lead, *a.shape[1:]), b.reshape(*lead, *b.shape[1:])


@functools.partial(jax.jit, static_argnums=(2, 3, 4, 5, 6), donate_argnums=0)
def _take_one(
    stack: jax.Array,
    at: jax.Array,
    sharding: NamedSharding,
    rank: int,
    scale: float,
    inputs: int,
    paired: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(the stack without the principal part of one weight, a, b)."""
    everywhere = NamedSharding(sharding.mesh, PartitionSpec())

    def whole(x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, everywhere)

    at = tuple(at)
    weight = whole(stack[at])
    shape = weight.shape
    pair = shape[inputs : inputs + int(paired)]
    halves = weight.reshape(math.prod(shape[:inputs]), math.prod(pair), -1)
    split = functools.partial(split_principal, rank=rank, scale=scale)
    a, b, rest = jax.vmap(split, in_axes=1, out_axes=(1, 1, 1))(halves)
    stack = stack.at[at].set(whole(rest).reshape(shape))
    a = whole(a).reshape(*shape[:inputs], *pair, rank)
    b = whole(b).reshape(rank, *shape[inputs:])
    return jax.lax.with_sharding_constraint(stack, sharding), a, b


def split_principal(
    value: jax.Array, rank: int, scale: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A matrix [K, N] -> (a fp32 [K, r], b fp32 [r, N], the rest [K, N] in the dtype of `value`).

    Singular vectors are eigenvectors of the product of the matrix with its transpose, over its
    shorter side. Each has the sign that makes its largest entry positive.
    """
    w = value.astype(jnp.float32)
    if w.shape[0] > w.shape[1]:
        a, b, rest = split_principal(value.T, rank, scale)
        return b.T, a.T, rest.T
    with jax.default_matmul_precision("highest"):
        _, vectors = jnp.linalg.eigh(w @ w.T)
        u = vectors[:, ::-1][:, :rank]
        largest = jnp.argmax(jnp.abs(u), axis=0)
        u *= jnp.sign(u[largest, jnp.arange(rank)])
        v = u.T @ w
        singular = jnp.linalg.norm(v, axis=1)
        half = jnp.sqrt(singular / scale)
        a = u * half
        b = v / jnp.maximum(half * scale, jnp.finfo(jnp.float32).tiny)[:, None]
        rest = w - scale * (a @ b)
    return a, b, rest.astype(value.dtype)
