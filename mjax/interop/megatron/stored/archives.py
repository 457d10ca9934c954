"""Torch's zip archives: the objects in them, and the places of their tensors, with no torch.

Invariants: unpickling imports and runs nothing that a pickle names (unknown classes become
`Inert`). A tensor is mapped from its file, within its bounds. Source: torch.serialization.
"""

import argparse
import collections
import contextlib
import io
import pickle
import re
import struct
import types
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import ml_dtypes
import numpy as np

from mjax.errors import UserError
from mjax.interop.megatron.stored.quantized import (
    Dequantized,
    Quantized,
    StoredTensor,
    UnknownForm,
    maker_named,
    maker_of,
)

_STORAGES = {
    "FloatStorage": np.dtype(np.float32),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "HalfStorage": np.dtype(np.float16),
    "DoubleStorage": np.dtype(np.float64),
}
_BYTES = {"ByteStorage": np.dtype(np.uint8), "FloatStorage": np.dtype(np.float32)}
_DAMAGE = (
    pickle.UnpicklingError, zipfile.BadZipFile, EOFError, KeyError, IndexError, AttributeError,
    TypeError, ValueError, OSError, struct.error, ArithmeticError, MemoryError, RuntimeError,
    zlib.error,
)  # fmt: skip


@contextlib.contextmanager
def damage_named(failed: str) -> Iterator[None]:
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


@dataclass(frozen=True)
class MappedTensor:
    """Place of a tensor in a file: its first byte, and steps between entries in bytes.

    of: how 8 bits are values, if it is quantized; then `scales` says where theirs lie.
    """

    dtype: np.dtype
    at: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    of: Quantized | None = None
    scales: "MappedTensor | None" = None

    def array(self, path: Path, shape: tuple[int, ...] | None = None) -> np.ndarray | Dequantized:
        """The tensor, mapped from its file; `shape`: as which it is asked for."""
        shape = shape or self.shape
        if self.of is not None:
            data = replace(self, of=None).array(path)
            return Dequantized(self.of, data, self.scales.array(path), shape)
        if 0 in self.shape:
            nothing = np.empty(self.shape, self.dtype)
            return nothing.reshape(shape)
        steps = zip(self.shape, self.strides, strict=True)
        extent = sum((n - 1) * step for n, step in steps)
        flat = np.memmap(path, np.uint8, "r", self.at, (extent + self.dtype.itemsize,))
        whole = np.ndarray(self.shape, self.dtype, flat, 0, self.strides)
        return whole.reshape(shape)


def storage_places(part: "FilePart") -> dict[str, int]:
    """The first byte in the file of each storage of an archive; torch never compresses them."""
    with zipfile.ZipFile(part) as archive:
        infos = [i for i in archive.infolist() if "/data/" in i.filename]
    places = {}
    for info in infos:
        if info.compress_type == zipfile.ZIP_STORED:
            part.seek(info.header_offset + 26)
            inside = info.header_offset + 30 + sum(struct.unpack("<HH", part.read(4)))
            places[info.filename.partition("/data/")[2]] = part.start + inside
    return places


def mapped_tensor(
    stored: StoredTensor | Quantized, places: dict[str, int], kinds: dict = _STORAGES
) -> MappedTensor:
    """The place of a tensor of an archive with these storages; `kinds`: dtypes of storages."""
    if isinstance(stored, Quantized):
        data, scales = (mapped_tensor(x, places, _BYTES) for x in (stored.data, stored.scales))
        if stored.data_transposed:
            turned = ((*x[1:], *x[:1]) for x in (data.shape, data.strides))
            data = MappedTensor(data.dtype, data.at, *turned)
        return MappedTensor(data.dtype, data.at, data.shape, data.strides, stored, scales)
    (storage, key), offset, shape, strides = stored
    if storage not in kinds:
        raise UnknownForm(f"a {storage}, which is none of {', '.join(kinds)}")
    dtype = kinds[storage]
    if min((*strides, *shape, offset)) < 0 or len(strides) != len(shape):
        raise ValueError(f"shape {shape} by strides {strides} from {offset}")
    steps = tuple(step * dtype.itemsize for step in strides)
    return MappedTensor(dtype, places[key] + offset * dtype.itemsize, tuple(shape), steps)


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
    "__builtin__.getattr": lambda of, name: _own(maker_of(of, name)) or Inert(of, name),
    "builtins.getattr": lambda of, name: _own(maker_of(of, name)) or Inert(of, name),
}


def _own(known):
    """A function or class that is a pickle's own: it may set attributes of what it names."""
    if known is argparse.Namespace:
        return type("Namespace", (argparse.Namespace,), {})
    if isinstance(known, types.FunctionType):
        return lambda *given: known(*given)
    return known


def _tensor_or_number(storage, *where):
    """A tensor as ((storage, key), offset, shape, strides); one without axes as its number."""
    *named, content = storage
    if where[1] == () and where[0] == 0 and content is not None and named[0] in _STORAGES:
        return float(np.frombuffer(content, _STORAGES[named[0]])[0])
    return tuple(named), *where[:3]


class _InertUnpickler(pickle.Unpickler):
    """`content(key)`: the bytes of a storage of the archive, None if they are long."""

    def __init__(self, file, content=lambda key: None):
        super().__init__(file)
        self.content = content

    def find_class(self, module: str, name: str):
        known = _KNOWN.get(f"{module}.{name}")
        if module.startswith("transformer_engine."):
            known = maker_named(name)
        return _own(known) or type(name, (Inert,), {"__module__": module})

    def persistent_load(self, pid: tuple) -> tuple[str, str, bytes | None]:
        """Class, key and, if short, content of a tensor's storage."""
        return pid[1].__name__, pid[2], self.content(pid[2])


def unpickled(file) -> object:
    """The object of a plain pickle, of inert classes."""
    return _InertUnpickler(file).load()


class FilePart(io.RawIOBase):
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


def load_archive(part: FilePart):
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

        return _InertUnpickler(io.BytesIO(archive.read(name)), content).load()
