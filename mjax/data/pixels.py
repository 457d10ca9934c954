"""Encoded images to pixels, with Pillow; no JAX is imported, for processes that only decode.

Invariant: the pixels are a function of the bytes and the sizes, whoever decodes them.
"""

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image

_SPARE = 3.0  # a large image is first reduced by whole factors, to no less than so many times


def decode_image(encoded: bytes | np.ndarray, side: int, channels: int) -> np.ndarray:
    """uint8 [side, side, channels]: the shorter side resized, the center cut out.

    Raises what Pillow raises for what is no image.
    """
    from PIL import Image

    if isinstance(encoded, np.ndarray):
        image = Image.fromarray(encoded)
    else:
        image = Image.open(io.BytesIO(encoded))
        least = int(_SPARE * side)
        image.draft(None, (least, least))  # JPEG alone: it is decoded at a half, a quarter, ..
    square = _square(image.convert("L" if channels == 1 else "RGB"), side)
    return np.asarray(square).reshape(side, side, -1)


def _square(image: "Image", side: int) -> "Image":
    """The center of an image as a square, bicubically resized."""
    if image.size == (side, side):
        return image
    least = min(image.size)
    left, top = ((length - least) / 2 for length in image.size)
    box = left, top, left + least, top + least
    return image.resize((side, side), resample=3, box=box, reducing_gap=_SPARE)  # 3: bicubic


def norm_pixels(
    pixels: np.ndarray, mean: Sequence[float], std: Sequence[float], out: np.ndarray | None = None
) -> np.ndarray:
    """fp32 [H, W, C]: uint8 pixels as 0 to 1, without the mean, divided by the deviation.

    `mean` and `std` are one number or one a channel. `out`: where it is written. It is fastest
    where each channel of `out` is contiguous.
    """
    out = np.empty(pixels.shape, np.float32) if out is None else out
    levels = np.arange(256, dtype=np.float32)[:, None] / 255
    table = ((levels - mean) / std).astype(np.float32)  # of fp64 in between
    for channel in range(pixels.shape[2]):
        levels = np.ascontiguousarray(table[:, channel % table.shape[1]])
        np.take(levels, pixels[..., channel], out=out[..., channel], mode="clip")
    return out
