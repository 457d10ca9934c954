"""The keys that all towers have: encoders of what stands in a text, as images or sounds."""

from typing import ClassVar, Literal

from pydantic import Field

from mjax.config.schema.base import Group
from mjax.config.schema.sizes import UpTo16, UpTo24


class TowerConfig(Group):
    """The sizes of a tower's layers, and how much of it a text holds (docs/models/multimodal.md).

    item: the word for one thing that the tower encodes. <item> stands for one in a prompt, and keys
        of the config have it in their names.
    leading: the tokens of an item before those that stand in the text.
    key_bias: whether keys have a bias in the tower's attention.
    is_cut: whether an item is cut into tiles, whose number depends on its size
    (`data/multimodal/tiles.py`). is_tiled: whether features are mixed from those of tiles
    (`models/towers/tiles.py`). is_shuffled: whether the projector makes one token of four.
    """

    item: ClassVar[str]
    leading: ClassVar[int] = 0
    key_bias: ClassVar[bool] = True
    is_cut: ClassVar[bool] = False
    is_tiled: ClassVar[bool] = False
    is_shuffled: ClassVar[bool] = False
    is_packed: ClassVar[bool] = False
    kind_of_norm: ClassVar[str] = "layernorm"

    hidden_size: UpTo24 = Field(0, ge=0)
    """Width of the tower's layers; 0: there are none."""
    intermediate_size: UpTo24 = Field(0, ge=0)
    """FFN width of the tower's layers."""
    num_attention_heads: UpTo16 = Field(1, ge=1)
    hidden_act: Literal["gelu", "gelu_tanh", "quick_gelu", "silu"] = "gelu"
    """silu: of a gate."""
    layer_norm_eps: float = Field(1e-5, gt=0)
    length_multiple: UpTo16 = Field(16, ge=1)
    """Pad the tokens of an item to a multiple of this, which tp and 2 x cp x tp divide."""

    @property
    def token_id(self) -> int | None:
        """The token that stands for one of an item."""
        return getattr(self, f"{self.item}_token_id")

    @property
    def max_items(self) -> int:
        """Items of a text, at most."""
        return getattr(self, f"max_{self.item}s")

    @property
    def mark(self) -> str:
        """Text that stands for an item in a prompt."""
        return f"<{self.item}>"

    @property
    def item_shape(self) -> tuple[int, ...]:
        """The numbers of an item, or of a tile, as the tower reads it."""
        raise NotImplementedError

    def num_tokens(self, size: int | None = None) -> int:
        """The tokens of an item of `size`; None: of the size that its positions are for."""
        raise NotImplementedError

    def text_tokens(self, size: int | None = None) -> int:
        """The tokens of an item that stand in a text."""
        return self.num_tokens(size) - self.leading

    def row_length(self, size: int | None = None) -> int:
        """`num_tokens` and padding: a row of the tower's layers."""
        return self.padded(self.num_tokens(size))

    def padded(self, count: int) -> int:
        """`count` tokens, rounded up to `length_multiple`."""
        return -(-count // self.length_multiple) * self.length_multiple
