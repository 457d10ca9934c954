"""Writes torch's archives and `.metadata` without torch: classes and functions go by their names.

Everything is pickled by opcodes that torch's loader of weights alone accepts (protocol 2).
Sources: torch.serialization, torch.distributed.checkpoint (metadata.py, filesystem.py).
"""

import io
import pickle
import sys
import zipfile
from dataclasses import dataclass

import ml_dtypes
import numpy as np

TORCH_DTYPES = {  # numpy's -> torch's name, and the name of its storage
    np.dtype(np.float32): ("float32", "FloatStorage"),
    np.dtype(ml_dtypes.bfloat16): ("bfloat16", "BFloat16Storage"),
}


@dataclass(frozen=True)
class TorchName:
    """A class or function that the reader imports."""

    module: str
    name: str


@dataclass(frozen=True)
class CallOf:
    """The result of a function."""

    function: TorchName
    args: tuple


@dataclass(frozen=True)
class Instance:
    """An object of a class with these attributes."""

    of: TorchName
    state: object


@dataclass(frozen=True)
class TorchStorage:
    """The storage of a tensor of an archive."""

    kind: str
    numel: int
    key: str = "0"


class _Pickler(pickle._Pickler):  # that in C imports what it names
    def save(self, obj, save_persistent_id=True):
        if isinstance(obj, TorchName):
            self.write(pickle.GLOBAL + f"{obj.module}\n{obj.name}\n".encode())
        elif isinstance(obj, CallOf):
            self.save(obj.function)
            self.save(obj.args)
            self.write(pickle.REDUCE)
        elif isinstance(obj, Instance):
            self.save(obj.of)
            self.write(pickle.EMPTY_TUPLE + pickle.NEWOBJ)
            self.save(obj.state)
            self.write(pickle.BUILD)
        elif isinstance(obj, TorchStorage):
            self.save(("storage", TorchName("torch", obj.kind), obj.key, "cpu", obj.numel))
            self.write(pickle.BINPERSID)
        elif isinstance(obj, str):
            super().save(sys.intern(obj))  # what is equal is one, or bytes would depend on identity
        else:
            super().save(obj, save_persistent_id)


def pickled(obj: object) -> bytes:
    out = io.BytesIO()
    _Pickler(out, 2).dump(obj)
    return out.getvalue()


def archive(obj: object, data: np.ndarray | None = None) -> bytes:
    """A torch archive of an object, equal at any time; `data`: the content of its one storage."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as file:
        file.writestr(_archive_entry("data.pkl"), pickled(obj))
        file.writestr(_archive_entry("byteorder"), "little")
        if data is not None:
            content = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
            with file.open(_archive_entry("data/0"), "w", force_zip64=True) as entry:
                entry.write(memoryview(content))
        file.writestr(_archive_entry("version"), "3\n")
    return out.getvalue()


def _archive_entry(name: str) -> zipfile.ZipInfo:
    return zipfile.ZipInfo(f"archive/{name}")  # of 1980, whenever it is written


def tensor_archive(x: np.ndarray) -> bytes:
    """A torch archive of a tensor."""
    strides = tuple(step // x.itemsize for step in np.ascontiguousarray(x).strides)
    _, kind = TORCH_DTYPES[x.dtype]
    storage = TorchStorage(kind, x.size)
    hooks = CallOf(TorchName("collections", "OrderedDict"), ())
    rebuild = TorchName("torch._utils", "_rebuild_tensor_v2")
    return archive(CallOf(rebuild, (storage, 0, x.shape, strides, False, hooks)), x)


def namespace(values: dict) -> Instance:
    """An argparse.Namespace."""
    return Instance(TorchName("argparse", "Namespace"), values)


_METADATA = "torch.distributed.checkpoint.metadata"


def _torch_size(shape: tuple[int, ...]) -> CallOf:
    return CallOf(TorchName("torch", "Size"), (tuple(map(int, shape)),))


def tensor_metadata(dtype: np.dtype, shape: tuple[int, ...], chunks: list) -> Instance:
    """The entry of a tensor in `.metadata`; `chunks`: (offsets, sizes)."""
    layout = CallOf(TorchName("torch.serialization", "_get_layout"), ("torch.strided",))
    memory = CallOf(TorchName(_METADATA, "_MEM_FORMAT_ENCODING"), (0,))
    kind = TorchName("torch", TORCH_DTYPES[dtype][0])
    properties = Instance(
        TorchName(_METADATA, "TensorProperties"), (kind, layout, False, memory, False)
    )
    chunk = TorchName(_METADATA, "ChunkStorageMetadata")
    made = [
        Instance(chunk, {"offsets": _torch_size(at), "sizes": _torch_size(n)}) for at, n in chunks
    ]
    state = {"properties": properties, "size": _torch_size(shape), "chunks": made}
    return Instance(TorchName(_METADATA, "TensorStorageMetadata"), state)


def object_metadata() -> Instance:
    """The entry of an object in `.metadata`."""
    return Instance(TorchName(_METADATA, "BytesStorageMetadata"), {})


def metadata_file(entries: dict[str, Instance], places: list[tuple]) -> bytes:
    """`.metadata`; `places`: (name, offsets or None, file, first byte, bytes)."""
    index = TorchName(_METADATA, "MetadataIndex")
    info = TorchName("torch.distributed.checkpoint.filesystem", "_StorageInfo")
    stored = {}
    for name, at, file, offset, length in places:
        key = {"fqn": name, "offset": None if at is None else _torch_size(at), "index": None}
        value = {"relative_path": file, "offset": offset, "length": length}
        stored[_HashedInstance(index, key)] = Instance(info, value)
    state = {"state_dict_metadata": entries, "planner_data": None, "storage_data": stored}
    return pickled(Instance(TorchName(_METADATA, "Metadata"), state))


class _HashedInstance(Instance):
    """An instance that is a key of a dict."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__
