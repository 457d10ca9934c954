"""Stochastic rounding of fp32 to bf16: up or down, each as likely as the value is near.

The mean of many roundings is the value itself, so steps below half a bf16 step add up instead of
vanishing (Gupta et al., arXiv:1502.02551). Invariant: the random bits are a pure function of (seed,
step, parameter, which of its tensors, element of the global parameter), so every mesh and ZeRO
stage rounds alike. They take a few integer operations an element, which fuse into the update's
kernel; no random array exists.
"""

import math
import zlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from mjax.kernels.base.mixer import mix

Name = tuple[str, ...]  # of a parameter in the nested dict
Offsets = tuple[jax.Array, ...]  # see `element_offsets`


def element_offsets(indices: Sequence[jax.Array], shape: Sequence[int]) -> Offsets:
    """A uint32 vector for each dimension, from which the number of an element follows.

    `indices` are, for each dimension, the global index of every local entry along it; `shape` is
    that of the global parameter. Entry (i, j, k) is element `offsets[1][j] + offsets[2][k]` of row
    `offsets[0][i]`.
    """
    offsets = []
    for dim, index in enumerate(indices):
        stride = math.prod(shape[dim + 1 :]) if dim > 0 else 1
        # It wraps in rows of 2**32 elements, which then share bits with others far away: harmless.
        stride = jnp.uint32(stride & 0xFFFFFFFF)
        offsets.append(index.astype(jnp.uint32) * stride)
    return tuple(offsets)


def random_bits(seed: int, step: jax.Array, name: Name, tensor: str, offsets: Offsets) -> jax.Array:
    """Uniform uint32 bits for every entry of a shard of the `tensor` of a parameter."""
    key = step.astype(jnp.uint32)
    low, high = seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF
    name_hash = zlib.crc32("/".join(name).encode())
    for word in (low, high, name_hash):
        key = mix(key) + jnp.uint32(word)
    column_key = mix(key)
    row_key = mix(key ^ jnp.uint32(0x9E3779B9))
    along_dims = []
    for dim, offset in enumerate(offsets):
        ones = [1] * (len(offsets) - dim - 1)
        along_dims.append(offset.reshape(-1, *ones))
    rows, *columns = along_dims
    element = mix(sum(columns, column_key)) + mix(rows + row_key)  # same for all its tensors
    tensor_hash = zlib.crc32(tensor.encode())
    return mix(element ^ jnp.uint32(tensor_hash))


def round_to_bf16(x: jax.Array, bits: jax.Array) -> jax.Array:
    """bf16 of fp32 x, rounded up in magnitude with the probability of the part that is cut off.

    Values that bf16 can express, infinities and NaN stay as they are. `bits` are uint32 like x.
    """
    raw = jax.lax.bitcast_convert_type(x, jnp.uint32)
    raised = raw + (bits >> 16)
    rounded = (raised >> 16).astype(jnp.uint16)
    rounded = jax.lax.bitcast_convert_type(rounded, jnp.bfloat16)
    return jnp.where(jnp.isfinite(x), rounded, x.astype(jnp.bfloat16))
