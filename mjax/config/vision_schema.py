"""The keys of models that read images: the group `model.vision` (`model_schema.py`)."""

from typing import ClassVar

from pydantic import Field

from mjax.config.sizes import UpTo16, UpTo20
from mjax.config.tower_schema import TowerConfig


class VisionConfig(TowerConfig):
    """How images enter a model, in the words of Hugging Face's vision configs (docs/multimodal.md).

    A model with a `patch_size` reads images in the place of tokens: ViT. With a projector (P) in
    `model.layer_pattern` it reads both, and V blocks have these sizes: LLaVA.
    """

    item: ClassVar[str] = "image"
    leading: ClassVar[int] = 1  # the class token

    image_size: UpTo20 = Field(0, ge=0)
    """Pixels of a side of the images that learned positions are for."""
    patch_size: UpTo20 = Field(0, ge=0)
    """Pixels of a side of a patch; 0: no images are read."""
    num_channels: int = Field(3, ge=1, le=1024)
    """Numbers of a pixel."""
    patch_bias: bool = True
    """Bias on the embedding of patches."""
    embedding_norm: bool = False
    """Norm of embedded patches (CLIP)."""
    image_token_id: int | None = Field(None, ge=0)
    """Token in whose place a patch of an image stands."""
    max_images: UpTo16 = Field(1, ge=1)
    """Images of a text, at most."""
    num_labels: int = Field(0, ge=0)
    """Classes told from an image's class token; 0: none."""

    def grid(self, image_size: int | None = None) -> int:
        """The patches along a side of an image; None: of `image_size` pixels a side."""
        return (image_size or self.image_size) // self.patch_size

    def num_tokens(self, size: int | None = None) -> int:
        """The tokens of an image: its class token, and its patches."""
        return self.leading + self.grid(size) ** 2

    @property
    def numbers(self) -> int:
        """The numbers of a patch."""
        return self.num_channels * self.patch_size**2
