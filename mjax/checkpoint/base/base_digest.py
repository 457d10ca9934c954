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
    word = xp.uint32
    place = _places(xp, bits.shape, first, shape)
    mixed = bits.astype(word) + place + word(1)
    mixed = mixed * word(_MIX)
    mixed = mixed ^ (mixed >> word(15))
    mixed = mixed * word(_FINISH)
    mixed = mixed ^ (mixed >> word(13))
    return xp.sum(mixed, dtype=word)


def _places(xp: ModuleType, block: Sequence[int], first: Sequence[int], shape: Sequence[int]):
    """The number of each element of a block in its parameter, row by row, modulo 2^32."""
    word, stride = xp.uint32, 1
    place = xp.zeros(block, word)
    for axis in reversed(range(len(shape))):
        column = [1] * len(shape)
        column[axis] = -1
        along = xp.arange(block[axis], dtype=word) + word(first[axis])
        along = along * word(stride % 2**32)
        place = place + along.reshape(column)
        stride *= shape[axis]
    return place


def digest_of(sums: Mapping[tuple[str, ...], int]) -> str:
    """The digest of a model from the sums of its parameters, by path."""
    lines = []
    for path, total in sorted(sums.items()):
        name = ".".join(path)
        lines.append(f"{name} {int(total) % 2**32}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def bits_dtype(itemsize: int) -> np.dtype:
    """The unsigned integers as wide as elements of that many bytes."""
    return np.dtype(f"uint{8 * itemsize}")
