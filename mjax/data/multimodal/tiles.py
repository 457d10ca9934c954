"""Pictures cut into tiles, for models with `model.vision.image_grid_pinpoints`.

LLaVA-OneVision's way (arXiv 2408.03326). An image that is alone in its text is a whole view and the
tiles of a grid, which lie on the size that wastes least. The text holds the features of the whole
view, and then those of the grid's rows without padding, each row with a newline behind it. One
beside others is a single tile, padded to a square, and a newline. Pixels are those of
transformers' LlavaOnevisionImageProcessorPil.

With `model.vision.tile_tags` it is NVLM's way (arXiv 2409.11402), Megatron-LM's: an image is scaled
to the grid of the nearest proportions. The text holds the tiles of each image in the order of
reading and then its whole view, each behind a tag, which is ordinary text. An image of one tile is
the whole view alone.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mjax.config.schema.vision import VisionConfig
from mjax.data.base.tokenizer import Tokenizer
from mjax.data.multimodal.decoders import Decode, attempt
from mjax.data.multimodal.pixels import decode_picture
from mjax.data.multimodal.readers import ImageReader
from mjax.data.multimodal.sources import Item
from mjax.errors import UserError, or_user_error
from mjax.models.towers.tiles import (
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
_TILES_NEED = "pictures need {reason}; install mjax[vision]"
_SLACK = 1.1  # the part of the allowed side that a grid may have more


class PictureReader(ImageReader):
    """Decodes pictures in their own sizes; `cut_pictures` makes tiles of them."""

    @property
    def decode(self) -> Decode:
        """Makes uint8 [H, W, 3], or [H, W], of an encoded picture; can be pickled."""
        return partial(decode_picture, channels=self.cfg.model.vision.num_channels)

    def flaw(self, decoded: np.ndarray) -> str | None:
        """Why a picture cannot be cut, in words."""
        found = attempt(best_size, *decoded.shape[:2], self.cfg.model.vision)
        return found if isinstance(found, str) else None

    def pictures(self, items: Sequence[Item]) -> list[np.ndarray | None]:
        """Decode each item; None for one that cannot be used, which the log names."""
        found: list[np.ndarray | None] = [None] * len(items)

        def keep(place: int, decoded: np.ndarray | str) -> None:
            if not isinstance(decoded, str):
                decoded = self.flaw(decoded) or decoded.copy()
            if isinstance(decoded, str):
                self.skipped.note(items[place].name, decoded)
            else:
                found[place] = decoded

        self.decode_all(items, keep)
        return found


class CutPictures(NamedTuple):
    """The tiles fp32 [T, H, W, C] of a text's pictures, normed, and what stands in it for each.

    texts: the ids that stand for a picture. features: those of its tokens, unless there are tags.
    """

    tiles: np.ndarray
    texts: list[list[int]]
    features: list[Features]


def cut_pictures(
    arrays: Sequence[np.ndarray],
    vision: VisionConfig,
    mean: Sequence[float],
    std: Sequence[float],
    tags: Sequence[Sequence[int]] = (),
) -> CutPictures:
    """A text's pictures in tiles, and with the ids of `tile_tags`, if the model has them.

    Pictures are uint8 [H, W, 3], or [H, W]. `mean` and `std` are of pixels from 0 to 1. Raises
    `ValueError` for a picture too narrow.
    """
    with or_user_error(_TILES_NEED, ImportError):
        from PIL import Image

    gray = vision.num_channels == 1
    pictures = [Image.fromarray(a.reshape(a.shape[:2]) if gray else a) for a in arrays]
    side, channels = vision.image_size, vision.num_channels
    if tags:
        of_pictures = [_grid_and_whole(picture, vision) for picture in pictures]
        tiles = [tile for own in of_pictures for tile in own]
        texts = [_behind_tags(len(own), tags, vision) for own in of_pictures]
    elif len(pictures) == 1:
        tiles = _whole_and_grid(pictures[0], vision)
    else:
        ground = tuple(int(of_channel * 255) for of_channel in (*mean, *mean, *mean)[:channels])
        squares = [_on_square(picture, ground) for picture in pictures]
        tiles = [square.resize((side, side), _BICUBIC) for square in squares]
    shape = len(tiles), side, side, channels
    pixels = np.array([np.asarray(tile) for tile in tiles], np.float32).reshape(shape)
    normed = (pixels / 255 - np.asarray(mean)) / np.asarray(std)
    if tags:
        return CutPictures(normed.astype(np.float32), texts, [])
    features = features_of_images([(p.height, p.width) for p in pictures], vision)
    texts = [[vision.image_token_id] * len(own.corners) for own in features]
    return CutPictures(normed.astype(np.float32), texts, features)


def tiled_images(
    rows: Sequence[Sequence[np.ndarray]],
    vision: VisionConfig,
    mean: Sequence[float] = (0.5,),
    std: Sequence[float] = (0.5,),
) -> tuple[Tiled, list[list[int]]]:
    """Cut the pictures of texts, uint8 [H, W, C] of any size, into a model's inputs.

    Returns them and how many tokens `image_token_id` stand in a text for each of its pictures.
    """
    cuts = [cut_pictures(pictures, vision, mean, std) for pictures in rows]
    corners = padded_features([found.features for found in cuts])
    counts = [[len(text) for text in found.texts] for found in cuts]
    return Tiled(_stacked([found.tiles for found in cuts]), *corners), counts


def tagged_images(
    rows: Sequence[Sequence[np.ndarray]],
    vision: VisionConfig,
    tokenizer: Tokenizer,
    mean: Sequence[float] = (0.5,),
    std: Sequence[float] = (0.5,),
) -> tuple[np.ndarray, list[list[list[int]]]]:
    """Cut the pictures of texts into the inputs of a model with `tile_tags`, fp32 [B, I, H, W, C].

    Returns them and the ids that stand in a text for each of its pictures, tags among them.
    """
    tags = tag_ids(vision, tokenizer)
    cuts = [cut_pictures(pictures, vision, mean, std, tags) for pictures in rows]
    return _stacked([found.tiles for found in cuts]), [found.texts for found in cuts]


def tag_ids(vision: VisionConfig, tokenizer: Tokenizer) -> list[list[int]]:
    """The ids of each of `tile_tags`. Raises `UserError` where they do not tell tiles apart."""
    found = [tokenizer.encode(tag) for tag in vision.tile_tags]
    if len({(), *map(tuple, found)}) <= len(found):
        said = "the tokenizer has the same ids, or none, for several"
        raise UserError(f"model.vision.tile_tags: {said}; give tags that it tells apart")
    for tag, ids in zip(vision.tile_tags, found, strict=True):
        if vision.image_token_id in ids:
            said = f"{tag!r} holds token {vision.image_token_id}, which stands for an image"
            raise UserError(f"model.vision.tile_tags: {said}; give another tag")
    return found


def expanded(
    ids: Sequence[int], token: int | None, texts: Sequence[Sequence[int]]
) -> tuple[list[int], list[int]]:
    """Ids in which `texts` stand in the place of each `token`, of a picture; their places in `ids`.

    Raises `UserError` where there are fewer pictures.
    """
    if ids.count(token) > len(texts):
        marks = f"a text has {ids.count(token)} <image>, and {len(texts)} pictures are given"
        raise UserError(f"{marks}; give one for each")
    found, places, left = [], [], iter(texts)
    for place, id in enumerate(ids):
        more = next(left) if id == token else [id]
        found += more
        places += [place] * len(more)
    return found, places


def _stacked(tiles: Sequence[np.ndarray]) -> np.ndarray:
    """Tiles of texts, stacked; zeros where a text has fewer."""
    most = max(map(len, tiles))
    pixels = np.zeros((len(tiles), most, *tiles[0].shape[1:]), np.float32)
    for row, own in enumerate(tiles):
        pixels[row, : len(own)] = own
    return pixels


def _grid_and_whole(picture: "Image", vision: VisionConfig) -> list["Image"]:
    """The tiles of a picture in the order of reading, if they are several, and its whole view."""
    tall, wide = nearest_size(picture.height, picture.width, vision)
    side = vision.image_size
    whole = picture.resize((side, side), _BICUBIC)
    if (tall, wide) == (side, side):
        return [whole]
    return [*_tiles_of(picture.resize((wide, tall), _BICUBIC), side), whole]


def _behind_tags(count: int, tags: Sequence[Sequence[int]], vision: VisionConfig) -> list[int]:
    """The ids of an image of `count` tiles, the whole view among them, each behind its tag."""
    tile = [vision.image_token_id] * vision.text_tokens()
    return [id for tag in [*tags[: count - 1], tags[-1]] for id in [*tag, *tile]]


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
    return [picture.resize((side, side), _BICUBIC), *_tiles_of(canvas, side)]


def _tiles_of(canvas: "Image", side: int) -> list["Image"]:
    """The tiles that a canvas consists of, in the order of reading."""
    return [
        canvas.crop((left, top, left + side, top + side))
        for top in range(0, canvas.height, side)
        for left in range(0, canvas.width, side)
    ]


def _on_square(picture: "Image", ground: tuple[int, ...]) -> "Image":
    """A picture in the middle of a square of a color."""
    from PIL import Image

    most = max(picture.size)
    canvas = Image.new(picture.mode, (most, most), ground if len(ground) > 1 else ground[0])
    canvas.paste(picture, tuple((most - length) // 2 for length in picture.size))
    return canvas


# ---- what stands in a text -----------------------------------------------------------------------


def best_size(height: int, width: int, vision: VisionConfig) -> tuple[int, int]:
    """The (height, width) of `image_grid_pinpoints` that keeps most of an image.

    The least padding breaks a tie. Raises `ValueError` for an image so narrow that none keeps a
    pixel. With tags it is `nearest_size`.
    """
    if vision.tile_tags:
        return nearest_size(height, width, vision)
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


def nearest_size(height: int, width: int, vision: VisionConfig) -> tuple[int, int]:
    """The (height, width) of `image_grid_pinpoints` with the proportions nearest to an image's.

    A tie goes to the largest that has less than twice the pixels of the image, or else to the
    smallest (Megatron-LM, InternVL).
    """
    best, least = (0, 0), math.inf
    for tall, wide in sorted(vision.image_grid_pinpoints, key=math.prod):
        apart = abs(width / height - wide / tall)
        if apart < least or (apart == least and 2 * height * width > tall * wide):
            best, least = (tall, wide), apart
    return best


def features_of_images(sizes: Sequence[tuple[int, int]], vision: VisionConfig) -> list[Features]:
    """The features that stand in a text for each of its images; transformers' order."""
    if len(sizes) != 1:
        return [features_of_one_tile(vision, number) for number in range(len(sizes))]
    whole = unmixed(np.arange(vision.text_tokens()))
    return [joined([whole, _features_of_grid(*sizes[0], vision)])]


def _features_of_grid(height: int, width: int, vision: VisionConfig) -> Features:
    """Features of an image's tiles, which follow its whole view; a newline ends each row."""
    side = vision.feature_grid()
    sizes = best_size(height, width, vision)
    rows, columns = (size // vision.image_size for size in sizes)
    count = rows * columns * side**2
    numbers = side**2 + np.arange(count)  # tile by tile
    by_tile = numbers.reshape(rows, columns, side, side)
    grid = by_tile.transpose(0, 2, 1, 3).reshape(rows * side, columns * side)
    grid = _without_padding(grid, height, width)
    corners, weights = _interpolated(grid, *_size_in_text(grid, vision))
    newline = unmixed(np.full(len(corners), NEWLINE))
    corners = np.concatenate([corners, newline.corners[:, None]], axis=1)
    weights = np.concatenate([weights, newline.weights[:, None]], axis=1)
    return Features(corners.reshape(-1, CORNERS), weights.reshape(-1, CORNERS))


def _size_in_text(grid: np.ndarray, vision: VisionConfig) -> tuple[int, int]:
    """The size to which a grid of features is reduced if it has too many."""
    most_tiles = int(vision.vision_aspect_ratio.removeprefix("anyres_max_"))
    most = most_tiles * vision.feature_grid() ** 2
    ratio = math.sqrt(grid.size / most)
    if ratio <= _SLACK:
        ratio = 1
    tall, wide = grid.shape
    return int(tall // ratio), int(wide // ratio)


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
    height, width = grid.shape
    for rows, of_rows in _neighbors(height, tall):
        for columns, of_columns in _neighbors(width, wide):
            corners.append(grid[np.ix_(rows, columns)])
            weights.append(np.outer(of_rows, of_columns))
    numbers = np.stack(corners, axis=2).astype(np.int32)
    return numbers, np.stack(weights, axis=2).astype(np.float32)


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
