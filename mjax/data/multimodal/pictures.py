"""Pictures and videos of any size as patches, for models with `model.vision.max_patches` (Qwen-VL).

A picture is scaled, with nearly its own proportions, such that its sides are multiples of two
patches and its pixels lie within `min_pixels` and `max_pixels`. A patch holds two frames, which are
equal in a picture. Pixels are those of transformers' Qwen2VLImageProcessorPil.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from mjax.config.schema.vision import FRAMES, VisionConfig
from mjax.data.multimodal.decoders import Decode, attempt
from mjax.data.multimodal.pixels import Bounds, decode_scaled, norm_pixels, size_of_picture
from mjax.data.multimodal.sources import Item
from mjax.data.multimodal.tiles import PictureReader
from mjax.errors import UserError
from mjax.models.towers.image_places import MERGED_SIDE, CutImages, Grid, PackedImages, packed_row

_SMALLEST = 16  # patches of a row


class Video(NamedTuple):
    """A video in a text: the ids that stand for it, and the patches of each run of its tokens."""

    ids: list[int]
    cut: CutImages


def bounds_of(vision: VisionConfig) -> Bounds:
    """The sizes of pictures of a model."""
    return Bounds(MERGED_SIDE * vision.patch_size, vision.min_pixels, vision.max_pixels)


class ScaledReader(PictureReader):
    """Decodes pictures in the sizes that patches of a model fill."""

    @property
    def decode(self) -> Decode:
        """Makes uint8 [H, W, C] of an encoded picture; can be pickled."""
        vision = self.cfg.model.vision
        return partial(decode_scaled, channels=vision.num_channels, bounds=bounds_of(vision))

    def flaw(self, decoded: np.ndarray) -> str | None:
        return None


def patches_of_picture(
    picture: bytes | np.ndarray,
    vision: VisionConfig,
    mean: Sequence[float] = (0.5,),
    std: Sequence[float] = (0.5,),
) -> tuple[np.ndarray, Grid]:
    """(patches fp32 [n, C*2*P*P] of a picture, four of a merged token together, and its grid).

    It is encoded, or uint8 [H, W, C]. `mean` and `std` are of pixels from 0 to 1.
    """
    pixels = decode_scaled(picture, vision.num_channels, bounds_of(vision))
    return patches_of_frames(np.stack([pixels] * FRAMES), vision, mean, std)


def tokens_of_picture(item: Item, vision: VisionConfig) -> int:
    """The tokens of a text for a picture, by its size alone; 1 for one that cannot be used."""
    size = attempt(lambda: bounds_of(vision).nearest(*size_of_picture(item.read())))
    if isinstance(size, str):
        return 1
    unit = MERGED_SIDE * vision.patch_size
    return size[0] // unit * (size[1] // unit)


def patches_of_frames(
    frames: np.ndarray, vision: VisionConfig, mean: Sequence[float], std: Sequence[float]
) -> tuple[np.ndarray, Grid]:
    """`patches_of_picture` of uint8 frames [F, H, W, C] in their last size, an even number."""
    count, height, width, channels = frames.shape
    side = vision.patch_size
    grid = Grid(count // FRAMES, height // side, width // side)
    pairs, rows, columns = grid.merged
    normed = norm_pixels(frames, mean, std, np.empty(frames.shape, np.float32), 3)
    cut = pairs, FRAMES, rows, MERGED_SIDE, side, columns, MERGED_SIDE, side
    patches = normed.reshape(*cut, channels)
    patches = patches.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
    return patches.reshape(grid.patches, vision.numbers), grid


def with_items_in_place(
    ids: Sequence[int], images: CutImages, vision: VisionConfig, videos: Sequence[Video] = ()
) -> tuple[list[int], list[int], list]:
    """Ids in which images and videos have all their tokens; their places in `ids`; what they are.

    An image or a video is one id before. Raises `UserError` where there are fewer than ids.
    """
    found, places, cut = [], [], []
    left = {vision.image_token_id: iter(images), vision.video_token_id: iter(videos)}
    for place, id in enumerate(ids):
        own = [id]
        if id is not None and id in left:
            item = next(left[id], None)
            if item is None:
                raise UserError("a text has more <image> or <video> than are given; give one each")
            own = item.ids if isinstance(item, Video) else own * item[1].tokens
            cut += item.cut if isinstance(item, Video) else [item]
        found += own
        places += [place] * len(own)
    return found, places, cut


def packed_prompt(
    ids: Sequence[int], images: CutImages, vision: VisionConfig, videos: Sequence[Video] = ()
) -> tuple[list[int], PackedImages]:
    """A prompt with all tokens of its images and videos, and these, for `Engine.add`."""
    ids, _, cut = with_items_in_place(ids, images, vision, videos)
    return ids, PackedImages(*(array[0] for array in packed_images([ids], [cut], vision)))


def packed_images(
    tokens: Sequence[Sequence[int]], images: Sequence[CutImages], vision: VisionConfig
) -> PackedImages:
    """The images of texts of equal length, [B, S] ids in which each has its tokens, in order.

    `images`: of each text, as `patches_of_picture` gives them. Rows are as long as the fullest.
    """
    length = _SMALLEST
    for own in images:
        while length < sum(grid.patches for _, grid in own):
            length *= 2
    rows = []
    for ids, own in zip(tokens, images, strict=True):
        rows.append(packed_row(np.asarray(ids), own, vision, length=length))
    return PackedImages(*(np.stack(parts) for parts in zip(*rows, strict=True)))
