"""Pictures cut into tiles, for models with `model.vision.image_grid_pinpoints`.

LLaVA-OneVision's way (arXiv 2408.03326). An image that is alone in its text is a whole view and the
tiles of a grid, which lie on the size that wastes least. The text holds the features of the whole
view, and then those of the grid's rows without padding, each row with a newline behind it. One
beside others is a single tile, padded to a square, and a newline. Pixels are those of
transformers' LlavaOnevisionImageProcessorPil.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from mjax.config.vision_schema import VisionConfig
from mjax.data.decoders import Decode, attempt
from mjax.data.pixels import decode_picture
from mjax.data.readers import ImageReader
from mjax.data.sources import Item
from mjax.errors import UserError, or_user_error
from mjax.models.tiles import (
    CORNERS,
    NEWLINE,
    Features,
    Tiled,
    features_of_one_tile,
    joined,
    padded_features,
    unmixed,
)

if TYPE_CHECKING:
    from PIL.Image import Image

_BICUBIC = 3
_NEEDS = "pictures need {reason}; install mjax[vision]"
_SLACK = 1.1  # the part of the allowed side that a grid may have more


class PictureReader(ImageReader):
    """Decodes pictures in their own sizes; `cut` makes tiles of them."""

    @property
    def decode(self) -> Decode:
        """Makes uint8 [H, W, 3], or [H, W], of an encoded picture; can be pickled."""
        return partial(decode_picture, channels=self.cfg.model.vision.num_channels)

    def pictures(self, items: Sequence[Item]) -> list[np.ndarray | None]:
        """What `decode` makes of each item; None where it cannot be used, which the log names."""
        found: list[np.ndarray | None] = [None] * len(items)

        def keep(place: int, decoded: np.ndarray | str) -> None:
            if not isinstance(decoded, str):
                why = attempt(best_size, *decoded.shape[:2], self.cfg.model.vision)
                decoded = why if isinstance(why, str) else decoded.copy()
            if isinstance(decoded, str):
                self.skipped.add(items[place].name, decoded)
            else:
                found[place] = decoded

        self.decode_all(items, keep)
        return found


def cut(
    arrays: Sequence[np.ndarray],
    vision: VisionConfig,
    mean: Sequence[float],
    std: Sequence[float],
) -> tuple[np.ndarray, list[Features]]:
    """The tiles fp32 [T, H, W, C] of a text's pictures, normed, and what stands in it for each.

    Pictures are uint8 [H, W, 3], or [H, W]. `mean` and `std` are of pixels from 0 to 1. Raises
    `ValueError` for a picture too narrow.
    """
    with or_user_error(_NEEDS, ImportError):
        from PIL import Image

    gray = vision.num_channels == 1
    pictures = [Image.fromarray(a.reshape(a.shape[:2]) if gray else a) for a in arrays]
    side, channels = vision.image_size, vision.num_channels
    if len(pictures) == 1:
        tiles = _whole_and_grid(pictures[0], vision)
    else:
        ground = tuple(int(of_channel * 255) for of_channel in (*mean, *mean, *mean)[:channels])
        squares = [_square(picture, ground) for picture in pictures]
        tiles = [square.resize((side, side), _BICUBIC) for square in squares]
    shape = len(tiles), side, side, channels
    pixels = np.array([np.asarray(tile) for tile in tiles], np.float32).reshape(shape)
    normed = (pixels / 255 - np.asarray(mean)) / np.asarray(std)
    sizes = [(picture.height, picture.width) for picture in pictures]
    return normed.astype(np.float32), features_of_images(sizes, vision)


def tiled_images(
    rows: Sequence[Sequence[np.ndarray]],
    vision: VisionConfig,
    mean: Sequence[float] = (0.5,),
    std: Sequence[float] = (0.5,),
) -> tuple[Tiled, list[list[int]]]:
    """What a model reads of texts with pictures, uint8 [H, W, C] of any size; their tokens.

    The second is how many tokens `image_token_id` stand in a text for each of its pictures.
    """
    cuts = [cut(pictures, vision, mean, std) for pictures in rows]
    most = max(len(tiles) for tiles, _ in cuts)
    side = vision.image_size
    pixels = np.zeros((len(rows), most, side, side, vision.num_channels), np.float32)
    for row, (tiles, _) in enumerate(cuts):
        pixels[row, : len(tiles)] = tiles
    counts = [[len(found.corners) for found in features] for _, features in cuts]
    return Tiled(pixels, *padded_features([features for _, features in cuts])), counts


def expanded(ids: Sequence[int], token: int | None, counts: Sequence[int]) -> list[int]:
    """Ids in which each `token`, of a picture, stands as often as `counts` says."""
    return [ids[place] for place in places_of(ids, token, counts)]


def places_of(ids: Sequence[int], token: int | None, counts: Sequence[int]) -> list[int]:
    """The places in ids of what `expanded` gives."""
    if ids.count(token) > len(counts):
        marks = f"a text has {ids.count(token)} <image>, and {len(counts)} pictures are given"
        raise UserError(f"{marks}; give one for each")
    found, left = [], iter(counts)
    for place, id in enumerate(ids):
        found += [place] * (next(left) if id == token else 1)
    return found


def _whole_and_grid(picture: "Image", vision: VisionConfig) -> list["Image"]:
    """A whole view of a picture and its tiles, in the order of reading."""
    from PIL import Image

    side = vision.image_size
    tall, wide = best_size(picture.height, picture.width, vision)
    across, down = wide / picture.width, tall / picture.height
    if across < down:
        size = wide, min(math.ceil(picture.height * across), tall)
    else:
        size = min(math.ceil(picture.width * down), wide), tall
    canvas = Image.new(picture.mode, (wide, tall))
    place = (wide - size[0]) // 2, (tall - size[1]) // 2
    canvas.paste(picture.resize(size, _BICUBIC), place)
    tiles = [picture.resize((side, side), _BICUBIC)]
    for top in range(0, tall, side):
        for left in range(0, wide, side):
            tiles.append(canvas.crop((left, top, left + side, top + side)))
    return tiles


def _square(picture: "Image", ground: tuple[int, ...]) -> "Image":
    """A picture in the middle of a square of a color."""
    from PIL import Image

    most = max(picture.size)
    canvas = Image.new(picture.mode, (most, most), ground if len(ground) > 1 else ground[0])
    canvas.paste(picture, tuple((most - length) // 2 for length in picture.size))
    return canvas


# ---- what stands in a text -----------------------------------------------------------------------


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


def features_of_images(sizes: Sequence[tuple[int, int]], vision: VisionConfig) -> list[Features]:
    """What stands in a text for each of its images [height, width]; transformers' order."""
    if len(sizes) != 1:
        return [features_of_one_tile(vision, number) for number in range(len(sizes))]
    whole = unmixed(np.arange(vision.text_tokens()))
    return [joined([whole, _features_of_grid(*sizes[0], vision)])]


def _features_of_grid(height: int, width: int, vision: VisionConfig) -> Features:
    """Those of the tiles behind the whole view of an image, a newline behind each row."""
    side = vision.feature_grid()
    sizes = best_size(height, width, vision)
    rows, columns = (size // vision.image_size for size in sizes)
    count = rows * columns * side**2
    numbers = side**2 + np.arange(count)  # tile by tile
    by_tile = numbers.reshape(rows, columns, side, side)
    grid = by_tile.transpose(0, 2, 1, 3).reshape(rows * side, columns * side)
    grid = _without_padding(grid, height, width)
    most = int(vision.vision_aspect_ratio.removeprefix("anyres_max_"))
    ratio = math.sqrt(grid.size / (most * side**2))
    ratio = ratio if ratio > _SLACK else 1
    corners, weights = _interpolated(grid, int(grid.shape[0] // ratio), int(grid.shape[1] // ratio))
    newline = unmixed(np.full(len(corners), NEWLINE))
    corners = np.concatenate([corners, newline.corners[:, None]], axis=1)
    weights = np.concatenate([weights, newline.weights[:, None]], axis=1)
    return Features(corners.reshape(-1, CORNERS), weights.reshape(-1, CORNERS))


def _without_padding(grid: np.ndarray, height: int, width: int) -> np.ndarray:
    """The part of a grid that an image [height, width] fills in its middle."""
    tall, wide = grid.shape
    if width / height > wide / tall:
        real = int(round(height * (wide / width), 7))
        margin = (tall - real) // 2
        return grid[margin : tall - margin]
    real = int(round(width * (tall / height), 7))
    margin = (wide - real) // 2
    return grid[:, margin : wide - margin]


def _interpolated(grid: np.ndarray, tall: int, wide: int) -> tuple[np.ndarray, np.ndarray]:
    """A grid at another size, bilinearly: its numbers and their weights, [tall, wide, 4]."""
    corners, weights = [], []
    for rows, of_rows in _neighbors(grid.shape[0], tall):
        for columns, of_columns in _neighbors(grid.shape[1], wide):
            corners.append(grid[np.ix_(rows, columns)])
            weights.append(np.outer(of_rows, of_columns))
    stacked = np.stack(corners, axis=2), np.stack(weights, axis=2)
    return stacked[0].astype(np.int32), stacked[1].astype(np.float32)


def _neighbors(old: int, new: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Linear interpolation along a line: (places, weights) of the points before and behind.

    As torch does it: pixel centers are aligned, and what lies outside has the border's value.
    """
    points = (np.arange(new) + 0.5) * (old / max(new, 1))
    points = np.maximum(points - 0.5, 0)
    before = points.astype(int)
    behind = np.minimum(before + 1, old - 1)
    share = points - before
    return [(before, 1 - share), (behind, share)]
