"""Samples with images and sounds: webdataset tar files, parquet, JSON lines, folders, digits.

A source is listed once, and a file is read when a batch asks for it. Invariant: the samples of a
source and their order are a function of its files, as the file system sorts their names.
"""

import glob
import json
import logging
import os
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mjax.data.base.documents import MARK, is_json_lines, json_rows
from mjax.errors import UNREADABLE, UserError, or_user_error

log = logging.getLogger(__name__)
DIGITS = "digits"
_NEEDS = "data.images needs {reason}; install mjax[vision]"
IMAGES, SOUNDS, VIDEOS = "images", "audio", "videos"  # keys of JSON lines and columns
_ITEM_KEYS = {"image": IMAGES, IMAGES: IMAGES, SOUNDS: SOUNDS, "video": VIDEOS, VIDEOS: VIDEOS}
IMAGE_SUFFIXES = ".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".ppm", ".tif", ".tiff"
SUFFIXES = dict.fromkeys(IMAGE_SUFFIXES, IMAGES)
SUFFIXES |= dict.fromkeys((".wav", ".flac", ".ogg", ".mp3"), SOUNDS)
SUFFIXES |= dict.fromkeys((".mp4", ".mkv", ".webm", ".mov", ".avi"), VIDEOS)
FACTS = {".cls": "label", ".txt": "text", ".json": None}  # None: a dictionary of facts


class Item(NamedTuple):
    """An image, a sound or a video: its name, and what reads its file, or an array of pixels."""

    name: str
    read: Callable[[], bytes | np.ndarray]


@dataclass
class Sample:
    """A sample as its source has it: a name, facts such as "text", items by their keys."""

    name: str
    facts: dict[str, Any] = field(default_factory=dict)
    items: dict[str, list[Item]] = field(default_factory=dict)

    def add(self, key: str, item: Item) -> None:
        self.items.setdefault(key, []).append(item)


def samples_of(path: str, facts: Sequence[str]) -> list[Sample]:
    """All samples of a source that have one of these facts.

    Samples of folders and tar files that lack all are left out and counted in the log. Raises
    `UserError` if there are none, or if a file cannot be read.
    """
    if path == DIGITS:
        return list(_digits())
    readers = {".tar": _in_tar, ".parquet": _in_parquet}
    found: list[Sample] = []
    if Path(path).is_dir():
        found = list((_in_classes if "label" in facts else _in_folder)(Path(path)))
    else:
        for file in sorted(glob.glob(path)) or [path]:
            reader = _in_lines if is_json_lines(file) else readers.get(Path(file).suffix)
            if reader is None:
                raise UserError(
                    f"data.images: {file} is neither a folder nor a .tar nor a .parquet nor a "
                    ".jsonl; give one"
                )
            wrong = f"data.images: {file} cannot be read: {{reason}}; give a whole {reader.__doc__}"
            with or_user_error(wrong, (*UNREADABLE, LookupError, tarfile.TarError)):
                found += reader(Path(file))
    is_of_files = Path(path).is_dir() or path.endswith(".tar")
    whole, lacking = [], []
    for sample in found:
        is_whole = not is_of_files or any(sample.facts.get(fact) is not None for fact in facts)
        (whole if is_whole else lacking).append(sample)
    if not whole:
        what = f"a {facts[0]}"
        raise UserError(f"data.images: {path} holds no sample with {what}; give one that does")
    if lacking:
        say = "data.images: %s: %d of %d samples have no %s and are left out: %s, .."
        log.warning(say, path, len(lacking), len(found), facts[0], lacking[0].name)
    return whole


def _digits() -> Iterator[Sample]:
    """The 1,797 digits of scikit-learn, 8 x 8 pixels from 0 to 16."""
    with or_user_error(_NEEDS, ImportError):
        from sklearn.datasets import load_digits

    data = load_digits()
    pixels = np.round(data.images * (255 / 16)).astype(np.uint8)
    for number, (image, label) in enumerate(zip(pixels, data.target, strict=True)):
        name = f"digits/{number}"
        item = Item(name, partial(np.asarray, image))
        yield Sample(name, {"label": int(label)}, {IMAGES: [item]})


def _in_classes(folder: Path) -> Iterator[Sample]:
    """The images of a folder with a folder for each class; classes are numbered by name."""
    classes = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
    files = []
    for label, name in enumerate(classes):
        files += [(label, file) for file in _files(folder / name)]
    _say_unread(f"{folder}", [f"{file}" for _, file in files], IMAGE_SUFFIXES)
    for label, file in files:
        if file.suffix.lower() not in IMAGE_SUFFIXES:
            continue
        name = str(file.relative_to(folder))
        image = Item(name, file.read_bytes)
        yield Sample(name, {"label": label}, {IMAGES: [image]})


def _files(folder: Path) -> list[Path]:
    return [file for file in sorted(folder.rglob("*")) if file.is_file()]


def _say_unread(source: str, names: Sequence[str], suffixes: Iterable[str]) -> None:
    """Count in the log the files of a source that are not read, for their suffixes are unknown."""
    unread = [name for name in names if Path(name).suffix.lower() not in suffixes]
    if unread:
        say = "data.images: %s: %d of %d files are not read, as %s: they end in none of %s"
        log.warning(say, source, len(unread), len(names), unread[0], ", ".join(suffixes))


def _in_folder(folder: Path) -> list[Sample]:
    """The samples of a folder with KEY.jpg and KEY.txt."""
    members = [(str(file.relative_to(folder)), file.read_bytes) for file in _files(folder)]
    return _grouped(members, f"{folder}")


def _in_tar(file: Path) -> list[Sample]:
    """webdataset of KEY.jpg and KEY.cls, KEY.txt or KEY.json."""
    with tarfile.open(file, "r:") as tar:  # uncompressed: images are read in place
        parts = [(m.name, m.offset_data, m.size) for m in tar if m.isfile()]
        end = tar.offset
    if _read_at(file, end, tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):  # tarfile lets that pass
        raise tarfile.ReadError(f"no member and no end at byte {end:,}: it is cut short or damaged")
    members = [(name, partial(_read_at, file, offset, size)) for name, offset, size in parts]
    return _grouped(members, f"{file}", f"{file.name}/")


def _grouped(
    members: Sequence[tuple[str, Callable[[], bytes]]], source: str, before: str = ""
) -> list[Sample]:
    """Samples of members of one name up to the first dot, named with what stands `before` it."""
    _say_unread(source, [name for name, _ in members], [*SUFFIXES, *FACTS])
    samples: dict[str, Sample] = {}
    for name, read in members:
        folder, file = os.path.split(name)
        key = before + os.path.join(folder, file.partition(".")[0])
        suffix = Path(file).suffix.lower()
        if suffix not in SUFFIXES and suffix not in FACTS:
            continue
        sample = samples.setdefault(key, Sample(key))
        if suffix in SUFFIXES:
            sample.add(SUFFIXES[suffix], Item(before + name, read))
            continue
        with or_user_error(f"{before}{name}: {{reason}}; mend it", UNREADABLE):
            said = read().decode().removeprefix(MARK)
            found = said.strip() if suffix == ".txt" else json.loads(said)
        sample.facts |= found if isinstance(found, dict) else {FACTS[suffix] or "label": found}
    return list(samples.values())


def _read_at(file: Path, offset: int, size: int) -> bytes:
    """Bytes of a file."""
    with open(file, "rb") as opened:
        opened.seek(offset)
        return opened.read(size)


def _in_parquet(file: Path) -> list[Sample]:
    """parquet with columns image or images, and label or text, held in memory."""
    with or_user_error(_NEEDS, ImportError):
        from pyarrow import ListScalar, parquet

    table = parquet.read_table(file)
    items = [name for name in _ITEM_KEYS if name in table.column_names]
    rows = table.drop_columns(items).to_pylist() or [{}] * len(table)
    samples = [Sample(f"{file.name}:{row}", facts) for row, facts in enumerate(rows)]
    for column in items:
        key = _ITEM_KEYS[column]
        for sample, cell in zip(samples, table[column], strict=True):
            parts = cell if isinstance(cell, ListScalar) and cell.is_valid else [cell]
            for part in filter(attrgetter("is_valid"), parts):
                sample.add(key, Item(sample.name, partial(_bytes_of, part, file.parent)))
    return samples


def _bytes_of(cell: Any, folder: Path) -> bytes:
    """The encoded file in a cell: bytes, or Hugging Face's struct of bytes or a path."""
    found = cell.as_py()
    if isinstance(found, dict):
        named = found.get("path")
        has_path = found["bytes"] is None and named is not None
        found = (folder / named).read_bytes() if has_path else found["bytes"]
    if not isinstance(found, bytes):
        raise ValueError(f"{type(found).__name__} in the place of an encoded file")
    return found


def _in_lines(file: Path) -> list[Sample]:
    """file of JSON lines."""
    samples = []
    for name, row in json_rows([str(file)]):
        sample = Sample(name, row)
        for key, column in _ITEM_KEYS.items():
            named = row.pop(key, [])
            named = [named] if isinstance(named, str) else named
            if not isinstance(named, list) or not all(isinstance(f, str) for f in named):
                raise UserError(f'{name}: "{key}" is no list of files')
            for path in (file.parent / name for name in named):
                sample.add(column, Item(str(path), path.read_bytes))
        samples.append(sample)
    return samples
