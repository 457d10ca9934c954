"""THE table of modalities: images and sounds, and the places of their tokens in a text.

An item is an image or a sound. Its row of a tower has some leading tokens, those that stand in the
text, and padding. A new modality is a group of sizes (`config/schema/towers.py`), an embedding, the
letters of its tower and projector (`config/languages/layer_pattern.py`), and a row here.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mjax.config.schema.model import ModelConfig
from mjax.config.schema.towers import TowerConfig
from mjax.errors import UserError
from mjax.models.base.context import Context, Tokens, tokens_of
from mjax.models.towers.audio import FrameEmbedding, rows_of_frames
from mjax.models.towers.image_places import PackedImages
from mjax.models.towers.packed_vision import PackedPatchEmbedding, beside_given_packed
from mjax.models.towers.tiles import NEWLINE, Tiled
from mjax.models.towers.tower_mesh import rows_here
from mjax.models.towers.vision import PatchEmbedding, rows_of_images


class Modality(NamedTuple):
    """How items reach a tower.

    field: of a batch, fp32 [B, I, T, N]: what each token of a row's I items is embedded from.
    axes: the logical axes of I, T and N. columns: the field with the columns of T.
    embedding: the name of the part of the model that embeds them, and its class.
    rows: makes [n, T, N] of items [n, ...], given the tower's config and T.
    """

    field: str
    axes: tuple[str, str, str]
    columns: str
    embedding: str
    module: Callable[..., nnx.Module]
    rows: Callable[[np.ndarray | jax.Array, TowerConfig, int], np.ndarray | jax.Array]


def _embedding_of_patches(cfg: ModelConfig, rngs: nnx.Rngs) -> nnx.Module:
    """The module that embeds the patches of squares, or of packed images."""
    made = PackedPatchEmbedding if cfg.vision.is_packed else PatchEmbedding
    return made(cfg, rngs)


MODALITIES: dict[str, Modality] = {
    "vision": Modality(
        field="patches",
        axes=("images", "image_tokens", "pixels"),
        columns="image_columns",
        embedding="patch_embedding",
        module=_embedding_of_patches,
        rows=rows_of_images,
    ),
    "audio": Modality(
        field="frames",
        axes=("sounds", "sound_tokens", "mels"),
        columns="sound_columns",
        embedding="frame_embedding",
        module=FrameEmbedding,
        rows=lambda mels, audio, length: rows_of_frames(mels, length),
    ),
}


class Items(NamedTuple):
    """The items of a row: count, size (None: that of the positions), tokens with padding."""

    count: int
    size: int | None
    length: int

    def projected(self, tower: TowerConfig) -> tuple[int, int]:
        """A projector's tokens of an item, with padding, and those before the text's."""
        if tower.is_shuffled:
            return tower.padded(tower.text_tokens(self.size)), 0
        return self.length, tower.leading


def features_of(
    tokens: np.ndarray | jax.Array, tower: TowerConfig, items: Items
) -> np.ndarray | jax.Array:
    """int32 [B, S]: `Tokens.features` of texts with items of a tower, those of a row in order."""
    stands = tokens == tower.token_id
    number = stands.cumsum(1) - 1
    return _in_rows(number, stands, tower, items)


def features_of_tiles(
    tokens: np.ndarray | jax.Array,
    tower: TowerConfig,
    items: Items,
    corners: np.ndarray | jax.Array,
    weights: np.ndarray | jax.Array,
) -> tuple[np.ndarray | jax.Array, np.ndarray | jax.Array]:
    """`Tokens.features` and `weights`, [B, S, 4], of texts with tiles (`Tiled`).

    A newline is what follows all items.
    """
    stands = tokens == tower.token_id
    listed = stands.cumsum(1) - 1
    listed = listed.clip(0, corners.shape[1] - 1)[..., None]
    xp = np if isinstance(tokens, np.ndarray) else jnp
    number = xp.take_along_axis(corners, listed, 1)
    features = _in_rows(number, stands[..., None], tower, items)
    newline = items.count * items.projected(tower)[0]
    features = xp.where((number == NEWLINE) & stands[..., None], newline, features)
    weights = xp.take_along_axis(weights, listed, 1)
    return features.astype(np.int32), weights


def _in_rows(
    number: np.ndarray | jax.Array,
    stands: np.ndarray | jax.Array,
    tower: TowerConfig,
    items: Items,
) -> np.ndarray | jax.Array:
    """int32: the places in a row's projected items of its features `number`; -1: none stands."""
    length, before = items.projected(tower)
    item, place = divmod(number, tower.text_tokens(items.size))
    features = item * length + place + before
    return (stands * (features + 1) - 1).astype(np.int32)


def beside_items(
    text: Tokens,
    modality: str,
    tower: TowerConfig,
    items: Items,
    features: jax.Array | None,
    columns: jax.Array | None = None,
    weights: jax.Array | None = None,
    ctx: Context = Context(),  # noqa: B008 - frozen
) -> Tokens:
    """Facts about a text's tokens, with those about the tokens of its items of a modality.

    features: int32 [B, S] (`Tokens`); None: no item stands in the text. columns: of an item's
    tokens on this device; None: all. Padding is segment 0. weights: of features of tiles.
    """
    columns = jnp.arange(items.length, dtype=jnp.int32) if columns is None else columns
    rows = text.rows[:, None] * items.count + jnp.arange(items.count)
    rows = rows_here(rows.reshape(-1), modality, ctx)
    shape = rows.size, len(columns)
    real = tower.num_tokens(items.size)
    tokens = tokens_of(
        shape,
        jnp.broadcast_to(jnp.minimum(columns, real - 1), shape),
        segments=jnp.broadcast_to(columns < real, shape).astype(jnp.int32),
        rows=rows,
        columns=columns,
        key=text.key,
    )
    found = {} if features is None else {modality: features}
    factors = {} if weights is None else {modality: weights}
    return replace(
        text,
        others=text.others | {modality: tokens},
        features=text.features | found,
        weights=text.weights | factors,
    )


def beside_given(
    tokens: jax.Array,
    text: Tokens,
    modality: str,
    tower: TowerConfig,
    items: "jax.Array | Tiled | PackedImages | None",
) -> tuple[Tokens, jax.Array | None, int | None]:
    """Facts about tokens [B, S] beside items [B, I, ...], rows [B*I, T, N] of them, and their size.

    Without items none stands in the text, or caches hold them.
    """
    if items is None:
        features = jnp.full_like(tokens, -1)
        return replace(text, features=text.features | {modality: features}), None, None
    if tower.is_packed != isinstance(items, PackedImages):
        raise UserError(
            f"{tower.mark}: a model reads images of their own sizes if model.vision.max_patches "
            "is set, from `mjax.data.multimodal.pictures.packed_images`, and else squares or tiles"
        )
    if isinstance(items, PackedImages):
        return *beside_given_packed(tokens, text, items), None
    tiled = items if isinstance(items, Tiled) else None
    if tower.is_tiled != (tiled is not None):
        raise UserError(
            f"{tower.mark}: this model reads images {'in tiles' if tower.is_tiled else 'whole'}; "
            "give `mjax.data.multimodal.tiles.tiled_images` to one with image_grid_pinpoints and "
            "no tile_tags, else an array"
        )
    pixels = items if tiled is None else tiled.pixels
    each, size = pixels.shape[1:3]
    if (tower.is_tiled or tower.is_shuffled) and tower.grid(size) != tower.grid():
        raise UserError(f"{tower.mark}: {size} pixels a side; give model.vision.image_size")
    of_row = Items(each, size, tower.num_tokens(size))
    weights = None
    if tiled is None:
        features = features_of(tokens, tower, of_row)
    else:
        corners = jnp.asarray(tiled.corners)
        given = jnp.asarray(tiled.weights)
        features, weights = features_of_tiles(tokens, tower, of_row, corners, given)
    text = beside_items(text, modality, tower, of_row, features, weights=weights)
    flat = pixels.reshape(-1, *pixels.shape[2:])
    return text, MODALITIES[modality].rows(flat, tower, of_row.length), size
