"""Qwen-VL's tower: patches of images of any size in one row, and their merger into a text.

A patch is a product of its pixels in two frames with one matrix. It turns by its row and column,
and sees its image, or its window of it (arXiv 2502.13923). Learned positions, if there are any, are
those of one grid, between which an image's own are interpolated (Qwen3-VL). The merger makes one
token of four patches, which lie together (`image_places.py`), so no device needs those of another.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx

from mjax.config.languages.layer_pattern import BRANCHES, DEEPSTACK, branches_of
from mjax.config.schema.model import ModelConfig
from mjax.config.schema.vision import FRAMES, MERGED
from mjax.models.attention.calls import patches_of_window
from mjax.models.attention.positions import look_up
from mjax.models.attention.self_attention import Attention
from mjax.models.base.branch import BranchCache, BranchInputs, BranchModule, BranchOutput
from mjax.models.base.context import Context, Tokens, tokens_of
from mjax.models.base.norm import Norm
from mjax.models.base.params import declare, declare_bias, matrix, normal
from mjax.models.towers.image_places import TIME_AXES, PackedImages
from mjax.models.towers.projector import in_order, projected
from mjax.sharding.spec import ParamSpec

_CORNERS = (False, False), (False, True), (True, False), (True, True)


class PackedPatchEmbedding(nnx.Module):
    """[B, T, C*2*P*P] pixels of patches -> [B, T/tp, D], learned positions added if it has some.

    `cfg` has the sizes of the tower. `weight` is [C, 2, P, P, D].
    """

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs):
        self.cfg = cfg
        width, vision = cfg.hidden_size, cfg.vision
        init = normal(cfg.initializer_range)
        side = vision.patch_size
        shape = vision.num_channels, FRAMES, side, side, width
        axes = "patch", "patch", "patch", "patch", "embed"
        weight = matrix(shape, axes, "model.embed_patches.weight", inputs=4)
        self.weight = declare(rngs, weight, init)
        if vision.patch_bias:
            self.bias = declare_bias(rngs, (width,), ("embed",), "model.embed_patches.bias")
        if vision.image_size:
            positions = ParamSpec(
                shape=(vision.grid() ** 2, width),
                axes=("positions", "embed"),
                role="embedding",
                hf=("model.embed_image_positions",),
            )
            self.positions = declare(rngs, positions, init)

    def __call__(self, patches: jax.Array, tokens: Tokens, ctx: Context, grid: int) -> jax.Array:
        """`grid`: the patches along a side of what learned positions are for."""
        parallel = ctx.parallel
        weight = self.weight[...]
        pixels = parallel.shard_seq(patches).astype(weight.dtype)
        x = pixels @ weight.reshape(-1, weight.shape[-1])
        if self.cfg.vision.patch_bias:
            x = x + self.bias[...]
        if self.cfg.vision.image_size:
            places = parallel.shard_seq(tokens.axes)
            positions = self.interpolated(places, grid)
            x = x + positions.astype(x.dtype)
        return x

    def interpolated(self, places: jax.Array, grid: int) -> jax.Array:
        """Learned positions of patches by their rows, columns and images' sizes, bilinearly."""
        table = self.positions[...]
        sizes = jnp.maximum(places[..., 2:4] - 1, 1)
        points = places[..., :2].astype(jnp.float32)
        points = points * (grid - 1) / sizes
        before = jnp.floor(points)
        share = points - before
        first = before.astype(jnp.int32)
        found = jnp.zeros((), jnp.float32)
        for corner in _CORNERS:
            is_behind = jnp.array(corner)
            weights = jnp.where(is_behind, share, 1 - share)
            weight = weights.prod(-1, keepdims=True)
            at = jnp.minimum(first + is_behind, grid - 1)
            rows = at[..., 0] * grid + at[..., 1]
            found = found + weight * look_up(table, rows)
        return found


class PatchAttention(Attention):
    """Attention of patches to those of their image, or of their window."""

    hf_name = "attn"

    @staticmethod
    def flops(cfg: ModelConfig, word: str, seq_length: int) -> float:
        seen, sizes = seq_length, cfg.attention
        if BRANCHES[word].within == "windows":
            seen = min(patches_of_window(cfg.vision), seq_length)
        return 12.0 * sizes.num_attention_heads * sizes.head_dim * seen


class PatchMerger(BranchModule):
    """[B, S/tp, D] -> [B, S/tp, D]: the merged patches of images where they stand, zeros elsewhere.

    It reads the tower's last layer, [B, T/tp, D'], after a norm, four patches as one.
    """

    norms_merged = False

    def __init__(self, cfg: ModelConfig, out_std: float, rngs: nnx.Rngs):
        self.cfg = cfg
        init, tower = normal(cfg.initializer_range), cfg.of_modality("vision")
        width, wide = tower.hidden_size, MERGED * tower.hidden_size
        normed = wide if self.norms_merged else width
        self.norm = Norm(tower, (normed,), ("embed",), "tower_norm", rngs)
        up = matrix(
            (wide, wide),
            ("embed", "mlp"),
            "linear_1.weight",
            matmul="projector_up",
        )
        shape = wide, cfg.hidden_size
        down = matrix(
            shape,
            ("mlp", "embed"),
            "linear_2.weight",
            matmul="projector_down",
        )
        self.up = declare(rngs, up, init)
        self.up_bias = declare_bias(rngs, (wide,), ("mlp",), "linear_1.bias")
        self.down = declare(rngs, down, init)
        self.down_bias = declare_bias(rngs, shape[1:], ("embed",), "linear_2.bias")

    @jax.named_scope("patch_merger")
    def __call__(
        self, x: jax.Array, inputs: BranchInputs, cache: BranchCache = None
    ) -> BranchOutput:
        source, ctx = inputs.source, inputs.ctx
        if source.x is None:  # the images of a text are in the caches of its attention
            return BranchOutput(jnp.zeros_like(x))
        h = self.own_part(source.x, inputs)
        h = h if self.norms_merged else self.norm(h)
        rows, patches, width = h.shape
        h = h.reshape(rows, patches // MERGED, MERGED * width)
        h = self.norm(h) if self.norms_merged else h
        columns = source.tokens.columns[::MERGED]
        tokens = replace(source.tokens, columns=columns // MERGED)
        y = projected(self, h, tokens, ctx)
        merged = source._replace(tokens=tokens)
        features = in_order(y, merged, ctx)
        places = inputs.tokens.features["vision"]
        places = ctx.parallel.shard_seq(places)
        places = places[..., None]
        found = jnp.take_along_axis(features, jnp.maximum(places, 0), 1)
        return BranchOutput(jnp.where(places >= 0, found, 0))

    def own_part(self, x: jax.Array, inputs: BranchInputs) -> jax.Array:
        """The activations to merge, [B, T/tp, D'], of the stream that the layer reads."""
        return x


class DeepMerger(PatchMerger):
    """A merger of the output of an earlier layer of the tower, after a norm of four patches.

    The n-th of a model merges the n-th output that is kept (DeepStack, arXiv 2406.04334).
    """

    norms_merged = True

    def own_part(self, x: jax.Array, inputs: BranchInputs) -> jax.Array:
        kinds = self.cfg.layer_kinds
        own = [n for n, kind in enumerate(kinds) if "deep_merger" in branches_of(kind)]
        number = jnp.searchsorted(jnp.array(own), inputs.layer)
        width = self.cfg.vision.hidden_size
        return jax.lax.dynamic_slice_in_dim(x, number * width, width, 2)


def beside_packed(
    text: Tokens,
    places: jax.Array,
    features: jax.Array,
    axes: jax.Array,
    columns: jax.Array | None = None,
) -> Tokens:
    """Facts about a text's tokens, with those about the patches of its images (`PackedImages`)."""
    patches = tokens_of(places.shape[:2], rows=text.rows, columns=columns, key=text.key)
    patches = replace(
        patches,
        axes=places[..., :4],
        segments=places[..., 4],
        windows=places[..., 5],
    )
    others = text.others | {"vision": patches, DEEPSTACK: patches}
    found = text.features | {"vision": features}
    return replace(text, axes=axes, others=others, features=found)


def beside_given_packed(
    tokens: jax.Array, text: Tokens, images: PackedImages
) -> tuple[Tokens, jax.Array]:
    """Facts about tokens [B, S] beside images, and their patches [B, T, N].

    The images' text may be shorter than `tokens`, whose rest is text, and is -1 in what is padding.
    """
    size = tokens.shape[1]
    length = min(size, images.features.shape[1])
    more = size - length
    features = jnp.asarray(images.features)[:, :length]
    features = jnp.pad(features, ((0, 0), (0, more)), constant_values=-1)
    given = jnp.asarray(images.axes)[:, :length]  # a scatter makes XLA (jax 0.11.2) crash on meshes
    given = jnp.pad(given, ((0, 0), (0, more), (0, 0)))
    is_given = (tokens >= 0) & (jnp.arange(size) < length)
    axes = jnp.stack([text.positions] * TIME_AXES, -1)
    axes = jnp.where(is_given[..., None], given, axes)
    places = jnp.asarray(images.places)
    return beside_packed(text, places, features, axes), images.patches
