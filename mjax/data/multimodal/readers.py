"""Readers of images and sounds: the items of a batch, decoded; what is bad is named in the log.

A reader's `decode` runs in processes that import no JAX (`data/multimodal/decoders.py`), which give
back no more bytes than they must; `fill` makes of them what a model reads, in threads of the run.
"""

import importlib
import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from mjax.config.schema.run import Config
from mjax.data.multimodal.audio import decode_frames
from mjax.data.multimodal.decoders import Decode, decoders
from mjax.data.multimodal.pixels import decode_image, norm_image, norm_pixels
from mjax.data.multimodal.sources import Item
from mjax.errors import UserError, or_user_error
from mjax.models.towers.audio import rows_of_frames
from mjax.models.towers.vision import patches_of

log = logging.getLogger(__name__)


FIRST = 32  # samples of a source of training data, of which most must be of use
NAMED_AT_MOST = 5  # samples that are left out; further ones are counted

# The name of a sample, and those of its items.
NamesOfSamples = tuple[str, ...]


class Skipped:
    """The samples of a source that are left out: the first are named in the log, all are counted.

    whys: by the name of a sample or an item, what is wrong with it.
    """

    def __init__(self, source: str, split: str, count: int, size: int):
        """`count` samples are in this split of a source, and `size` are drawn from it."""
        self.source, self.count = source, count
        self.first = min(FIRST, count, size) if split == "train" else 0
        self.whys: dict[str, str] = {}
        self.left_out: set[str] = set()
        self.seen: dict[str, bool] = {}  # the first samples, and whether they are of use
        self.lock = threading.Lock()

    def note(self, name: str, why: str) -> None:
        """Keep why a sample or an item cannot be used, for `judge`."""
        self.whys[name] = why

    def judge(self, samples: Sequence[NamesOfSamples], is_good: Sequence[bool]) -> None:
        """Count samples. Raises `UserError` where most of the first cannot be used."""
        with self.lock:
            for names, good in zip(samples, is_good, strict=True):
                if len(self.seen) < self.first:
                    self.seen[names[0]] = bool(good)
                if not good:
                    self._leave_out(names)

    def _leave_out(self, names: NamesOfSamples) -> None:
        bad, known = len(self.left_out) + 1, self._known(names)
        # Behind the first ones, as often as their number doubles.
        if names[0] not in self.left_out and (bad <= NAMED_AT_MOST or bad.bit_count() == 1):
            say = "data.images: %s cannot be used and is left out (%s); %d of %d so far"
            log.warning(say, *known, bad, self.count)
        self.left_out.add(names[0])
        bad = len(self.seen) - sum(self.seen.values())
        if 2 * bad > self.first:
            raise UserError(
                f"data.images: {self.source}: {bad} of the first {len(self.seen)} samples cannot "
                f"be used, such as {self.described(names)}; mend them or leave them out"
            )

    def _known(self, names: NamesOfSamples) -> tuple[str, str] | None:
        return next(((name, self.whys[name]) for name in names if name in self.whys), None)

    def described(self, names: NamesOfSamples) -> str:
        """The name of what is wrong with a sample, and why; or else those of its items."""
        if known := self._known(names):
            return "{} ({})".format(*known)
        return ", ".join(dict.fromkeys(names[1:] or names))


class ImageReader:
    """Decodes the images of a run to rows of a tower.

    `library` is what decodes them, and `extra` what installs it. Raises `UserError` without it.
    """

    library, extra = "PIL", "vision"

    def __init__(self, cfg: Config, skipped: Skipped | None = None):
        wrong = f"data.images needs {{reason}}; install mjax[{self.extra}]"
        with or_user_error(wrong, ImportError):
            importlib.import_module(self.library)
        self.cfg, self.skipped = cfg, skipped or Skipped("", "valid", 0, 0)

    @property
    def decode(self) -> Decode:
        """Makes uint8 [H, W, C] of an encoded image; can be pickled."""
        channels = self.cfg.model.vision.num_channels
        return partial(decode_image, side=self.cfg.image_size, channels=channels)

    def item(self, encoded: bytes) -> np.ndarray:
        """fp32 [H, W, C], normed: an image as `lm.model` takes it. Raises for what is none."""
        scale = self.cfg.data.images
        return norm_image(self.decode(encoded), scale.mean, scale.std)

    def fill(self, row: np.ndarray, decoded: np.ndarray) -> None:
        """Write the patches of an image from `decode` to zeros [T, C*P*P], normed."""
        vision = self.cfg.model.vision
        scale = self.cfg.data.images
        (flat,) = patches_of(decoded[None], vision.patch_size)
        patches = flat.reshape(len(flat), vision.num_channels, -1)
        last = vision.leading + len(patches)
        places = row[vision.leading : last].reshape(patches.shape)
        norm_pixels(patches, scale.mean, scale.std, places, 1)

    def read(self, items: Sequence[Item], rows: Sequence[np.ndarray]) -> np.ndarray:
        """Fill rows of zeros, one an item; returns which items could be decoded, bool [n]."""
        is_good = np.zeros(len(items), bool)

        def keep(place: int, decoded: np.ndarray | str) -> None:
            if isinstance(decoded, str):
                self.skipped.note(items[place].name, decoded)
            else:
                self.fill(rows[place], decoded)
                is_good[place] = True

        self.decode_all(items, keep)
        return is_good

    def decode_all(
        self, items: Sequence[Item], keep: Callable[[int, np.ndarray | str], None]
    ) -> None:
        """Decode items in the run's processes; `keep` is as `Decoders.decode` takes it."""
        count = self.cfg.data.images.workers
        decoders(count).decode(self.decode, [item.read for item in items], keep)


class SoundReader(ImageReader):
    """Decodes the sounds of a run to rows of a tower."""

    library, extra = "soundfile", "audio"

    @property
    def decode(self) -> Decode:
        """Makes log-mel frames, fp32 [F, M], of an encoded sound; can be pickled."""
        audio = self.cfg.model.audio
        return partial(
            decode_frames, bins=audio.num_mel_bins, frames=2 * audio.max_source_positions
        )

    def item(self, encoded: bytes) -> np.ndarray:
        """fp32 [F, M]: a sound as `lm.model` takes it. Raises for what is none."""
        return self.decode(encoded)

    def fill(self, row: np.ndarray, decoded: np.ndarray) -> None:
        """Write the frames of each token to zeros [T, 5*M]."""
        row[...] = rows_of_frames(decoded[None], len(row))[0]
