"""The objective of images: their classes (ViT, arXiv 2010.11929).

A data set (`data/multimodal/images.py`) gives all fields.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import numpy as np

from mjax.config.schema.run import Config
from mjax.models.architectures import ImageEncoder
from mjax.models.base.context import Context, Tokens
from mjax.models.towers.vision import image_fields
from mjax.objectives.fields import Batch, BatchField, HostBatch
from mjax.objectives.masked import ROW_LABEL, OfRows
from mjax.objectives.objective import OfConfig

PATCHES = BatchField(np.float32, ("batch", "seq", "pixels"))


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
class ClassifyImages(OfConfig, OfRows):
    """The cross-entropy of images' classes in nats, a mean over rows whose "row_label" is not -1.

    "patches" are fp32 [B, S, C*P*P] (`models/towers/vision.py`). With `measures` there is also the
    part of the images that the model gets right, "accuracy".
    """

    measures: bool = False

    @property
    def fields(self) -> Mapping[str, BatchField]:
        return {"patches": PATCHES, "row_label": ROW_LABEL}

    def embed(self, edges: ImageEncoder, batch: Batch, tokens: Tokens, ctx: Context) -> jax.Array:
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
