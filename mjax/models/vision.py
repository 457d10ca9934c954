"""How images enter a model: patches, a class token and learned positions (ViT, arXiv 2010.11929).

A patch is a token, and its embedding a product of its pixels with one matrix. Tokens lie along the
columns of a row: the class token, the patches in the order of reading, and padding that no token
sees (segment 0). So images are cut over the mesh as texts are. The module belongs to the edges of
the model.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mjax.config.model_schema import ModelConfig
from mjax.models.context import Context, Tokens
from mjax.models.params import declare, declare_bias, normal
from mjax.sharding.spec import ParamSpec

_CUBIC = -0.75  # the slope of the kernel that torch resizes with


class PatchEmbedding(nnx.Module):
    """[B, S, C*P*P] pixels of patches -> [B, S/tp, D], positions added.

    `weight` is [C, P, P, D]. The row of column 0 holds the class token, and its pixels are not
    read. `positions` are of the class token, and of the grid of `model.vision.image_size`.
    """

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs):
        self.cfg = cfg
        width, vision = cfg.hidden_size, cfg.vision
        init = normal(cfg.initializer_range)
        weight = ParamSpec(
            shape=(vision.num_channels, vision.patch_size, vision.patch_size, width),
            axes=("patch", "patch", "patch", "embed"),
            role="matrix",
            inputs=3,
            hf=("model.embed_patches.weight",),
        )
        self.weight = declare(rngs, weight, init)
        self.bias = declare_bias(rngs, (width,), ("embed",), "model.embed_patches.bias")
        name = "model.embed_class"
        class_token = ParamSpec((width,), ("embed",), "embedding", hf=(name,))
        self.class_token = declare(rngs, class_token, init)
        positions = ParamSpec(
            shape=(vision.num_tokens(), width),
            axes=("positions", "embed"),
            role="embedding",
            hf=("model.embed_positions",),
        )
        self.positions = declare(rngs, positions, init)

    def __call__(self, patches: jax.Array, tokens: Tokens, ctx: Context, grid: int) -> jax.Array:
        """`grid`: the patches along a side of an image."""
        parallel = ctx.parallel
        weight = self.weight[...]
        pixels = parallel.shard_seq(patches).astype(weight.dtype)
        x = pixels @ weight.reshape(-1, weight.shape[-1]) + self.bias[...]
        is_class = parallel.shard(tokens.columns, "tp", 0) == 0
        x = jnp.where(is_class[:, None], self.class_token[...], x)
        positions = parallel.shard_seq(tokens.positions)
        return x + jnp.take(self.table(grid), positions, axis=0)

    def table(self, grid: int) -> jax.Array:
        """The positions of a grid of `grid` x `grid` patches behind that of the class token."""
        table, known = self.positions[...], self.cfg.vision.grid()
        if grid == known:
            return table
        resize = jnp.asarray(resize_matrix(known, grid), jnp.float32)
        square = table[1:].reshape(known, known, -1)
        resized = jnp.einsum("ah,bw,hwd->abd", resize, resize, square, precision="highest")
        resized = resized.reshape(grid * grid, -1)
        return jnp.concatenate([table[:1], resized.astype(table.dtype)])


@functools.cache
def resize_matrix(old: int, new: int) -> np.ndarray:
    """float64 [new, old]: bicubic interpolation along a line, as torch does it.

    Pixel centers are aligned, and what lies outside has the value of the border.
    """
    matrix = np.zeros((new, old))
    for row in range(new):
        center = (row + 0.5) * old / new - 0.5
        first = int(np.floor(center)) - 1
        for place in range(first, first + 4):
            matrix[row, min(max(place, 0), old - 1)] += _cubic(abs(center - place))
    return matrix


def _cubic(distance: float) -> float:
    """Keys' kernel of cubic convolution."""
    a, d = _CUBIC, distance
    if d <= 1:
        return ((a + 2) * d - (a + 3)) * d * d + 1
    if d < 2:
        return ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return 0.0


def patches_of(images: np.ndarray, patch_size: int) -> np.ndarray:
    """[..., H, W, C] -> [..., H/P * W/P, C*P*P]: patches in the order of reading.

    The numbers of a patch are channel by channel.
    """
    *lead, height, width, channels = images.shape
    rows, columns = height // patch_size, width // patch_size
    cut = images.reshape(*lead, rows, patch_size, columns, patch_size, channels)
    n = len(lead)
    order = (*range(n), n, n + 2, n + 4, n + 1, n + 3)
    return cut.transpose(order).reshape(*lead, rows * columns, -1)


def image_fields(images: np.ndarray, patch_size: int, length: int) -> dict[str, np.ndarray]:
    """Rows of `length` columns that hold an image each, fp32 [B, H, W, C].

    `patches` [B, S, C*P*P], and int32 [B, S] `segment_ids`, 0 in padding, and `positions`.
    """
    patches = patches_of(images, patch_size)
    rows, count, pixels = patches.shape
    field = np.zeros((rows, length, pixels), np.float32)
    field[:, 1 : 1 + count] = patches
    columns = np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length))
    real = columns <= count
    return {
        "patches": field,
        "segment_ids": real.astype(np.int32),
        "positions": np.where(real, columns, 0),
    }
