"""Products of MXFP8 and NVFP4 by `jax.nn.scaled_matmul`: in hardware on Blackwell, by cuDNN.

The call takes rows of codes and one scale for each block of a row: E4M3 or E5M2 under E8M0 for each
32, E2M1 under E4M3 for each 16. XLA fills sizes up to whole tiles and orders the scales as tensor
cores read them. Elsewhere it multiplies codes by scales first, so that CPUs test the operands.
Invariant: codes times scales are the numbers of the blocks, bit for bit, so the result is that of
`multiply_blocks` but for the order of sums in fp32.
"""

import jax
import jax.numpy as jnp
from jax import lax

from mjax.kernels.elementwise.gate import E4M3
from mjax.kernels.fp8.blocks import Blocks, divided_by_tensor_scales, spread


def codes_and_scales(x: Blocks) -> tuple[jax.Array, jax.Array]:
    """Codes [R, C] of a matrix and scales [R, C / side] for blocks of one row.

    C is filled up with zeros to whole blocks. NVFP4's are the blocks that have an `amax`.
    """
    rows, side = x.block
    codes = jnp.pad(x.values, ((0, 0), (0, -x.values.shape[1] % side)))
    scales = spread(x.factors, (rows, 1), (len(codes), x.factors.shape[1]))
    if x.amax is not None:
        return codes.astype(jnp.float4_e2m1fn), scales.astype(E4M3)
    # A power of two is its exponent: the byte of E8M0, for 2**-127 and NaN too.
    exponents = lax.bitcast_convert_type(scales, jnp.uint32) >> 23
    return codes, lax.bitcast_convert_type(exponents.astype(jnp.uint8), jnp.float8_e8m0fnu)


def multiply_scaled(a: Blocks, b: Blocks, dtype: jnp.dtype) -> jax.Array:
    """The product [M, N] in `dtype` of a [M, K] and the transpose of b [N, K], summed in fp32."""
    (left, of_left), (right, of_right) = codes_and_scales(a), codes_and_scales(b)
    batch = (x[None] for x in (left, right, of_left, of_right))
    made = dtype if a.amax is None else jnp.float32
    y = jax.nn.scaled_matmul(*batch, preferred_element_type=made)[0]
    return divided_by_tensor_scales(y, a, b).astype(dtype)
