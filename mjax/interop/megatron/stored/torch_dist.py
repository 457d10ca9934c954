"""Reads Megatron-LM's `torch_dist` checkpoint folders, with neither Megatron nor torch installed.

`metadata.json` says the format, `.metadata` of every tensor where its chunks lie, and each chunk is
a torch zip archive within a `__R_N.distcp` file. All that is not sharded lies in `common.pt`, and
since Megatron-core 0.19 in such a file, too: the object `common_state`.
Invariants: unpickling imports and runs nothing of the checkpoint's (unknown classes become
`Inert`), and a part of a tensor opens only the files, and touches only the pages, that hold it.
Sources: torch.distributed.checkpoint (metadata.py, filesystem.py), torch.serialization.
"""

import argparse
import collections
import contextlib
import io
import pickle
import re
import struct
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from mjax.errors import UserError, or_user_error
from mjax.interop.megatron.stored.quantized import (
    MAKERS,
    Dequantized,
    Quantized,
    StoredTensor,
    UnknownForm,
    maker_of,
)
from mjax.json_file import parse_json

_CONVERT = "convert it with Megatron-LM: --ckpt-convert-format torch_dist --ckpt-convert-save DIR"
_STORAGES = {
    "FloatStorage": np.dtype(np.float32),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "HalfStorage": np.dtype(np.float16),
    "DoubleStorage": np.dtype(np.float64),
}
_BYTES = {"ByteStorage": np.dtype(np.uint8), "FloatStorage": np.dtype(np.float32)}
_COMMON_STATE = "common_state/shard_0_1"
_DAMAGE = (
    pickle.UnpicklingError, zipfile.BadZipFile, EOFError, KeyError, IndexError, AttributeError,
    TypeError, ValueError, OSError, struct.error,
)  # fmt: skip


@dataclass(frozen=True)
class TorchChunk:
    """A box of a tensor and the bytes of the file that hold its archive."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class TorchTensor:
    shape: tuple[int, ...]
    chunks: tuple[TorchChunk, ...]


@dataclass(frozen=True)
class TorchDist:
    """An opened folder: names and places of its tensors (objects left out) and its arguments."""

    folder: Path
    tensors: dict[str, TorchTensor]
    common: dict
    name_of_common: str = "common.pt"

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
                its = (slice(a - o, b - o) for a, b, o in zip(low, high, chunk.start, strict=True))
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
            path = _file_within(self.folder, file)
            size = path.stat().st_size if path.is_file() else 0
            if size < end:
                what = f"has {size:,} of {end:,} bytes" if size else "is missing"
                raise UserError(f"{path} {what}; copy the checkpoint again, whole")

    def _chunk(self, name: str, chunk: TorchChunk) -> np.ndarray | Dequantized:
        """The chunk's array, mapped from its file."""
        path = _file_within(self.folder, chunk.file)
        with _damage_named(f"{path}: cannot read {name!r} at byte {chunk.offset:,}"):
            with path.open("rb") as file:
                part = _Part(file, chunk.offset, chunk.length)
                stored = _load_archive(part)
                if isinstance(stored, Quantized):
                    parts = [_mapped(path, part, x, _BYTES) for x in (stored.data, stored.scales)]
                    return Dequantized(stored, *parts, chunk.shape)
                storage = stored[0][0]
                if storage not in _STORAGES:
                    raise UserError(
                        f"{path}: {name!r} is a {storage}, which is none of "
                        f"{', '.join(_STORAGES)}; save the model in bf16, fp16 or fp32"
                    )
                return _mapped(path, part, stored, _STORAGES).reshape(chunk.shape)


def _mapped(path: Path, part: "_Part", stored: StoredTensor, kinds: dict) -> np.ndarray:
    """A tensor of an archive, mapped from its file; `kinds`: dtypes of storages."""
    (storage, key), offset, shape, strides = stored
    dtype = kinds[storage]
    if min((*strides, *shape, offset)) < 0:
        raise ValueError(f"shape {shape} by strides {strides} from {offset}")
    if 0 in shape:
        return np.empty(shape, dtype)
    extent = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    at = part.start + _first_byte(part, f"/data/{key}") + offset * dtype.itemsize
    flat = np.memmap(path, dtype, "r", at, (extent,))
    strides = [s * dtype.itemsize for s in strides]
    return np.lib.stride_tricks.as_strided(flat, shape, strides, writeable=False)


def open_torch_dist(path: str | Path) -> TorchDist:
    """Open a run folder (its latest iteration) or one iteration's folder. Reads no tensor."""
    folder = _iteration_folder(Path(path))
    _check_format(folder)
    with _damage_named(f"{folder}: cannot read common.pt or .metadata"):
        with (folder / ".metadata").open("rb") as file:
            metadata = _Unpickler(file).load()
        tensors = _tensors(metadata)
        own = [i for i in metadata.storage_data if i.fqn == _COMMON_STATE]
        if own and not (folder / "common.pt").exists():
            place = metadata.storage_data[own[0]]
            name = str(place.relative_path)
            with _file_within(folder, name).open("rb") as file:
                (common,) = _load_archive(_Part(file, place.offset, place.length))
            return TorchDist(folder, tensors, common, f"{name} (common_state)")
        with (folder / "common.pt").open("rb") as file:
            common = _load_archive(_Part(file, 0, (folder / "common.pt").stat().st_size))
        return TorchDist(folder, tensors, common)


def _file_within(folder: Path, name: str) -> Path:
    """A data file; `UserError` for a name that leads out of the folder."""
    if Path(name).name != name:
        raise UserError(f"{folder}: .metadata names the file {name!r} outside the folder; refused")
    return folder / name


@contextlib.contextmanager
def _damage_named(failed: str) -> Iterator[None]:
    """Turn the errors that damage raises into one line that says what `failed`."""
    try:
        yield
    except UserError:
        raise
    except UnknownForm as e:
        raise UserError(f"{failed}, {e}; save the model in bf16") from e
    except FileNotFoundError as e:
        raise UserError(f"{e.filename} is missing; copy the checkpoint again, whole") from e
    except _DAMAGE as e:
        raise UserError(f"{failed} ({type(e).__name__}: {e}); copy the checkpoint again") from e


def _iteration_folder(path: Path) -> Path:
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
        if any(folder.glob("mp_rank_*")):
            what = f"has Megatron's legacy format 'torch'; {_CONVERT}"
        elif (folder / ".metadata").exists():
            what = (
                "has .metadata but no metadata.json: format torch_dcp or fsdp_dtensor, or a save "
                f"that never finished; {_CONVERT}, or take another iteration"
            )
        else:
            what = "has no metadata.json; give a Megatron-LM run or iter_NNNNNNN folder"
        raise UserError(f"{folder} {what}")
    wrong = f"{file} names no sharded_backend; copy the checkpoint again"
    with or_user_error(wrong, (ValueError, KeyError, TypeError)):
        found = parse_json(file.read_text())["sharded_backend"]
    if found != "torch_dist":
        raise UserError(f"{file}: the format is {found!r}, not 'torch_dist'; {_CONVERT}")


def _tensors(metadata: "Inert") -> dict[str, TorchTensor]:
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


class Inert:
    """Stands for an object of a class that is not imported: its arguments and state, no code."""

    def __new__(cls, *args, **kwargs):
        made = object.__new__(cls)
        made.args = args
        return made

    def __init__(self, *args, **kwargs):
        pass

    def __setstate__(self, state):
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})

    def __setitem__(self, key, value):
        pass

    def append(self, value):
        pass

    def extend(self, values):
        pass

    def __repr__(self) -> str:
        return f"{type(self).__module__}.{type(self).__name__}{self.args}"


_KNOWN = {
    "argparse.Namespace": argparse.Namespace,
    "collections.OrderedDict": collections.OrderedDict,
    "torch.Size": tuple,
    "torch._utils._rebuild_tensor_v2": lambda storage, *where: _tensor_or_number(storage, *where),
    "torch._utils._rebuild_parameter": lambda tensor, *_: tensor,
    "__builtin__.getattr": lambda of, name: maker_of(of, name) or Inert(of, name),
    "builtins.getattr": lambda of, name: maker_of(of, name) or Inert(of, name),
}


def _tensor_or_number(storage, *where):
    """A tensor as ((storage, key), offset, shape, strides); one without axes as its number."""
    *named, content = storage
    if where[1] == () and where[0] == 0 and content is not None and named[0] in _STORAGES:
        return float(np.frombuffer(content, _STORAGES[named[0]])[0])
    return tuple(named), *where[:3]


class _Unpickler(pickle.Unpickler):
    """`content(key)`: the bytes of a storage of the archive, None if they are long."""

    def __init__(self, file, content=lambda key: None):
        super().__init__(file)
        self.content = content

    def find_class(self, module: str, name: str):
        known = _KNOWN.get(f"{module}.{name}")
        if module.startswith("transformer_engine."):
            known = MAKERS.get(name)
        return known or type(name, (Inert,), {"__module__": module})

    def persistent_load(self, pid: tuple) -> tuple[str, str, bytes | None]:
        """Class, key and, if short, content of a tensor's storage."""
        return pid[1].__name__, pid[2], self.content(pid[2])


class _Part(io.RawIOBase):
    """Some bytes of a file as a file."""

    def __init__(self, file, start: int, size: int):
        self.file, self.start, self.size, self.at = file, start, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self.at = offset + (0, self.at, self.size)[whence]
        return self.at

    def readinto(self, buffer) -> int:
        self.file.seek(self.start + self.at)
        n = self.file.readinto(memoryview(buffer)[: max(self.size - self.at, 0)])
        self.at += n
        return n


def _load_archive(part: _Part):
    """The object of a torch archive; tensors come as ((storage, key), offset, shape, strides)."""
    with zipfile.ZipFile(part) as archive:
        (name,) = (n for n in archive.namelist() if re.fullmatch(r"[^/]+/data\.pkl", n))
        order = name.replace("data.pkl", "byteorder")
        if order in archive.namelist() and archive.read(order) != b"little":
            raise UserError(
                f"{part.file.name}: big-endian tensors; save on a little-endian machine"
            )

        def content(key: str) -> bytes | None:
            info = archive.getinfo(name.replace("data.pkl", f"data/{key}"))
            return archive.read(info) if info.file_size <= 8 else None

        return _Unpickler(io.BytesIO(archive.read(name)), content).load()


def _first_byte(part: _Part, suffix: str) -> int:
    """Offset of the bytes of the archive's one file with this suffix; torch never compresses."""
    with zipfile.ZipFile(part) as archive:
        (info,) = (i for i in archive.infolist() if i.filename.endswith(suffix))
    if info.compress_type != zipfile.ZIP_STORED:
        raise zipfile.BadZipFile("the tensor is compressed")
    part.seek(info.header_offset + 26)
    return info.header_offset + 30 + sum(struct.unpack("<HH", part.read(4)))
