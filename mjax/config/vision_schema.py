"""The keys of models that read images: the group `model.vision` (`model_schema.py`)."""

from typing import ClassVar, Literal

from pydantic import Field

from mjax.config.group import Group
from mjax.config.sizes import UpTo16, UpTo20, UpTo24
from mjax.config.tower_schema import TowerConfig


class VisionConfig(TowerConfig):
    """How images enter a model, in the words of Hugging Face's vision configs (docs/multimodal.md).

    A model with a `patch_size` reads images in the place of tokens: ViT. With V in
    `model.layer_pattern` it reads both, and V blocks have these sizes: LLaVA, CLIP.
    """

    item: ClassVar[str] = "image"

    image_size: UpTo20 = Field(0, ge=0)
    """Pixels of a side of the images that learned positions are for."""
    patch_size: UpTo20 = Field(0, ge=0)
    """Pixels of a side of a patch; 0: no images are read."""
    num_channels: int = Field(3, ge=1, le=1024)
    """Numbers of a pixel."""
    patch_bias: bool = True
    """Bias on the embedding of patches."""
    class_token: bool = True
    """Whether a token of its own stands before the patches; SigLIP has none, and pools them by
    attention.
    """
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

    @property
    def leading(self) -> int:
        return int(self.class_token)

    def num_tokens(self, size: int | None = None) -> int:
        """The tokens of an image: its class token, if it has one, and its patches."""
        return self.leading + self.grid(size) ** 2

    @property
    def numbers(self) -> int:
        """The numbers of a patch."""
        return self.num_channels * self.patch_size**2


class ContrastiveConfig(Group):
    """How images are compared with texts that have layers of their own (docs/multimodal.md)."""

    projection_dim: UpTo24 = Field(0, ge=0)
    """Width of the space that images and texts are embedded in."""
    loss: Literal["softmax", "sigmoid"] = "softmax"
    """Which text of the batch is an image's, and the reverse (CLIP); or of each pair whether they
    belong together (SigLIP).
    """
    eos_token_id: int | None = Field(None, ge=0)
    """A text is read off at its first token of this id; 2: at its largest id, as CLIP's published
    files have it; None: at the last column (SigLIP).
    """
