"""Pictures cut into tiles, for models with `model.vision.image_grid_pinpoints`.

`models/tiles.py` says which tiles and what stands in a text for them. Pixels are those of
transformers' LlavaOnevisionImageProcessorPil: an image that is alone is scaled as a whole to a
square, and then with its own proportions onto a black canvas, which is cut; one beside others is
padded to a square with the mean.
"""

import io
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from mjax.config.vision_schema import VisionConfig
from mjax.data.images import NEEDS, ImageReader
from mjax.errors import or_user_error
from mjax.models.tiles import Features, Tiled, best_size, features_of_images, joined
from mjax.models.tiles import padded_features as padded

if TYPE_CHECKING:
    from PIL.Image import Image

_BICUBIC = 3


class PictureReader(ImageReader):
    """Decodes pictures in their own sizes; `cut` makes tiles of them."""

    def decode(self, encoded: bytes | np.ndarray) -> "Image":
        vision = self.cfg.model.vision
        picture = open_picture(encoded, vision.num_channels)
        best_size(picture.height, picture.width, vision)  # raises where it has none
        return picture


def open_picture(encoded: bytes | np.ndarray, channels: int) -> "Image":
    """A picture of one channel or three; raises for what is none."""
    with or_user_error(NEEDS, ImportError):
        from PIL import Image

    is_array = isinstance(encoded, np.ndarray)
    image = Image.fromarray(encoded) if is_array else Image.open(io.BytesIO(encoded))
    return image.convert("L" if channels == 1 else "RGB")


def cut(
    pictures: Sequence["Image"],
    vision: VisionConfig,
    mean: Sequence[float],
    std: Sequence[float],
) -> tuple[np.ndarray, list[Features]]:
    """The tiles fp32 [T, H, W, C] of a text's pictures, normed, and what stands in it for each.

    `mean` and `std` are of pixels from 0 to 1. Raises `ValueError` for a picture that is too narrow.
    """
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
    opened = [[open_picture(p, vision.num_channels) for p in pictures] for pictures in rows]
    cuts = [cut(pictures, vision, mean, std) for pictures in opened]
    most = max(len(tiles) for tiles, _ in cuts)
    side = vision.image_size
    pixels = np.zeros((len(rows), most, side, side, vision.num_channels), np.float32)
    for row, (tiles, _) in enumerate(cuts):
        pixels[row, : len(tiles)] = tiles
    counts = [[len(found.corners) for found in features] for _, features in cuts]
    return Tiled(pixels, *padded([joined(features) for _, features in cuts])), counts


def expanded(ids: Iterable[int], token: int | None, counts: Sequence[int]) -> list[int]:
    """Ids in which each `token`, of a picture, stands as often as `counts` says; others as given."""
    found, left = [], iter(counts)
    for id in ids:
        found += [id] * (next(left) if id == token else 1)
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
