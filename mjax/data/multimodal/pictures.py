"""Pictures and videos of any size as patches, for models with `model.vision.max_patches` (Qwen-VL).

A picture is scaled, with nearly its own proportions, such that its sides are multiples of two
patches and its pixels lie within `min_pixels` and `max_pixels`. A patch holds two frames, which are
equal in a picture. Pixels are those of transformers' Qwen2VLImageProcessorPil.
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np

from mjax.config.schema.vision import FRAMES, VisionConfig
from mjax.data.multimodal.pixels import norm_pixels
from mjax.errors import or_user_error
from mjax.models.towers.image_places import MERGED_SIDE, Grid, PackedImages, packed_row

_RESAMPLING = 3  # bicubic
_NARROWEST = 200  # times that a side may be as long as the other
_SMALLEST = 16  # patches of a row


def scaled_size(height: int, width: int, vision: VisionConfig) -> tuple[int, int]:
    """The (height, width) that a picture is scaled to. Raises `ValueError` for one too narrow."""
    unit = MERGED_SIDE * vision.patch_size
    if max(height, width) > _NARROWEST * min(height, width):
        raise ValueError(f"{height} x {width} pixels are too narrow")
    sides = np.array([height, width])
    nearest = np.round(sides / unit).astype(int) * unit
    if math.prod(nearest) > vision.max_pixels:
        ratio = math.sqrt(height * width / vision.max_pixels)
        nearest = np.maximum(np.floor(sides / ratio / unit).astype(int), 1) * unit
    elif math.prod(nearest) < vision.min_pixels:
        ratio = math.sqrt(vision.min_pixels / (height * width))
        nearest = np.ceil(sides * ratio / unit).astype(int) * unit
    return int(nearest[0]), int(nearest[1])


def patches_of_picture(
    picture: np.ndarray, vision: VisionConfig, mean: Sequence[float], std: Sequence[float]
) -> tuple[np.ndarray, Grid]:
    """(patches fp32 [n, C*2*P*P] of uint8 [H, W, C], four of a merged token together, its grid)."""
    with or_user_error("pictures need {reason}; install mjax[vision]", ImportError):
        from PIL import Image

    gray = vision.num_channels == 1
    image = Image.fromarray(picture.reshape(picture.shape[:2]) if gray else picture)
    height, width = scaled_size(*picture.shape[:2], vision)
    pixels = np.asarray(image.resize((width, height), _RESAMPLING)).reshape(height, width, -1)
    return patches_of_frames(np.stack([pixels] * FRAMES), vision, mean, std)


def patches_of_frames(
    frames: np.ndarray, vision: VisionConfig, mean: Sequence[float], std: Sequence[float]
) -> tuple[np.ndarray, Grid]:
    """`patches_of_picture` of uint8 frames [F, H, W, C] in their last size, an even number."""
    count, height, width, channels = frames.shape
    side = vision.patch_size
    grid = Grid(count // FRAMES, height // side, width // side)
    cut = (
        grid.frames,
        FRAMES,
        grid.rows // MERGED_SIDE,
        MERGED_SIDE,
        side,
        grid.columns // MERGED_SIDE,
        MERGED_SIDE,
        side,
    )
    normed = norm_pixels(frames, mean, std, np.empty(frames.shape, np.float32), 3)
    patches = normed.reshape(*cut, channels)
    patches = patches.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
    return patches.reshape(grid.patches, vision.numbers), grid


def packed_images(
    tokens: Sequence[Sequence[int]],
    images: Sequence[Iterable[tuple[np.ndarray, Grid]]],
    vision: VisionConfig,
) -> PackedImages:
    """The images of texts of equal length, [B, S] ids in which each has its tokens, in order.

    `images`: of each text, as `patches_of_picture` gives them. Rows are as long as the fullest.
    """
    images = [list(own) for own in images]
    most = max((sum(len(patches) for patches, _ in own) for own in images), default=0)
    length = max(_SMALLEST, 1 << max(most - 1, 0).bit_length())
    rows = []
    for ids, own in zip(tokens, images, strict=True):
        patches, grids = zip(*own, strict=True) if own else ((), ())
        rows.append(packed_row(np.asarray(ids), patches, grids, vision, length=length))
    return PackedImages(*(np.stack(parts) for parts in zip(*rows, strict=True)))
