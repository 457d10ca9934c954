"""Reads Megatron-LM's `torch_dist` checkpoint folders, with neither Megatron nor torch installed.

`metadata.json` says the format, `.metadata` of every tensor where its chunks lie, and each chunk is
a torch zip archive within a `__R_N.distcp` file. All that is not sharded lies in `common.pt`, and
since Megatron-core 0.19 in such a file, too: the object `common_state`.
Invariants: unpickling imports and runs nothing of the checkpoint's (unknown classes become
`Inert`), and a part of a tensor opens only the files, and touches only the pages, that hold it.
Sources: torch.distributed.checkpoint (metadata.py, filesystem.py), torch.serialization.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mjax.errors import UserError, or_user_error
from mjax.interop.megatron.stored.archives import (
    FilePart,
    Inert,
    MappedTensor,
    damage_named,
    load_archive,
    mapped_tensor,
    storage_places,
    unpickled,
)
from mjax.interop.megatron.stored.quantized import Dequantized
from mjax.json_file import parse_json

CONVERT = "convert it with Megatron-LM: --ckpt-convert-format torch_dist --ckpt-convert-save DIR"
_COMMON_STATE = "common_state/shard_0_1"


@dataclass(frozen=True)
class TorchChunk:
    """A box of a tensor and the bytes of the file that hold its archive.

    place: where it lies, for an archive of many tensors. first: its first row there.
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    offset: int
    length: int
    place: MappedTensor | None = None
    first: int = 0


@dataclass(frozen=True)
class TorchTensor:
    shape: tuple[int, ...]
    chunks: tuple[TorchChunk, ...]


@dataclass(frozen=True)
class TorchDist:
    """An opened folder: names and places of its tensors (objects left out) and its arguments.

    weights_alone: why its optimizer cannot be read; empty: it can.
    """

    folder: Path
    tensors: dict[str, TorchTensor]
    common: dict
    name_of_common: str = "common.pt"
    weights_alone: str = ""

    @property
    def where_common(self) -> str:
        return str(self.folder / self.name_of_common)

    def arguments(self) -> argparse.Namespace:
        """The arguments of the run that wrote it."""
        args = self.common.get("args") if isinstance(self.common, dict) else None
        if not isinstance(args, argparse.Namespace):
            raise UserError(
                f"{self.where_common} holds no `args`: Megatron-LM's training script did not write "
                "it; load and save it once with pretrain_gpt.py"
            )
        return args

    def read(self, name: str, box: tuple[slice, ...]) -> np.ndarray:
        """Part of a tensor as unsigned integers, which numpy copies much faster than bfloat16; view
        them as `dtype(name)`. `box` has a slice with start and stop for each axis."""
        start = tuple(s.start for s in box)
        out = np.empty([s.stop - s.start for s in box], f"u{self.dtype(name).itemsize}")
        filled = 0
        for chunk in self.tensors[name].chunks:
            ends = [c + n for c, n in zip(chunk.start, chunk.shape, strict=True)]
            low = [max(s.start, c) for s, c in zip(box, chunk.start, strict=True)]
            high = [min(s.stop, end) for s, end in zip(box, ends, strict=True)]
            if all(a < b for a, b in zip(low, high, strict=True)):
                mine = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, start, strict=True))
                origin = [chunk.start[0] - chunk.first, *chunk.start[1:]]
                its = (slice(a - o, b - o) for a, b, o in zip(low, high, origin, strict=True))
                out[mine] = self._chunk(name, chunk)[tuple(its)].view(out.dtype)
                filled += out[mine].size
        if filled != out.size:
            raise UserError(
                f"{self.folder}: the chunks of {name!r} do not cover it once; the checkpoint is "
                "incomplete: take another iteration"
            )
        return out

    def dtype(self, name: str) -> np.dtype:
        return self._chunk(name, self.tensors[name].chunks[0]).dtype

    def check_files(self, names: set[str]) -> None:
        """Raise `UserError` where a file that holds one of these tensors is absent or too short."""
        ends: dict[str, int] = {}
        for chunk in (c for name in sorted(names) for c in self.tensors[name].chunks):
            ends[chunk.file] = max(ends.get(chunk.file, 0), chunk.offset + chunk.length)
        for file, end in ends.items():
            path = file_within(self.folder, file)
            size = path.stat().st_size if path.is_file() else 0
            if size < end:
                what = f"has {size:,} of {end:,} bytes" if size else "is missing"
                raise UserError(f"{path} {what}; copy the checkpoint again, whole")

    def _chunk(self, name: str, chunk: TorchChunk) -> np.ndarray | Dequantized:
        """The chunk's array, mapped from its file."""
        path = file_within(self.folder, chunk.file)
        with damage_named(f"{path}: cannot read {name!r} at byte {chunk.offset:,}"):
            if chunk.place is not None:
                return chunk.place.array(path)
            with path.open("rb") as file:
                part = FilePart(file, chunk.offset, chunk.length)
                place = mapped_tensor(load_archive(part), storage_places(part))
            return place.array(path, chunk.shape)


def open_torch_dist(path: str | Path) -> TorchDist:
    """Open a run folder (its latest iteration) or one iteration's folder. Reads no tensor."""
    folder = iteration_folder(Path(path))
    _check_format(folder)
    with damage_named(f"{folder}: cannot read common.pt or .metadata"):
        metadata = read_metadata(folder)
        tensors = tensors_of(metadata)
        own = [i for i in metadata.storage_data if i.fqn == _COMMON_STATE]
        if own and not (folder / "common.pt").exists():
            place = metadata.storage_data[own[0]]
            name = str(place.relative_path)
            with file_within(folder, name).open("rb") as file:
                (common,) = load_archive(FilePart(file, place.offset, place.length))
            return TorchDist(folder, tensors, common, f"{name} (common_state)")
        with (folder / "common.pt").open("rb") as file:
            common = load_archive(FilePart(file, 0, (folder / "common.pt").stat().st_size))
        return TorchDist(folder, tensors, common)


def read_metadata(folder: Path) -> Inert:
    with (folder / ".metadata").open("rb") as file:
        return unpickled(file)


def file_within(folder: Path, name: str) -> Path:
    """A data file; `UserError` for a name that leads out of the folder."""
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise UserError(f"{folder}: .metadata names the file {name!r} outside the folder; refused")
    return folder / name


def iteration_folder(path: Path) -> Path:
    if not path.is_dir():
        raise UserError(f"{path} is not a folder; give a Megatron-LM run or iter_NNNNNNN folder")
    tracker = path / "latest_checkpointed_iteration.txt"
    if (path / "metadata.json").exists() or not tracker.exists():
        return path
    word = tracker.read_text().strip()
    if word != "release" and not word.isdecimal():
        raise UserError(f"{tracker} says {word!r}, not an iteration; give the iter_ folder itself")
    folder = path / (word if word == "release" else f"iter_{int(word):07d}")
    if not folder.is_dir():
        raise UserError(f"{tracker} names {folder.name}, which is absent; give an iter_ folder")
    return folder


def _check_format(folder: Path) -> None:
    """`UserError` unless the folder is a committed torch_dist checkpoint."""
    file = folder / "metadata.json"
    if not file.exists():
        raise UserError(
            f"{folder} has no metadata.json; give a Megatron-LM run or iter_NNNNNNN folder"
        )
    wrong = f"{file} names no sharded_backend; copy the checkpoint again"
    with or_user_error(wrong, (ValueError, KeyError, TypeError)):
        found = parse_json(file.read_text())["sharded_backend"]
    if found != "torch_dist":
        raise UserError(f"{file}: the format is {found!r}, not 'torch_dist'; {CONVERT}")


def tensors_of(metadata: Inert) -> dict[str, TorchTensor]:
    """`.metadata` as plain data. Entries without chunks are pickled objects: left out."""
    starts = ((i, getattr(i, "offset", None) or ()) for i in metadata.storage_data)  # None: absent
    places = {(i.fqn, tuple(start)): metadata.storage_data[i] for i, start in starts}
    tensors = {}
    for name, entry in metadata.state_dict_metadata.items():
        chunks = []
        for chunk in getattr(entry, "chunks", ()):
            place = places[name, tuple(chunk.offsets)]
            if getattr(place, "transform_descriptors", None):
                raise UserError(f"{name!r} is stored compressed; save without DCP extensions")
            where = place.relative_path, place.offset, place.length
            chunks.append(TorchChunk(tuple(chunk.offsets), tuple(chunk.sizes), *where))
        if chunks:
            tensors[name] = TorchTensor(tuple(entry.size), tuple(chunks))
    return tensors
