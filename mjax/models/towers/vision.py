"""How images enter a model: patches, a class token and learned positions (ViT, arXiv 2010.11929).

A patch is a token, and its embedding a product of its pixels with one matrix. Tokens lie along the
columns of a row: the class token, if there is one, the patches in the order of reading, and padding
that no token sees (segment 0). So images are cut over the mesh as texts are. The module belongs to
the edges of the model.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mjax.config.schema.model import ModelConfig
from mjax.config.schema.vision import VisionConfig
from mjax.models.attention.positions import look_up
from mjax.models.base.context import Context, Tokens
from mjax.models.base.norm import Norm
from mjax.models.base.params import declare, declare_bias, matrix, normal
from mjax.sharding.spec import ParamSpec

_CUBIC = -0.75  # the slope of the kernel that torch resizes with


class PatchEmbedding(nnx.Module):
    """[B, S, C*P*P] pixels of patches -> [B, S/tp, D], positions added.

    `cfg` has the sizes of the tower. `weight` is [C, P, P, D]. Column 0 of a row holds the class
    token, if there is one, and its pixels are not read. `positions` are of the class token, and of
    the grid of `model.vision.image_size`.
    """

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs):
        self.cfg = cfg
        width, vision = cfg.hidden_size, cfg.vision
        init = normal(cfg.initializer_range)
        shape = vision.num_channels, vision.patch_size, vision.patch_size, width
        axes = "patch", "patch", "patch", "embed"
        weight = matrix(shape, axes, "model.embed_patches.weight", inputs=3)
        self.weight = declare(rngs, weight, init)
        if vision.patch_bias:
            self.bias = declare_bias(rngs, (width,), ("embed",), "model.embed_patches.bias")
        if vision.embedding_norm:
            self.norm = Norm(cfg, (width,), ("embed",), "model.embed_images_norm", rngs)
        if vision.class_token:
            name = "model.embed_class"
            class_token = ParamSpec((width,), ("embed",), "embedding", hf=(name,))
            self.class_token = declare(rngs, class_token, init)
        positions = ParamSpec(
            shape=(vision.num_tokens(), width),
            axes=("positions", "embed"),
            role="embedding",
            hf=("model.embed_image_positions",),
        )
        self.positions = declare(rngs, positions, init)

    def __call__(self, patches: jax.Array, tokens: Tokens, ctx: Context, grid: int) -> jax.Array:
        """`grid`: the patches along a side of an image."""
        parallel = ctx.parallel
        weight = self.weight[...]
        pixels = parallel.shard_seq(patches).astype(weight.dtype)
        x = pixels @ weight.reshape(-1, weight.shape[-1])
        if self.cfg.vision.patch_bias:
            x = x + self.bias[...]
        if self.cfg.vision.class_token:
            columns = parallel.shard_seq(tokens.columns, 0)
            is_class = columns[:, None] == 0
            x = jnp.where(is_class, self.class_token[...], x)
        positions = parallel.shard_seq(tokens.positions)
        x = x + look_up(self.table(grid), positions)
        return self.norm(x) if self.cfg.vision.embedding_norm else x

    def table(self, grid: int) -> jax.Array:
        """The positions of a grid of `grid` x `grid` patches, behind that of the class token."""
        table, known = self.positions[...], self.cfg.vision.grid()
        if grid == known:
            return table
        resize = jnp.asarray(resize_matrix(known, grid), jnp.float32)
        before = int(self.cfg.vision.class_token)
        square = table[before:].reshape(known, known, -1)
        resized = jnp.einsum("ah,bw,hwd->abd", resize, resize, square, precision="highest")
        resized = resized.reshape(grid * grid, -1)
        return jnp.concatenate([table[:before], resized.astype(table.dtype)])


@functools.cache
def resize_matrix(old: int, new: int) -> np.ndarray:
    """float64 [new, old]: bicubic interpolation along a line, as torch does it.

    Pixel centers are aligned, and what lies outside has the value of the border.
    """
    matrix = np.zeros((new, old))
    rows = np.arange(new)
    centers = (rows + 0.5) * old / new
    centers -= 0.5
    for tap in range(-1, 3):
        places = np.floor(centers) + tap
        weights = _cubic(np.abs(centers - places))
        columns = np.clip(places, 0, old - 1)
        np.add.at(matrix, (rows, columns.astype(int)), weights)
    return matrix


def _cubic(distances: np.ndarray) -> np.ndarray:
    """Keys' kernel of cubic convolution, of distances up to 2."""
    a = _CUBIC
    inner = a + 2, -a - 3, 0, 1
    outer = a, -5 * a, 8 * a, -4 * a
    near = np.polyval(inner, distances)
    far = np.polyval(outer, distances)
    return np.where(distances <= 1, near, far)


def patches_of(images: np.ndarray, patch_size: int) -> np.ndarray:
    """[B, H, W, C] -> [B, H/P * W/P, C*P*P]: patches in the order of reading.

    The numbers of a patch are channel by channel. Pixels left over at the right and the lower
    border are cut off.
    """
    batch, height, width, channels = images.shape
    rows = height // patch_size
    columns = width // patch_size
    images = images[:, : rows * patch_size, : columns * patch_size]
    shape = (
        batch,
        rows,
        patch_size,
        columns,
        patch_size,
        channels,
    )
    cut = images.reshape(shape)
    cut = cut.transpose(0, 1, 3, 5, 2, 4)
    return cut.reshape(batch, rows * columns, -1)


def pixel_shuffle(x: jax.Array) -> jax.Array:
    """[n, s*s, c] -> [n, s*s/4, 4c]: each square of four patches becomes one (InternVL, Megatron).

    Patches are in the order of reading, before and after. Channels are those of the upper left
    patch, of the upper right, of the lower left and of the lower right.
    """
    n, count, channels = x.shape
    half = math.isqrt(count) // 2
    x = x.reshape(n, half, 2, half, 2, channels)
    x = x.transpose(0, 1, 3, 2, 4, 5)
    return x.reshape(n, half * half, 4 * channels)


def rows_of_images(
    images: np.ndarray | jax.Array, vision: VisionConfig, length: int
) -> np.ndarray | jax.Array:
    """[B, H, W, C] -> rows [B, length, C*P*P]: nothing for a class token, the patches, padding."""
    xp = np if isinstance(images, np.ndarray) else jnp
    patches = patches_of(images, vision.patch_size)
    behind = length - vision.leading - patches.shape[1]
    return xp.pad(patches, ((0, 0), (vision.leading, behind), (0, 0)))


def image_fields(images: np.ndarray, vision: VisionConfig, length: int) -> dict[str, np.ndarray]:
    """`fields_of_rows` of rows of `length` columns that hold an image each, fp32 [B, H, W, C]."""
    patches = rows_of_images(images, vision, length).astype(np.float32)
    return fields_of_rows(patches, vision.num_tokens(images.shape[1]))


def fields_of_rows(patches: np.ndarray, count: int) -> dict[str, np.ndarray]:
    """`patches` as given, [B, S, C*P*P], of which `count` columns are an image's.

    And int32 [B, S] `segment_ids`, 0 in padding, and `positions`.
    """
    columns = np.arange(patches.shape[1], dtype=np.int32)
    columns = np.broadcast_to(columns, patches.shape[:2])
    real = columns < count
    return {
        "patches": patches,
        "segment_ids": real.astype(np.int32),
        "positions": np.where(real, columns, 0),
    }
