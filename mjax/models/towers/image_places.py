"""The places of the patches of images in a packed row, and of what they become in a text.

A row of the tower holds the images of a text one after the other, each in its own proportions
(Qwen2.5-VL, arXiv 2502.13923; Qwen3-VL). Four patches, two by two, lie together, for they become
one token of the text. The patches of a window lie together, too. So a mask of windows is one of
segments, and a token's feature is found by its place. All of it is numpy: data computes it once a
batch. Positions of a text are those of Qwen-VL: a text goes on from the largest position before it,
and each document begins at 0.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from mjax.config.schema.vision import MERGED, VisionConfig
from mjax.errors import UserError

MERGED_SIDE = 2  # merged patches along a side
# Columns of `places`: a patch's row and column, those of its image, its frame's number, its window.
PLACES = 6
FRAME = 4  # of them; the next is its window
TIME_AXES = 3


class Grid(NamedTuple):
    """An image, or frames of a video that stand in one run of tokens: its patches.

    interval: positions of the text from one frame to the next.
    """

    frames: int
    rows: int
    columns: int
    interval: float = 1.0

    @property
    def patches(self) -> int:
        return self.frames * self.rows * self.columns

    @property
    def merged(self) -> tuple[int, int, int]:
        """Frames, rows and columns of merged patches."""
        return self.frames, self.rows // MERGED_SIDE, self.columns // MERGED_SIDE

    @property
    def tokens(self) -> int:
        """Its tokens in a text."""
        return self.patches // MERGED


# The images of a text: the patches of each, [n, N], four of a merged token together, and its grid.
CutImages = Sequence[tuple[np.ndarray, Grid]]


class PackedImages(NamedTuple):
    """The images of texts, packed.

    patches: fp32 [B, T, N]. places: int32 [B, T, 6]: the row and the column of a patch, the rows
        and columns of its image, the numbers of its frame and of its window from 1 on; 0: padding.
    features: int32 [B, S], the merged token of a row in the place of a token of the text; -1: none.
    axes: int32 [B, S, 3], the positions of the text by time, row and column.
    """

    patches: np.ndarray | jax.Array
    places: np.ndarray | jax.Array
    features: np.ndarray | jax.Array
    axes: np.ndarray | jax.Array


def reading_order(grid: Grid, vision: VisionConfig) -> tuple[np.ndarray, np.ndarray]:
    """(the merged tokens of a grid in the order of windows, the number of each one's window)."""
    side = vision.window_size // vision.patch_size // MERGED_SIDE
    side = side or max(grid.rows, grid.columns)
    time, row, column = (places.ravel() for places in np.indices(grid.merged))
    down, below = np.divmod(row, side)
    across, beside = np.divmod(column, side)
    order = np.lexsort((beside, below, across, down, time))
    windows = np.stack([time, down, across], 1)
    windows = windows[order]
    steps = np.diff(windows, axis=0)
    is_new = steps.any(1)
    numbers = np.append(0, np.cumsum(is_new))
    return order, numbers[: len(order)]


def image_places(
    grids: Sequence[Grid], vision: VisionConfig, length: int
) -> tuple[np.ndarray, np.ndarray]:
    """(places int32 [length, 6] of a row's images, int [P]: which of their patches lies there).

    Patches are those of one image after the other, four of a merged token together. Raises
    `UserError` where a row has no room for them.
    """
    total = sum(grid.patches for grid in grids)
    if total > min(length, vision.max_patches):
        raise UserError(
            f"the images of a text have {total} patches: model.vision.max_patches is "
            f"{vision.max_patches}; raise it, or lower model.vision.max_pixels"
        )
    places, sources = np.zeros((length, PLACES), np.int32), np.zeros(total, int)
    first = frame = window = 0
    for grid in grids:
        order, windows = reading_order(grid, vision)
        here = slice(first, first + grid.patches)
        corners = MERGED * order[:, None] + np.arange(MERGED)
        sources[here] = first + corners.ravel()
        time, row, column = np.unravel_index(order, grid.merged)
        own = places[here].reshape(-1, MERGED, PLACES)
        down, across = np.divmod(np.arange(MERGED), MERGED_SIDE)
        own[..., 0] = MERGED_SIDE * row[:, None] + down
        own[..., 1] = MERGED_SIDE * column[:, None] + across
        own[..., 2:4] = grid.rows, grid.columns
        own[..., 4] = frame + 1 + time[:, None]
        own[..., 5] = window + 1 + windows[:, None]
        first += grid.patches
        frame += grid.frames
        window += windows[-1] + 1
    return places, sources


def text_places(
    tokens: np.ndarray, grids: Sequence[Grid], vision: VisionConfig, documents: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """`features` [S] and `axes` [S, 3] of `PackedImages`, of the text of a row.

    `documents` int [S] numbers its texts. Raises `UserError` where tokens are not those of images.
    """
    features = np.full(len(tokens), -1, np.int32)
    axes = np.zeros((len(tokens), TIME_AXES), np.int32)
    stands = np.isin(tokens, [vision.image_token_id, vision.video_token_id])
    left, first = iter(grids), 0
    place = position = 0
    while place < len(tokens):
        if place == 0 or documents[place] != documents[place - 1]:
            position = 0
        if not stands[place]:
            axes[place] = position
            place, position = place + 1, position + 1
            continue
        grid = next(left, Grid(0, 0, 0))
        run = slice(place, place + grid.tokens)
        if not grid.tokens or not stands[run].all() or len(stands[run]) < grid.tokens:
            raise _unlike(tokens, stands, grids)
        order, _ = reading_order(grid, vision)
        features[run][order] = first + np.arange(grid.tokens)
        time, row, column = (at.ravel() for at in np.indices(grid.merged))
        time = (time * grid.interval).astype(int)
        axes[run] = position + np.stack([time, row, column], 1)
        position += max(grid.merged[1:])
        first += grid.tokens
        place += grid.tokens
    if next(left, None) is not None:
        raise _unlike(tokens, stands, grids)
    return features, axes


def _unlike(tokens: np.ndarray, stands: np.ndarray, grids: Sequence[Grid]) -> UserError:
    counts = ", ".join(str(grid.tokens) for grid in grids) or "none"
    return UserError(
        f"a text of {len(tokens)} tokens has {stands.sum()} that stand for images, and images of "
        f"{counts} tokens are given; give each image its tokens, in order"
    )


def packed_row(
    tokens: np.ndarray,
    images: CutImages,
    vision: VisionConfig,
    documents: np.ndarray | None = None,
    length: int | None = None,
) -> PackedImages:
    """The images of a row, without the axis of rows. `length`: of it; None: that of a run."""
    grids = [grid for _, grid in images]
    places, sources = image_places(grids, vision, length or vision.row_length())
    row = np.zeros((len(places), vision.numbers), np.float32)
    if len(sources):
        row[: len(sources)] = np.concatenate([patches for patches, _ in images])[sources]
    one = np.ones(len(tokens), int) if documents is None else documents
    return PackedImages(row, places, *text_places(tokens, grids, vision, one))
