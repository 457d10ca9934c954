"""Images as several tiles: which grid an image is cut into, and what stands in a text for it.

LLaVA-OneVision's way (arXiv 2408.03326). An image that is alone in its text is a whole view and the
tiles of a grid, which lie on the size that wastes least of `image_grid_pinpoints`. One beside
others is a single tile, padded to a square. The text holds the features of the whole view, and then
those of the grid's rows without padding, each row with a newline behind it. A tile is an item of
the tower. So a row of a batch has room for a fixed number of tiles, and any number of features.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from mjax.config.vision_schema import VisionConfig

CORNERS = 4  # features of a grid that one of a smaller grid is interpolated from
NEWLINE, PADDING = -2, -1
_SLACK = 1.1  # how far above its square root the number of tiles may be


class Tiled(NamedTuple):
    """The tiles of texts, and the features that stand in them in order.

    pixels: fp32 [B, I, H, W, C], zeros where a row has fewer tiles.
    corners: int32 [B, F, 4], of all features of a row's tiles in the order of reading, or NEWLINE
        or PADDING. weights: fp32 [B, F, 4]. A feature is the sum of the four, times their weights.
    """

    pixels: np.ndarray | jax.Array
    corners: np.ndarray | jax.Array
    weights: np.ndarray | jax.Array


class Features(NamedTuple):
    """What stands in a text: `corners` and `weights` [F, 4] of a `Tiled` row."""

    corners: np.ndarray
    weights: np.ndarray

    @classmethod
    def of(cls, numbers: np.ndarray) -> "Features":
        """Those of int [F] features as they are."""
        corners = np.zeros((len(numbers), CORNERS), np.int32)
        corners[:] = numbers[:, None]
        weights = np.zeros(corners.shape, np.float32)
        weights[:, 0] = 1
        return cls(corners, weights)


def best_size(height: int, width: int, vision: VisionConfig) -> tuple[int, int]:
    """The (height, width) of `image_grid_pinpoints` that keeps most of an image.

    Of those that keep as much it is the one with the least padding. Raises `ValueError` for an
    image so narrow that none keeps a pixel.
    """
    best, most = None, (0, 0)
    for tall, wide in vision.image_grid_pinpoints:
        scale = min(wide / width, tall / height)
        scaled = int(width * scale) * int(height * scale)
        kept = min(scaled, width * height)
        wasted = tall * wide - kept
        if (kept, -wasted) > most:
            best, most = (tall, wide), (kept, -wasted)
    if best is None:
        raise ValueError(f"{height} x {width} pixels are too narrow to be cut into tiles")
    return best


def count_tiles(sizes: Sequence[tuple[int, int]], vision: VisionConfig) -> int:
    """The tiles of images [height, width] of a text."""
    if len(sizes) != 1:
        return len(sizes)
    rows, columns = _tile_grid(*sizes[0], vision)
    return 1 + rows * columns


def features_of_images(sizes: Sequence[tuple[int, int]], vision: VisionConfig) -> list[Features]:
    """What stands in a text for each of its images [height, width]; transformers' order."""
    if len(sizes) != 1:
        return [features_of_one_tile(vision, number) for number in range(len(sizes))]
    whole = Features.of(np.arange(vision.text_tokens()))
    return [joined([whole, _features_of_grid(*sizes[0], vision)])]


def features_of_one_tile(vision: VisionConfig, number: int) -> Features:
    """What stands in a text for its tile `number`, the whole of an image beside others."""
    each = vision.text_tokens()
    numbers = number * each + np.arange(each)
    return Features.of(np.append(numbers, NEWLINE))


def joined(parts: Sequence[Features]) -> Features:
    """Features one after the other."""
    parts = [Features.of(np.zeros(0, np.int32)), *parts]  # there may be none
    corners, weights = zip(*parts, strict=True)
    return Features(np.concatenate(corners), np.concatenate(weights))


def padded_features(rows: Sequence[Features]) -> tuple[np.ndarray, np.ndarray]:
    """`corners` and `weights` of a `Tiled`, from those of each row."""
    most = max(1, *(len(row.corners) for row in rows))
    corners = np.full((len(rows), most, CORNERS), PADDING, np.int32)
    weights = np.zeros(corners.shape, np.float32)
    for number, row in enumerate(rows):
        corners[number, : len(row.corners)] = row.corners
        weights[number, : len(row.weights)] = row.weights
    return corners, weights


def _tile_grid(height: int, width: int, vision: VisionConfig) -> tuple[int, int]:
    """The (rows, columns) of tiles that an image [height, width] is cut into."""
    tall, wide = best_size(height, width, vision)
    return tall // vision.image_size, wide // vision.image_size


def _features_of_grid(height: int, width: int, vision: VisionConfig) -> Features:
    """The features of the tiles behind the whole view: unpadded, and no more than allowed."""
    side = vision.feature_grid()
    grid = _tile_grid(height, width, vision)
    rows, columns = (np.arange(tiles * side) for tiles in grid)
    tall, wide = len(rows), len(columns)
    if width / height > wide / tall:
        real = int(round(height * (wide / width), 7))
        margin = (tall - real) // 2
        rows = rows[margin : tall - margin]
    else:
        real = int(round(width * (tall / height), 7))
        margin = (wide - real) // 2
        columns = columns[margin : wide - margin]
    most = int(vision.vision_aspect_ratio.removeprefix("anyres_max_"))
    ratio = math.sqrt(len(rows) * len(columns) / (most * side**2))
    sizes = len(rows), len(columns)
    if ratio > _SLACK:
        sizes = int(len(rows) // ratio), int(len(columns) // ratio)
    pair_of_rows = _between(rows, sizes[0])
    pair_of_columns = _between(columns, sizes[1])
    corners, weights = [], []
    for row, of_row in pair_of_rows:
        for column, of_column in pair_of_columns:
            tile = 1 + row[:, None] // side * grid[1] + column // side
            place = row[:, None] % side * side + column % side
            corners.append(tile * side**2 + place)
            weights.append(of_row[:, None] * of_column)
    return _with_newlines(np.stack(corners, 2), np.stack(weights, 2))


def _between(places: np.ndarray, count: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Linear interpolation of a line to `count` points: (places, weights) of both neighbors.

    As torch does it: pixel centers are aligned, and what lies outside has the border's value.
    """
    points = (np.arange(count) + 0.5) * (len(places) / max(count, 1))
    points = np.maximum(points - 0.5, 0)
    before = points.astype(int)
    behind = np.minimum(before + 1, len(places) - 1)
    share = points - before
    return [(places[before], 1 - share), (places[behind], share)]


def _with_newlines(corners: np.ndarray, weights: np.ndarray) -> Features:
    """A grid's [rows, columns, 4] in the order of reading, a newline behind each row."""
    newline = Features.of(np.array([NEWLINE] * len(corners)))
    corners = np.concatenate([corners, newline.corners[:, None]], 1)
    weights = np.concatenate([weights, newline.weights[:, None]], 1)
    shape = -1, CORNERS
    return Features(
        corners.reshape(shape).astype(np.int32),
        weights.reshape(shape).astype(np.float32),
    )
