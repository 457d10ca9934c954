"""The keys of models that read images: the group `model.vision` (`model.py`)."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from mjax.config.schema.base import Group
from mjax.config.schema.sizes import UpTo16, UpTo20, UpTo24
from mjax.config.schema.towers import TowerConfig

# Of Qwen-VL's towers: frames of a patch, and patches, two by two, that are one token of a text.
FRAMES, MERGED = 2, 4
HeightAndWidth = Annotated[list[Annotated[UpTo16, Field(ge=1)]], Field(min_length=2, max_length=2)]


class VisionConfig(TowerConfig):
    """How images enter a model, in the words of Hugging Face (docs/models/multimodal.md).

    A model with a `patch_size` reads images in the place of tokens: ViT. With vision
    blocks in `model.layer_pattern` it reads both, and they have these sizes: LLaVA, CLIP.
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
    image_grid_pinpoints: list[HeightAndWidth] = []
    """Sizes [height, width] that an image alone in its text is cut into tiles at, each of
    `image_size`; one beside others is a tile (LLaVA-OneVision). Empty: every image is one.
    """
    vision_aspect_ratio: str = Field("anyres_max_9", pattern=r"^anyres_max_[1-9]\d{0,3}$")
    """Features of more tiles than this number are interpolated to those of about as many."""
    tile_tags: list[Annotated[str, Field(min_length=1)]] = []
    """Texts before the tokens of the tiles of an image, and last that before its whole view, as
    <tile_1>, <tile_2> and <tile_global_thumbnail> (NVLM). Each image is cut then.
    """
    pixel_shuffle: bool = False
    """Four patches, two by two, enter the projector as one of four times the channels."""
    max_patches: UpTo20 = Field(0, ge=0)
    """Patches of a text's images together, at most, each image in its own proportions (Qwen-VL);
    0: images are squares of `image_size`.
    """
    min_pixels: UpTo24 = Field(3136, ge=1)
    """Pixels that such an image is scaled up to."""
    max_pixels: UpTo24 = Field(1003520, ge=1)
    """Pixels that it is scaled down to."""
    window_size: UpTo20 = Field(0, ge=0)
    """Pixels of a side of the windows of vision_window (Qwen2.5-VL)."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    deepstack_visual_indexes: list[UpTo16] = []
    """Layers of the tower whose outputs enter the text again, by deep_merger (Qwen3-VL)."""
    video_token_id: int | None = Field(None, ge=0)
    """Token in whose place a patch of a video's frames stands; None: no videos are read."""
    tokens_per_second: int = Field(0, ge=0)
    """Positions of a text that pass in a second of a video; 0: timestamps stand in the text."""
    num_labels: int = Field(0, ge=0)
    """Classes told from an image's class token; 0: none."""

    def grid(self, image_size: int | None = None) -> int:
        """The patches along a side of an image; None: of `image_size` pixels a side."""
        return (image_size or self.image_size) // self.patch_size

    @property
    def is_packed(self) -> bool:
        """Whether the images of a text lie in one row of the tower, each of a size of its own."""
        return self.max_patches > 0

    @property
    def kind_of_norm(self) -> str:
        return self.norm

    @property
    def head_dim(self) -> int:
        """Channels of a head of the tower."""
        return self.hidden_size // self.num_attention_heads

    @property
    def leading(self) -> int:
        return int(self.class_token and not self.is_packed)

    @property
    def item_shape(self) -> tuple[int, int, int]:
        return self.image_size, self.image_size, self.num_channels

    def num_tokens(self, size: int | None = None) -> int:
        """The tokens of an image: its class token, if it has one, and its patches."""
        if self.is_packed:
            return self.max_patches
        return self.leading + self.grid(size) ** 2

    @property
    def is_cut(self) -> bool:
        return bool(self.image_grid_pinpoints)

    @property
    def is_tiled(self) -> bool:
        return self.is_cut and not self.tile_tags

    @property
    def most_tiles(self) -> int:
        """Tiles of the largest of `image_grid_pinpoints`."""
        side = max(self.image_size, 1)
        counts = [(tall // side) * (wide // side) for tall, wide in self.image_grid_pinpoints]
        return max(counts, default=0)

    @property
    def is_shuffled(self) -> bool:
        return self.pixel_shuffle

    @property
    def max_items(self) -> int:
        """Images of a text, at most, or tiles where one is cut into them."""
        if self.is_packed:
            return 1
        if self.tile_tags:
            return self.max_images * len(self.tile_tags)
        return max(self.max_images, 1 + self.most_tiles)

    def feature_grid(self, size: int | None = None) -> int:
        """The tokens of a text along a side of an image, or of a tile."""
        return self.grid(size) // 2 if self.pixel_shuffle else self.grid(size)

    def text_tokens(self, size: int | None = None) -> int:
        if self.is_packed:
            return self.max_patches // MERGED
        return self.feature_grid(size) ** 2

    @property
    def numbers(self) -> int:
        """The numbers of a patch."""
        frames = FRAMES if self.is_packed else 1
        return self.num_channels * frames * self.patch_size**2


class ContrastiveConfig(Group):
    """Compares images with texts that have layers of their own (docs/models/multimodal.md)."""

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
