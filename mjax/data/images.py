"""Images with classes, for `train.objective=classify_images`: folders, tar files, parquet, digits.

Names are listed once, and an image is decoded when a batch asks for it. Invariant: sample n is a
pure function of (files, settings, seed, n): epoch e is a shuffle of the split's images by
RandomState(seed + e), and images are dealt to splits in an order of their names. An image that
cannot be decoded counts in no loss; it is named in the log, once.
"""

import glob
import hashlib
import io
import json
import logging
import os
import tarfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mjax.config.schema import Config
from mjax.data.gpt import Batch
from mjax.data.labelled import part_of_split, shuffled
from mjax.errors import UNREADABLE, UserError, or_user_error
from mjax.models.vision import image_fields

if TYPE_CHECKING:
    from PIL.Image import Image

log = logging.getLogger(__name__)
DIGITS = "digits"
SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".ppm"})
_NEEDS = "data.images needs {reason}; install mjax[vision]"


@dataclass(frozen=True)
class Sample:
    """An image: its name within the source, its class, and what reads it.

    It reads an encoded file, or an array of pixels.
    """

    name: str
    label: int
    read: Callable[[], bytes | np.ndarray]


class ImageDataset:
    """`size` samples: an image each, of `cfg.image_size` pixels a side, as patches.

    `batch(indices)` gives `patches` (fp32 [B, S, C*P*P]), `segment_ids`, `positions` (int32
    [B, S]) and `row_label` (int32 [B], -1 where an image cannot be decoded). Raises `UserError`
    for a source that cannot be read or has no image in the split.
    """

    max_documents = 2  # the image, and padding

    def __init__(
        self, path: str, split: str, split_fractions: Sequence[float], size: int, cfg: Config
    ):
        self.cfg, self.size = cfg, size
        samples = sorted(samples_of(path), key=_digest)
        source = f"data.images: {path}"
        self.samples = part_of_split(samples, split_fractions, split, source, "images")
        classes = cfg.model.vision.num_labels
        for sample in samples:
            if type(sample.label) is not int or not 0 <= sample.label < classes:
                raise UserError(
                    f"{sample.name}: class {sample.label} is none of "
                    f"model.vision.num_labels={classes}"
                )
        self.reader = ImageReader(cfg, len(self.samples))

    def __len__(self) -> int:
        return self.size

    def batch(self, indices: Sequence[int] | np.ndarray) -> Batch:
        """Samples `indices`, stacked."""
        cfg = self.cfg
        numbers = shuffled(indices, len(self.samples), cfg.run.seed)
        chosen = [self.samples[number] for number in numbers]
        found = [self.reader.read(sample.name, sample.read) for sample in chosen]
        labels = [-1 if f is None else s.label for f, s in zip(found, chosen, strict=True)]
        images = np.stack([self.reader.nothing if image is None else image for image in found])
        fields = image_fields(images, cfg.model.vision, cfg.data.seq_length)
        return fields | {"row_label": np.array(labels, np.int32)}


class ImageReader:
    """Decodes and scales the images of a run; what it cannot decode it names in the log, once."""

    def __init__(self, cfg: Config, count: int, bad: set[str] | None = None):
        """`count`: how many samples there are. `bad`: those so far, shared with other readers."""
        self.cfg, self.count = cfg, count
        self.bad: set[str] = set() if bad is None else bad
        self.lock = threading.Lock()

    @property
    def shape(self) -> tuple[int, ...]:
        """That of what `read` gives."""
        side = self.cfg.image_size
        return side, side, self.cfg.model.vision.num_channels

    @property
    def nothing(self) -> np.ndarray:
        """What stands for an image that is not there."""
        return np.zeros(self.shape, np.float32)

    def read(self, name: str, read: Callable[[], bytes | np.ndarray]) -> np.ndarray | None:
        """fp32 [H, W, C], or None for an image that cannot be decoded."""
        try:
            return self.decode(read())
        except (*UNREADABLE, SyntaxError, ArithmeticError) as e:
            self.skip(name, " ".join(str(e).split()) or type(e).__name__)
            return None

    def decode(self, encoded: bytes | np.ndarray) -> np.ndarray:
        """`read` of an encoded image; raises for what is none."""
        scale = self.cfg.data.images
        pixels = decode(encoded, self.shape[0], self.shape[2])
        return ((pixels - scale.mean) / scale.std).astype(np.float32)

    def skip(self, name: str, why: str) -> None:
        """Tell of a sample that is left out."""
        with self.lock:
            is_new = name not in self.bad
            self.bad.add(name)
        if is_new:
            bad = len(self.bad)
            say = "data.images: %s cannot be used and is left out (%s); %d of %d so far"
            log.warning(say, name, why, bad, self.count)


def decode(encoded: bytes | np.ndarray, side: int, channels: int) -> np.ndarray:
    """fp32 [side, side, channels] from 0 to 1: the shorter side resized, the center cut out."""
    with or_user_error(_NEEDS, ImportError):
        from PIL import Image

    is_array = isinstance(encoded, np.ndarray)
    image = Image.fromarray(encoded) if is_array else Image.open(io.BytesIO(encoded))
    pixels = np.asarray(_square(image.convert("L" if channels == 1 else "RGB"), side))
    return pixels.reshape(side, side, -1).astype(np.float32) / 255


def _square(image: "Image", side: int) -> "Image":
    """The center of an image as a square, bicubically resized."""
    if image.size == (side, side):
        return image
    least = min(image.size)
    left, top = ((length - least) / 2 for length in image.size)
    box = left, top, left + least, top + least
    return image.resize((side, side), resample=3, box=box, reducing_gap=3.0)  # 3: bicubic


# ---- sources -------------------------------------------------------------------------------------


def samples_of(path: str) -> list[Sample]:
    """All images of a source, in an order of their own. Raises `UserError` where there are none."""
    if path == DIGITS:
        return list(_digits())
    if Path(path).is_dir():
        found = list(_in_folder(Path(path)))
    else:
        readers = {".tar": _in_tar, ".parquet": _in_parquet}
        files = sorted(glob.glob(path)) or [path]
        found = []
        for file in files:
            reader = readers.get(Path(file).suffix)
            if reader is None:
                raise UserError(
                    f"data.images: {file} is neither a folder nor a .tar nor a .parquet; give one"
                )
            wrong = f"data.images: {file} cannot be read: {{reason}}; give a whole {reader.__doc__}"
            with or_user_error(wrong, (*UNREADABLE, ValueError, LookupError, tarfile.TarError)):
                found += reader(file)
    if not found:
        raise UserError(f"data.images: {path} holds no image with a class; give one that does")
    return found


def _digits() -> Iterator[Sample]:
    """The 1,797 digits of scikit-learn, 8 x 8 pixels from 0 to 16."""
    with or_user_error(_NEEDS, ImportError):
        from sklearn.datasets import load_digits

    data = load_digits()
    pixels = np.round(data.images * (255 / 16)).astype(np.uint8)
    for number, (image, label) in enumerate(zip(pixels, data.target, strict=True)):
        yield Sample(f"digits/{number}", int(label), partial(np.asarray, image))


def _in_folder(folder: Path) -> Iterator[Sample]:
    """The images of a folder with a folder for each class; classes are numbered by name."""
    classes = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
    for label, name in enumerate(classes):
        for file in sorted((folder / name).rglob("*")):
            if file.suffix.lower() in SUFFIXES:
                yield Sample(str(file.relative_to(folder)), label, file.read_bytes)


def _in_tar(file: str) -> list[Sample]:
    """webdataset: members of one name up to the first dot are a sample, KEY.jpg and KEY.cls."""
    images, labels = {}, {}
    with tarfile.open(file) as tar:
        for member in tar:
            folder, name = os.path.split(member.name)
            key, _, kind = name.partition(".")
            key = os.path.join(folder, key)
            if f".{kind.lower()}" in SUFFIXES:
                images[key] = partial(_part, file, member.offset_data, member.size)
            elif kind in ("cls", "json"):
                found = json.loads(tar.extractfile(member).read())
                labels[key] = found.get("label") if isinstance(found, dict) else found
    both = [key for key in images if type(labels.get(key)) is int]
    if len(both) < len(images):
        lacking = next(key for key in images if key not in both)
        count = len(images) - len(both)
        log.warning("data.images: %s: %d images have no class: %s, ..", file, count, lacking)
    return [Sample(f"{Path(file).name}/{key}", labels[key], images[key]) for key in both]


def _part(file: str, offset: int, size: int) -> bytes:
    """Bytes of a file."""
    with open(file, "rb") as opened:
        opened.seek(offset)
        return opened.read(size)


def _in_parquet(file: str) -> list[Sample]:
    """parquet with columns image (bytes, or a struct with them) and label, held in memory."""
    with or_user_error(_NEEDS, ImportError):
        from pyarrow import parquet

    table = parquet.read_table(file, columns=["image", "label"])
    labels = table["label"].to_pylist()

    def read(row: int) -> bytes:
        found = table["image"][row].as_py()
        return found["bytes"] if isinstance(found, dict) else found

    name = Path(file).name
    return [Sample(f"{name}:{row}", label, partial(read, row)) for row, label in enumerate(labels)]


def _digest(sample: Sample) -> bytes:
    return hashlib.blake2b(sample.name.encode(), digest_size=16).digest()
