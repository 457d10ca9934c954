"""Adapters that start as the largest part of their weights: PiSSA (arXiv 2404.02948).

Of W = U S V, the adapter takes the r largest singular values: a = U_r sqrt(S_r / scale) and
b = sqrt(S_r / scale) V_r. The base keeps W - scale a b. So the first product is that of W, but for
the rounding of the base.
"""

import jax
import jax.numpy as jnp


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
