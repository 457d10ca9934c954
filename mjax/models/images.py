"""The objective of image encoders: the class of an image (ViT, arXiv 2010.11929).

A data set of images (`data/images.py`) gives all fields.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import numpy as np

from mjax.config.schema import Config
from mjax.config.vision_schema import VisionConfig
from mjax.models.context import Context, Tokens
from mjax.models.decoder import Decoder
from mjax.models.masked import ROW_LABEL, OfRows
from mjax.models.objective import Batch, BatchField, HostBatch
from mjax.models.vision import image_fields

PATCHES = BatchField(np.float32, ("batch", "seq", "pixels"))


@dataclass(frozen=True)
class ClassifyImages(OfRows):
    """The cross-entropy of images' classes in nats, a mean over rows whose "row_label" is not -1.

    "patches" are fp32 [B, S, C*P*P] (`models/vision.py`). With `measures` there is also the part of
    the images that the model gets right, "accuracy".

    image_size: pixels of a side of the images of this run.
    """

    vision: VisionConfig
    image_size: int
    measures: bool = False

    @classmethod
    def of(cls, cfg: Config) -> "ClassifyImages":
        return cls(cfg.model.vision, cfg.image_size)

    @property
    def fields(self) -> Mapping[str, BatchField]:
        return {"patches": PATCHES, "row_label": ROW_LABEL}

    def embed(self, edges: Decoder, batch: Batch, tokens: Tokens, ctx: Context) -> jax.Array:
        return edges.embed_patches(batch["patches"], tokens, ctx, self.vision.grid(self.image_size))

    def make_fields(self, batch: HostBatch, seed: int, step: int, rows: np.ndarray) -> HostBatch:
        """Random images and their classes, for speed tests; nothing where the data set has them."""
        if "patches" in batch:
            return {}
        size, vision = self.image_size, self.vision
        shape = size, size, vision.num_channels
        images = [np.random.default_rng((seed, step, row)).random(shape) for row in rows]
        fields = image_fields(np.stack(images), vision.patch_size, batch["positions"].shape[1])
        return fields | {"row_label": (rows % vision.num_labels).astype(np.int32)}
