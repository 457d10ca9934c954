"""The largest magnitude that a block of weights keeps: its maximum, a percentile, or the best one.

A smaller largest magnitude gives a finer scale and clips what exceeds it. `mse` tries shares of the
maximum and takes the one of least squared error, in which each input counts by its mean square on
a text, where that is known. Invariant: matrices that servers fuse get one limit where the scheme
has one scale for the whole of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mjax.errors import UserError
from mjax.interop.quantized.schemes import RoundedMatrix, Scheme

SHARES_OF_MAXIMUM = np.arange(100, 49, -5, np.float32) / 100  # those that `mse` tries
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
    """The largest magnitude of matrices that share a number, chosen if it is their only scale.

    They read the same inputs. Raises `UserError` for a weight that is not finite.
    """
    joined = np.concatenate([matrix.weight for matrix in matrices])
    joined = replace(matrices[0], weight=joined)
    return float(_limits(joined, scheme, choice if scheme.is_whole else "max", 0.0).max())


def round_matrix(matrix: Matrix, scheme: Scheme, choice: str, limit: float) -> RoundedMatrix:
    """A matrix in the layout of a scheme; `limit` is that of those fused with it.

    Raises `UserError` for a weight that is not finite.
    """
    kept = np.float32(limit) if scheme.is_whole else _limits(matrix, scheme, choice, limit)
    return _round_clipped(matrix, scheme, limit, kept)


def _limits(matrix: Matrix, scheme: Scheme, choice: str, limit: float) -> np.ndarray:
    """The largest magnitudes that blocks keep, fp32 [R, 1, C, 1]."""
    sides = scheme.sides(matrix.weight.shape)
    blocks = np.abs(_blocks_of_matrix(matrix.weight, sides))
    most = blocks.max((1, 3), keepdims=True)
    if not np.isfinite(most).all():
        raise UserError(
            f"tensor {matrix.name} holds values that are not finite; nothing is written"
        )
    if choice == "percentile":
        return np.percentile(blocks, PERCENTILE, (1, 3), keepdims=True).astype(np.float32)
    best, least = most, np.full(most.shape, np.inf)
    for share in SHARES_OF_MAXIMUM if choice == "mse" else ():
        kept = most * share
        whole = float(kept.max()) if scheme.is_whole else limit
        rounded = _round_clipped(matrix, scheme, whole, kept)
        squares = np.square(rounded.numbers - matrix.weight)
        squares = squares if matrix.moments is None else squares * matrix.moments
        errors = _blocks_of_matrix(squares, sides).sum((1, 3), keepdims=True)
        best = np.where(errors < least, kept, best)
        least = np.minimum(errors, least)
    return best


def _round_clipped(matrix: Matrix, scheme: Scheme, limit: float, kept: np.ndarray) -> RoundedMatrix:
    """A matrix rounded after its blocks are clipped to `kept`, one number or [R, 1, C, 1]."""
    shape = matrix.weight.shape
    blocks = _blocks_of_matrix(matrix.weight, scheme.sides(shape))
    return scheme.round(np.clip(blocks, -kept, kept).reshape(shape), limit, matrix.name)


def _blocks_of_matrix(w: np.ndarray, sides: tuple[int, int]) -> np.ndarray:
    """[R r, C c] -> [R, r, C, c]."""
    (rows, columns), (height, width) = w.shape, sides
    return w.reshape(rows // height, height, columns // width, width)
