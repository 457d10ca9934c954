"""The keys of models that hear: the group `model.audio` (`model.py`)."""

from typing import ClassVar

from pydantic import Field

from mjax.config.schema.sizes import UpTo16, UpTo20
from mjax.config.schema.towers import TowerConfig


class AudioConfig(TowerConfig):
    """How sounds enter a model: Whisper's encoder, layers S of `model.layer_pattern`.

    A token is two frames of 10 ms each. All sounds are cut, or filled up with silence, to as many
    as there are positions.
    """

    item: ClassVar[str] = "audio"
    key_bias: ClassVar[bool] = False

    num_mel_bins: UpTo16 = Field(80, ge=1)
    """Numbers of a frame: energies of bands of the mel scale."""
    max_source_positions: UpTo20 = Field(0, ge=0)
    """Tokens of a sound, 20 ms each; 0: no sounds are read."""
    audio_token_id: int | None = Field(None, ge=0)
    """Token in whose place one of a sound stands."""
    max_audios: UpTo16 = Field(1, ge=1)
    """Sounds of a text, at most."""

    def grid(self, size: int | None = None) -> int:
        """The tokens of a sound of `size` frames."""
        return self.max_source_positions if size is None else size // 2

    @property
    def item_shape(self) -> tuple[int, int]:
        return 2 * self.max_source_positions, self.num_mel_bins

    def num_tokens(self, size: int | None = None) -> int:
        return self.grid(size)

    @property
    def numbers(self) -> int:
        """Values that a token is embedded from: its two frames, two before and one behind them."""
        return 5 * self.num_mel_bins
