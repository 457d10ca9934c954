"""NVFP4's parts: E2M1 numbers in blocks of 16, with E4M3 scales under one fp32 scale of the tensor.

A tensor's largest magnitude A gives the scale S = 448 * 6 / A. A block's scale is the E4M3 number
nearest to its own largest magnitude times S / 6, and numbers are E2M1 under both. Products are
summed under the blocks' scales and divided by both S at the end. Before weight gradients a random
Hadamard transform along tokens spreads outliers over 16 of them; it cancels in the product.
Gradients are rounded at random. Invariant: the random bits are a pure function of the step, the
matmul, and the places of token and output in the global batch and weight, so every mesh rounds
alike. Source: Transformer Engine 2.20 (its NVFP4 reference in Python), arXiv 2509.25149.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mjax.errors import UserError
from mjax.kernels.base.mixer import mix
from mjax.kernels.fp8.blocks import FORMATS, Blocks, block_maxima, round_to_format, spread
from mjax.sharding.collectives import Parallel

SIDE_OF_16 = 16
_SIGNS = np.array([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1], np.float32)


class GradientPlaces(NamedTuple):
    """The places of a gradient's elements, which key its rounding.

    key: uint32 [], of the step and the matmul. tokens: uint32 [B, S], a number for each token of
    the global batch. outputs: uint32 [1, *outputs], their numbers in the whole weight.
    """

    key: jax.Array
    tokens: jax.Array
    outputs: jax.Array


def round_four_bits(
    x: jax.Array, block: tuple[int, int], amax: jax.Array, noise: jax.Array | None = None
) -> Blocks:
    """x [R, C] in NVFP4; `amax` fp32 [] is the largest magnitude of the tensor it is of."""
    to, of_scales = FORMATS["e2m1"], FORMATS["e4m3"]
    most = jnp.finfo(jnp.float32).max
    whole = jnp.minimum(jnp.float32(to.top * of_scales.top) / amax, most)
    whole = jnp.where((amax == 0) | (whole == 0), 1, whole)
    maxima = block_maxima(x, block)
    factors = round_to_format(maxima * (whole * jnp.float32(1 / to.top)), of_scales)
    scales = jnp.minimum(1 / (factors * (1 / whole)), most)
    scaled = x.astype(jnp.float32) * spread(scales, block, x.shape)
    values = round_to_format(scaled, to, noise).astype(to.dtype)
    return Blocks(values, factors, amax, block, x.dtype)


def hadamard_matrix() -> np.ndarray:
    """The orthogonal matrix [16, 16] that mixes 16 tokens: signs, then Sylvester's over 4."""
    two = np.array([[1, 1], [1, -1]], np.float32)
    sylvester = functools.reduce(np.kron, [two] * 4)
    return _SIGNS[:, None] * sylvester / 4


def mix_tokens(x: jax.Array) -> jax.Array:
    """x [C, M] with each 16 of the M tokens mixed, in x's dtype; M is filled up with zeros."""
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % SIDE_OF_16)))
    groups = x.reshape(len(x), -1, SIDE_OF_16)
    matrix = jnp.asarray(hadamard_matrix(), x.dtype)
    mixed = jnp.einsum(
        "cgi,ij->cgj", groups, matrix, precision="highest", preferred_element_type=jnp.float32
    )
    return mixed.astype(x.dtype).reshape(x.shape)


def tokens_of_gradient(places: GradientPlaces, rows: int, parallel: Parallel) -> jax.Array:
    """The numbers uint32 [M] of a gradient's M tokens: all, or those of this tp device."""
    tokens = places.tokens
    if rows < tokens.size:
        tokens = parallel.shard(tokens, "tp", 1)
    if rows != tokens.size:
        raise UserError(
            "precision.fp8=nvfp4 rounds gradients by the places of tokens, and a layer has a "
            "weight that multiplies tokens of another stream; give it another recipe with "
            "precision.fp8_rules"
        )
    return tokens.reshape(-1)


def noise_of(places: GradientPlaces, tokens: jax.Array, copy: int) -> jax.Array:
    """Uniform numbers in [0, 1) of 24 bits, fp32 [M, N], for a `copy` of a gradient.

    `tokens` uint32 [M] are the numbers of its rows.
    """
    key = mix(places.key + jnp.uint32(copy))
    rows = mix(tokens + key)
    columns = mix(places.outputs.reshape(-1) ^ mix(key ^ jnp.uint32(0x9E3779B9)))
    bits = mix(rows[:, None] + columns)
    return (bits >> 8).astype(jnp.float32) * 2.0**-24
