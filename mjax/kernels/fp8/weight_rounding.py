"""Weights rounded to 4 bits in groups of inputs, in plain JAX: as servers have them.

`mxfp4` has E2M1 numbers under powers of two, rounded up so that nothing saturates. `int4_group128`
has the integers -7 to 7 under bfloat16 scales, rounded up likewise. `mjax quantize` stores these
numbers, and training can read them in the place of its weights.
"""

import jax
import jax.numpy as jnp
from jax import lax

from mjax.kernels.fp8.blocks import FORMATS, block_maxima, round_blocks, rounded_up, spread

SIDES_OF_GROUPS = {"mxfp4": 32, "int4_group128": 128}
_TOP_INTEGER = 7  # of 4 bits; -8 is not used


def round_integer_groups(w: jax.Array, side: int) -> tuple[jax.Array, jax.Array]:
    """(integers in fp32 [N, K], bfloat16 scales [N, K / side]) of fp32 w [N, K]."""
    wanted = block_maxima(w, (1, side)) * jnp.float32(1 / _TOP_INTEGER)
    wanted = jnp.maximum(wanted, jnp.finfo(jnp.float32).tiny)
    nearest = wanted.astype(jnp.bfloat16)
    is_less = nearest.astype(jnp.float32) < wanted
    bits = lax.bitcast_convert_type(nearest, jnp.uint16) + is_less.astype(jnp.uint16)
    scales = lax.bitcast_convert_type(bits, jnp.bfloat16)
    wide = spread(scales.astype(jnp.float32), (1, side), w.shape)
    return jnp.clip(jnp.round(w / wide), -_TOP_INTEGER, _TOP_INTEGER), scales


def rounded_in_groups(w: jax.Array, scheme: str) -> jax.Array:
    """The fp32 numbers of w [N, K] in a scheme of `SIDES_OF_GROUPS`; groups lie along K."""
    side = SIDES_OF_GROUPS[scheme]
    if scheme == "mxfp4":
        return round_blocks(w, (1, side), rounded_up, FORMATS["e2m1"]).numbers()
    values, scales = round_integer_groups(w, side)
    return values * spread(scales.astype(jnp.float32), (1, side), w.shape)
