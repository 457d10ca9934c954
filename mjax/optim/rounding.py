"""Stochastic rounding of fp32 to bf16: up or down, each as likely as the value is near.

The mean of many roundings is the value itself, so steps below half a bf16 step add up instead of
vanishing (Gupta et al., arXiv:1502.02551). Invariant: the random bits are a pure function of (seed,
step, parameter, which of its tensors, element of the whole parameter), so every mesh and ZeRO stage
rounds alike. They are a few integer operations an element that fuse into the update's kernel; no
random array exists. The mixer is C. Wellons' lowbias32 (https://nullprogram.com/blog/2018/07/31/).
"""

import math
import zlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp

Name = tuple[str, ...]  # of a parameter in the nested dict
Places = tuple[jax.Array, ...]  # where a shard lies in the whole, see `places`


def places(coordinates: Sequence[jax.Array], shape: Sequence[int]) -> Places:
    """A uint32 vector for each dimension, from the index of every local entry along it in the whole
    parameter, of that `shape`: entry (i, j, k) is element `at[1][j] + at[2][k]` of row `at[0][i]`.
    """
    steps = [1, *(math.prod(shape[dim + 1 :]) for dim in range(1, len(shape)))]
    # wraps in rows of 2**32 elements, which then share bits with others far away: harmless
    return tuple(
        c.astype(jnp.uint32) * jnp.uint32(step & 0xFFFFFFFF)
        for c, step in zip(coordinates, steps, strict=True)
    )


def mix(x: jax.Array) -> jax.Array:
    """A bijection of uint32 in which every bit of the argument moves every bit of the result."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def random_bits(seed: int, step: jax.Array, name: Name, tensor: str, at: Places) -> jax.Array:
    """Uniform uint32 bits for every entry of a shard of the `tensor` of a parameter."""
    key = step.astype(jnp.uint32)
    for word in (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF, zlib.crc32("/".join(name).encode())):
        key = mix(key) + jnp.uint32(word)
    first, second = mix(key), mix(key ^ jnp.uint32(0x9E3779B9))
    rows, *within = (x.reshape(-1, *[1] * (len(at) - dim - 1)) for dim, x in enumerate(at))
    element = mix(sum(within, first)) + mix(rows + second)  # shared by a parameter's tensors
    return mix(element ^ jnp.uint32(zlib.crc32(tensor.encode())))


def round_to_bf16(x: jax.Array, bits: jax.Array) -> jax.Array:
    """fp32 -> bf16: up in magnitude with the probability of the cut-off part; what bf16 can
    express, infinities and NaN stay as they are."""
    raw = jax.lax.bitcast_convert_type(x, jnp.uint32)
    rounded = ((raw + (bits >> 16)) >> 16).astype(jnp.uint16)
    rounded = jax.lax.bitcast_convert_type(rounded, jnp.bfloat16)
    return jnp.where(jnp.isfinite(x), rounded, x.astype(jnp.bfloat16))
