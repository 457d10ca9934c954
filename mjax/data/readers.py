"""Readers of images and sounds: the items of a batch, decoded; what is bad is named in the log.

A reader's `decode` runs in processes that import no JAX (`data/decoders.py`); `finish` runs here.
"""

import importlib
import logging
import threading
from collections.abc import Sequence
from functools import partial

import numpy as np

from mjax.config.schema import Config
from mjax.data.audio import decode_frames
from mjax.data.decoders import Decode, decoders
from mjax.data.pixels import decode_image, norm_pixels
from mjax.data.sources import Item
from mjax.errors import or_user_error

log = logging.getLogger(__name__)


class Skipped:
    """What is left out of some data: each is named in the log once, with how many there are."""

    def __init__(self, count: int):
        """`count`: how many samples there are."""
        self.count, self.names = count, set()
        self.lock = threading.Lock()

    def add(self, name: str, why: str) -> None:
        with self.lock:
            is_new = name not in self.names
            self.names.add(name)
            bad = len(self.names)
        if is_new:
            say = "data.images: %s cannot be used and is left out (%s); %d of %d so far"
            log.warning(say, name, why, bad, self.count)


class ImageReader:
    """Decodes and norms the images of a run, fp32 [H, W, C] each.

    `library` is what decodes them, and `extra` what installs it. Raises `UserError` without it.
    """

    library, extra = "PIL", "vision"

    def __init__(self, cfg: Config, skipped: Skipped):
        with or_user_error(
            f"data.images needs {{reason}}; install mjax[{self.extra}]", ImportError
        ):
            importlib.import_module(self.library)
        self.cfg, self.skipped = cfg, skipped

    @property
    def decode(self) -> Decode:
        """Makes uint8 [H, W, C] of an encoded image; can be pickled."""
        channels = self.cfg.model.vision.num_channels
        return partial(decode_image, side=self.cfg.image_size, channels=channels)

    def finish(self, pixels: np.ndarray, out: np.ndarray) -> None:
        """Write what `decode` gives to `out`, as a model reads it."""
        scale = self.cfg.data.images
        norm_pixels(pixels, scale.mean, scale.std, out)

    def nothing(self, count: int) -> np.ndarray:
        """Zeros [count, H, W, C], in which each channel of an image is contiguous."""
        side, channels = self.cfg.image_size, self.cfg.model.vision.num_channels
        return np.zeros((count, channels, side, side), np.float32).transpose(0, 2, 3, 1)

    def read(self, items: Sequence[Item]) -> tuple[np.ndarray, np.ndarray]:
        """(fp32 [n, ...] of n items, bool [n] that says which could be decoded)."""
        out, is_good = self.nothing(len(items)), np.zeros(len(items), bool)

        def keep(place: int, decoded: np.ndarray | str) -> None:
            if isinstance(decoded, str):
                self.skipped.add(items[place].name, decoded)
            else:
                self.finish(decoded, out[place])
                is_good[place] = True

        count = self.cfg.data.images.workers
        decoders(count).decode(self.decode, [item.read for item in items], keep)
        return out, is_good


class SoundReader(ImageReader):
    """Decodes the sounds of a run to log-mel frames, fp32 [F, M] each."""

    library, extra = "soundfile", "audio"

    @property
    def decode(self) -> Decode:
        """Makes fp32 [F, M] of an encoded sound, cut or filled up with silence."""
        return partial(decode_frames, bins=self.shape[1], frames=self.shape[0])

    def finish(self, frames: np.ndarray, out: np.ndarray) -> None:
        out[...] = frames

    @property
    def shape(self) -> tuple[int, int]:
        audio = self.cfg.model.audio
        return 2 * audio.max_source_positions, audio.num_mel_bins

    def nothing(self, count: int) -> np.ndarray:
        return np.zeros((count, *self.shape), np.float32)
