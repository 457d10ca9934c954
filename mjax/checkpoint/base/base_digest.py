"""A digest of the weights that adapters belong to, the same on every mesh and for blocks of files.

Each element is mixed with its place in its parameter, and the results are summed modulo 2^32. So
the parts of a parameter can be summed in any order, on devices or on the host. It guards against
another base by mistake, not against forgery.
"""

import hashlib
from collections.abc import Mapping, Sequence
from types import ModuleType

import numpy as np

_MIX, _FINISH = 0x9E3779B1, 0x85EBCA6B  # odd numbers that spread bits


def mixed_sum(xp: ModuleType, bits, first: Sequence[int], shape: Sequence[int]):
    """The sum, uint32 [], of a block of a parameter of `shape`, whose first element is `first`.

    bits: the block as unsigned integers of the width of its dtype. xp: numpy or jax.numpy.
    """
    place, stride = xp.zeros(bits.shape, xp.uint32), 1
    for axis in reversed(range(len(shape))):
        along = xp.arange(bits.shape[axis], dtype=xp.uint32) + xp.uint32(first[axis])
        column = [-1 if i == axis else 1 for i in range(len(shape))]
        place = place + along.reshape(column) * xp.uint32(stride % 2**32)
        stride *= shape[axis]
    mixed = (bits.astype(xp.uint32) + place + xp.uint32(1)) * xp.uint32(_MIX)
    mixed = (mixed ^ (mixed >> xp.uint32(15))) * xp.uint32(_FINISH)
    return xp.sum(mixed ^ (mixed >> xp.uint32(13)), dtype=xp.uint32)


def digest_of(sums: Mapping[tuple[str, ...], int]) -> str:
    """The digest of a model from the sums of its parameters, by path."""
    lines = [f"{'.'.join(path)} {int(total) % 2**32}" for path, total in sorted(sums.items())]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def bits_dtype(itemsize: int) -> np.dtype:
    """The unsigned integers as wide as elements of that many bytes."""
    return np.dtype(f"uint{8 * itemsize}")
