"""The largest magnitude that a block of weights keeps: its maximum, a percentile, or the best one.

A smaller largest magnitude gives a finer scale and clips what exceeds it. `mse` tries shares of the
maximum and takes the one of least squared error, in which each input counts by its mean square on
a text, where that is known. Invariant: matrices that servers fuse get one limit where the scheme
has one scale for the whole of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mjax.errors import UserError
from mjax.interop.quantized.schemes import RoundedMatrix, Scheme

SHARES_OF_MAXIMUM = np.arange(100, 49, -5) / np.float32(100)  # those that `mse` tries
PERCENTILE = 99.9
WAYS_TO_SCALE = ("max", "percentile", "mse")


@dataclass(frozen=True)
class Matrix:
    """A matrix to round.

    weight: fp32 [out, in]. moments: the mean squares of its inputs, fp32 [in]; None: all alike.
    """

    name: str
    weight: np.ndarray
    moments: np.ndarray | None = None


def limit_of_fused(matrices: Sequence[Matrix], scheme: Scheme, choice: str) -> float:
    """The largest magnitude that matrices which share a number keep; of one scale for all, chosen.

    Raises `UserError` for a weight that is not finite.
    """
    most, limit = 0.0, 0.0
    for matrix in matrices:
        blocks = _finite_blocks(matrix, (1, matrix.weight.shape[1]))
        most = max(most, float(blocks.max(initial=0)))
        if choice == "percentile" and scheme.block == (None, None):
            limit = max(limit, float(np.percentile(blocks, PERCENTILE)))
    if scheme.block != (None, None) or choice == "max":
        return most
    if choice == "percentile":
        return limit
    errors = np.zeros(len(SHARES_OF_MAXIMUM))
    for matrix in matrices:
        for number, share in enumerate(SHARES_OF_MAXIMUM):
            rounded = _round_clipped(matrix, scheme, most * share, np.float32(most * share))
            errors[number] += _errors(matrix, rounded.numbers).sum()
    return most * float(SHARES_OF_MAXIMUM[errors.argmin()])


def round_matrix(matrix: Matrix, scheme: Scheme, choice: str, limit: float) -> RoundedMatrix:
    """A matrix in the layout of a scheme; `limit` is that of those fused with it.

    Raises `UserError` for a weight that is not finite.
    """
    if scheme.block == (None, None):
        return _round_clipped(matrix, scheme, limit, np.float32(limit))
    sides = scheme.sides(matrix.weight.shape)
    if choice == "max":
        _finite_blocks(matrix, (1, matrix.weight.shape[1]))
        return scheme.round(matrix.weight.copy(), limit, matrix.name)
    blocks = _finite_blocks(matrix, sides)
    if choice == "percentile":
        kept = np.percentile(blocks, PERCENTILE, (1, 3), keepdims=True)
    else:
        kept = _best_limits(matrix, scheme, blocks.max((1, 3), keepdims=True), limit)
    return _round_clipped(matrix, scheme, limit, kept.astype(np.float32))


def _best_limits(matrix: Matrix, scheme: Scheme, most: np.ndarray, limit: float) -> np.ndarray:
    """The share of each block's maximum [R, 1, C, 1] that gives it the least error."""
    best, least = most, np.full(most.shape, np.inf)
    for share in SHARES_OF_MAXIMUM:
        numbers = _round_clipped(matrix, scheme, limit, most * share).numbers
        squares = _cut_in_blocks(_errors(matrix, numbers), scheme.sides(numbers.shape))
        errors = squares.sum((1, 3), keepdims=True)
        best = np.where(errors < least, most * share, best)
        least = np.minimum(errors, least)
    return best


def _round_clipped(matrix: Matrix, scheme: Scheme, limit: float, kept: np.ndarray) -> RoundedMatrix:
    """A matrix rounded after its blocks are clipped to `kept`, one number or [R, 1, C, 1]."""
    shape = matrix.weight.shape
    sides = scheme.sides(shape) if kept.ndim else shape
    clipped = np.clip(_cut_in_blocks(matrix.weight, sides), -kept, kept).reshape(shape)
    return scheme.round(clipped, limit, matrix.name)


def _finite_blocks(matrix: Matrix, sides: tuple[int, int]) -> np.ndarray:
    blocks = np.abs(_cut_in_blocks(matrix.weight, sides))
    if not np.isfinite(blocks.max(initial=0)):
        raise UserError(
            f"tensor {matrix.name} holds values that are not finite; nothing is written"
        )
    return blocks


def _errors(matrix: Matrix, numbers: np.ndarray) -> np.ndarray:
    squares = np.square(numbers - matrix.weight)
    return squares if matrix.moments is None else squares * matrix.moments


def _cut_in_blocks(w: np.ndarray, sides: tuple[int, int]) -> np.ndarray:
    """[R r, C c] -> [R, r, C, c]."""
    (rows, columns), (height, width) = w.shape, sides
    return w.reshape(rows // height, height, columns // width, width)
