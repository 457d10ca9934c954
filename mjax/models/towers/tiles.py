"""Images in tiles: what stands in a text for them (LLaVA-OneVision, arXiv 2408.03326).

A tile is an item of the tower. So a row of a batch has room for a fixed number of tiles, and any
number of features, which are those of its tiles or mixed from them. `data/multimodal/tiles.py` cuts
images.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mjax.config.schema.vision import VisionConfig

CORNERS = 4  # features of a grid that one of a smaller grid is interpolated from
NEWLINE, PADDING = -2, -1


class Tiled(NamedTuple):
    """The tiles of texts, and the features that stand in them in order.

    pixels: fp32 [B, I, H, W, C], zeros where a row has fewer tiles.
    corners: int32 [B, F, 4], of all features of a row's tiles in the order of reading, or NEWLINE
        or PADDING. weights: fp32 [B, F, 4]. A feature is the sum of the four, times their weights.
    """

    pixels: np.ndarray | jax.Array
    corners: np.ndarray | jax.Array
    weights: np.ndarray | jax.Array


class Features(NamedTuple):
    """The features of an image in a text: `corners` and `weights` [F, 4] of a `Tiled` row."""

    corners: np.ndarray
    weights: np.ndarray


def features_of_one_tile(vision: VisionConfig, number: int) -> Features:
    """The features of tile `number`, which is the whole of an image beside others."""
    each = vision.text_tokens()
    numbers = number * each + np.arange(each)
    return unmixed(np.append(numbers, NEWLINE))


def padded_features(texts: Sequence[Sequence[Features]]) -> tuple[np.ndarray, np.ndarray]:
    """`corners` and `weights` of a `Tiled`, from the features of the images of each text."""
    counts = [sum(len(image.corners) for image in text) for text in texts]
    shape = len(texts), max(1, *counts), CORNERS
    corners = np.full(shape, PADDING, np.int32)
    weights = np.zeros(shape, np.float32)
    for row, text in enumerate(texts):
        if text:
            found = joined(text)
            corners[row, : counts[row]] = found.corners
            weights[row, : counts[row]] = found.weights
    return corners, weights


def joined(parts: Sequence[Features]) -> Features:
    """Features one after the other."""
    corners, weights = zip(*parts, strict=True)
    return Features(np.concatenate(corners), np.concatenate(weights))


def unmixed(numbers: np.ndarray) -> Features:
    """The features of int [F] that no others are mixed with."""
    corners = np.repeat(numbers[:, None], CORNERS, axis=1)
    weights = np.zeros(corners.shape, np.float32)
    weights[:, 0] = 1
    return Features(corners.astype(np.int32), weights)


def mixed(
    features: jax.Array, places: jax.Array, weights: jax.Array, newline: jax.Array
) -> jax.Array:
    """Features [B, N, D] of tiles in their places in texts, [B, S, D]; zeros elsewhere.

    `places` and `weights` [B, S, 4] are as in `Tokens`. `newline` [D] has place N.
    """
    last = features.shape[1]
    found = jnp.zeros((), jnp.float32)
    for corner in range(CORNERS):
        place = places[..., corner, None].clip(0, last - 1)
        feature = jnp.take_along_axis(features, place, 1)
        weight = weights[..., corner, None]
        found = found + feature * weight
    first = places[..., :1]
    found = jnp.where(first >= 0, found, 0)
    found = found.astype(features.dtype)
    return jnp.where(first == last, newline, found)
