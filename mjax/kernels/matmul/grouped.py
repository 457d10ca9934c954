"""Grouped matmul: rows sorted by group, each times the matrix of its group, with both gradients.

`sizes` int32 [G] counts the rows of each group. Groups may be empty. Rows beyond sum(sizes) belong
to no group: products make them zero, and gradients of weights leave them out, if they are finite.
The plain-JAX versions are `jax.lax.ragged_dot_general`; XLA for GPUs multiplies all rows by all
groups there. `batched` is for groups of equal sizes: products of batches of matrices. Kernels for
Hopper GPUs are in `grouped_mosaic.py`, imported on use: it needs a jax that has Mosaic. Operands of
8 bits come with a scale, a power of two, for their product; elsewhere than on Hopper they are
multiplied in the dtype of the product, which holds them exactly. Invariant: a product is summed in
fp32 and rounded once, to the dtype of the rows, or the given one.
"""

import jax
import jax.numpy as jnp
from jax import lax

from mjax.errors import UserError
from mjax.kernels.base import chooser
from mjax.kernels.base.chooser import choose
from mjax.kernels.matmul.grouped_tiles import group_tile_of, tile8_of


def grouped_matmul(
    x: jax.Array,
    w: jax.Array,
    sizes: jax.Array,
    implementation: str = "auto",
    *,
    transposed: bool = False,
) -> jax.Array:
    """x [M, K], w [G, K, N], sizes int32 [G] -> [M, N], in x's dtype.

    `transposed`: by the transposes of w, x [M, N] -> [M, K], as the gradient of x is made.
    """
    if resolve_grouped(x, w.shape, implementation) == "mosaic":
        from mjax.kernels.matmul.grouped_mosaic import multiply_rows

        tile = group_tile_of(w.shape[1 if transposed else 2])
        return multiply_rows(x, w, sizes, tile, transposed)
    if implementation == "batched":
        return _equal_groups("gmn,gkn->gmk" if transposed else "gmk,gkn->gmn", x, w)
    return reference_rows(x, w, sizes, 2 if transposed else 1)


def grouped_weight_gradient(
    x: jax.Array,
    g: jax.Array,
    sizes: jax.Array,
    total: jax.Array | None = None,
    implementation: str = "auto",
) -> jax.Array:
    """The gradient [G, K, N] of w in `grouped_matmul`, from x [M, K] and g [M, N].

    With `total` fp32 [G, K, N] it returns the sum of both, in fp32, else the gradient in x's dtype.
    The kernel writes the sum where `total` lies, if nothing else reads it.
    """
    if resolve_grouped(x, (len(sizes), x.shape[1], g.shape[1]), implementation) == "mosaic":
        from mjax.kernels.matmul.grouped_mosaic import weight_gradient

        return weight_gradient(x, g, sizes, total, group_tile_of(g.shape[1]))
    if implementation == "batched":
        groups = len(sizes)
        product = jnp.einsum(
            "gmk,gmn->gkn",
            x.reshape(groups, -1, x.shape[1]),
            g.reshape(groups, -1, g.shape[1]),
            preferred_element_type=jnp.float32,
        )
        return product.astype(x.dtype) if total is None else total + product
    return reference_weight_gradient(x, g, sizes, total)


# ---- of 8 bits ---------------------------------------------------------------------------------


def grouped_matmul8(
    rows: jax.Array,
    w: jax.Array,
    sizes: jax.Array,
    scale: jax.Array,
    dtype: jnp.dtype,
    implementation: str = "auto",
    *,
    precise: bool = False,
) -> jax.Array:
    """rows [M, D], w [G, N, D] -> [M, N] in `dtype`, times `scale` fp32 []; both of 8 bits.

    `precise`: sums of Hopper's tensor cores, which keep 14 bits, are kept short.
    """
    if resolve_grouped(rows, w.shape, implementation) == "mosaic":
        from mjax.kernels.matmul.grouped_mosaic import multiply_rows

        tile = tile8_of(w.shape[1], precise)
        return multiply_rows(rows, w, sizes, tile, True, scale).astype(dtype)
    rows = rows.astype(dtype) * scale.astype(dtype)
    return grouped_matmul(rows, w.astype(dtype), sizes, implementation, transposed=True)


def grouped_weight_gradient8(
    x: jax.Array,
    g: jax.Array,
    sizes: jax.Array,
    scale: jax.Array,
    dtype: jnp.dtype,
    total: jax.Array | None = None,
    implementation: str = "auto",
) -> jax.Array:
    """`grouped_weight_gradient` of 8 bits: x [K, M] and g [N, M], their product times `scale`.

    Without `total` the gradient is in `dtype`.
    """
    if resolve_grouped(x.T, (len(sizes), len(x), len(g)), implementation) == "mosaic":
        from mjax.kernels.matmul.grouped_mosaic import weight_gradient

        tile = tile8_of(len(g), precise=True)
        made = weight_gradient(x, g, sizes, total, tile, scale)
        return made if total is not None else made.astype(dtype)
    x = x.T.astype(dtype) * scale.astype(dtype)
    return grouped_weight_gradient(x, g.T.astype(dtype), sizes, total, implementation)


def resolve_grouped(rows: jax.Array, weight: tuple[int, ...], implementation: str) -> str:
    """The implementation for rows [M, ...] and a weight [G, K, N].

    Raises `UserError` where one that was asked for cannot compute it.
    """
    shape = (len(rows), *weight)
    choice = choose("grouped_matmul", rows.dtype, shape, implementation=implementation)
    if choice.name == "mosaic":
        lacks = chooser.mosaic_grouped_lacks(rows.dtype, shape, chooser.this_device())
        if lacks:
            raise UserError(f"train.experts=mosaic: {lacks}; set train.experts=auto")
    return choice.name


def _equal_groups(products: str, rows: jax.Array, w: jax.Array) -> jax.Array:
    """Rows [M, ..] of groups of equal sizes times w [G, ..] of their group, in the rows' dtype."""
    groups = rows.reshape(len(w), -1, rows.shape[1])
    y = jnp.einsum(products, groups, w, preferred_element_type=jnp.float32)
    return y.reshape(len(rows), -1).astype(rows.dtype)


# ---- in plain JAX ------------------------------------------------------------------------------


def reference_rows(rows: jax.Array, w: jax.Array, sizes: jax.Array, contracted: int) -> jax.Array:
    """`grouped_matmul` in plain JAX: over axis 1 of w, or 2 if transposed."""
    numbers = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (contracted,)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[0],
    )
    y = lax.ragged_dot_general(rows, w, sizes, numbers, preferred_element_type=jnp.float32)
    grouped = jnp.arange(len(rows)) < jnp.sum(sizes)
    return jnp.where(grouped[:, None], y, 0).astype(rows.dtype)


def reference_weight_gradient(
    x: jax.Array, g: jax.Array, sizes: jax.Array, total: jax.Array | None
) -> jax.Array:
    """`grouped_weight_gradient` in plain JAX."""
    numbers = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((0,), (0,)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[],
    )
    product = lax.ragged_dot_general(x, g, sizes, numbers, preferred_element_type=jnp.float32)
    return product.astype(x.dtype) if total is None else total + product
