"""Muon for one parameter: momentum whose singular values are all pushed to about one.

The orthogonalisation is the quintic Newton-Schulz iteration of Jordan et al.
(https://kellerjordan.github.io/posts/muon/), batched over the axes that enumerate matrices
(`ParamSpec.matrix_view`): a stack of layers, the halves of a fused projection and experts are each
their own matrices, and the axes of one side of a matrix are flattened. Invariant: the update of a
matrix does not depend on how it is stacked or, given `gather` and `shard`, on how it is sharded.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from mjax.sharding.spec import ParamSpec

Resharder = Callable[[jax.Array, ParamSpec], jax.Array]
QUINTIC = (3.4445, -4.7750, 2.0315)


def newton_schulz(x_BIO: jax.Array, steps: int) -> jax.Array:
    """Push the singular values of each [I, O] matrix into about 0.7..1.2, in the dtype of `x`."""
    a, b, c = QUINTIC
    wide = x_BIO.shape[-2] <= x_BIO.shape[-1]
    x = x_BIO if wide else x_BIO.mT  # the Gram matrix is the smaller of the two
    norm = jnp.linalg.norm(x.astype(jnp.float32), axis=(-2, -1), keepdims=True)
    x = (x / (norm + 1e-7)).astype(x_BIO.dtype)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x if wide else x.mT


def scale(mode: str, fan_in: int, fan_out: int) -> float:
    """Factor on the orthogonal update.

    "original": sqrt(max(1, out / in)) (Jordan); "spectral": sqrt(max(in, out)) (Megatron-LM);
    "match_adamw": 0.2 times that, the RMS of a usual AdamW update (Moonlight, arXiv:2502.16982).
    """
    if mode == "original":
        return math.sqrt(max(1.0, fan_out / fan_in))
    return math.sqrt(max(fan_in, fan_out)) * (0.2 if mode == "match_adamw" else 1.0)


def muon_momentum(
    grad: jax.Array, mu: jax.Array, momentum: float, nesterov: bool
) -> tuple[jax.Array, jax.Array]:
    """(matrix to orthogonalise, new average of the gradient), in fp32."""
    grad, mu = grad.astype(jnp.float32), mu.astype(jnp.float32)
    mu = momentum * mu + (1 - momentum) * grad
    return (momentum * mu + (1 - momentum) * grad if nesterov else mu), mu


def muon_direction(
    m: jax.Array, spec: ParamSpec, steps: int, mode: str, gather: Resharder, shard: Resharder
) -> jax.Array:
    """What Muon subtracts per unit of learning rate, fp32 and shaped like `m`, a local shard.

    `gather` makes the shard whole along the input and output axes (batch axes may stay cut),
    `shard` cuts it again. Newton-Schulz runs in the dtype of `m`.
    """
    whole = gather(m, spec)
    batch, inputs, outputs = spec.matrix_view()
    order = (*batch, *inputs, *outputs)
    moved = whole.transpose(order)
    fan_in, fan_out = (math.prod(whole.shape[i] for i in side) for side in (inputs, outputs))
    x = newton_schulz(moved.reshape(-1, fan_in, fan_out), steps).reshape(moved.shape)
    back = tuple(order.index(i) for i in range(len(order)))
    return shard(x.transpose(back).astype(jnp.float32) * scale(mode, fan_in, fan_out), spec)
