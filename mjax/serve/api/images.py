"""Images in messages: data: URLs as the pixels that a model's tower reads."""

import base64
from collections.abc import Callable, Sequence

import numpy as np

from mjax.serve.base.wire import ImageFacts
from mjax.serve.protocol.chat_request import Message, MessagePart
from mjax.serve.protocol.errors import ApiError

IMAGE_MARK = "<image>"  # what stands for an image in a prompt
NAME = "messages.content.image_url"


def images_of(image: ImageFacts | None, messages: Sequence[Message]) -> list[np.ndarray]:
    """The images of messages, fp32 [H, W, C]. Raises `ApiError` for what cannot be read."""
    lists = [message.content for message in messages if isinstance(message.content, list)]
    parts = [part for parts in lists for part in parts if part.type == "image_url"]
    if parts and image is None:
        raise ApiError(400, f"{NAME}: this model reads no images in messages", NAME)
    return [_pixels(part, image) for part in parts]


def _pixels(part: MessagePart, image: ImageFacts) -> np.ndarray:
    from mjax.data.multimodal.pixels import decode_image, norm_image

    url = part.image_url if isinstance(part.image_url, str | None) else part.image_url.url
    kind, _, data = (url or "").partition(",")
    if not kind.startswith("data:") or not kind.endswith(";base64"):
        message = "give the image itself, data:image/png;base64,..: no address is fetched"
        raise ApiError(400, f"{NAME}: {message}", NAME)
    try:
        pixels = decode_image(base64.b64decode(data, validate=True), image.side, image.channels)
    except Exception:  # Pillow raises errors of many kinds
        raise ApiError(400, f"{NAME}: it is no image that can be read", NAME) from None
    return norm_image(pixels, image.mean, image.std)


def expanded_ids(
    encode: Callable[[str], list[int]],
    text: str,
    ids: Sequence[int],
    image: ImageFacts | None,
    count: int,
) -> list[int]:
    """The ids of a text with the tokens of `count` images in the places of their marks.

    `ids`: of the text as `encode` made them. Raises `ApiError` where marks are not those images.
    """
    if image is None:
        return [*ids]
    if text.count(IMAGE_MARK) != count:
        raise ApiError(
            400, f"messages: a text has {IMAGE_MARK}, which stands for an image", "messages"
        )
    if encode(IMAGE_MARK) == [image.tokens[0]]:
        found = [one for id in ids for one in (image.tokens if id == image.tokens[0] else [id])]
    else:
        first, *rest = text.split(IMAGE_MARK)
        found = [*encode(first)]
        for part in rest:
            found += [*image.tokens, *encode(part)]
    if sum(id == image.tokens[0] for id in found) != count * len(image.tokens):
        raise ApiError(400, "messages: a text has the token of an image", "messages")
    return found
