"""Muon for one parameter: momentum whose singular values are all pushed to about one.

The orthogonalization is the quintic Newton-Schulz iteration of Jordan et al.
(https://kellerjordan.github.io/posts/muon/), batched over the axes that enumerate matrices
(`ParamSpec.matrix_view`). The layers of a stack, the projections that share a tensor (a `pair` axis
or `ParamSpec.parts`) and experts are each their own matrices; the axes of one side of a matrix are
flattened. Invariant: the update of a matrix does not depend on how it is stacked, on what shares
its tensor or, given `gather` and `shard`, on how it is sharded.
"""

import itertools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from mjax.sharding.spec import ParamSpec

# (shard or matrix, its declaration) -> matrix or shard
Resharder = Callable[[jax.Array, ParamSpec], jax.Array]
QUINTIC = (3.4445, -4.7750, 2.0315)


def newton_schulz(x_BIO: jax.Array, steps: int) -> jax.Array:
    """[B, I, O] in x's dtype: the singular values of each matrix pushed into about 0.7..1.2."""
    a, b, c = QUINTIC
    wide = x_BIO.shape[-2] <= x_BIO.shape[-1]
    x = x_BIO if wide else x_BIO.mT  # the Gram matrix is the smaller of the two
    precise = x.astype(jnp.float32)
    norm = jnp.linalg.norm(precise, axis=(-2, -1), keepdims=True)
    x = x / (norm + 1e-7)
    x = x.astype(x_BIO.dtype)
    for _ in range(steps):
        gram = x @ x.mT
        polynomial = b * gram + c * (gram @ gram)
        x = a * x + polynomial @ x
    return x if wide else x.mT


def update_scale(mode: str, fan_in: int, fan_out: int) -> float:
    """The factor on an orthogonal update.

    "original": sqrt(max(1, out / in)) (Jordan); "spectral": sqrt(max(in, out)) (Megatron-LM);
    "match_adamw": 0.2 times that, the RMS of a usual AdamW update (Moonlight, arXiv:2502.16982).
    """
    if mode == "original":
        return math.sqrt(max(1.0, fan_out / fan_in))
    spectral = math.sqrt(max(fan_in, fan_out))
    if mode == "spectral":
        return spectral
    return 0.2 * spectral


def muon_momentum(
    grad: jax.Array, mu: jax.Array, momentum: float, nesterov: bool
) -> tuple[jax.Array, jax.Array]:
    """(the matrix to orthogonalize, the new average of the gradient), fp32."""
    grad = grad.astype(jnp.float32)
    mu = mu.astype(jnp.float32)
    mu = momentum * mu + (1 - momentum) * grad
    if not nesterov:
        return mu, mu
    return momentum * mu + (1 - momentum) * grad, mu


def muon_direction(
    m: jax.Array, spec: ParamSpec, steps: int, mode: str, gather: Resharder, shard: Resharder
) -> jax.Array:
    """The step of Muon per unit of learning rate, fp32, shaped like `m`, a local shard.

    `gather` makes matrices complete (the axes that enumerate them may stay split), `shard` splits
    them again. Newton-Schulz runs in the dtype of `m`.
    """
    matrices = gather(m, spec)
    starts = list(itertools.accumulate(spec.parts[:-1]))
    parts = []
    for part in jnp.split(matrices, starts, -1):
        parts.append(_orthogonal(part, spec, steps, mode))
    return shard(jnp.concatenate(parts, -1), spec)


def _orthogonal(matrices: jax.Array, spec: ParamSpec, steps: int, mode: str) -> jax.Array:
    """The step for the matrices of one projection, fp32."""
    batch, inputs, outputs = spec.matrix_view()
    order = (*batch, *inputs, *outputs)
    moved = matrices.transpose(order)
    fan_in = math.prod(matrices.shape[axis] for axis in inputs)
    fan_out = math.prod(matrices.shape[axis] for axis in outputs)
    x = moved.reshape(-1, fan_in, fan_out)
    x = newton_schulz(x, steps)
    x = x.reshape(moved.shape)
    inverse_order = tuple(order.index(axis) for axis in range(len(order)))
    x = x.transpose(inverse_order).astype(jnp.float32)
    return x * update_scale(mode, fan_in, fan_out)
