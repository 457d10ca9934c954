"""The keys of models that read images: the group `model.vision` (`model_schema.py`)."""

from pydantic import Field

from mjax.config.group import Group
from mjax.config.sizes import UpTo20


class VisionConfig(Group):
    """How images enter a model, in the words of Hugging Face's vision configs (docs/multimodal.md).

    A model with a `patch_size` reads images in the place of tokens: ViT.
    """

    image_size: UpTo20 = Field(0, ge=0)
    """Pixels of a side of the images that learned positions are for."""
    patch_size: UpTo20 = Field(0, ge=0)
    """Pixels of a side of a patch; 0: no images are read."""
    num_channels: int = Field(3, ge=1, le=1024)
    """Numbers of a pixel."""
    num_labels: int = Field(0, ge=0)
    """Classes told from an image's class token; 0: none."""

    def grid(self, image_size: int | None = None) -> int:
        """The patches along a side of an image; None: of `image_size` pixels a side."""
        return (image_size or self.image_size) // self.patch_size

    def num_tokens(self, image_size: int | None = None) -> int:
        """The tokens of an image: its class token, and its patches."""
        return 1 + self.grid(image_size) ** 2

    @property
    def patch_pixels(self) -> int:
        """The numbers of a patch."""
        return self.num_channels * self.patch_size**2
