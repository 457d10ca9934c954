"""What a text may hold besides words: THE table of modalities, and where their tokens stand in it.

An item is an image or a sound. Its row of a tower has some leading tokens, those that stand in the
text, and padding. A new modality is a group of sizes (`config/tower_schema.py`), an embedding, the
letters of its tower and projector (`config/pattern.py`), and a row here.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mjax.config.model_schema import ModelConfig
from mjax.config.tower_schema import TowerConfig
from mjax.models.audio import FrameEmbedding, rows_of_frames
from mjax.models.context import Tokens, tokens_of
from mjax.models.vision import PatchEmbedding, rows_of_images


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


MODALITIES: dict[str, Modality] = {
    "vision": Modality(
        field="patches",
        axes=("images", "image_tokens", "pixels"),
        columns="image_columns",
        embedding="patch_embedding",
        module=PatchEmbedding,
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


def features_of(
    tokens: np.ndarray | jax.Array, tower: TowerConfig, items: Items
) -> np.ndarray | jax.Array:
    """int32 [B, S]: `Tokens.features` of texts with items of a tower, those of a row in order."""
    stands = tokens == tower.token_id
    number = stands.cumsum(1) - 1
    item, place = divmod(number, tower.text_tokens(items.size))
    features = item * items.length + place + tower.leading
    return (stands * (features + 1) - 1).astype(np.int32)


def beside_items(
    text: Tokens,
    modality: str,
    tower: TowerConfig,
    items: Items,
    features: jax.Array | None,
    columns: jax.Array | None = None,
) -> Tokens:
    """Facts about a text's tokens, with those about the tokens of its items of a modality.

    features: int32 [B, S] (`Tokens`); None: no item stands in the text. columns: of an item's
    tokens on this device; None: all. Padding is segment 0.
    """
    columns = jnp.arange(items.length, dtype=jnp.int32) if columns is None else columns
    rows = text.rows[:, None] * items.count + jnp.arange(items.count)
    shape = rows.size, len(columns)
    real = tower.num_tokens(items.size)
    tokens = tokens_of(
        shape,
        jnp.broadcast_to(jnp.minimum(columns, real - 1), shape),
        segments=jnp.broadcast_to(columns < real, shape).astype(jnp.int32),
        rows=rows.reshape(-1),
        columns=columns,
        key=text.key,
    )
    found = {} if features is None else {modality: features}
    others = text.others | {modality: tokens}
    return replace(text, others=others, features=text.features | found)


def embeddings(cfg: ModelConfig, rngs: nnx.Rngs) -> dict[str, nnx.Module]:
    """What embeds the items that a model reads, by the name of the part."""
    found = {}
    for name in cfg.embedded:
        modality = MODALITIES[name]
        found[modality.embedding] = modality.module(cfg.of_modality(name), rngs)
    return found
