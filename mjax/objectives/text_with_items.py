"""Next-token prediction of texts with items: images (LLaVA, arXiv 2304.08485), sounds, or both.

A data set (`data/multimodal/image_text.py`) gives all fields.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from mjax.config.schema.model import ModelConfig
from mjax.config.schema.run import Config
from mjax.config.schema.towers import TowerConfig
from mjax.models.architectures import TextWithItems
from mjax.models.base.context import Context, Tokens
from mjax.models.base.streams import Streams
from mjax.models.towers.image_places import Grid, PackedImages, packed_row
from mjax.models.towers.modalities import (
    MODALITIES,
    Items,
    beside_items,
    features_of,
    features_of_tiles,
)
from mjax.models.towers.packed_vision import beside_packed
from mjax.models.towers.tiles import features_of_one_tile, padded_features
from mjax.models.towers.tower_mesh import row_axes, whole_rows_here
from mjax.objectives.fields import Batch, BatchField, HostBatch, Scalars
from mjax.objectives.next_token import NextToken
from mjax.objectives.objective import OfConfig

# The fields of packed images, as `beside_packed` takes them.
_PACKED_FACTS = "patch_places", "vision_features", "position_axes"


def items_of(cfg: Config, name: str) -> Items:
    """The items of a modality in a row of a run."""
    tower = cfg.model.tower(name)
    size = cfg.item_size(name)
    length = tower.row_length(size)
    return Items(tower.max_items, size, length)


@dataclass(frozen=True)
class WithItems(OfConfig, NextToken):
    """The cross-entropy of the next token in nats, a mean over unmasked tokens of texts.

    A token `token_id` of a tower stands for one of an item's. It counts in no loss, and neither
    does what is predicted from it. "patches" and "frames", fp32 [B, I, T, N], are those of the
    items of a row, a row each (`models/towers/modalities.py`), zeros where there are fewer.
    "vision_features" and "audio_features" say which of all tokens of its row's items stands in a
    token's place (`Tokens`), with "vision_weights" where images are cut into tiles.
    """

    @property
    def model(self) -> ModelConfig:
        return self.cfg.model

    @property
    def fields(self) -> Mapping[str, BatchField]:
        found = dict(NextToken.fields)
        for name in self.model.modalities:
            modality = MODALITIES[name]
            axes = "batch", *modality.axes
            found[modality.field] = BatchField(np.float32, axes)
            axes = "batch", "seq"
            if self.model.tower(name).is_tiled:
                axes = *axes, "corners"
                found[f"{name}_weights"] = BatchField(np.float32, axes)
            found[f"{name}_features"] = BatchField(np.int32, axes, pad=-1)
        if self.is_packed:
            found["patch_places"] = BatchField(np.int32, ("batch", "image_tokens", "places"))
            found["position_axes"] = BatchField(np.int32, ("batch", "seq", "axes"))
        return found

    @property
    def is_packed(self) -> bool:
        """Whether images are packed in rows of the tower (`models/towers/image_places.py`)."""
        return "vision" in self.model.modalities and self.model.vision.is_packed

    def mask(self, batch: Batch) -> jax.Array:
        """fp32 [B, S]: the tokens that count."""
        mask = batch["loss_mask"]
        for name in self.model.modalities:
            tower = self.model.tower(name)
            tokens = [tower.token_id]
            if name == "vision" and tower.video_token_id is not None:
                tokens.append(tower.video_token_id)
            for token in tokens:
                for field in ("tokens", "labels"):
                    mask = mask * (batch[field] != token)
        return mask

    def counts(self, batch: Batch) -> Scalars:
        masked = batch | {"loss_mask": self.mask(batch)}
        return super().counts(masked)

    def tokens(self, batch: Batch, base: Tokens, ctx: Context) -> Tokens:
        """Facts about the tokens of a text, with those about the tokens of its items."""
        for name in self.model.modalities:
            columns = batch[MODALITIES[name].columns]
            if "cp" in row_axes(name, ctx):
                columns = None
            if name == "vision" and self.is_packed:
                facts = (batch[field] for field in _PACKED_FACTS)
                base = beside_packed(base, *facts, columns)
                continue
            base = beside_items(
                base,
                name,
                self.model.tower(name),
                items_of(self.cfg, name),
                batch.get(f"{name}_features"),
                columns,
                batch.get(f"{name}_weights"),
                ctx,
            )
        return base

    def embed(self, edges: TextWithItems, batch: Batch, tokens: Tokens, ctx: Context) -> Streams:
        rows, sizes = {}, {}
        for name in self.model.modalities:
            field = batch[MODALITIES[name].field]
            rows[name] = whole_rows_here(field.reshape(-1, *field.shape[2:]), name, ctx)
            sizes[name] = self.cfg.item_size(name)
        return edges.embed_items(batch["tokens"], rows, sizes, tokens, ctx)

    def losses(
        self, edges: TextWithItems, x: Streams, batch: Batch, tokens: Tokens, ctx: Context
    ) -> Scalars:
        masked = batch | {"loss_mask": self.mask(batch)}
        return super().losses(edges, x, masked, tokens, ctx)

    def make_fields(self, batch: HostBatch, seed: int, step: int, rows: np.ndarray) -> HostBatch:
        """Random items at the start of each row, for speed tests, where the data has none.

        There is one of each modality. The features follow from the tokens.
        """
        made: HostBatch = {}
        tokens = batch["tokens"].copy()
        first = 0
        for name in self.model.modalities:
            tower = self.model.tower(name)
            items = items_of(self.cfg, name)
            field = MODALITIES[name].field
            if name == "vision" and self.is_packed:
                made |= {} if field in batch else self._packed_noise(tokens, seed, step, rows)
                continue
            if field not in batch:
                made[field] = random_items(tower, items, seed, step, rows)
                behind = first + tower.text_tokens(items.size) + tower.is_tiled
                tokens[:, first:behind] = tower.token_id
                first = behind
                made["tokens"] = tokens
            if not tower.is_tiled:
                made[f"{name}_features"] = features_of(tokens, tower, items)
            elif f"{name}_features" not in batch:
                texts = [[features_of_one_tile(tower, 0)]] * len(tokens)
                found = features_of_tiles(tokens, tower, items, *padded_features(texts))
                made[f"{name}_features"], made[f"{name}_weights"] = found
        return made

    def _packed_noise(
        self, tokens: np.ndarray, seed: int, step: int, rows: np.ndarray
    ) -> HostBatch:
        """Noise in the place of an image of 4 x 6 patches at the start of each row."""
        vision, grid = self.model.vision, Grid(1, 4, 6)
        made = []
        for row, ids in zip(rows, tokens, strict=True):
            rng = np.random.default_rng((seed, step, row))
            noise = rng.random((grid.patches, vision.numbers), np.float32)
            ids[: grid.tokens] = vision.image_token_id
            made.append(packed_row(ids, [(noise, grid)], vision))
        return fields_of_packed(made) | {"tokens": tokens}


def fields_of_packed(rows: Sequence[PackedImages]) -> HostBatch:
    """The fields of packed images, of those of each row."""
    patches, *facts = (np.stack(parts) for parts in zip(*rows, strict=True))
    return {"patches": patches[:, None]} | dict(zip(_PACKED_FACTS, facts, strict=True))


def random_items(
    tower: TowerConfig, items: Items, seed: int, step: int, rows: np.ndarray
) -> np.ndarray:
    """fp32 [B, I, T, N]: one random item for each of rows `rows` of a step's global batch."""
    shape = items.length, tower.numbers
    made = np.zeros((len(rows), items.count, *shape), np.float32)
    real = slice(tower.leading, tower.num_tokens(items.size))
    for place, row in enumerate(rows):
        rng = np.random.default_rng((seed, step, row))
        made[place, 0, real] = rng.random(shape)[real]
    return made
