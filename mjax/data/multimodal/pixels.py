"""Encoded images to pixels, with Pillow; no JAX is imported, for processes that only decode.

Invariant: the pixels are a function of the bytes and the sizes, whoever decodes them.
"""

import io
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image

_NARROWEST = 200  # times that a side of a picture may be as long as the other
_SPARE = 3.0  # a large image is first reduced by whole factors, to no less than so many times


def decode_image(encoded: bytes | np.ndarray, side: int, channels: int) -> np.ndarray:
    """uint8 [side, side, channels]: the shorter side resized, the center cut out.

    Raises what Pillow raises for what is no image, and `ValueError` for pixels beyond 8 bits.
    """
    image = _opened(encoded)
    least = int(_SPARE * side)
    image.draft(None, (least, least))  # JPEG alone: it is decoded at a half, a quarter, ..
    square = _center_square(_of_8_bits(image, channels), side)
    return np.asarray(square).reshape(side, side, -1)


def decode_picture(encoded: bytes | np.ndarray, channels: int) -> np.ndarray:
    """uint8 [H, W, 3], or [H, W] of one channel, in its own size; raises as `decode_image`."""
    return np.asarray(_of_8_bits(_opened(encoded), channels))


class Bounds(NamedTuple):
    """Sizes that a picture is scaled to: multiples of `unit`, `least` to `most` pixels in all."""

    unit: int
    least: int
    most: int

    def nearest(self, height: int, width: int) -> tuple[int, int]:
        """The size for a picture, of nearly its proportions. Raises `ValueError` for a narrow one.

        It is Qwen-VL's: a side is rounded, and up or down where the pixels are too few or too many.
        """
        if max(height, width) > _NARROWEST * min(height, width):
            raise ValueError(f"{height} x {width} pixels are too narrow")
        sides = height / self.unit, width / self.unit
        found = [round(side) for side in sides]
        pixels = math.prod(found) * self.unit**2
        if pixels > self.most:
            ratio = math.sqrt(height * width / self.most)
            found = [max(math.floor(side / ratio), 1) for side in sides]
        elif pixels < self.least:
            ratio = math.sqrt(self.least / (height * width))
            found = [math.ceil(side * ratio) for side in sides]
        return found[0] * self.unit, found[1] * self.unit


def decode_scaled(encoded: bytes | np.ndarray, channels: int, bounds: Bounds) -> np.ndarray:
    """uint8 [H, W, channels] in the nearest size within bounds; raises as `decode_image`."""
    image = _of_8_bits(_opened(encoded), channels)
    height, width = bounds.nearest(image.height, image.width)
    return np.asarray(image.resize((width, height), 3)).reshape(height, width, -1)  # 3: bicubic


def size_of_picture(encoded: bytes | np.ndarray) -> tuple[int, int]:
    """(height, width) of a picture that is not decoded; raises as `decode_image`."""
    image = _opened(encoded)
    return image.height, image.width


def _opened(encoded: bytes | np.ndarray) -> "Image":
    from PIL import Image, UnidentifiedImageError

    if isinstance(encoded, np.ndarray):
        return Image.fromarray(encoded)
    try:
        return Image.open(io.BytesIO(encoded))
    except UnidentifiedImageError:  # Pillow's words name an object in memory
        raise ValueError("no image that Pillow knows") from None


def _of_8_bits(image: "Image", channels: int) -> "Image":
    """An image of one or three channels; Pillow cuts off wider numbers, which are refused."""
    if image.mode.startswith(("F", "I")):
        wide = np.asarray(image)
        least, most = wide.min(), wide.max()  # NaN if any is
        is_of_8_bits = least >= 0 and most <= 255
        if not is_of_8_bits or (image.mode == "F" and 0 < most <= 1):
            raise ValueError(f"pixels from {least:g} to {most:g}; give whole numbers of 8 bits")
    return image.convert("L" if channels == 1 else "RGB")


def _center_square(image: "Image", side: int) -> "Image":
    """The center of an image as a square, bicubically resized."""
    if image.size == (side, side):
        return image
    least = min(image.size)
    left, top = ((length - least) / 2 for length in image.size)
    box = left, top, left + least, top + least
    return image.resize((side, side), resample=3, box=box, reducing_gap=_SPARE)  # 3: bicubic


def norm_pixels(
    pixels: np.ndarray, mean: Sequence[float], std: Sequence[float], out: np.ndarray, axis: int
) -> np.ndarray:
    """Write uint8 pixels to fp32 `out`: as 0 to 1, less the mean, over the deviation.

    Both are one number or one a channel, and channels lie along `axis`. Returns `out`.
    """
    shape = [1] * pixels.ndim
    shape[axis] = -1
    scale = 1 / (255 * np.asarray(std))
    shift = -np.asarray(mean) / std
    np.multiply(pixels, scale.astype(np.float32).reshape(shape), out=out, dtype=np.float32)
    out += shift.astype(np.float32).reshape(shape)
    return out


def norm_image(pixels: np.ndarray, mean: Sequence[float], std: Sequence[float]) -> np.ndarray:
    """fp32 [H, W, C] of uint8 pixels by `norm_pixels`."""
    return norm_pixels(pixels, mean, std, np.empty(pixels.shape, np.float32), 2)
