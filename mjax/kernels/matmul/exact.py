"""A matmul with the products and sums of fp32, which for bf16 operands is as fast as one in bf16.

A product of two bf16 numbers has 16 significant bits, so fp32 holds it exactly. Tensor cores sum in
fp32. Invariant: outputs and gradients are those of a matmul in fp32 but for the order of sums.
"""

import jax
import jax.numpy as jnp


@jax.custom_vjp
def multiply_exactly(x: jax.Array, w: jax.Array) -> jax.Array:
    """x [B, S, D] times w [D, E] as fp32 [B, S, E], products and their sums in fp32.

    Tensor cores multiply bf16 exactly and sum in fp32. So they take bf16 operands as they are, and
    an fp32 cotangent as three parts in bf16.
    """
    return _einsum("bsd,de->bse", x, w)


def _multiply_exactly_forward(x: jax.Array, w: jax.Array) -> tuple[jax.Array, tuple]:
    return multiply_exactly(x, w), (x, w)


def _multiply_exactly_backward(saved: tuple, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, w = saved
    width, experts = w.shape
    parts, matrices = [dy], [w]
    if _is_bf16(x, w):
        parts, matrices = _bf16_parts(dy), [w, w, w]
    parts = jnp.concatenate(parts, -1)
    matrix = jnp.concatenate(matrices, -1)
    dx = _einsum("bse,de->bsd", parts, matrix)
    of_parts = _einsum("bsd,bse->de", x, parts)
    dw = of_parts.reshape(width, -1, experts).sum(1)
    return dx.astype(x.dtype), dw.astype(w.dtype)


multiply_exactly.defvjp(_multiply_exactly_forward, _multiply_exactly_backward)


def _is_bf16(*arrays: jax.Array) -> bool:
    return all(array.dtype == jnp.bfloat16 for array in arrays)


def _einsum(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """An einsum whose products and sums are those of fp32."""
    precision = None
    if not _is_bf16(a, b):
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        precision = jax.lax.Precision.HIGHEST
    return jnp.einsum(subscripts, a, b, precision=precision, preferred_element_type=jnp.float32)


def _bf16_parts(x: jax.Array) -> list[jax.Array]:
    """Three bf16 arrays that add up to fp32 x: each has 8 of its 24 bits."""
    parts = []
    for _ in range(3):
        part = jax.lax.reduce_precision(x, 8, 7)
        parts.append(part.astype(jnp.bfloat16))
        x = x - part
    return parts
