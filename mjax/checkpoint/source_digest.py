"""The digest of weights as a `Source` gives them, block by block (`base/base_digest.py`).

It is that which a run with adapters records of its base, whatever the base's format.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from mjax.checkpoint.base.base_digest import bits_dtype, digest_of, mixed_sum
from mjax.checkpoint.base.source import Index, Source, block_shape, blocks, run_all
from mjax.checkpoint.base.source import Path as Leaf
from mjax.sharding.spec import ParamSpec

_IN_CACHE = 2**16  # numbers that are mixed at a time: five times as fast as blocks of a source


def digest_of_source(source: Source, specs: Mapping[Leaf, ParamSpec]) -> str:
    """The digest of the parameters that `specs` declare, by path."""
    return digest_of(sums_of_source(source, specs))


def sums_of_source(source: Source, specs: Mapping[Leaf, ParamSpec]) -> dict[Leaf, int]:
    """The sum of each parameter.

    One that is `held` counts as rounded to that dtype, others as they are stored.
    """
    tasks, paths = [], []
    for path, spec in specs.items():
        for index in blocks(spec.shape, block_shape(spec.shape, 8)):
            tasks.append(partial(_sum_of_block, source, path, spec, index))
            paths.append(path)
    sums = dict.fromkeys(specs, 0)
    for path, total in zip(paths, run_all(tasks), strict=True):
        sums[path] += total
    return sums


def _sum_of_block(source: Source, path: Leaf, spec: ParamSpec, index: Index) -> int:
    part = source.read(path, index)
    if spec.held is not None:
        part = part.astype(spec.held, copy=False)
    return sum_of_part(part, [s.start for s in index], spec.shape)


def sum_of_part(part: np.ndarray, first: Sequence[int], shape: Sequence[int]) -> int:
    """The sum of a part of a parameter of `shape`, whose first element is `first`."""
    bits = np.ascontiguousarray(part).view(bits_dtype(part.dtype.itemsize))
    small, total = list(bits.shape), 0
    for axis in range(len(small)):
        row = math.prod(small[axis + 1 :])
        small[axis] = max(1, min(small[axis], _IN_CACHE // max(row, 1)))
    for index in blocks(bits.shape, tuple(small)):
        starts = [s.start for s in index]
        here = np.add(starts, first)
        with np.errstate(over="ignore"):  # sums are modulo 2^32
            total += int(mixed_sum(np, bits[index], here, shape))
    return total
