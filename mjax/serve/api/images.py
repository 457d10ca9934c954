"""Images in messages: data: URLs as the pixels that a model's tower reads."""

import base64
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from mjax.serve.base.wire import ImageFacts
from mjax.serve.protocol.chat_request import Message, MessagePart
from mjax.serve.protocol.errors import ApiError

IMAGE_MARK = "<image>"  # what stands for an image in a prompt
NAME = "messages.content.image_url"


def images_of(image: ImageFacts | None, messages: Sequence[Message]) -> list[np.ndarray]:
    """The images of messages [H, W, C], fp32; or uint8, in sizes of their own, as engines cut them.

    Raises `ApiError` for what cannot be read.
    """
    lists = [message.content for message in messages if isinstance(message.content, list)]
    parts = [part for parts in lists for part in parts if part.type == "image_url"]
    if parts and image is None:
        raise ApiError(400, f"{NAME}: this model reads no images in messages", NAME)
    return [_pixels(part, image) for part in parts]


def _pixels(part: MessagePart, image: ImageFacts) -> np.ndarray:
    from mjax.data.multimodal.pixels import Bounds, decode_image, decode_scaled, norm_image

    url = part.image_url if isinstance(part.image_url, str | None) else part.image_url.url
    kind, _, data = (url or "").partition(",")
    if not kind.startswith("data:") or not kind.endswith(";base64"):
        message = "give the image itself, data:image/png;base64,..: no address is fetched"
        raise ApiError(400, f"{NAME}: {message}", NAME)
    try:
        encoded = base64.b64decode(data, validate=True)
        if image.bounds is not None:
            return decode_scaled(encoded, image.channels, Bounds(*image.bounds))
        pixels = decode_image(encoded, image.side, image.channels)
    except Exception:  # Pillow raises errors of many kinds
        raise ApiError(400, f"{NAME}: it is no image that can be read", NAME) from None
    return norm_image(pixels, image.mean, image.std)


def expanded_ids(
    encode: Callable[[str], list[int]],
    text: str,
    ids: Sequence[int],
    image: ImageFacts | None,
    images: Sequence[np.ndarray],
) -> list[int]:
    """The ids of a text with the tokens of images in the places of their marks.

    `ids`: of the text as `encode` made them. A template may write the token of an image itself.
    Raises `ApiError` where marks are not those images.
    """
    if image is None:
        return [*ids]
    token, runs = image.tokens[0], list(map(image.run, images))
    if text.count(IMAGE_MARK) == 0 or encode(IMAGE_MARK) == [token]:
        places = [at for at, id in enumerate(ids) if id == token]
        parts = [ids[first + 1 : last] for first, last in pairwise([-1, *places, len(ids)])]
    else:
        parts = list(map(encode, text.split(IMAGE_MARK)))
        if any(token in part for part in parts):
            raise ApiError(400, "messages: a text has the token of an image", "messages")
    if len(parts) != len(runs) + 1:
        raise ApiError(
            400, f"messages: a text has {IMAGE_MARK}, which stands for an image", "messages"
        )
    behind = zip(runs, parts[1:], strict=True)
    return [*parts[0], *(id for run, part in behind for id in (*run, *part))]
