"""Objectives that read images: the class of an image (ViT, arXiv 2010.11929), and the next token of
a text with images (LLaVA, arXiv 2304.08485). `contrastive.py` has those that compare both.

A data set (`data/images.py`) gives all fields.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import jax
import numpy as np

from mjax.config.schema import Config
from mjax.config.vision_schema import VisionConfig
from mjax.models.context import Context, Tokens
from mjax.models.decoder import Decoder
from mjax.models.masked import ROW_LABEL, OfRows
from mjax.models.objective import Batch, BatchField, HostBatch, NextToken, Scalars
from mjax.models.projector import beside_images
from mjax.models.streams import Streams
from mjax.models.vision import features_of, image_fields

PATCHES = BatchField(np.float32, ("batch", "seq", "pixels"))
PATCHES_OF_TEXTS = BatchField(np.float32, ("batch", "images", "image_tokens", "pixels"))


def random_images(cfg: Config, seed: int, step: int, rows: np.ndarray) -> np.ndarray:
    """[B, H, W, C] for rows `rows` of the global batch of a step, for speed tests."""
    size = cfg.image_size
    shape = size, size, cfg.model.vision.num_channels
    images = []
    for row in rows:
        rng = np.random.default_rng((seed, step, row))
        images.append(rng.random(shape))
    return np.stack(images)


@dataclass(frozen=True)
class ClassifyImages(OfRows):
    """The cross-entropy of images' classes in nats, a mean over rows whose "row_label" is not -1.

    "patches" are fp32 [B, S, C*P*P] (`models/vision.py`). With `measures` there is also the part of
    the images that the model gets right, "accuracy".
    """

    cfg: Config
    measures: bool = False

    @classmethod
    def of(cls, cfg: Config) -> "ClassifyImages":
        return cls(cfg)

    @property
    def fields(self) -> Mapping[str, BatchField]:
        return {"patches": PATCHES, "row_label": ROW_LABEL}

    def embed(self, edges: Decoder, batch: Batch, tokens: Tokens, ctx: Context) -> jax.Array:
        grid = self.cfg.model.vision.grid(self.cfg.image_size)
        return edges.embed_patches(batch["patches"], tokens, ctx, grid)

    def make_fields(self, batch: HostBatch, seed: int, step: int, rows: np.ndarray) -> HostBatch:
        """Random images and their classes, for speed tests; nothing where the data set has them."""
        if "patches" in batch:
            return {}
        vision = self.cfg.model.vision
        images = random_images(self.cfg, seed, step, rows)
        length = batch["positions"].shape[1]
        fields = image_fields(images, vision, length)
        labels = rows % vision.num_labels
        return fields | {"row_label": labels.astype(np.int32)}


@dataclass(frozen=True)
class WithImages(NextToken):
    """The cross-entropy of the next token in nats, a mean over unmasked tokens of texts.

    A token `model.vision.image_token_id` stands for a patch. It counts in no loss, and neither does
    what is predicted from it. "patches", fp32 [B, I, T, C*P*P], are those of the images of a row, a
    row each (`models/vision.py`), zeros where there are fewer. "features" say which of all tokens
    of its row's images stands in a token's place (`Tokens`).
    """

    cfg: Config

    fields: ClassVar[Mapping[str, BatchField]] = NextToken.fields | {
        "patches": PATCHES_OF_TEXTS,
        "features": BatchField(np.int32, pad=-1),
    }

    @property
    def vision(self) -> VisionConfig:
        return self.cfg.model.vision

    def mask(self, batch: Batch) -> jax.Array:
        """fp32 [B, S]: the tokens that count."""
        mask = batch["loss_mask"]
        for name in ("tokens", "labels"):
            mask = mask * (batch[name] != self.vision.image_token_id)
        return mask

    def counts(self, batch: Batch) -> Scalars:
        masked = batch | {"loss_mask": self.mask(batch)}
        return super().counts(masked)

    def tokens(self, text: Tokens, batch: Batch) -> Tokens:
        """Facts about the tokens of images beside those of a text."""
        size, vision = self.cfg.image_size, self.vision
        images = vision.max_images, vision.row_length(size)
        return beside_images(
            text,
            batch.get("features"),
            images,
            vision.num_tokens(size),
            batch["image_columns"],
        )

    def embed(self, edges: Decoder, batch: Batch, tokens: Tokens, ctx: Context) -> Streams:
        grid = self.vision.grid(self.cfg.image_size)
        return edges.embed_images(
            batch["tokens"],
            batch["patches"],
            tokens,
            ctx,
            grid,
        )

    def losses(
        self, edges: Decoder, x: Streams, batch: Batch, tokens: Tokens, ctx: Context
    ) -> Scalars:
        masked = batch | {"loss_mask": self.mask(batch)}
        return super().losses(edges, x.decoder, masked, tokens, ctx)

    def make_fields(self, batch: HostBatch, seed: int, step: int, rows: np.ndarray) -> HostBatch:
        """A random image at the start of each row, for speed tests, where the data has none.

        "features" follow from the tokens.
        """
        vision, made = self.vision, {}
        size = self.cfg.image_size
        length = vision.row_length(size)
        count = vision.num_tokens(size)
        tokens = batch["tokens"]
        if "patches" not in batch:
            tokens = tokens.copy()
            tokens[:, : count - 1] = vision.image_token_id
            made = {"tokens": tokens, "patches": self.random_patches(seed, step, rows)}
        made["features"] = features_of(tokens, vision.image_token_id, count, length)
        return made

    def random_patches(self, seed: int, step: int, rows: np.ndarray) -> np.ndarray:
        """The field "patches" of rows with one random image each."""
        images = random_images(self.cfg, seed, step, rows)
        length = self.vision.row_length(self.cfg.image_size)
        first = image_fields(images, self.vision, length)["patches"]
        others = (0, 0), (0, self.vision.max_images - 1), (0, 0), (0, 0)
        return np.pad(first[:, None], others)
